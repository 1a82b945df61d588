"""Several processes: how they start, agree, and end."""
