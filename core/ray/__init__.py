"""Heliograph on Ray: a launcher for clusters, search with Tune, data from Ray Data."""

from .attempts import Attempt, RayValues
from .session import current_session
from .trials import Search, Trial, tune_results
from .tuning import tune

__all__ = ["Attempt", "RayValues", "Search", "Trial", "current_session", "tune", "tune_results"]
