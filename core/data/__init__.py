"""Training and evaluation data: the order of samples, random draws of loading, and positions in an epoch."""
