"""Failures of ranks: reports and exceptions sent between processes."""

from __future__ import annotations

import json
import pickle
import signal
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Self

from ...events.checks import describe_error, error_text
from ..system.errors import RankFailed, add_run_note, run_notes


@dataclass(frozen=True, slots=True)
class Failure:
    """The report about the rank that failed first.

    Attributes:
        rank: the one that failed.
        kind: the qualified name of the exception's type; `died`, `hung` or `left` if another rank reports it.
        text: the exception's text, or the observation about that rank.
        place: where in the run it was.
        interrupt: whether it was a Ctrl-C.
    """

    rank: int
    kind: str
    text: str = ""
    place: str = ""
    interrupt: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int, place: str) -> Self:
        """Return the report about an exception."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return cls(rank, name, error_text(error), place, isinstance(error, KeyboardInterrupt))

    @classmethod
    def read(cls, text: str | bytes) -> Self:
        return cls(**json.loads(text))

    def write(self) -> str:
        return json.dumps(asdict(self))

    def as_error(self) -> BaseException:
        """Return the exception for the other ranks: KeyboardInterrupt after a Ctrl-C, else RankFailed."""
        error = RankFailed(self.rank, self.kind, self.text, self.place)
        return KeyboardInterrupt(str(error)) if self.interrupt else error


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and the errors in its `__cause__` and `__context__`."""
    seen: dict[int, BaseException] = {}
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in seen:
            seen[id(link)] = link
            pending += [link.__context__, link.__cause__]
    yield from seen.values()


@dataclass(frozen=True)
class Carried:
    """An exception as data that can always be pickled.

    Attributes:
        forms: its class, arguments and attributes, pickled if possible; last, a RuntimeError with its text. The first
            one that can be loaded is used.
        text: the formatted tracebacks of the exception and its causes.
        cause: its `__cause__`.
    """

    forms: tuple[bytes, ...]
    text: str
    cause: Carried | None

    @classmethod
    def of(cls, error: BaseException) -> Self:
        _, args, *state = _builtin(type(error)).__reduce__(error)
        attributes = {name: value for part in state for name, value in part.items() if _pickle(value)}
        notes = {name: attributes[name] for name in ("__notes__", "heliograph_run_notes") if name in attributes}
        substitute = _pickle((RuntimeError, (describe_error(error),), notes))
        forms = tuple(form for form in (_pickle((type(error), args, attributes)), substitute) if form)
        text = "".join(traceback.format_exception(error))
        return cls(forms, text, None if error.__cause__ is None else cls.of(error.__cause__))

    def rebuild(self) -> BaseException:
        """Return the exception with its own type if this process can import it; `__init__` is not called."""
        error = _load(self.forms)
        error.__cause__ = None if self.cause is None else self.cause.rebuild()
        return error


def _pickle(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001  # pickling the user's values may raise anything
        return b""


def _load(forms: tuple[bytes, ...]) -> BaseException:
    try:
        kind, args, attributes = pickle.loads(forms[0])  # noqa: S301  # from our own child
        base = _builtin(kind)
        error: BaseException = base.__new__(kind, *args)
        base.__init__(error, *args)
    except Exception:  # noqa: BLE001  # unpickling the user's values may raise anything
        return _load(forms[1:])
    for name, value in attributes.items():
        object.__setattr__(error, name, value)
    return error


def _builtin(kind: type[BaseException]) -> Any:
    # The nearest built-in base takes exceptions apart and rebuilds them without the user's `__init__`.
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


@dataclass(frozen=True)
class ProcessFailure:
    """A failure on a rank, or in the caller's `on_message`.

    Attributes:
        error: the exception.
        text: its formatted traceback, if it comes from another process.
        rank: its rank; None in this process.
        signum: the signal that ended the rank, if any.
    """

    error: BaseException
    text: str = ""
    rank: int | None = None
    signum: int = 0

    @property
    def is_no_failure(self) -> bool:
        """True if the rank only exited with status 0."""
        return isinstance(self.error, SystemExit) and not self.error.code

    @property
    def rank_failure(self) -> RankFailed | None:
        """The report of the rank that failed first, if there is one."""
        error: BaseException | None = self.error
        while error is not None and not isinstance(error, RankFailed):
            error = error.__cause__
        return error

    @property
    def follows(self) -> bool:
        """True if this rank failed because another one did."""
        return self.rank_failure is not None and not self.died

    @property
    def died(self) -> bool:
        """True if the rank ended without a report."""
        return self.rank is not None and not self.text

    @staticmethod
    def raise_first(failures: list[ProcessFailure], killed: list[int], grace: float, sent: set[int]) -> None:
        """Raise the first error that is not a consequence of another rank's error, if there is one.

        Args:
            failures: in the order of their arrival.
            killed: ranks that did not end in time.
            grace: the seconds that they had.
            sent: the signals that were sent to the ranks.
        """
        if not failures:
            return
        causes = [failure.rank_failure for failure in failures]
        hung = {cause.rank for cause in causes if cause is not None and cause.kind == "hung"}
        # The end of a rank that hung says less than the reports of the others.
        failures = [failure for failure in failures if not (failure.died and failure.rank in hung)] or failures
        first = min(failures, key=lambda failure: (failure.is_no_failure, failure.follows))  # min keeps the order
        error = first.error
        for text in dict.fromkeys(note for failure in failures for note in run_notes(failure.error)):
            if text not in run_notes(error):
                add_run_note(error, text)
        if first.signum in sent:
            raise KeyboardInterrupt if first.signum == signal.SIGINT else SystemExit(128 + first.signum) from error
        if first.text:
            error.add_note(f"heliograph: raised on rank {first.rank}:\n{first.text.rstrip()}")
        for failure in failures:
            if failure is not first and failure.signum not in sent:  # a signal that we sent is no news
                where = "on_message" if failure.rank is None else f"rank {failure.rank}"
                error.add_note(f"heliograph: also failed: {where}, with {describe_error(failure.error)}")
        for rank in killed:
            error.add_note(f"heliograph: rank {rank} did not end within {grace:g} s of that, and was killed.")
        cause = first.rank_failure
        error.heliograph_rank = first.rank if cause is None else cause.rank  # type: ignore[attr-defined]
        raise error


def silent_death(rank: int, status: int, *, began: bool) -> ProcessFailure:
    """Return the failure of a rank whose process ended without a report.

    Args:
        rank: its number.
        status: its exit status, or minus the number of the signal that ended it.
        began: whether it had called the function.
    """
    how = f"signal {_name(-status)} ended it" if status < 0 else f"it ended with exit status {status}"
    text = f"{how} before it {'could report' if began else 'called the function'}. See its output above"
    if not began and status == 1:
        text += '. Each process imports the script: does it call launch outside of `if __name__ == "__main__":`?'
    return ProcessFailure(RankFailed(rank, "died", text, ""), rank=rank, signum=max(0, -status))


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return str(signum)
