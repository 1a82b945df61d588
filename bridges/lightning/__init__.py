"""Lightning: its callbacks in our loop."""

from .from_lightning import from_lightning as from_lightning
