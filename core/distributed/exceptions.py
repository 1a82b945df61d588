"""Exceptions sent between processes, and the one that leaves `launch`."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, Self

from ...events.errors import describe_error
from ..system.errors import RankFailed, add_run_note, run_notes

Piece = tuple[bytes | None, str]  # pickled if possible, and as text
Name = tuple[str, str]  # a class's module and qualified name


@dataclass(frozen=True)
class Carried:
    """An exception as plain data.

    Attributes:
        kinds: its class and its exception base classes, in the order of inheritance.
        args: its arguments.
        state: its attributes, including its notes.
        text: its traceback and those of its causes, formatted.
        cause: its `__cause__`.
        context: its `__context__`.
        suppresses: whether the context is hidden.
    """

    kinds: tuple[Name, ...]
    args: tuple[Piece, ...]
    state: dict[str, Piece]
    text: str
    cause: Carried | None
    context: Carried | None
    suppresses: bool

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return an exception as data that can always be pickled."""
        return cls._of(error, set())

    @classmethod
    def _of(cls, error: BaseException, seen: set[int]) -> Self:
        seen.add(id(error))  # a chain may have a cycle
        kinds = [kind for kind in type(error).__mro__ if issubclass(kind, BaseException)]
        builtin: Any = _builtin(type(error))
        _, args, *state = builtin.__reduce__(error)
        cause, context = error.__cause__, error.__context__
        return cls(
            kinds=tuple((kind.__module__, kind.__qualname__) for kind in kinds),
            args=tuple(_pack(value) for value in args),
            state={name: _pack(value) for attributes in state for name, value in attributes.items()},
            text="".join(traceback.format_exception(error)) if len(seen) == 1 else "",
            cause=cls._of(cause, seen) if cause is not None and id(cause) not in seen else None,
            context=cls._of(context, seen) if context is not None and id(context) not in seen else None,
            suppresses=error.__suppress_context__,
        )

    def rebuild(self) -> BaseException:
        """Return the exception with its own type if this process can import it, else with a substitute.

        A substitute has the name of the type and inherits from its first importable base. User code in `__init__` or
        `__new__` is not called. Values that could not be pickled are text.
        """
        args = tuple(_unpack(piece) for piece in self.args)
        state = {name: _unpack(piece) for name, piece in self.state.items()}
        try:
            error = _make(_find(self.kinds), args, state)
        except Exception:  # noqa: BLE001  # the user's class may refuse; keep its name and text
            error = _make(_substitute(self.kinds[0], Exception), args, state)
        error.__cause__ = None if self.cause is None else self.cause.rebuild()
        error.__context__ = None if self.context is None else self.context.rebuild()
        error.__suppress_context__ = self.suppresses
        return error


def _make(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    base: Any = _builtin(kind)
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)
    for name, value in state.items():
        object.__setattr__(error, name, value)
    return error


def _find(kinds: Sequence[Name]) -> type[BaseException]:
    # The substitute inherits from the nearest importable base, at the latest BaseException.
    classes = [_import(*name) for name in kinds]
    nearest = next(kind for kind in classes if kind is not None)
    return nearest if classes[0] is not None else _substitute(kinds[0], nearest)


def _import(module: str, name: str) -> type[BaseException] | None:
    try:
        value = attrgetter(name)(import_module(module))
    except Exception:  # noqa: BLE001  # importing a module may raise anything
        return None
    return value if isinstance(value, type) and issubclass(value, BaseException) else None


def _substitute(name: Name, base: type[BaseException]) -> type[BaseException]:
    module, qualified = name
    body = {"__module__": module, "__qualname__": qualified, "__doc__": "Substitute for a class of another process."}
    return type(qualified.rpartition(".")[2], (base,), body)


def _builtin(kind: type[BaseException]) -> type[BaseException]:
    # The nearest built-in base can take its instances apart and rebuild them.
    return next(base for base in kind.__mro__ if base.__module__ == "builtins" and issubclass(base, BaseException))


def _pack(value: Any) -> Piece:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  # the user's __repr__
        text = f"<{type(value).__qualname__}, whose repr raised {type(error).__name__}>"
    try:
        return pickle.dumps(value), text
    except Exception:  # noqa: BLE001  # the user's __reduce__
        return None, text


def _unpack(piece: Piece) -> Any:
    pickled, text = piece
    if pickled is None:
        return text
    try:
        return pickle.loads(pickled)  # noqa: S301  # from our own child
    except Exception:  # noqa: BLE001  # the user's __setstate__, or a class that this process lacks
        return text


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
        failures, hung = _split_hung(failures, sent)
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
        for rank, text in hung:
            error.add_note(f"heliograph: rank {rank} hung, and has ended since: {text}")
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


def _split_hung(
    failures: list[ProcessFailure], sent: set[int]
) -> tuple[list[ProcessFailure], list[tuple[int | None, str]]]:
    # The end of a rank that hung says less than the reports of the others, so it becomes (rank, text) for a note.
    causes = [failure.rank_failure for failure in failures]
    hung = {cause.rank for cause in causes if cause is not None and cause.kind == "hung"}
    remaining, ends = list[ProcessFailure](), list[tuple[int | None, str]]()
    for failure, cause in zip(failures, causes, strict=True):
        if cause is not None and cause.kind == "died" and failure.rank in hung and failure.signum not in sent:
            ends.append((failure.rank, cause.text))
        else:
            remaining.append(failure)
    return remaining, ends


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return str(signum)
