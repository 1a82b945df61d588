"""Trainings from a configuration file, `python -m heliograph fit config.yaml`, and the list of plugins."""
