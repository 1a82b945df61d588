"""Trackers: pages, databases and files that show a run; `tracker.py` is what they have in common."""
