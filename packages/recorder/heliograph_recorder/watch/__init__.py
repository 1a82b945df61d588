"""`python -m heliograph watch`: a live page of running trainings, made from their recordings."""
