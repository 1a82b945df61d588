"""Training with creator functions, as in RaySGD: in this process, in several, or on a cluster."""

from .trainer import CreatorTrainer, LocalLauncher

__all__ = ["CreatorTrainer", "LocalLauncher"]
