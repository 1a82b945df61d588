"""The parts of a Lightning trainer that callbacks reach into: its strategy, its fit loop, its logger connector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn
from weakref import ref

from heliograph.spi import LoopEngine, known_names

Readers = Mapping[str, Any]
MEND = "What needs more of the loop is a plugin of Heliograph: see docs/writing_a_plugin.md."


class Part:
    """An object of which some attributes can be read, and few set.

    Args:
        work: what the callbacks of the run share, a `Work`; given to the readers.

    Attributes:
        label: what callbacks call it.
        readers: of each attribute, a function that returns it.
    """

    label = "trainer"
    readers: ClassVar[Readers] = {}

    def __init__(self, work: Any) -> None:
        vars(self)["_reference"] = ref(work)  # a module that keeps its trainer must not keep the run

    @property
    def _work(self) -> Any:
        return self._reference()

    def __getattr__(self, name: str) -> Any:
        if (reader := self.readers.get(name)) is None:
            raise AttributeError(
                f"{self.label}.{name} is not there: this is a Heliograph training, and from_lightning does not have it."
                f"{known_names(name, self.readers)} {MEND}"
            )
        return reader(self._work)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{self.label}.{name} = {value!r} would change nothing: this is a Heliograph training, whose plugins and "
            f"arguments of fit decide that. Of the trainer, from_lightning lets callbacks set should_stop. {MEND}"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.readers})


class Strategy(Part):
    """The collectives, those of the engine."""

    label = "trainer.strategy"
    readers: ClassVar[Readers] = {
        "root_device": lambda work: work.run.engine.device,
        "global_rank": lambda work: work.run.engine.rank,
        "local_rank": lambda work: work.run.engine.local_rank,
        "world_size": lambda work: work.run.engine.world_size,
        "is_global_zero": lambda work: work.run.engine.is_main,
        "lightning_module": lambda work: work.module,
        "model": lambda work: work.module,
    }

    @property
    def _engine(self) -> LoopEngine:
        return self._work.run.engine  # type: ignore[no-any-return]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank on all."""
        return self._engine.broadcast(obj, src)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self._engine.barrier()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over all ranks."""
        if group is not None:
            _refuse("reduce(group=...): ranks are reduced over all together")
        how: Any = str(reduce_op).rpartition(".")[2].lower()
        return self._engine.reduce(tensor, "mean" if how == "avg" else how)  # which says what is allowed

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # Lightning's name
        """Return whether all ranks, or any of them, say yes."""
        if all:
            return not self._engine.vote([float(not decision)])[0]
        return bool(self._engine.vote([float(decision)])[0])


class EpochLoop(Part):
    """The loop over the batches of an epoch."""

    label = "trainer.fit_loop.epoch_loop"
    readers: ClassVar[Readers] = {
        "_batches_that_stepped": lambda work: work.run.progress.steps,
        "global_step": lambda work: work.run.progress.steps,
        "batch_idx": lambda work: work.batch_index,
        "total_batch_idx": lambda work: work.run.progress.batches - 1,
    }


class FitLoop(Part):
    """The loop over epochs; the length of a run is that of `fit`."""

    label = "trainer.fit_loop"
    readers: ClassVar[Readers] = {
        "epoch_loop": EpochLoop,
        "max_epochs": lambda work: work.trainer.max_epochs,
        "total_batch_idx": lambda work: work.run.progress.batches - 1,
        "_skip_backward": lambda _: False,
    }

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_skip_backward" or value:  # which it never does here
            super().__setattr__(name, value)


class LoggerConnector(Part):
    """When values of steps are logged: always, since a log has the last one."""

    label = "trainer._logger_connector"
    readers: ClassVar[Readers] = {"should_update_logs": lambda work: work.run.report.tracks}


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"trainer.strategy.{what}.")
