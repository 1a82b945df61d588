"""What stands in a replay for the hardware, the optimizers and the data of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from ....core.errors import NotRecorded
from ....events.engine import Reduction
from ....events.guarantee import Guarantee


class Unheld:
    """An attribute that a recording does not hold: to read it raises `NotRecorded`.

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


class RecordedGroup(MutableMapping[str, Any]):
    """A parameter group, of which there is the learning rate, and that only while a log is told that holds it."""

    def __init__(self) -> None:
        self.rate: float | None = None

    def __getitem__(self, key: str) -> Any:
        if key == "lr" and self.rate is not None:
            return self.rate
        if key == "lr":
            raise NotRecorded("the learning rate here", "At a Log it does, where LearningRate(...) was in the run.")
        raise NotRecorded(f"the optimizer's {key!r}")

    def __setitem__(self, key: str, value: Any) -> None:
        raise NotRecorded(f"a training that goes on with another {key!r}")

    def __delitem__(self, key: str) -> None:
        raise NotRecorded(f"a training that goes on without {key!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(["params", "lr"])

    def __len__(self) -> int:
        return 2


class RecordedOptimizer:
    """Says that there is an optimizer, and little more."""

    state: Any = Unheld("the optimizer's state")
    defaults: Any = Unheld("the optimizer's settings")

    def __init__(self) -> None:
        self.group = RecordedGroup()
        self.param_groups = [self.group]

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Refuse."""
        raise NotRecorded("the optimizer")

    zero_grad = state_dict = load_state_dict = add_param_group = step


class RecordedEngine:
    """The main rank of so many, without a device; what the others had is not there.

    Args:
        world_size: how many processes trained.
    """

    device: Any = Unheld("the device")
    rank = local_rank = 0
    is_main = is_local_main = True

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def reduce(self, value: Any, how: Reduction = "mean") -> Any:
        """Return the value, where there was one rank."""
        return self._own(value)

    def gather(self, tensor: Any) -> list[Any]:
        """Return the tensor of the one rank."""
        return [self._own(tensor)]

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the object of the one rank."""
        return [self._own(value)]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value, where there was one rank."""
        return self._own(value)

    def barrier(self) -> None:
        """Go on: nobody is waited for."""

    def clip_gradients(self, parameters: Iterable[Any], norm: float | None, norm_type: float = 2.0) -> Any:
        """Refuse."""
        raise NotRecorded("the gradients")

    def _own(self, value: Any) -> Any:
        if self.world_size > 1:
            raise NotRecorded(f"what the other {self.world_size - 1} ranks had")
        return value


class RecordedData:
    """The training data, of which nothing is recorded but how many batches came."""

    seed: Any = Unheld("the seed of the data")
    phase: Any = Unheld("which phase of the data was read")
    batch_size: Any = Unheld("the batch size of the loader")
    layouts: Any = Unheld("how the data lay in batches")

    def guarantee(self) -> tuple[str, tuple[str, ...]]:
        """Refuse."""
        raise NotRecorded("what a resume would be worth")

    def doubt(self, guarantee: Guarantee, reason: str) -> None:
        """Refuse."""
        raise NotRecorded("what a resume would be worth")

    def reads_as(self, ranks: int) -> bool:
        """Refuse."""
        raise NotRecorded("how the data were dealt out")
