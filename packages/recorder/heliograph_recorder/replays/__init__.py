"""Drive plugins with a recorded run."""
