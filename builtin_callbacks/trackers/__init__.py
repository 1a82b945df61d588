"""Trackers of runs: pages, databases and files. `tracker.py` contains their base class."""
