"""Replacements of the engine, the optimizers and the data of a recorded run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from heliograph import NotRecorded
from heliograph.events import Reduction


class UnrecordedAttribute:
    """A descriptor for unrecorded attributes: reading it raises `NotRecorded`.

    Args:
        name: the attribute in words.
        hint: how to record it, if that is possible.
    """

    def __init__(self, name: str, hint: str = "") -> None:
        self._name, self._hint = name, hint

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise NotRecorded(self._name, self._hint)


class UnrecordedCounts(dict[str, int]):
    """Counts by stream; reading one raises `NotRecorded`."""

    def __missing__(self, name: str) -> int:
        raise NotRecorded("the number of batches of each stream")


class RecordedGroup(MutableMapping[str, Any]):
    """A parameter group with only the learning rate, which is known during a `Log` that contains it."""

    def __init__(self) -> None:
        self.rate: float | None = None

    def __getitem__(self, key: str) -> Any:
        if key == "lr" and self.rate is not None:
            return self.rate
        if key == "lr":
            raise NotRecorded("the learning rate here", "A Log has it if LearningRate(...) was in the run.")
        raise NotRecorded(f"the optimizer's {key!r}")

    def __setitem__(self, key: str, value: Any) -> None:
        raise NotRecorded(f"a training with a different {key!r}")

    def __delitem__(self, key: str) -> None:
        raise NotRecorded(f"a training without {key!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(["params", "lr"])

    def __len__(self) -> int:
        return 2


class RecordedOptimizer:
    """An optimizer with one parameter group that cannot step."""

    state: Any = UnrecordedAttribute("the optimizer's state")
    defaults: Any = UnrecordedAttribute("the optimizer's settings")

    def __init__(self) -> None:
        self.group = RecordedGroup()
        self.param_groups = [self.group]

    def step(self, *arguments: Any, **options: Any) -> Any:
        raise NotRecorded("the optimizer")

    zero_grad = state_dict = load_state_dict = add_param_group = step


class RecordedEngine:
    """The engine of the main rank, without a device and without the values of the other ranks."""

    device: Any = UnrecordedAttribute("the device")
    clip_gradients: Any = UnrecordedAttribute("the gradients")
    rank = local_rank = 0
    is_main = is_local_main = True
    waited_seconds = 0.0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def reduce(self, value: Any, how: Reduction = "mean") -> Any:
        return self._on_one_rank(value)

    def gather(self, tensor: Any) -> list[Any]:
        return [self._on_one_rank(tensor)]

    def gather_objects(self, value: Any) -> list[Any]:
        return [self._on_one_rank(value)]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return self._on_one_rank(value)

    def barrier(self) -> None:
        pass

    def vote(self, values: Sequence[float]) -> list[float]:
        return list(self._on_one_rank(values))

    def refusing(self, plugin: str, event: str) -> AbstractContextManager[None]:
        return nullcontext()

    def writing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _on_one_rank(self, value: Any) -> Any:
        if self.world_size > 1:
            raise NotRecorded(f"the values of the other ranks ({self.world_size - 1})")
        return value


class RecordedData:
    """The data of a recorded run: the names of the validation sets and the number of batches."""

    train_loader: Any = UnrecordedAttribute("the loader")
    validation_loaders: Any = UnrecordedAttribute("the validation loaders")
    stream: Any = UnrecordedAttribute("the stream of a batch")
    seed: Any = UnrecordedAttribute("the seed of the data")
    phase: Any = UnrecordedAttribute("the phase of the data")
    batch_size: Any = UnrecordedAttribute("the batch size of the loader")
    layouts: Any = UnrecordedAttribute("the distribution of the samples over batches")
    key_draws: Any = UnrecordedAttribute("the data, and its draws")
    resume_facts: Any = UnrecordedAttribute("the facts of a resume")
    report_untracked: Any = resume_facts
    report_difference: Any = resume_facts

    def __init__(self, validation_sets: tuple[str, ...], is_last_batch: Callable[[], bool]) -> None:
        self.validation_sets, self._is_last_batch, self.in_hand = validation_sets, is_last_batch, False
        self.evaluation_batches: int | None = None

    @property
    def is_last_batch(self) -> bool:
        return self._is_last_batch()
