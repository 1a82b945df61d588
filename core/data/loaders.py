"""The loaders of a run, made from datasets if necessary: phases, streams, evaluation sets and limits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, Protocol, TypedDict, cast

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ...events.checks import check_flag, check_whole_number, is_whole_number, known_names
from ...events.signatures import show_attributes
from ...plugins.discovery import find
from ..system.extras import kind_of
from .dataloader import shield_workers
from .limited import Limit, Limited, check_limit
from .samplers import RandomSampler, SequentialSampler
from .sizes import length_of
from .source import loaders_of
from .streams import Streams

ONLY_TRAINING = ("shuffle", "sampler", "batch_sampler", "drop_last", "draws_per")
OURS = ("shuffle", "draws_per", "columns")  # unknown to torch's loader, or with another meaning


class LoaderParams(TypedDict, total=False):
    """Parameters to make a `DataLoader` from a dataset: torch's own, and a few more.

    Attributes:
        batch_size: samples per batch and process; 1 by default, None for a dataset that yields complete batches.
        global_batch_size: samples of the batches of all ranks together, in equal parts; instead of `batch_size`.
        shuffle: a new order in every epoch, a pure function of the run's seed and the epoch.
        sampler: any torch sampler; one with `indices(seed, epoch, start)` can start at any position at once.
        batch_sampler: yields the indices of each batch, such as `TokenBudgetBatchSampler`; instead of batch_size,
            shuffle, sampler and drop_last.
        draws_per: the key of random draws in the dataset: `batch` (the default, cheapest) or `sample`, which also makes
            them independent of the batch size and the number of processes.
        columns: for a Ray dataset, the columns of a batch, such as `("image", "label")` for (inputs, targets); by
            default a batch is a dict of all columns.
        num_workers: loader processes; for a map-style dataset their number changes no batch and no draw.
        drop_last: whether a last, smaller batch is dropped.
        collate_fn: as in torch.
        pin_memory: as in torch.
        persistent_workers: as in torch.
        prefetch_factor: as in torch.
        timeout: as in torch, in seconds.
        multiprocessing_context: as in torch.
        worker_init_fn: as in torch.
    """

    batch_size: int | None
    global_batch_size: int
    shuffle: bool
    sampler: Sampler[Any] | Iterable[Any]
    batch_sampler: Sampler[list[int]] | Iterable[list[int]]
    draws_per: Literal["batch", "sample"]
    columns: Sequence[str]
    num_workers: int
    drop_last: bool
    collate_fn: Callable[[list[Any]], Any]
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int
    timeout: float
    multiprocessing_context: Any
    worker_init_fn: Callable[[int], None]


class Phases:
    """Several phases of training data: `fit(task, Phases(easy, hard))`.

    A run starts with the first phase. `control.next_phase(reason)` ends the epoch at the next boundary and continues
    with the next phase; in the last phase it has no effect. Checkpoints save the phase.

    Args:
        *loaders: a loader or dataset for each phase.

    Raises:
        ValueError: there is none.
    """

    __repr__ = show_attributes

    def __init__(self, *loaders: Any) -> None:
        if not loaders:
            raise ValueError("Phases(...) takes at least one loader or dataset.")
        self.loaders = loaders


def check_params(params: Any, data: Iterable[Any]) -> None:
    if params is None:
        return
    if not isinstance(params, dict):
        raise TypeError(f"loader_params= takes a dict such as {{'batch_size': 32, 'shuffle': True}}, got {params!r}.")
    for unknown in params.keys() - LoaderParams.__annotations__.keys():
        raise ValueError(f"loader_params= has no {unknown!r}.{known_names(unknown, LoaderParams.__annotations__)}")
    if params.get("draws_per", "batch") not in ("batch", "sample"):
        raise ValueError(f"loader_params['draws_per'] is 'batch' or 'sample', got {params['draws_per']!r}.")
    if params.get("shuffle") and (params.get("sampler") or params.get("batch_sampler")) is not None:
        raise ValueError("loader_params= takes a sampler or shuffle=True, not both: the sampler defines the order.")
    check_flag("loader_params['shuffle']", params.get("shuffle", False))
    check_whole_number("loader_params['global_batch_size']", params.get("global_batch_size", 1), at_least=1)
    if "global_batch_size" in params and "batch_size" in params:
        raise ValueError(
            "loader_params= takes batch_size (of one process) or global_batch_size (of all processes), not both."
        )
    data = list(data)
    if not any(map(is_dataset, data)):
        kinds = ", ".join(type(part).__name__ for part in data)
        raise ValueError(f"loader_params= is for a dataset, but {kinds} is already a loader: give its dataset.")
    if "columns" in params and not any(map(adapter_of, data)):
        raise ValueError("loader_params['columns'] is for Ray datasets only; other datasets yield complete samples.")


def shared_params(params: Any) -> Any:
    if not isinstance(params, Mapping):
        return params
    names = LoaderParams.__annotations__
    return {name: value for name, value in params.items() if name in names or not isinstance(value, Mapping)} or None


def params_of_one_process(params: Any, world_size: int) -> Any:
    """Return checked parameters for one process: `batch_size` is its part of a global batch.

    Raises:
        ValueError: the global batch cannot be divided equally.
    """
    if params is None:
        return None
    local = {name: int(value) if is_whole_number(value) else value for name, value in params.items()}
    if "global_batch_size" in local:
        total = local.pop("global_batch_size")
        if total % world_size:
            nearest = max(1, round(total / world_size)) * world_size
            raise ValueError(
                f"loader_params['global_batch_size'] = {total} cannot be divided equally among {world_size} ranks: use "
                f"a multiple such as {nearest}, or another number of ranks."
            )
        local["batch_size"] = total // world_size
    return local


def evaluation_loader(data: Any, params: LoaderParams | None, split: str) -> Any:
    # Every sample once, in order.
    usable = None if params is None else {name: value for name, value in params.items() if name not in ONLY_TRAINING}
    if params is not None and params.get("batch_sampler") is not None and is_dataset(data):
        raise ValueError(
            f"loader_params['batch_sampler'] is for the training data: give the {split} data as batches, as in "
            f"DataLoader(dataset, batch_size=32)."
        )
    loader = _make(data, usable, split)
    return shield_workers(loader) if type(loader) is DataLoader and loader.num_workers else loader


def is_dataset(data: Any) -> bool:
    # True for samples, False for batches. Datasets of other libraries are recognized by their methods.
    if isinstance(data, Dataset) or adapter_of(data) is not None:
        return True
    is_batches = isinstance(data, DataLoader | list | tuple | Mapping)
    return not is_batches and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def samples_at_most(data: Any, size: int) -> int:
    """Limit a batch size to try to the number of samples of a dataset, if known.

    Raises:
        ValueError: the size is not a positive integer.
    """
    if isinstance(data, DataLoader | list | tuple):
        raise TypeError(f"find_batch_size makes batches of several sizes: give a dataset, not {kind_of(data)}.")
    check_whole_number("largest", size, of="samples", at_least=1)
    samples = length_of(data) if isinstance(data, Dataset) else None  # type: ignore[arg-type]  # it may have no length
    return min(size, samples) if samples else size


def make_loader(data: Any, params: Any, split: str) -> Any:
    if (adapter := adapter_of(data)) is not None:
        return adapter.loader(data, params, split)
    if params is None or not is_dataset(data):
        return data
    options = {name: value for name, value in params.items() if name not in OURS}
    if isinstance(data, IterableDataset):
        if params.get("shuffle") or params.get("sampler") is not None or params.get("draws_per") == "sample":
            raise ValueError(
                f"The {split} dataset is iterable and defines its own order: remove shuffle, sampler and draws_per."
            )
        return DataLoader(data, **options)
    if not (size := len(data)):
        raise ValueError(f"The {split} dataset is empty.")
    if params.get("batch_sampler") is not None:
        return DataLoader(data, **options)
    sampler = params.get("sampler")
    if sampler is None:
        sampler = RandomSampler(size) if params.get("shuffle") else SequentialSampler(size)
    return DataLoader(data, **{**options, "sampler": sampler})


GROUP = "heliograph.loaders"

PLAIN = ("builtins", "collections", "torch", "numpy", "__main__")  # packages whose objects have no adapter


class Adapter(Protocol):
    """The object of an entry point of the group: an instance, or a class with static methods."""

    def accepts(self, data: Any) -> bool:
        """Return whether this is a dataset of the library; another object may be a loader."""

    def loader(self, dataset: Any, params: Mapping[str, Any] | None, split: str) -> Any:
        """Return a loader of a dataset with the given `loader_params`.

        Raises:
            TypeError: a batch size is missing.
            ValueError: a parameter does not apply to such a dataset.
        """


def adapter_of(data: Any) -> Adapter | None:
    package = type(data).__module__.partition(".")[0]
    if package in PLAIN or package not in _packages():
        return None
    adapter = cast(Adapter, find(package, GROUP).load())
    return adapter if adapter.accepts(data) else None


@cache
def _packages() -> frozenset[str]:
    return frozenset(point.name for point in entry_points(group=GROUP))


def check_loader(loader: Any, split: str) -> None:
    if isinstance(loader, Mapping):
        raise TypeError(
            f"The {split} loader is a dict with the keys {sorted(map(str, loader))[:5]}, but a loader yields batches: "
            f"give one of its values. Phases(...) trains on several, one after another."
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"The {split} loader must be an iterable of batches, got {type(loader).__name__}.")
    is_indexed = hasattr(loader, "__len__") and not hasattr(loader, "__iter__")  # a dataset of another library
    is_torchs = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if is_indexed or is_torchs or isinstance(loader, Tensor):
        raise TypeError(
            f"The {split} loader is {kind_of(loader)}, not batches: give a DataLoader, or a dataset, such as "
            f"TensorDataset(inputs, targets), with loader_params={{'batch_size': 32}}."
        )
    if length_of(loader) == 0:
        raise ValueError(f"The {split} loader is empty: it has no batch. Check its dataset, batch_size and drop_last.")


Named = Mapping[str, LoaderParams]
TrainingLoaders = tuple[Sequence[Any], LoaderParams | None, Sequence[Collection[str]]]


def loaders_of_fit(train: Any, options: Mapping[str, Any], world_size: int) -> TrainingLoaders:
    """Return the loader of each phase, the common loader parameters, and the stream names of each phase with streams.

    Args:
        train: the `train` argument of `fit`.
        options: its other arguments.
        world_size: the number of processes that read.
    """
    params, limit, validation = (options.get(name) for name in ("loader_params", "limit_train", "validation"))
    sets = {} if validation is None else named_sets(validation)
    loaders = training_loaders(train, params, world_size, limit=limit, validation_sets=plain_sets(sets).values())
    phases = phases_of(train)
    common = params_of_one_process(split_params(params, phases)[0], world_size)
    return loaders, common, [list(phase.loaders) for phase in phases if isinstance(phase, Streams)]


def training_loaders(
    train: Any, params: Any, world_size: int = 1, *, limit: Any = None, validation_sets: Iterable[Any] = ()
) -> list[Any]:
    """Return the loader of each phase, made from its dataset if necessary.

    Args:
        train: the `train` argument of `fit`.
        params: how to batch datasets, also by stream name.
        world_size: the number of processes that read.
        limit: of an epoch, as `limit_train` of `fit`.
        validation_sets: the validation sets, which share the parameters.

    Raises:
        TypeError: an object is neither a loader nor a dataset, or it is a dataset without parameters.
        ValueError: a loader is empty, or it is a loader and has parameters.
    """
    phases = phases_of(train)
    common, named = split_params(params, phases)
    _check_params(common, named, phases, list(validation_sets))
    local = params_of_one_process(common, world_size)
    local_named = {name: params_of_one_process(stream, world_size) for name, stream in named.items()}
    return [_make_phase(phase, local, local_named, limit) for phase in phases]


def phases_of(train: Any) -> list[Any]:
    phases = list(train.loaders) if isinstance(train, Phases) else [train]
    return [Streams(phase) if isinstance(phase, Mapping) else phase for phase in phases]


def split_params(params: Any, phases: Iterable[Any]) -> tuple[Any, dict[str, Any]]:
    # The parameters for all datasets, and the complete parameters of each stream with its own parameters.
    if not isinstance(params, dict):
        return params, {}
    names = [name for phase in phases if isinstance(phase, Streams) for name in phase.loaders]
    streams = {name: value for name, value in params.items() if name in names and isinstance(value, dict)}
    common = {name: value for name, value in params.items() if name not in streams}
    return common or (None if streams else common), {name: {**common, **stream} for name, stream in streams.items()}


def _check_params(common: Any, named: Named, phases: Iterable[Any], validation_sets: list[Any]) -> None:
    data_by_stream = [pair for phase in phases for pair in loaders_of(phase).items()]
    check_params(common, [*(data for _, data in data_by_stream), *validation_sets])
    for name, params in named.items():
        check_params(params, [data for stream, data in data_by_stream if stream == name])
    if common and not any(is_dataset(data) for _, data in data_by_stream):
        for name in ONLY_TRAINING:
            if name in common:
                raise ValueError(
                    f"loader_params[{name!r}] is for a training dataset, but train is already a loader: set it in the "
                    f"loader."
                )


def _make_phase(phase: Any, params: LoaderParams | None, named: Named, limit: Any) -> Any:
    if not isinstance(phase, Streams):
        if isinstance(limit, Mapping):
            raise ValueError(f"limit_train takes limits by name only if there are several streams, got {limit!r}.")
        return _limited(_make(phase, params, "train"), limit, per_sample=_is_per_sample(params))
    _check_repeated(phase.loaders)
    params_of = {name: named.get(name, params) for name in phase.loaders}
    return _limited(
        phase.made(
            lambda name, data: _make(data, params_of[name], f"train stream {name!r}"),
            limits_of("limit_train", limit if isinstance(limit, Mapping) else None, phase.loaders, "stream"),
            [name for name, stream_params in params_of.items() if _is_per_sample(stream_params)],
        ),
        None if isinstance(limit, Mapping) else limit,
        per_sample=False,
    )


def _make(data: Any, params: Any, split: str) -> Any:
    loader = make_loader(data, params, split)
    check_loader(loader, split)
    return loader


def _limited(loader: Any, limit: Any, *, per_sample: bool) -> Any:
    if limit is None:
        return loader
    return Limited(loader, check_limit("limit_train", limit), "train loader", per_sample=per_sample)


def _is_per_sample(params: LoaderParams | None) -> bool:
    return params is not None and params.get("draws_per") == "sample"


def _check_repeated(streams: Mapping[str, Any]) -> None:
    # A map-style dataset may be several streams; an object with a position may not.
    positioned = {name: data for name, data in streams.items() if not is_dataset(data)}
    for name, data in positioned.items():
        if sum(data is another for another in positioned.values()) > 1:
            raise ValueError(f"The train stream {name!r} is the same object as another: give a loader for each.")


class Periodic:
    """A validation set for every n-th validation.

    For example: `validation={"small": a, "large": Periodic(b, every=5)}`.

    Validations are counted from 1 over the whole training, including resumed runs: with `every=5`, the 5th and 10th
    read the set. In the other validations it has no metrics, neither new nor old, so a plugin that monitors one of
    them, such as `EarlyStopping`, does nothing. Every validation must read at least one set.

    Args:
        data: the loader or dataset.
        every: read the set in every n-th validation.

    Raises:
        ValueError: `every` is not positive.
    """

    __repr__ = show_attributes

    def __init__(self, data: Any, *, every: int) -> None:
        self.data, self.every = data, check_whole_number("every", every, of="validations", at_least=1)


EvaluationSets = tuple[dict[str, Any], dict[str, Limit], dict[str, int]]


def evaluation_sets(sets: Any, phase: str, params: LoaderParams | None, limit: Any, option: str) -> EvaluationSets:
    """Return the loaders of the sets by name, the limits of some sets, and the periods of periodic ones.

    Args:
        sets: one set, which gets the empty name, or several by name.
        phase: `validation` or `test`.
        params: how to batch datasets.
        limit: of all sets, or of some by name.
        option: the name of the limit argument, for errors.

    Raises:
        TypeError: a set is neither a loader nor a dataset with parameters.
        ValueError: there is no set, a name has a slash, a set is empty, a limit is out of range, or all sets are
            periodic.
    """
    named = named_sets(sets)
    if not named:
        raise ValueError(f"There is no {phase} data: the dict of sets is empty, put one in it.")
    every = {name: data.every for name, data in named.items() if isinstance(data, Periodic)}
    if every and min(every.get(name, 1) for name in named) > 1:
        raise ValueError(
            "All validation sets are Periodic, so some validations would read none: give one set without Periodic, or "
            "validate less often, for example with ValidationSchedule(Every(epochs=5))."
        )
    loaders = {}
    for name, data in plain_sets(named).items():
        if not isinstance(name, str) or "/" in name:
            raise ValueError(
                f"The name of a {phase} set becomes part of metric names, so it is a string without '/'; got {name!r}."
            )
        loaders[name] = evaluation_loader(data, params, f"{phase} {name}".strip())
    return loaders, limits_of(option, limit, loaders, f"{phase} set"), every


def named_sets(sets: Any) -> dict[str, Any]:
    return dict(sets) if isinstance(sets, Mapping) else {"": sets}


def plain_sets(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: data.data if isinstance(data, Periodic) else data for name, data in named.items()}


def limits_of(option: str, limit: Any, names: Mapping[str, Any], kind: str) -> dict[str, Limit]:
    """Return the limit of each set or stream that has one.

    Args:
        option: the name of the argument, for errors.
        limit: one for all, some by name, or None.
        names: the sets or streams by name.
        kind: the kind of the named objects, for errors.

    Raises:
        ValueError: a name is unknown, or a limit is neither a number of batches nor a fraction.
    """
    if limit is None:
        return {}
    if not isinstance(limit, Mapping):
        return dict.fromkeys(names, check_limit(option, limit))
    for name in limit.keys() - names.keys():
        raise ValueError(f"{option} has no {kind} {name!r}.{known_names(str(name), filter(None, names))}")
    return {name: check_limit(f"{option}[{name!r}]", value) for name, value in limit.items()}
