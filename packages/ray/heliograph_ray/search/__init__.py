"""Search for hyper-parameters with Ray Tune."""
