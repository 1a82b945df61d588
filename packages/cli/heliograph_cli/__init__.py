"""Trainings from a configuration file: `python -m heliograph fit config.yaml`."""
