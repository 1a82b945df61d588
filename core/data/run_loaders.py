"""The loaders of a run, made of what `fit` is given: phases, streams, sets of a validation or test, limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch.utils.data import DataLoader

from ...events.checks import check_whole_number, known_names
from ...events.signatures import show_attributes
from .loaders import (
    ONLY_TRAINING,
    LoaderParams,
    Phases,
    check_loader,
    check_params,
    evaluation_loader,
    is_dataset,
    make_loader,
    params_of_one_process,
)
from .sources.limited import Limit, Limited, check_limit
from .sources.stateful import is_stateful
from .streams import Streams

Named = Mapping[str, LoaderParams]
TrainingLoaders = tuple[Sequence[Any], LoaderParams | None, Sequence[Collection[str]]]


def given_loaders(train: Any, options: Mapping[str, Any], world_size: int) -> TrainingLoaders:
    """Return the loader of each phase, the parameters for all datasets, and the names of its streams.

    Args:
        train: what `fit` is given.
        options: its other arguments.
        world_size: how many processes read.
    """
    params, limit, validation = (options.get(name) for name in ("loader_params", "limit_train", "validation"))
    sets = {} if validation is None else named_sets(validation)
    loaders = training_loaders(train, params, world_size, limit=limit, others=plain_sets(sets).values())
    phases = phases_of(train)
    common = params_of_one_process(split_params(params, phases)[0], world_size)
    return loaders, common, [list(phase.loaders) for phase in phases if isinstance(phase, Streams)]


def training_loaders(
    train: Any, params: Any, world_size: int = 1, *, limit: Any = None, others: Iterable[Any] = ()
) -> list[Any]:
    """Return the loader of each phase, made from its dataset where that was given; it reads for all ranks.

    Args:
        train: what `fit` is given.
        params: how to batch datasets; those of streams by name, too.
        world_size: how many processes read.
        limit: of an epoch, as `limit_train` of `fit`.
        others: the validation sets, which the parameters are for as well.

    Raises:
        TypeError: something is neither a loader nor a dataset, or is a dataset and nothing says how to batch it.
        ValueError: a loader is empty, or parameters were given for a loader that is made already.
    """
    phases = phases_of(train)
    common, named = split_params(params, phases)
    _check_params(common, named, phases, list(others))
    own = params_of_one_process(common, world_size)
    own_named = {name: cast(LoaderParams, params_of_one_process(each, world_size)) for name, each in named.items()}
    return [_make_phase(phase, own, own_named, limit) for phase in phases]


def phases_of(train: Any) -> list[Any]:
    """Return the phases of training data; data by name are `Streams`."""
    phases = list(train.loaders) if isinstance(train, Phases) else [train]
    return [Streams(each) if isinstance(each, Mapping) else each for each in phases]


def split_params(params: Any, phases: Iterable[Any]) -> tuple[Any, dict[str, Any]]:
    """Return the parameters for all, None where there are none, and those of streams that have some of their own."""
    if not isinstance(params, dict):
        return params, {}
    names = [name for each in phases if isinstance(each, Streams) for name in each.loaders]
    own = {name: each for name, each in params.items() if name in names and isinstance(each, dict)}
    common = {name: each for name, each in params.items() if name not in own}
    return common or (None if own else common), {name: {**common, **each} for name, each in own.items()}


def _check_params(common: Any, named: Named, phases: Iterable[Any], others: list[Any]) -> None:
    given = list(_given(phases))
    streams = [name for name, _ in given if name]
    for name, each in common.items() if streams and isinstance(common, dict) else ():
        if isinstance(each, dict) and name not in LoaderParams.__annotations__:
            raise ValueError(f"loader_params= has no stream {name!r}.{known_names(str(name), streams)}")
    check_params(common, [*(data for _, data in given), *others])
    for name, params in named.items():
        check_params(params, [data for each, data in given if each == name])
    if common and not any(is_dataset(data) for _, data in given):
        for name in ONLY_TRAINING:
            if name in common:
                raise ValueError(
                    f"loader_params[{name!r}] is for training data, and the train loader is made already: make it so."
                )


def _given(phases: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, data) of all streams, and ("", data) of phases that are none."""
    for phase in phases:
        yield from phase.loaders.items() if isinstance(phase, Streams) else [("", phase)]


def _make_phase(phase: Any, params: LoaderParams | None, named: Named, limit: Any) -> Any:
    if not isinstance(phase, Streams):
        if isinstance(limit, Mapping):
            raise ValueError(f"limit_train takes limits by name for several streams only, got {limit!r}.")
        return _limited(_make(phase, params, "train"), limit, per_sample=_is_per_sample(params))
    _check_repeated(phase.loaders)
    params_of = {name: named.get(name, params) for name in phase.loaders}
    return _limited(
        phase.made(
            lambda name, data: _make(data, params_of[name], f"train stream {name!r}"),
            limits_of("limit_train", limit if isinstance(limit, Mapping) else None, phase.loaders, "stream"),
            [name for name, each in params_of.items() if _is_per_sample(each)],
        ),
        None if isinstance(limit, Mapping) else limit,
        per_sample=False,
    )


def _make(data: Any, params: LoaderParams | None, what: str) -> Any:
    loader = make_loader(data, params, what)
    check_loader(loader, what)
    return loader


def _limited(loader: Any, limit: Any, *, per_sample: bool) -> Any:
    if limit is None:
        return loader
    return Limited(loader, check_limit("limit_train", limit), "train loader", per_sample=per_sample)


def _is_per_sample(params: LoaderParams | None) -> bool:
    return params is not None and params.get("draws_per") == "sample"


def _check_repeated(streams: Mapping[str, Any]) -> None:
    """Raise ValueError where one object that has a position or an epoch of its own is given for two streams."""
    parts = [part for each in streams.values() for part in {id(each): each, id(_inner(each)): _inner(each)}.values()]
    for number, count in Counter(map(id, parts)).items():
        part = next(each for each in parts if id(each) == number)
        if count > 1 and (isinstance(part, Iterator) or is_stateful(part) or hasattr(part, "set_epoch")):
            raise ValueError(
                f"Two train streams read the same {type(part).__name__}, whose position or epoch would be that of the "
                f"other one: give each an object of its own."
            )


def _inner(data: Any) -> Any:
    return data.dataset if isinstance(data, DataLoader) else data


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

    __repr__ = show_attributes

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
