"""The state of a run as plain types and tensors."""
