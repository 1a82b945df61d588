"""`Verdicts`: measures where the time of a training goes."""
