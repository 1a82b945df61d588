"""PyTorch-Ignite: its handlers in our loop, our plugins in its loop."""

from .attach import attach as attach
from .from_ignite import from_ignite as from_ignite
