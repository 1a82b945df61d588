"""Random draws of loading: keyed by position, isolated from the training."""
