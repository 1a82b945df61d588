"""`diverge`: the first difference between two recorded runs."""
