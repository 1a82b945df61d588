"""Outputs of steps: kept by batch, joined in the order of the data, gathered from the ranks, stored."""
