"""Checkpoints in remote storage: `heliograph.Checkpoint("s3://bucket/run")` uses this package."""
