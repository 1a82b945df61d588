"""The training loaders of a run, made of what `fit` is given: phases, streams, limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch.utils.data import DataLoader

from ...events.checks import known_names
from .evaluation_sets import limits_of, named_sets, plain_sets
from .loaders import (
    ONLY_TRAINING,
    LoaderParams,
    Phases,
    check_params,
    is_dataset,
    make_loader,
    params_of_one_process,
)
from .order.sizes import batch_size, check_loader
from .sources.limited import Limited, check_limit
from .sources.stateful import is_stateful
from .streams import Streams, StreamSizes

Named = Mapping[str, LoaderParams]
TrainingLoaders = tuple[Sequence[Any], LoaderParams | None, Callable[[Any], int]]


def given_loaders(train: Any, options: Mapping[str, Any], world_size: int) -> TrainingLoaders:
    """Return the loader of each phase, the parameters for all datasets, and what counts the samples of a batch.

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
    names = [list(each.loaders) for each in phases if isinstance(each, Streams)]
    return loaders, common, StreamSizes(*names) if names else batch_size


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
