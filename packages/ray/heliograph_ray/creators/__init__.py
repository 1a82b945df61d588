"""Training with creator functions, as in RaySGD: in this process, in several, or on a cluster."""

from .local import LocalLauncher
from .trainer import CreatorTrainer

__all__ = ["CreatorTrainer", "LocalLauncher"]
