"""`StepCheck`: repeats a step from the same state and compares all bits."""
