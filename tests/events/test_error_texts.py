from __future__ import annotations

import pytest
from heliograph.events.checks import describe_error, error_text, is_interrupt


class MuteError(Exception):
    """An error whose text cannot be had, for whatever reason."""

    def __init__(self, reason: BaseException) -> None:
        self.reason = reason

    def __str__(self) -> str:
        raise self.reason


@pytest.mark.parametrize("reason", [OSError(), SystemExit(3), GeneratorExit(), RecursionError()], ids=repr)
def test_an_error_whose_text_cannot_be_had_says_so(reason: BaseException) -> None:
    expected = f"<its text raised {type(reason).__name__}>"
    assert error_text(MuteError(reason)) == expected
    assert describe_error(MuteError(reason)) == f"MuteError: {expected}"


def test_a_text_that_is_no_string_is_said_to_be_none() -> None:
    class NumberError(Exception):
        def __str__(self) -> str:
            return 3  # type: ignore[return-value]

    assert error_text(NumberError()) == "<its text raised TypeError>"


def test_a_ctrl_c_during_the_text_is_a_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt):
        error_text(MuteError(KeyboardInterrupt()))


def test_an_error_is_described_by_type_and_text() -> None:
    assert describe_error(KeyError("x")) == "KeyError: 'x'"
    assert describe_error(ValueError()) == "ValueError"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), True),
        (BaseExceptionGroup("a", [ValueError(), BaseExceptionGroup("b", [KeyboardInterrupt()])]), True),
        (BaseExceptionGroup("a", [SystemExit()]), False),
        (ExceptionGroup("a", [ValueError()]), False),
        (SystemExit(), False),
        (ValueError(), False),
    ],
    ids=repr,
)
def test_what_is_a_ctrl_c(error: BaseException, expected: bool) -> None:
    assert is_interrupt(error) is expected
