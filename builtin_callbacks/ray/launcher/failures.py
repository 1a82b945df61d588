"""What an error of Ray Train's means: whose fault it was, and whether it is worth another try."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ....core.distributed.launch.exceptions import Failure, rebuild
from ....core.distributed.ranks.failure import chain, is_broken_collective
from ....core.errors import SEEN, RankFailed
from ....core.system.extras import require
from ....events.errors import describe_error
from ..session import LAUNCHER

if TYPE_CHECKING:
    from .attempts import Group

Kind = Literal["lost", "hung", "preempted", "resized", "failed"]
# Ray's own errors, by name, of which each says that another process, or what it held, is gone.
GONE = ("RayActorError", "NodeDiedError", "LocalRayletDiedError", "OwnerDiedError", "ObjectLostError")
FACT = re.compile(r"^\t(\w+): (.*)$", re.MULTILINE)  # as Ray writes of whom it missed
SENTENCE_END = re.compile(r"(?<=\.)\s")


class WorkerFailed(RuntimeError):  # noqa: N818  # tells Ray of what the caller knows already
    """The function raised on a worker."""

    def __init__(self, rank: int, name: str) -> None:
        super().__init__(rank, name)  # as given, so that it can be pickled
        self.rank, self.name = rank, name

    def __str__(self) -> str:
        return f"rank {self.rank} failed with {self.name}, which is raised where RayLauncher.run was called"


@dataclass(frozen=True)
class Verdict:
    """How an attempt failed.

    Attributes:
        kind: `lost` (a worker, or its machine), `hung` (a worker), `preempted`, `resized` (the workers left, as another
            number of them is to go on): worth another try; `failed`: not so.
        text: what happened, for people.
        errors: what to raise if there is no other try, the first cause first.
        cause: what Ray says.
    """

    kind: Kind
    text: str
    errors: tuple[Failure, ...]
    cause: BaseException | None = None


def follows(error: BaseException) -> bool:
    """Return whether an exception on a worker came about because another process failed or is gone."""
    return is_broken_collective(error) or any(isinstance(each, RankFailed) or is_gone(each) for each in chain(error))


def is_gone(error: BaseException) -> bool:
    """Return whether Ray says by an exception that another process, or what it held, is gone."""
    exceptions = require("ray.exceptions", "RayLauncher", extra="ray")
    gone = tuple(getattr(exceptions, name) for name in GONE)
    return isinstance(error, gone) and not getattr(error, "actor_init_failed", False)


def judge(group: Group | None, error: BaseException | None, *, was_asked: bool = False) -> Verdict:
    """Return how an attempt failed.

    Args:
        group: the last worker group of it; None where no worker had begun.
        error: what `fit` raised, None where it raised nothing.
        was_asked: whether the caller asked the workers to end: to leave then is no preemption, but an exit.
    """
    told = {} if group is None else group.failed
    failures = {rank: Failure(rebuild(each.error), each.error.text, rank) for rank, each in told.items()}
    causes = [failures[rank] for rank, each in told.items() if not each.follows]
    others = [failures[rank] for rank, each in told.items() if each.follows]
    left = None if group is None else next(iter(group.left.values()), None)
    if any(not each.is_no_failure for each in causes):
        return _failed([*causes, *others], error)
    if left is not None and not was_asked:
        return Verdict("resized" if left.by == LAUNCHER else "preempted", left.reason, (), error)
    if _is_preempted(error):
        return Verdict("preempted", str(error), (), error)
    seen = next((each for failure in others for each in chain(failure.error) if isinstance(each, RankFailed)), None)
    if seen is not None and seen.kind not in SEEN:  # it was told of an error that did not get here itself
        return _failed([*causes, *others], error)
    gone = _gone(error, failures)
    if seen is not None or gone or others:
        first = seen or RankFailed(*(gone or (others[0].rank or 0, "left", _line(others[0].error))), "")
        kind: Kind = "hung" if first.kind == "hung" else "lost"
        return Verdict(kind, str(first), (Failure(first, rank=first.rank), *others), error)
    if causes:
        return _failed(causes, error)
    if error is None and left is not None:
        return Verdict("failed", left.reason, (Failure(SystemExit(0)),))
    if error is None:
        error = RuntimeError("Ray ended the run without an error, but not every worker has told how it ended.")
    return Verdict("lost" if _is_early(error) else "failed", _line(error), (Failure(error),), error)


def _failed(failures: Sequence[Failure], error: BaseException | None) -> Verdict:
    return Verdict("failed", f"rank {failures[0].rank} failed with {_line(failures[0].error)}", tuple(failures), error)


def _line(error: BaseException) -> str:
    return describe_error(error)


def _gone(error: BaseException | None, told: Mapping[int, Failure]) -> tuple[int, str, str] | None:
    """Return rank, kind and text of the first worker that Ray missed, where it did."""
    missed: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    for rank, failure in sorted(missed.items()):
        if rank not in told and not isinstance(failure, WorkerFailed):
            return rank, "died", _brief(str(getattr(failure, "health_check_failure", failure)))
    return None


def _brief(said: str) -> str:
    """Return the sentence of Ray's in which it says why a worker is gone, with process and machine if it names them."""
    facts = list(FACT.finditer(said))
    named = {each[1]: each[2] for each in facts}
    reason = said[facts[-1].end() :] if facts else said
    sentence = SENTENCE_END.split(" ".join(reason.split()), maxsplit=1)[0]
    where = ", ".join(f"{name} {named[name]}" for name in ("pid", "ip") if name in named)
    return f"{sentence.rstrip('.')} ({where})" if where else sentence


def _is_preempted(error: BaseException | None) -> bool:
    """Return whether Ray says that a machine was taken away."""
    missed = getattr(error, "worker_failures", {}).values()
    deaths = [getattr(each, "health_check_failure", each) for each in missed]
    return type(error).__name__ == "PreemptionError" or any(getattr(each, "preempted", False) for each in deaths)


def _is_early(error: BaseException) -> bool:
    """Return whether a worker, or what Ray starts them with, was lost before the function was called."""
    inner = getattr(error, "controller_failure", error)
    actor_error = require("ray.exceptions", "RayLauncher", extra="ray").RayActorError
    if getattr(inner, "actor_init_failed", False):  # it raised, and would again
        return False
    return isinstance(inner, actor_error) or type(inner).__name__ == "WorkerGroupStartupFailedError"
