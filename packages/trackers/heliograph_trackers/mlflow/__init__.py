"""`MLflow`: what a run of it holds, the names that it takes, requests to it."""
