"""The public names for authors of larger plugins; `spi.py` imports each from its module when it is first used."""

from collections.abc import Callable
from typing import Any

from .builtin_callbacks.trackers import Page as Page
from .builtin_callbacks.trackers import Place as Place
from .builtin_callbacks.trackers import Tracker as Tracker
from .core.checkpoint.compatibility import scale_optimizer as scale_optimizer
from .core.checkpoint.compatibility import scale_scheduler as scale_scheduler
from .core.checkpoint.storage import read_manifest as read_manifest
from .core.checkpoint.storage.lock import Lock as Lock
from .core.checkpoint.storage.manifest import Entry as Entry
from .core.checkpoint.storage.manifest import MissingManifestError as MissingManifestError
from .core.checkpoint.storage.manifest import clean as clean
from .core.checkpoint.storage.store import Store as Store
from .core.data.rng import capture as capture
from .core.data.rng import restore as restore
from .core.data.rng import seed_all as seed_all
from .core.data.samplers import SeekableSampler as SeekableSampler
from .core.distributed.collective_errors import is_broken_collective as is_broken_collective
from .core.distributed.exchange import average_gradients as average_gradients
from .core.distributed.failure import error_chain as error_chain
from .core.distributed.membership import membership as membership
from .core.distributed.outcomes import on_main as on_main
from .core.engines.contract import LoopEngine as LoopEngine
from .core.engines.ddp import ProcessEngine as ProcessEngine
from .core.engines.movers import register_mover as register_mover
from .core.host import Host as Host
from .core.host import current_host as current_host
from .core.host import ended_for_good as ended_for_good
from .core.host import hosted_by as hosted_by
from .core.loop_state import as_plain as as_plain
from .core.metrics import Metrics as Metrics
from .core.metrics.monitor import Monitor as Monitor
from .core.objects.equality import Leaf as Leaf
from .core.objects.equality import leaves as leaves
from .core.objects.program import differing as differing
from .core.objects.program import encode as encode
from .core.program import TrainerFactory as TrainerFactory
from .core.program import UsageError as UsageError
from .core.program import find_function as find_function
from .core.result_views import as_json as as_json
from .core.system.extras import printable_lines as printable_lines
from .core.system.extras import require as require
from .core.system.extras import version as version
from .core.system.extras import with_article as with_article
from .core.trace import Difference as Difference
from .core.trace import Fact as Fact
from .core.trace import Tracer as Tracer
from .events.checks import check_flag as check_flag
from .events.checks import check_number as check_number
from .events.checks import check_path as check_path
from .events.checks import check_whole_number as check_whole_number
from .events.checks import count as count
from .events.checks import describe as describe
from .events.checks import describe_error as describe_error
from .events.checks import is_number as is_number
from .events.checks import is_whole_number as is_whole_number
from .events.checks import known_names as known_names
from .events.checks import printable as printable
from .plugins.discovery import check_options as check_options
from .plugins.discovery import find as find
from .plugins.first_party import is_first_party as is_first_party

def lazy_names(module: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]: ...
