"""What a replay has instead of the hardware, the optimizers and the data of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from heliograph import NotRecorded
from heliograph.events import Reduction, ResumeFacts


class Unrecorded:
    """An attribute that no recording has: reading it raises `NotRecorded`.

    Args:
        what: what it is.
        mend: what would record it, if anything does.
    """

    def __init__(self, what: str, mend: str = "") -> None:
        self._what, self._mend = what, mend

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise NotRecorded(self._what, self._mend)


class UnrecordedCounts(dict[str, int]):
    """Counts by name that no recording has: asking for one raises `NotRecorded`."""

    def __missing__(self, name: str) -> int:
        raise NotRecorded("how many batches of each stream were read")


class RecordedGroup(MutableMapping[str, Any]):
    """A parameter group with nothing but the learning rate, which is known only during a `Log` that has it."""

    def __init__(self) -> None:
        self.rate: float | None = None

    def __getitem__(self, key: str) -> Any:
        if key == "lr" and self.rate is not None:
            return self.rate
        if key == "lr":
            raise NotRecorded("the learning rate here", "A Log holds it, if LearningRate(...) was in the run.")
        raise NotRecorded(f"the optimizer's {key!r}")

    def __setitem__(self, key: str, value: Any) -> None:
        raise NotRecorded(f"a training that continues with another {key!r}")

    def __delitem__(self, key: str) -> None:
        raise NotRecorded(f"a training that continues without {key!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(["params", "lr"])

    def __len__(self) -> int:
        return 2


class RecordedOptimizer:
    """An optimizer with one parameter group that cannot step."""

    state: Any = Unrecorded("the optimizer's state")
    defaults: Any = Unrecorded("the optimizer's settings")

    def __init__(self) -> None:
        self.group = RecordedGroup()
        self.param_groups = [self.group]

    def step(self, *arguments: Any, **options: Any) -> Any:
        raise NotRecorded("the optimizer")

    zero_grad = state_dict = load_state_dict = add_param_group = step


class RecordedEngine:
    """The engine of the main rank, without a device and without the values of the other ranks.

    Args:
        world_size: how many processes trained.
    """

    device: Any = Unrecorded("the device")
    rank = local_rank = 0
    is_main = is_local_main = True
    waited_seconds = 0.0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def reduce(self, value: Any, how: Reduction = "mean") -> Any:
        return self._own(value)

    def gather(self, tensor: Any) -> list[Any]:
        return [self._own(tensor)]

    def gather_objects(self, value: Any) -> list[Any]:
        return [self._own(value)]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return self._own(value)

    def barrier(self) -> None:
        pass  # Return at once: a replay is one process.

    def vote(self, values: Sequence[float]) -> list[float]:
        return list(self._own(values))

    def refusing(self, plugin: str, event: str) -> AbstractContextManager[None]:
        return nullcontext()

    def writing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def clip_gradients(self, parameters: Iterable[Any], norm: float | None, norm_type: float = 2.0) -> Any:
        raise NotRecorded("the gradients")

    def _own(self, value: Any) -> Any:
        if self.world_size > 1:
            raise NotRecorded(f"the values of the other ranks ({self.world_size - 1})")
        return value


class RecordedData:
    """The data of a recorded run, of which a recording has only the number of batches.

    Args:
        validation_sets: the names of the validation sets.
        is_last_batch: returns whether the current batch is the last of its epoch.
    """

    train_loader: Any = Unrecorded("the loader")
    validation_loaders: Any = Unrecorded("the validation loaders")
    stream: Any = Unrecorded("which of several streams a batch is of")
    seed: Any = Unrecorded("the seed of the data")
    phase: Any = Unrecorded("which phase of the data was read")
    batch_size: Any = Unrecorded("the batch size of the loader")
    layouts: Any = Unrecorded("how the samples were distributed over batches")

    def __init__(self, validation_sets: tuple[str, ...], is_last_batch: Callable[[], bool]) -> None:
        self.validation_sets, self._is_last_batch, self.in_hand = validation_sets, is_last_batch, False
        self.evaluation_batches: int | None = None

    @property
    def is_last_batch(self) -> bool:
        return self._is_last_batch()

    def key_draws(self, seed: int, *, probe: bool = True) -> None:
        raise NotRecorded("the data, whose draws are to be keyed")

    def resume_facts(self) -> ResumeFacts:
        raise NotRecorded("what is known about a resume")

    def report_untracked(self, path: str, kind: str) -> None:
        raise NotRecorded("what is known about a resume")

    def report_difference(self, text: str) -> None:
        raise NotRecorded("what is known about a resume")
