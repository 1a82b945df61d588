"""The records of TensorBoard's files, beside those that its own writer writes."""

from __future__ import annotations

from io import BytesIO

from heliograph.builtin_callbacks.trackers import record
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_they_are_those_of_its_own_writer(contents: list[bytes]) -> None:
    file = BytesIO()
    writer = RecordWriter(file)
    for each in contents:
        writer.write(each)

    assert b"".join(map(record, contents)) == file.getvalue()
