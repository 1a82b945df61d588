"""Exceptions that cross from one process to another."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from typing import Any, Never

import pytest
from heliograph import RankFailed, TrainingError
from heliograph.core.distributed.exceptions import Carried
from heliograph.tests.messages import assert_facts

pytestmark = pytest.mark.usefixtures("leaves_nothing")


class KeywordError(Exception):
    made = 0

    def __init__(self, *, code: int) -> None:
        type(self).made += 1
        super().__init__("code", code)
        self.code = code


class FileGoneError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "gone", path)


class TextError(UnicodeDecodeError):
    def __new__(cls, text: str) -> TextError:
        return super().__new__(cls, text)

    def __init__(self, text: str) -> None:
        super().__init__("utf-8", text.encode(), 0, 1, "bad")


class UnheardError(Exception):
    """Never makes it through its own constructor."""

    def __init__(self, text: str) -> None:
        raise AssertionError("called")


class ChoosyError(Exception):
    def __init_subclass__(cls, *, why: str, **options: Any) -> None:
        super().__init_subclass__(**options)


class ShyError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("not me")


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("not me")

    def __reduce__(self) -> Never:
        raise RuntimeError("not me either")


def sent(error: BaseException) -> BaseException:
    carried: Carried = pickle.loads(pickle.dumps(Carried.of(error)))
    return carried.rebuild()


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:  # noqa: BLE001
        return caught


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a"),
        ValueError(),
        SystemExit(143),
        KeyboardInterrupt(),
        StopIteration(3),
        OSError(2, "No such file", "data.bin"),
        ImportError("no", name="module", path="file"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        SyntaxError("bad", ("file", 1, 2, "text")),
        KeywordError(code=3),
        FileGoneError("data.bin"),
        TextError("x"),
        RankFailed(1, "KeyError", "'a'", "in train"),
        TrainingError("failed"),
        pickle.PicklingError("no"),
        ExceptionGroup("several", [KeyError("a"), ValueError("b")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_type_text_and_attributes_arrive(error: BaseException) -> None:
    arrived = sent(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert repr(arrived) == repr(error)
    names = ("code", "value", "errno", "filename", "name", "path", "start", "lineno", "rank", "kind")
    assert [getattr(arrived, name, None) for name in names] == [getattr(error, name, None) for name in names]


def test_no_constructor_is_called() -> None:
    error = KeywordError(code=3)
    before = KeywordError.made
    sent(error)
    assert KeywordError.made == before
    unreceived = UnheardError.__new__(UnheardError, "text")
    assert repr(sent(unreceived)) == "UnheardError('text')"


def test_what_cannot_be_pickled_arrives_as_text() -> None:
    error = ValueError("text", lock := threading.Lock())
    error.held = lock  # type: ignore[attr-defined]
    error.shy = Shy()  # type: ignore[attr-defined]
    arrived = sent(error)
    assert arrived.args == ("text", repr(lock))
    assert vars(arrived).keys() == {"held", "shy"}
    assert vars(arrived)["held"] == repr(lock)
    assert_facts(vars(arrived)["shy"], "Shy", "RuntimeError")


def test_a_type_that_cannot_be_imported_gets_a_stand_in_of_its_name_and_base() -> None:
    class LocalError(KeywordError):
        pass

    class LowerError(LocalError, LookupError):
        pass

    arrived = sent(LowerError(code=3))
    assert isinstance(arrived, KeywordError)
    assert type(arrived) is not LowerError
    assert type(arrived).__mro__[1] is KeywordError
    assert type(arrived).__name__ == "LowerError"
    assert repr(type(arrived)) == repr(LowerError)
    assert arrived.code == 3


@pytest.mark.parametrize("name", [("no_such_module", "OwnError"), (__name__, "OwnError"), (__name__, "sent")])
def test_what_is_no_type_here_gets_a_stand_in(name: tuple[str, str]) -> None:
    carried = replace(Carried.of(ValueError("text")), kinds=(name, ("builtins", "ValueError")))
    arrived = carried.rebuild()
    assert type(arrived).__mro__[1] is ValueError
    assert (type(arrived).__module__, type(arrived).__name__) == name


def test_a_base_that_refuses_stand_ins_is_left_out() -> None:
    class LocalError(ChoosyError, why="test"):
        pass

    arrived = sent(LocalError("text"))
    assert repr(arrived) == "LocalError('text')"
    assert type(arrived).__mro__[1] is Exception


def test_a_group_of_what_cannot_be_pickled_arrives_as_a_stand_in() -> None:
    arrived = sent(ExceptionGroup("several", [ValueError(threading.Lock())]))
    assert type(arrived).__name__ == "ExceptionGroup"
    assert arrived.args[0] == "several"


def test_causes_contexts_and_notes_arrive() -> None:
    cause = raised(KeyError("cause"), raised(OSError("root")))
    error = raised(ValueError("text"), cause)
    error.__context__ = raised(IndexError("context"))
    error.add_note("a note")
    arrived = sent(error)
    assert repr(arrived.__cause__) == "KeyError('cause')"
    assert arrived.__cause__ is not None
    assert repr(arrived.__cause__.__cause__) == "OSError('root')"
    assert repr(arrived.__context__) == "IndexError('context')"
    assert arrived.__suppress_context__
    assert arrived.__notes__ == ["a note"]


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    arrived = sent(first)
    assert arrived.__cause__ is not None
    assert arrived.__cause__.__cause__ is None


def test_the_traceback_arrives_as_text() -> None:
    text = Carried.of(raised(ValueError("text"), raised(KeyError("cause")))).text
    assert text.count("Traceback (most recent") == 2
    assert text.count("in raised\n") == 2
    assert text.endswith("ValueError: text\n")
    assert "ShyError: " in Carried.of(raised(ShyError("text"))).text
