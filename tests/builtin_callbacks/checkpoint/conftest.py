from heliograph.tests.stores import names, old, older, opened, state

__all__ = ["names", "old", "older", "opened", "state"]
