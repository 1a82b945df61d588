"""Replay plugins with a recorded run."""
