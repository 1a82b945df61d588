"""Checkpoints on disk: written so that none is ever lost, verified before they are believed, safely read."""

from .consolidating import consolidate
from .files import Files, prepare_folder
from .manifest import Entry, JudgedBy
from .migrations import load_any, newest_of_helios
from .names import checkpoint_name, clean
from .reading import State, entries, load, load_weights, newest, read, read_manifest
from .reading import check as verify
from .store import Store

__all__ = [
    "Entry",
    "Files",
    "JudgedBy",
    "State",
    "Store",
    "checkpoint_name",
    "clean",
    "consolidate",
    "entries",
    "load",
    "load_any",
    "load_weights",
    "newest",
    "newest_of_helios",
    "prepare_folder",
    "read",
    "read_manifest",
    "verify",
]
