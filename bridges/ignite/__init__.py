"""PyTorch-Ignite: its handlers in our loop, our plugins in its loop."""

from .from_ignite import from_ignite as from_ignite
