"""Whether a Ray dataset comes in the same order when it is executed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....core.system.extras import require
from .dealt_rows import USER


def unseeded(dataset: Any) -> str | None:
    """Return what shuffles or samples a dataset without a seed; None where there is no such operation of Ray's."""
    for operator in dataset._logical_plan.dag.post_order_iter():
        if any(_has_none(config) for config in _configs(operator)):
            return str(operator.name)
    return None


def _configs(operator: Any) -> Iterator[Any]:
    """Yield what says how an operator draws; its kinds keep it in different places, none of them public."""
    data = require("ray.data", USER, extra="ray")
    yield getattr(operator, "seed_config", None)
    for argument in getattr(operator, "fn_args", None) or ():
        yield argument if isinstance(argument, data.RandomSeedConfig) else None
    yield getattr(getattr(operator, "datasource", None), "_shuffle", None)
    files = getattr(operator, "shuffle_config_factory", lambda: None)
    one, other = files(), files()
    yield one if one == other else "files"


def _has_none(config: Any) -> bool:
    """Return whether it draws a seed by itself each time."""
    return config is not None and getattr(config, "seed", None) is None
