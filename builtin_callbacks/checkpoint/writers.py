"""Write checkpoints while the loop waits; on several ranks, the main rank writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ...core.distributed.failure import on_main, outcome_of, values_of_ranks
from ...events import Run

T = TypeVar("T")
Shards = dict[str, tuple[int, str]]  # bytes and digest of files, by name


class CheckpointWriter:
    """Write on the main rank while the loop waits; every rank receives the results.

    On several ranks all methods except `close` are collectives; so is `end`, unless the rank has left the group.

    Args:
        weights_only: save only the weights.
    """

    def __init__(self, *, weights_only: bool) -> None:
        self._weights_only = weights_only

    @property
    def is_idle(self) -> bool:
        return True

    def begin(self, run: Run) -> None: ...

    def hold(self, run: Run, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._capture(run, shards)  # the loop waits, so nothing changes it

    def _capture(self, run: Run, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
        # the live state, reduced by `reduce_state` of plugins such as `TrainedOnly`; a collective
        state: dict[str, Any] = run.state_dict(shards, weights_only=self._weights_only)
        for plugin in run.plugins:
            if callable(reduce := getattr(plugin, "reduce_state", None)) and run.plugins.is_enabled(plugin):
                state = reduce(run, state)
        return state

    def do(self, run: Run, work: Callable[[], T], then: Callable[[T], object], *, is_save: bool = True) -> None:
        """Run `work` on the main rank; when it is done, call `then` with its result in the thread of the loop.

        If this rank must abandon the work, the run gets a note if `is_save`.
        """
        then(on_main(run.engine, watched(run, work)))

    def do_on_every_rank(self, run: Run, work: Callable[[], T], then: Callable[[list[T]], object]) -> None:
        then(values_of_ranks(run.engine, outcome_of(watched(run, work))))

    def drain(self) -> None: ...

    def end(self, run: Run) -> None: ...

    def close(self) -> None: ...


def watched(run: Run, work: Callable[[], T]) -> Callable[[], T]:
    # failures of other ranks do not end this process during the work
    engine = run.engine

    def guarded() -> T:
        with engine.writing():
            return work()

    return guarded
