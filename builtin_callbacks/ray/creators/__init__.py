"""Training by functions that make what is trained, on whatever runs them: RaySGD's way in."""

from .local import LocalLauncher
from .trainer import CreatorTrainer

__all__ = ["CreatorTrainer", "LocalLauncher"]
