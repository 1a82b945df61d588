"""The engine whose ranks each hold a part of the weights."""
