from heliograph.packages.cli.tests.checkpoints.helios_files import old
from heliograph.tests.stores import names, opened, state

__all__ = ["names", "old", "opened", "state"]
