"""Commands: trainings from configuration files (`heliograph fit config.yaml`), lists of plugins, and checkpoints."""
