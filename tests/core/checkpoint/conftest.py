from heliograph.tests.stores import names, opened, state

__all__ = ["names", "opened", "state"]
