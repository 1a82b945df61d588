"""Loaders made from datasets, those of other libraries too, and several phases of training data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, Protocol, TypedDict, cast

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ...events.checks import check_flag, check_whole_number, is_whole_number, known_names
from ...events.signatures import show_attributes
from ...plugins.discovery import find
from ..system.extras import kind_of
from .order.samplers import RandomSampler, SequentialSampler
from .order.sizes import length_of
from .sources.dataloader import shield_workers

ONLY_TRAINING = ("shuffle", "sampler", "batch_sampler", "drop_last", "draws_per")
INSTEAD = ("batch_size", "global_batch_size", "shuffle", "sampler", "drop_last")  # of which a batch sampler decides
OURS = ("shuffle", "draws_per", "columns")  # what torch's own loader does not take, or not so


class LoaderParams(TypedDict, total=False):
    """How to make a `DataLoader` from a dataset: torch's own parameters, and some that mean more here.

    Attributes:
        batch_size: samples in a batch, per process; 1 by default, None for a dataset that yields whole batches.
        global_batch_size: instead of it, the samples in the batches of all ranks together, of equal parts.
        shuffle: a new order in every epoch, a pure function of the run's seed and the epoch.
        sampler: any torch sampler; one with `indices(seed, epoch, start)` is gone to any position at once.
        batch_sampler: yields the indices of each batch, such as `TokenBudgetBatchSampler`; instead of batch_size,
            shuffle, sampler and drop_last.
        draws_per: what random draws in the dataset are keyed by: `batch` (the default, cheapest) or `sample`, which
            makes them independent of the batch size and of the number of processes too.
        columns: of a Ray dataset, the columns that make a batch, such as `("image", "label")` for (inputs, targets); by
            default a batch is a dict of all.
        num_workers: processes that load; their number changes no batch and no draw of a map-style dataset.
        drop_last: whether a last, smaller batch is left out.
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


NUMBERS = {"batch_size": 1, "global_batch_size": 1, "num_workers": 0, "prefetch_factor": 1}  # at least


