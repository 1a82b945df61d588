"""The environment of the process: signals, optional packages, a terminal."""
