"""Exceptions, carried from one process to another, and which of several leaves `launch`."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, Self

from ....events.errors import describe_error
from ...system.errors import RankFailed, add_run_note, run_notes

Piece = tuple[bytes | None, str]  # pickled where that works, and as text
Name = tuple[str, str]  # a class's module and qualified name


@dataclass(frozen=True)
class Carried:
    """An exception as plain data.

    Attributes:
        kinds: its class and the bases of that which are exceptions too, in the order of inheritance.
        args: its arguments.
        state: its attributes, its notes included.
        text: its traceback and those of its causes, formatted.
        cause: what it was raised from.
        context: what was being handled when it was raised.
        suppresses: whether the context is not to be shown.
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
        seen.add(id(error))  # a chain may bite its own tail
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
        """Return the exception: of its own type where this process can import it, else of a substitute's.

        A substitute has the type's name, and inherits from the first of its bases that can be imported. No `__init__`
        or `__new__` of the user's is called. What could not be pickled is there as text.
        """
        args = tuple(_unpack(piece) for piece in self.args)
        state = {name: _unpack(piece) for name, piece in self.state.items()}
        try:
            error = _make(_find(self.kinds), args, state)
        except Exception:  # noqa: BLE001  # a class may refuse whatever it likes; its name and text still arrive
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
    """Return the class, or a substitute that inherits from the nearest base; BaseException is the last of them."""
    found = [_import(*name) for name in kinds]
    nearest = next(kind for kind in found if kind is not None)
    return nearest if found[0] is not None else _substitute(kinds[0], nearest)


def _import(module: str, name: str) -> type[BaseException] | None:
    try:
        found = attrgetter(name)(import_module(module))
    except Exception:  # noqa: BLE001  # a module raises what it likes when it is imported
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _substitute(name: Name, base: type[BaseException]) -> type[BaseException]:
    module, qualified = name
    body = {"__module__": module, "__qualname__": qualified, "__doc__": "Stands in for a class of another process."}
    return type(qualified.rpartition(".")[2], (base,), body)


def _builtin(kind: type[BaseException]) -> type[BaseException]:
    """Return the nearest base that is Python's own: it knows how to take its instances apart and to make them."""
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
    except Exception:  # noqa: BLE001  # the user's __setstate__, or a class that is not to be found here
        return text


@dataclass(frozen=True)
class ProcessFailure:
    """What went wrong on a rank, or in the caller's own `on_message`.

    Attributes:
        error: the exception.
        text: its traceback, formatted, where it comes from another process.
        rank: where; None in this process.
        signum: the signal that ended the rank, where one did.
    """

    error: BaseException
    text: str = ""
    rank: int | None = None
    signum: int = 0

    @property
    def is_no_failure(self) -> bool:
        """Whether the rank merely asked to exit, with status 0."""
        return isinstance(self.error, SystemExit) and not self.error.code

    @property
    def named(self) -> RankFailed | None:
        """What it says of the rank that failed first, if it says anything."""
        error: BaseException | None = self.error
        while error is not None and not isinstance(error, RankFailed):
            error = error.__cause__
        return error

    @property
    def follows(self) -> bool:
        """Whether this rank failed because another one did."""
        return self.named is not None and not self.died

    @property
    def died(self) -> bool:
        """Whether the rank did not even report."""
        return self.rank is not None and not self.text

    @staticmethod
    def raise_first(failures: list[ProcessFailure], killed: list[int], grace: float, sent: set[int]) -> None:
        """Raise the error that came first and does not merely follow another rank's, if there is one.

        Args:
            failures: in the order of their arrival.
            killed: ranks that did not end in time.
            grace: the seconds that they had.
            sent: the signals that the ranks were sent.
        """
        if not failures:
            return
        failures, ended = _apart(failures, sent)
        first = min(failures, key=lambda each: (each.is_no_failure, each.follows))  # of equal ones, the earliest
        error = first.error
        for text in dict.fromkeys(note for other in failures for note in run_notes(other.error)):
            if text not in run_notes(error):
                add_run_note(error, text)
        if first.signum in sent:
            raise KeyboardInterrupt if first.signum == signal.SIGINT else SystemExit(128 + first.signum) from error
        if first.text:
            error.add_note(f"heliograph: raised on rank {first.rank}:\n{first.text.rstrip()}")
        for other in failures:
            if (
                other is not first and other.signum not in sent
            ):  # a rank that died of what we sent has nothing to report
                where = "on_message" if other.rank is None else f"rank {other.rank}"
                error.add_note(f"heliograph: also failed: {where}, with {describe_error(other.error)}")
        for hung in ended:
            error.add_note(f"heliograph: rank {hung.rank} hung, and has ended since: {hung.named and hung.named.text}")
        for rank in killed:
            error.add_note(f"heliograph: rank {rank} did not end within {grace:g} s of that, and was killed.")
        error.heliograph_rank = first.rank if first.named is None else first.named.rank  # type: ignore[attr-defined]
        raise error


def died(rank: int, status: int, *, began: bool) -> ProcessFailure:
    """Return the failure of a rank whose process ended without a report.

    Args:
        rank: its number.
        status: its exit status, or minus the number of the signal that ended it.
        began: whether it had got as far as the function.
    """
    how = f"signal {_name(-status)} ended it" if status < 0 else f"it ended with exit status {status}"
    text = f"{how} before it {'could report' if began else 'called the function'}. Look above for what it printed"
    if not began and status == 1:
        text += '. Each process imports the script: does that call launch outside of `if __name__ == "__main__":`?'
    return ProcessFailure(RankFailed(rank, "died", text, ""), rank=rank, signum=max(0, -status))


def _apart(failures: list[ProcessFailure], sent: set[int]) -> tuple[list[ProcessFailure], list[ProcessFailure]]:
    """Return the failures, and apart from them how ranks ended that hung: that says less than what the others saw."""
    named = [each.named for each in failures]
    hung = {each.rank for each in named if each is not None and each.kind == "hung"}
    ended = [
        failure
        for failure, each in zip(failures, named, strict=True)
        if each is not None and each.kind == "died" and failure.rank in hung and failure.signum not in sent
    ]
    return [each for each in failures if each not in ended], ended


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return str(signum)
