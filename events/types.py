"""Types that stand in the signatures of runs, controls and the bus, for those who write them down."""

from .bus import FunctionName as FunctionName
from .bus import PluginName as PluginName
from .catalogue import Phase as Phase
from .catalogue import Status as Status
from .control import Pending as Pending
from .control import Verb as Verb
from .engine import Reduction as Reduction
from .guarantee import Guarantee as Guarantee
from .run import CheckpointSource as CheckpointSource
