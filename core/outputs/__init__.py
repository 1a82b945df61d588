"""Outputs of the samples of a set: kept by batch, joined in the order of the data, gathered from ranks, on disk."""
