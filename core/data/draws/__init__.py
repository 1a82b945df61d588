"""Random draws of loading: keyed by position, kept apart from those of the training."""
