"""`Remote`, which accepts requests to a running training from outside, and its client."""
