"""The sets of a validation or test: periodic ones, limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...events.checks import check_whole_number, known_names
from .loaders import LoaderParams, evaluation_loader
from .sources.limited import Limit, check_limit


class Periodic:
    """A validation set that only every so many validations read: `{"small": a, "large": Periodic(b, every=5)}`.

    Validations are counted from 1 in the whole training, resumed runs included, so with `every=5` the fifth reads it,
    then the tenth. In the others it has no metrics, neither new nor old ones: a plugin that monitors one, such as
    `EarlyStopping`, does nothing then. At least one set is read in every validation.

    Args:
        data: the loader or dataset.
        every: how many validations there are for each that reads it.

    Raises:
        ValueError: `every` is not positive.
    """

    def __init__(self, data: Any, *, every: int) -> None:
        self.data, self.every = data, check_whole_number("every", every, of="validations", at_least=1)


EvaluationSets = tuple[dict[str, Any], dict[str, Limit], dict[str, int]]


def evaluation_sets(given: Any, phase: str, params: LoaderParams | None, limit: Any, option: str) -> EvaluationSets:
    """Return the loaders of sets by name, the limits of some, and of periodic ones how rarely they are read.

    Args:
        given: one set, which has the empty name then, or several by name.
        phase: `validation` or `test`.
        params: how to batch datasets.
        limit: of all sets, or of some by name.
        option: the argument that gave it.

    Raises:
        TypeError: a set is neither a loader nor a dataset with parameters.
        ValueError: there is no set, a name has a slash, a set is empty, a limit is out of its range, or all sets are
            periodic.
    """
    named = named_sets(given)
    if not named:
        raise ValueError(f"There is no {phase} data: the dict of sets is empty, put one in it.")
    every = {name: each.every for name, each in named.items() if isinstance(each, Periodic)}
    if every and min(every.get(name, 1) for name in named) > 1:
        raise ValueError(
            "All validation sets are Periodic, so some validations would read none: give one set as it is, or validate "
            "less often, as with ValidationSchedule(Every(epochs=5))."
        )
    loaders = {}
    for name, data in plain_sets(named).items():
        if not isinstance(name, str) or "/" in name:
            raise ValueError(
                f"The name of a {phase} set becomes part of metric names: a string without '/'; got {name!r}."
            )
        loaders[name] = evaluation_loader(data, params, f"{phase} {name}".strip())
    return loaders, limits_of(option, limit, loaders, f"{phase} set"), every


def named_sets(given: Any) -> dict[str, Any]:
    """Return sets by name; a single one has the empty name."""
    return dict(given) if isinstance(given, Mapping) else {"": given}


def plain_sets(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return what periodic sets are made of, and others as they are."""
    return {name: each.data if isinstance(each, Periodic) else each for name, each in named.items()}


def limits_of(option: str, limit: Any, names: Mapping[str, Any], what: str) -> dict[str, Limit]:
    """Return the limit of each set or stream that has one.

    Args:
        option: the name of the argument, for errors.
        limit: one for all, or some by name; None where there is none.
        names: the sets or streams, by name.
        what: they are, for errors.

    Raises:
        ValueError: a name is unknown, or a limit is neither a number of batches nor a fraction.
    """
    if limit is None:
        return {}
    if not isinstance(limit, Mapping):
        return dict.fromkeys(names, check_limit(option, limit))
    for name in limit.keys() - names.keys():
        raise ValueError(f"{option} has no {what} {name!r}.{known_names(str(name), filter(None, names))}")
    return {name: check_limit(f"{option}[{name!r}]", each) for name, each in limit.items()}
