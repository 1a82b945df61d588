"""Heliograph on Ray: a launcher for clusters, search with Tune, data from Ray Data."""

from .launcher.attempts import Attempt, RayValues
from .search.trials import Search, Trial, tune_results
from .search.tune import tune
from .session import current_session

__all__ = ["Attempt", "RayValues", "Search", "Trial", "current_session", "tune", "tune_results"]
