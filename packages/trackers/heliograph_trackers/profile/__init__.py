"""Trace some steps with torch's profiler."""
