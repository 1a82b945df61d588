"""Export the model at the end of a run, checked against the task's module."""
