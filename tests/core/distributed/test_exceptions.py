"""Exceptions that cross from one process to another."""

from __future__ import annotations

import pickle
import threading

import pytest
from heliograph import RankFailed, TrainingError
from heliograph.core.distributed.failure import Carried

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


class ShyError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("not me")


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


def test_attributes_that_cannot_be_pickled_are_left_out() -> None:
    error = ValueError("text")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.add_note("a note")
    arrived = sent(error)
    assert repr(arrived) == "ValueError('text')"
    assert vars(arrived) == {"__notes__": ["a note"]}


def test_what_this_process_cannot_load_arrives_as_a_runtime_error() -> None:
    class LocalError(KeywordError):
        pass

    error = LocalError(code=3)
    error.add_note("a note")
    arrived = sent(error)
    assert type(arrived) is RuntimeError
    assert str(arrived).startswith("LocalError: ('code', 3)")
    assert arrived.__notes__ == ["a note"]
    assert type(sent(ExceptionGroup("several", [ValueError(threading.Lock())]))) is RuntimeError


def test_causes_and_notes_arrive() -> None:
    cause = raised(KeyError("cause"), raised(OSError("root")))
    error = raised(ValueError("text"), cause)
    error.add_note("a note")
    arrived = sent(error)
    assert repr(arrived.__cause__) == "KeyError('cause')"
    assert arrived.__cause__ is not None
    assert repr(arrived.__cause__.__cause__) == "OSError('root')"
    assert arrived.__notes__ == ["a note"]


def test_the_traceback_arrives_as_text() -> None:
    text = Carried.of(raised(ValueError("text"), raised(KeyError("cause")))).text
    assert text.count("Traceback (most recent") == 2
    assert text.count("in raised\n") == 2
    assert text.endswith("ValueError: text\n")
    assert "ShyError: " in Carried.of(raised(ShyError("text"))).text
