"""Metrics of a run: running means, monitored metrics, logged rows, payloads for trackers."""
