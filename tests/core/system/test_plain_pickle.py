"""Plain values as bytes: the same bits, and no other classes."""

from __future__ import annotations

import math
import pickle
from pathlib import PurePath

import pytest
from heliograph.core.objects.equality import scalar_bits
from heliograph.core.system.plain_pickle import pack, unpack


def test_plain_values_keep_types_and_bits() -> None:
    value = [
        True,
        1,
        1.0,
        -0.0,
        math.nan,
        1j,
        "text",
        b"",
        b"\xff",
        None,
        (1, {"key": [2**3000]}),
        {"a"},
        frozenset("b"),
    ]
    assert scalar_bits(unpack(pack(value))) == scalar_bits(value)


@pytest.mark.parametrize("value", [PurePath("a"), len, int, object()])
def test_other_values_are_neither_written_nor_read(value: object) -> None:
    with pytest.raises(TypeError, match="not a plain type"):
        pack([value])
    with pytest.raises(ValueError, match=r"could .*run code"):
        unpack(pickle.dumps(value, 5))


def test_equal_values_have_equal_bytes_and_nothing_is_shared() -> None:
    text, values = "".join(["a", "b"]), [1]
    assert pack([text, text, values, values]) == pack([text, "ab", values, [1]])


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps([[1]] * 2, 5),  # shared lists, which a walk may visit any number of times
        b"\x80\x05Kr\xff\xff\xff\x7f.",  # a table with room for two billion values
        b"\x80\x05\x96\x00\x00\x00\x00\x10\x00\x00\x00.",  # a bytearray of 64 GiB
        b"\x80\x05]",
        b"",
        "text",
    ],
)
def test_forged_bytes_are_refused(content: object) -> None:
    with pytest.raises(ValueError, match="packed values of the checkpoint are damaged"):
        unpack(content)
