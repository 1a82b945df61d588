"""Whether a Ray dataset has the same order when it is executed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from heliograph.spi import require

from .distributor import PURPOSE


def find_unseeded(dataset: Any) -> str | None:
    """Return the name of an operation of Ray that shuffles or samples a dataset without a seed; None without any."""
    for operator in dataset._logical_plan.dag.post_order_iter():
        if any(_lacks_seed(config) for config in _configs(operator)):
            return str(operator.name)
    return None


def _configs(operator: Any) -> Iterator[Any]:
    """Yield an operator's configurations of randomness; each kind has it in another attribute, none of them public."""
    data = require("ray.data", PURPOSE, extra="ray")
    yield getattr(operator, "seed_config", None)
    for argument in getattr(operator, "fn_args", None) or ():
        yield argument if isinstance(argument, data.RandomSeedConfig) else None
    yield getattr(getattr(operator, "datasource", None), "_shuffle", None)
    files = getattr(operator, "shuffle_config_factory", lambda: None)
    one, other = files(), files()
    yield one if one == other else "files"


def _lacks_seed(config: Any) -> bool:
    """Return whether a configuration draws a new seed each time."""
    return config is not None and getattr(config, "seed", None) is None
