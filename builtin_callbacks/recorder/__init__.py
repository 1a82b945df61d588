"""Record a run, and read recordings: explain, replay, timeline."""
