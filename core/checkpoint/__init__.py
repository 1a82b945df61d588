"""The state of a run, and checkpoint files."""
