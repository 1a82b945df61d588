"""Checkpoints on disk: written so that none is ever lost, verified before they are loaded, read safely."""

from .files import Files as Files
from .manifest import Entry as Entry
from .manifest import JudgedBy as JudgedBy
from .manifest import checkpoint_name as checkpoint_name
from .manifest import clean as clean
from .reader import State as State
from .reader import entries as entries
from .reader import load as load
from .reader import newest as newest
from .reader import read as read
from .reader import read_manifest as read_manifest
from .reader import verify as verify
from .store import Store as Store
