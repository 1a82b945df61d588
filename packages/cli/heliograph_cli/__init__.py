"""Trainings from configuration files, for example `heliograph fit config.yaml`, and the list of plugins."""
