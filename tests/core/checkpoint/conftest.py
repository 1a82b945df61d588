from heliograph.tests.stores import names, old, opened, state

__all__ = ["names", "old", "opened", "state"]
