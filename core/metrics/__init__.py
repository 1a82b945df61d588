"""Numbers of a run: means, a metric that something watches, the losses of a window."""
