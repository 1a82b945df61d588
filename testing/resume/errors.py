"""The error of a check that cannot be done."""


class UsageError(ValueError):
    """An argument is wrong, or the run cannot be checked; this says nothing about the resume."""
