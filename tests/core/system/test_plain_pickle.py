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
    with pytest.raises(pickle.UnpicklingError, match=r"could run code"):
        unpack(pickle.dumps([value]))
