"""The state of a run, checkpoint files, and the conversion of Helios checkpoints."""
