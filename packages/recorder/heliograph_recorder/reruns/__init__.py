"""Reruns of recorded trainings: `goto`, `fork` and `drill`."""
