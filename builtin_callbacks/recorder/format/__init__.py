"""The recording of a run: what is in it, how it is written and read."""