class Phases:
    """Several phases of training data: `fit(task, Phases(easy, hard))`.

    A run begins with the first; `control.next_phase(reason)` ends the epoch at the next boundary and continues with the
    next one. In the last phase the request has no effect. Checkpoints keep the phase.

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


def check_params(params: Any, given: Iterable[Any]) -> None:
    """Raise unless loader parameters are known ones, and there is a dataset that they are for."""
    if params is None:
        return
    if not isinstance(params, dict):
        raise TypeError(f"loader_params= takes a dict such as {{'batch_size': 32, 'shuffle': True}}, got {params!r}.")
    for unknown in params.keys() - LoaderParams.__annotations__.keys():
        raise ValueError(f"loader_params= has no {unknown!r}.{known_names(unknown, LoaderParams.__annotations__)}")
    if params.get("draws_per", "batch") not in ("batch", "sample"):
        raise ValueError(f"loader_params['draws_per'] is 'batch' or 'sample', got {params['draws_per']!r}.")
    if params.get("sampler") is not None and params.get("shuffle"):
        raise ValueError("loader_params= takes a sampler or shuffle=True, not both: the sampler is the order.")
    for name in ("shuffle", "drop_last", "pin_memory", "persistent_workers"):
        check_flag(f"loader_params[{name!r}]", params.get(name, False))
    for name, least in NUMBERS.items():
        if params.get(name) is not None or name in ("global_batch_size", "num_workers"):
            or_else = "None" if name in ("batch_size", "prefetch_factor") else ""
            check_whole_number(f"loader_params[{name!r}]", params.get(name, 1), at_least=least, or_else=or_else)
    if params.get("batch_sampler") is not None and (given_too := [name for name in INSTEAD if params.get(name)]):
        raise ValueError(
            f"loader_params['batch_sampler'] decides which samples make a batch, and in which order: leave out "
            f"{', '.join(given_too)}."
        )
    if "global_batch_size" in params and "batch_size" in params:
        raise ValueError("loader_params= takes batch_size, of one process, or global_batch_size, of all; not both.")
    _check_given(params, list(given))


def shared_params(params: Any) -> Any:
    """Return the parameters that are not those of one stream of a training, None where there are none."""
    if not isinstance(params, Mapping):
        return params
    known = LoaderParams.__annotations__
    return {name: each for name, each in params.items() if name in known or not isinstance(each, Mapping)} or None


def _check_given(params: dict[str, Any], given: list[Any]) -> None:
    if not any(map(is_dataset, given)):
        kinds = ", ".join(type(each).__name__ for each in given)
        hint = " A list holds batches, not samples." * any(isinstance(each, list) for each in given)
        raise ValueError(
            f"loader_params= says how to read a dataset, but {kinds} is a loader, made already: give its dataset.{hint}"
        )
    if "columns" in params and not any(map(adapter_of, given)):
        raise ValueError(
            "loader_params['columns'] is for a Ray dataset: of others, each sample is what the dataset gives."
        )


def params_of_one_process(params: LoaderParams | None, world_size: int) -> LoaderParams | None:
    """Return checked parameters as one of so many processes goes by them, its part of a global batch as `batch_size`.

    Raises:
        ValueError: the ranks cannot have equal parts of the global batch.
    """
    if params is None:
        return None
    own = cast(LoaderParams, {name: int(each) if is_whole_number(each) else each for name, each in params.items()})
    if "global_batch_size" in own:
        whole = own.pop("global_batch_size")
        if whole % world_size:
            nearest = max(1, round(whole / world_size)) * world_size
            raise ValueError(
                f"loader_params['global_batch_size'] = {whole} cannot be shared equally by {world_size} ranks: give a "
                f"multiple such as {nearest}, or another number of ranks."
            )
        own["batch_size"] = whole // world_size
    return own


def evaluation_loader(data: Any, params: LoaderParams | None, split: str) -> Any:
    """Return a loader of a validation or test set: every sample once, in order."""
    rest = None if params is None else {name: each for name, each in params.items() if name not in ONLY_TRAINING}
    if params is not None and params.get("batch_sampler") is not None and is_dataset(data):
        raise ValueError(
            f"loader_params['batch_sampler'] is for the training data: give the {split} data as batches, as in "
            f"DataLoader(dataset, batch_size=32)."
        )
    loader = make_loader(data, rest, split)
    check_loader(loader, split)
    return shield_workers(loader) if type(loader) is DataLoader and loader.num_workers else loader


def is_dataset(data: Any) -> bool:
    """Return whether something holds samples, not batches; those of other libraries are known by their methods."""
    if isinstance(data, Dataset) or adapter_of(data) is not None:
        return True
    is_batches = isinstance(data, DataLoader | list | tuple | Mapping)
    return not is_batches and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def samples_at_most(data: Any, size: int) -> int:
    """Return the size of a batch that is to be tried: no more than the samples of a dataset, where that says how many.

    Raises:
        TypeError: the data are batches already.
        ValueError: the size is not a positive whole number.
    """
    if isinstance(data, DataLoader | list | tuple):
        raise TypeError(
            f"find_batch_size makes batches of several sizes, and {kind_of(data)} is batches already: give its dataset."
        )
    check_whole_number("largest", size, of="samples", at_least=1)
    samples = length_of(data) if isinstance(data, Dataset) else None  # type: ignore[arg-type]  # asked for its length
    return min(size, samples) if samples else size


def make_loader(data: Any, params: Any, split: str) -> Any:
    """Return a loader as it is, or one that is made from a dataset."""
    if (adapter := adapter_of(data)) is not None:
        return adapter.loader(data, params, split)
    if params is None or not is_dataset(data):
        return data
    options = {name: value for name, value in params.items() if name not in OURS}
    if isinstance(data, IterableDataset):
        if params.get("shuffle") or params.get("sampler") is not None:
            raise ValueError(f"The {split} dataset is iterable, so its order is its own: no shuffle and no sampler.")
        if params.get("draws_per") == "sample":
            raise ValueError(f"The {split} dataset is iterable: what it draws is keyed by batch, not by sample.")
        return DataLoader(data, **options)
    try:
        size = len(data)
    except TypeError:
        raise TypeError(f"The {split} dataset {type(data).__name__} has no length: give it __len__.") from None
    if not size:
        raise ValueError(f"The {split} dataset is empty.")
    if params.get("batch_sampler") is not None:
        return DataLoader(data, **{name: value for name, value in options.items() if name not in INSTEAD})
    sampler = params.get("sampler")
    if sampler is None:
        sampler = RandomSampler(size) if params.get("shuffle") else SequentialSampler(size)
    return DataLoader(data, **{**options, "sampler": sampler})


GROUP = "heliograph.loaders"


PLAIN = ("builtins", "collections", "torch", "numpy", "__main__")  # packages whose objects have no adapter


class Adapter(Protocol):
    """What an entry point of the group names: an object, or a class with static methods."""

    def accepts(self, data: Any) -> bool:
        """Return whether this is a dataset of the library: something else may be a loader already."""

    def loader(self, dataset: Any, params: Mapping[str, Any] | None, split: str) -> Any:
        """Return a loader of a dataset, as `loader_params` say.

        Raises:
            TypeError: nothing says how to batch it.
            ValueError: a parameter is not for such a dataset.
        """


def adapter_of(data: Any) -> Adapter | None:
    """Return what makes a loader of somebody's dataset; None where no installed package does."""
    package = type(data).__module__.partition(".")[0]
    if package in PLAIN or package not in _packages():
        return None
    adapter = cast(Adapter, find(package, GROUP).load())
    return adapter if adapter.accepts(data) else None


@cache
def _packages() -> frozenset[str]:
    return frozenset(point.name for point in entry_points(group=GROUP))


def check_loader(loader: Any, split: str) -> None:
    """Raise TypeError unless a loader can be iterated, ValueError where it says that it is empty."""
    if isinstance(loader, Mapping):
        raise TypeError(
            f"The {split} loader is a dict with the keys {sorted(map(str, loader))[:5]}, and a "
            f"loader yields batches: give one of its values. Phases(...) trains on several, one after the other."
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"The {split} loader must be an iterable of batches, got {type(loader).__name__}.")
    samples = hasattr(loader, "__len__") and not hasattr(loader, "__iter__")  # as other libraries' datasets
    if samples or (isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)):
        raise TypeError(
            f"The {split} loader is a dataset of samples: say how to batch it, loader_params={{'batch_size': 32}}, or "
            f"give a DataLoader."
        )
    if isinstance(loader, Tensor):
        raise TypeError(
            f"The {split} loader is a tensor, which holds no batches: give TensorDataset(inputs, targets) with "
            f"loader_params={{'batch_size': 32}}."
        )
    if length_of(loader) == 0:
        raise ValueError(f"The {split} loader is empty: it has no batch. Check its dataset, batch_size and drop_last.")
