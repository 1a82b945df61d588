"""What the process meets: signals, optional packages, a cluster, a terminal."""
