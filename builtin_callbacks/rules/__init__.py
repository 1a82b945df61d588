"""Rules: steer a run by a file instead of code."""
