"""`Remote`, which lets people steer a run from outside, and the client that they ask with."""
