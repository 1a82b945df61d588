"""`Recorder`, and what reads its recordings: explain, replay, timeline."""
