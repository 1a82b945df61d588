"""What an error of Ray Train means: what failed, and whether another attempt may succeed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from heliograph import RankFailed
from heliograph.core.distributed.exceptions import ProcessFailure
from heliograph.spi import describe_error, error_chain, is_broken_collective, require

if TYPE_CHECKING:
    from .attempts import WorkerGroup

Kind = Literal["lost", "hung", "preempted", "failed"]
# Ray's own errors, by name, that mean that another process, or an object that it held, is gone.
LOSSES = ("RayActorError", "NodeDiedError", "LocalRayletDiedError", "OwnerDiedError", "ObjectLostError")
FACT = re.compile(r"^\t(\w+): (.*)$", re.MULTILINE)  # of a dead worker, in Ray's message
SENTENCE_END = re.compile(r"(?<=\.)\s")


class WorkerFailed(RuntimeError):  # noqa: N818  # for Ray; the caller has the error itself
    """The function raised on a worker."""

    def __init__(self, rank: int, name: str) -> None:
        super().__init__(rank, name)  # as given, so that it can be pickled
        self.rank, self.name = rank, name

    def __str__(self) -> str:
        return f"rank {self.rank} failed with {self.name}, which is raised where RayLauncher.run was called"


@dataclass(frozen=True)
class AttemptFailure:
    """How an attempt failed.

    Attributes:
        kind: `lost` (a worker, or its machine), `hung` (a worker), `preempted` (the machine of a worker is taken away):
            another attempt may follow; `failed`: none follows.
        text: what happened, for people.
        errors: what to raise if no other attempt follows, the first cause first.
        cause: Ray's error.
    """

    kind: Kind
    text: str
    errors: tuple[ProcessFailure, ...]
    cause: BaseException | None = None


def is_secondary(error: BaseException) -> bool:
    """Return whether a worker raised an exception only because another process failed or is gone."""
    return is_broken_collective(error) or any(
        isinstance(each, RankFailed) or is_process_loss(each) for each in error_chain(error)
    )


def is_process_loss(error: BaseException) -> bool:
    """Return whether an exception of Ray means that another process, or an object that it held, is gone."""
    exceptions = require("ray.exceptions", "RayLauncher", extra="ray")
    losses = tuple(getattr(exceptions, name) for name in LOSSES)
    return isinstance(error, losses) and not getattr(error, "actor_init_failed", False)


def classify_failure(
    group: WorkerGroup | None, error: BaseException | None, *, is_stopping: bool = False
) -> AttemptFailure:
    """Return how an attempt failed.

    Args:
        group: its last worker group; None if no worker had started.
        error: what `fit` raised; None if it raised nothing.
        is_stopping: whether the caller asked the workers to end, so that their exit is not a preemption.
    """
    failed = {} if group is None else group.failed
    failures = {rank: ProcessFailure(each.error.rebuild(), each.error.text, rank) for rank, each in failed.items()}
    causes = [failures[rank] for rank, each in failed.items() if not each.is_secondary]
    others = [failures[rank] for rank, each in failed.items() if each.is_secondary]
    notice = None if group is None else next(iter(group.exit_notices.values()), None)
    if any(not each.is_no_failure for each in causes):
        return _failed([*causes, *others], error)
    if notice is not None and not is_stopping:
        return AttemptFailure("preempted", notice.reason, (), error)
    if _is_preempted(error):
        return AttemptFailure("preempted", str(error), (), error)
    seen = next(
        (each for failure in others for each in error_chain(failure.error) if isinstance(each, RankFailed)), None
    )
    if seen is not None and seen.was_reported:  # another rank's error, which did not arrive here itself
        return _failed([*causes, *others], error)
    dead = _find_dead_worker(error, failures)
    if seen is not None or dead or others:
        first = seen or RankFailed(*(dead or (others[0].rank or 0, "left", describe_error(others[0].error))), "")
        kind: Kind = "hung" if first.kind == "hung" else "lost"
        return AttemptFailure(kind, str(first), (ProcessFailure(first, rank=first.rank), *others), error)
    if causes:
        return _failed(causes, error)
    if error is None and notice is not None:
        return AttemptFailure("failed", notice.reason, (ProcessFailure(SystemExit(0)),))
    if error is None:
        error = RuntimeError("Ray ended the run without an error, but not every worker has reported how it ended.")
    return AttemptFailure(
        "lost" if _is_lost_early(error) else "failed", describe_error(error), (ProcessFailure(error),), error
    )


def _failed(failures: Sequence[ProcessFailure], error: BaseException | None) -> AttemptFailure:
    text = f"rank {failures[0].rank} failed with {describe_error(failures[0].error)}"
    return AttemptFailure("failed", text, tuple(failures), error)


def _find_dead_worker(
    error: BaseException | None, reported: Mapping[int, ProcessFailure]
) -> tuple[int, str, str] | None:
    """Return rank, kind and text of the first worker that Ray reports as dead and that has reported no failure."""
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    for rank, failure in sorted(failures.items()):
        if rank not in reported and not isinstance(failure, WorkerFailed):
            return rank, "died", _shorten(str(getattr(failure, "health_check_failure", failure)))
    return None


def _shorten(message: str) -> str:
    """Return the sentence of Ray's message that says why a worker died, with pid and ip if the message has them."""
    facts = list(FACT.finditer(message))
    named = {each[1]: each[2] for each in facts}
    reason = message[facts[-1].end() :] if facts else message
    sentence = SENTENCE_END.split(" ".join(reason.split()), maxsplit=1)[0]
    where = ", ".join(f"{name} {named[name]}" for name in ("pid", "ip") if name in named)
    return f"{sentence.rstrip('.')} ({where})" if where else sentence


def _is_preempted(error: BaseException | None) -> bool:
    """Return whether Ray reports that a machine was taken away."""
    failures = getattr(error, "worker_failures", {}).values()
    deaths = [getattr(each, "health_check_failure", each) for each in failures]
    return type(error).__name__ == "PreemptionError" or any(getattr(each, "preempted", False) for each in deaths)


def _is_lost_early(error: BaseException) -> bool:
    """Return whether a worker, or Ray's controller of them, was lost before the function was called."""
    inner = getattr(error, "controller_failure", error)
    actor_error = require("ray.exceptions", "RayLauncher", extra="ray").RayActorError
    if getattr(inner, "actor_init_failed", False):  # its constructor raised, and would again
        return False
    return isinstance(inner, actor_error) or type(inner).__name__ == "WorkerGroupStartupFailedError"
