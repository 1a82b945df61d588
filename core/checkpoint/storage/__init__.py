"""Checkpoints on disk: written so that none is ever lost, verified before they are loaded, read safely."""

from .files import Files
from .manifest import Entry, JudgedBy, checkpoint_name, clean
from .reader import State, entries, load, newest, read, read_manifest
from .reader import check as verify
from .store import Store

__all__ = [
    "Entry",
    "Files",
    "JudgedBy",
    "State",
    "Store",
    "checkpoint_name",
    "clean",
    "entries",
    "load",
    "newest",
    "read",
    "read_manifest",
    "verify",
]
