"""The chain of digests."""

from __future__ import annotations

import numpy as np
from heliograph_recorder.digests.checksums import Chain
from hypothesis import given
from hypothesis import strategies as st

Rows = list[list[int]]
ROWS = st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3), min_size=1, max_size=12)


def chained(*groups: Rows) -> Chain:
    """Return the chain of rows that came in groups."""
    chain = Chain()
    for rows in groups:
        chain.add(np.array(rows, np.uint64))
    return chain


@given(ROWS, st.data())
def test_in_which_groups_rows_come_makes_no_difference(rows: Rows, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(rows)))
    whole, parts = chained(rows), chained(*[part for part in (rows[:cut], rows[cut:]) if part])
    assert (whole.value, whole.length) == (parts.value, parts.length)


@given(ROWS, ROWS, st.data())
def test_a_row_that_differs_is_never_forgotten(rows: Rows, later: Rows, data: st.DataObject) -> None:
    row, column = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, 2))
    other = [list(each) for each in rows]
    other[row][column] = (other[row][column] + data.draw(st.integers(1, 2**32 - 1))) % 2**32
    assert chained(rows, later).value != chained(other, later).value


@given(ROWS, ROWS)
def test_a_chain_continues_from_its_state(rows: Rows, later: Rows) -> None:
    chain = Chain()
    chain.load_state_dict(chained(rows).state_dict())
    chain.add(np.array(later, np.uint64))
    assert chain.state_dict() == chained(rows, later).state_dict()
