"""Classification of Ray Train's errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from heliograph import RankFailed
from heliograph.core.distributed.failure import ProcessFailure
from heliograph.spi import describe_error, error_chain, is_broken_collective, require

from .attempts import WorkerGroup

Kind = Literal["lost", "hung", "preempted", "failed"]
# Ray's errors for a lost process or a lost object
LOSSES = ("RayActorError", "NodeDiedError", "LocalRayletDiedError", "OwnerDiedError", "ObjectLostError")
FACT = re.compile(r"^\t(\w+): (.*)$", re.MULTILINE)  # of a dead worker, in Ray's message
SENTENCE_END = re.compile(r"(?<=\.)\s")


class WorkerFailed(RuntimeError):  # noqa: N818  # for Ray; the caller has the error itself
    """The function raised on a worker."""

    def __str__(self) -> str:
        rank, name = self.args  # as given, so that it can be pickled
        return f"rank {rank} failed with {name}, which RayLauncher.run raises"


@dataclass(frozen=True)
class AttemptFailure:
    """How an attempt failed.

    Attributes:
        kind: another attempt may follow `lost` (a worker or its machine), `hung` (a worker) and `preempted` (a machine
            will be taken away), but not `failed`.
        text: a description.
        errors: the errors to raise if no attempt follows, the first cause first.
        cause: Ray's error.
    """

    kind: Kind
    text: str
    errors: tuple[ProcessFailure, ...]
    cause: BaseException | None = None


def is_secondary(error: BaseException) -> bool:
    return is_broken_collective(error) or any(
        isinstance(cause, RankFailed) or is_process_loss(cause) for cause in error_chain(error)
    )


def is_process_loss(error: BaseException) -> bool:
    exceptions = require("ray.exceptions", "RayLauncher", extra="ray")
    losses = tuple(getattr(exceptions, name) for name in LOSSES)
    return isinstance(error, losses) and not getattr(error, "actor_init_failed", False)


def classify_failure(
    group: WorkerGroup | None, error: BaseException | None, *, is_stopping: bool = False
) -> AttemptFailure:
    failed = {} if group is None else group.failed
    failures = {
        rank: ProcessFailure(failure.error.rebuild(), failure.error.text, rank) for rank, failure in failed.items()
    }
    causes = [failures[rank] for rank, failure in failed.items() if not failure.is_secondary]
    consequences = [failures[rank] for rank, failure in failed.items() if failure.is_secondary]
    notice = None if group is None else next(iter(group.exit_notices.values()), None)
    if any(not cause.is_no_failure for cause in causes):
        return _failed([*causes, *consequences], error)
    if notice is not None and not is_stopping:
        return AttemptFailure("preempted", notice.reason, (), error)
    if _is_preempted(error):
        return AttemptFailure("preempted", str(error), (), error)
    seen = next(
        (cause for failure in consequences for cause in error_chain(failure.error) if isinstance(cause, RankFailed)),
        None,
    )
    if seen is not None and seen.was_reported:  # caused by the error of another rank, which did not arrive here
        return _failed([*causes, *consequences], error)
    dead = _find_dead_worker(error, failures)
    if seen is not None or dead or consequences:
        first = seen or RankFailed(
            *(dead or (consequences[0].rank or 0, "left", describe_error(consequences[0].error))), ""
        )
        kind: Kind = "hung" if first.kind == "hung" else "lost"
        return AttemptFailure(kind, str(first), (ProcessFailure(first, rank=first.rank), *consequences), error)
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
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    for rank, failure in sorted(failures.items()):
        if rank not in reported and not isinstance(failure, WorkerFailed):
            return rank, "died", _shorten(str(getattr(failure, "health_check_failure", failure)))
    return None


def _shorten(message: str) -> str:
    facts = list(FACT.finditer(message))
    named = {fact[1]: fact[2] for fact in facts}
    reason = message[facts[-1].end() :] if facts else message
    sentence = SENTENCE_END.split(" ".join(reason.split()), maxsplit=1)[0]
    where = ", ".join(f"{name} {named[name]}" for name in ("pid", "ip") if name in named)
    return f"{sentence.rstrip('.')} ({where})" if where else sentence


def _is_preempted(error: BaseException | None) -> bool:
    failures = getattr(error, "worker_failures", {}).values()
    deaths = [getattr(death, "health_check_failure", death) for death in failures]
    return type(error).__name__ == "PreemptionError" or any(getattr(death, "preempted", False) for death in deaths)


def _is_lost_early(error: BaseException) -> bool:
    inner = getattr(error, "controller_failure", error)
    actor_error = require("ray.exceptions", "RayLauncher", extra="ray").RayActorError
    if getattr(inner, "actor_init_failed", False):  # its constructor would raise again
        return False
    return isinstance(inner, actor_error) or type(inner).__name__ == "WorkerGroupStartupFailedError"
