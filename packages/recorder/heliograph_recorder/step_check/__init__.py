"""StepCheck: a step is done once more, and must come out the same."""
