"""The error of a check that was asked for what it cannot do."""


class UsageError(ValueError):
    """The check was called wrongly, or with a run that it cannot judge; nothing is said of the resume."""
