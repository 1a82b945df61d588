"""The values of metrics: what of them a checkpoint holds."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.core.checkpoint.state.schema import check_plain
from heliograph_rules.active_rules import plain


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": [1, 2.5, "x", None, True]}, {"a": [1, 2.5, "x", None, True]}),
        (deque([1, (2, 3)], maxlen=2), [1, [2, 3]]),
        ({"a": np.float64(0.5), "b": np.bool_(True), "c": np.int32(3)}, {"a": 0.5, "b": True, "c": 3}),
        (torch.tensor(2.5), 2.5),
        (np.array(3), 3),
        (object(), None),
        ({"a": object()}, None),
        (torch.ones(2), None),
    ],
    ids=["plain", "deque", "numpy", "tensor", "array", "object", "within", "vector"],
)
def test_a_value_is_saved_as_plain_types_or_not_at_all(value: Any, expected: Any) -> None:
    saved = plain(value)
    check_plain(saved, "the value")
    assert saved == expected
    assert type(saved) is type(expected)
