"""The order of samples: a pure function of the seed and the epoch."""
