"""Checkpoints on disk: written so that none is ever lost, verified before they are loaded, read safely."""

from .files import Files as Files
from .inventory import read_manifest as read_manifest
from .manifest import Entry as Entry
from .manifest import JudgedBy as JudgedBy
from .manifest import checkpoint_name as checkpoint_name
from .manifest import clean as clean
from .store import Store as Store
