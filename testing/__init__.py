"""For the tests of plugins, one's own included: `check_plugin(lambda: MyPlugin(...))`."""

from .conformance import check_plugin
from .recorder import Recorder

__all__ = ["Recorder", "check_plugin"]
