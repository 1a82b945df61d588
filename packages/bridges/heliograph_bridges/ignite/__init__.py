"""PyTorch-Ignite: handlers as plugins, and plugins in its engines."""

from .attach import attach as attach
from .from_ignite import from_ignite as from_ignite
