"""Whatever became of its files, a recording is read or refused; what is read can be told and replayed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.__main__ import main
from heliograph.builtin_callbacks.recorder.explain.story import brief, story
from heliograph.builtin_callbacks.recorder.format.checksum import parse, sealed
from heliograph.builtin_callbacks.recorder.format.lines import ROWS
from heliograph.builtin_callbacks.recorder.format.reader import read
from heliograph.builtin_callbacks.recorder.format.records import Batches
from heliograph.builtin_callbacks.recorder.format.tail import tail_path
from heliograph.builtin_callbacks.recorder.format.walk import walk
from heliograph.builtin_callbacks.recorder.timeline.page import page
from heliograph.builtin_callbacks.recorder.timeline.trace import trace
from heliograph.tests.recordings import fit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

INTACT = "intact.recording"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what a run leaves that is killed at its 13th step."""
    folder = tmp_path_factory.mktemp("runs")

    class Copier(h.Plugin):
        @h.on(h.BatchEnd, lane=h.Lane.REPORT)
        def copy(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.steps == 13:
                assert run.recording is not None
                shutil.copy(run.recording, folder / INTACT)
                shutil.copy(tail_path(run.recording), tail_path(folder / INTACT))

    plugins = [
        h.LogSchedule(h.Every(steps=2)),
        h.ValidationSchedule(h.Every(epochs=1)),
        h.EarlyStopping("validation/loss", patience=2),
        h.SaveSchedule(h.Every(steps=4)),
        h.Checkpoint(folder / "saved", keep_last=2),
        h.Recorder(folder / "recorded", losses=True, sample=3),
        Copier(),
    ]
    fit(plugins)
    assert len(read(folder / INTACT).attempts[0].entries) > 20
    return folder


@st.composite
def damages(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw what may become of a file: pieces of it are wrong, missing or new."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(0, 200))
        put_in = draw(st.binary(max_size=8))
        data = data[:at] + put_in + (b"" if draw(st.integers(0, 9)) == 0 else data[at + length :])
    return data


def _tell(path: Path) -> None:
    """Read, tell and replay a recording."""
    try:
        recording = read(path)
    except ValueError as error:
        assert "is no recording of heliograph" in str(error) or "is empty" in str(error)  # noqa: PT017  # or it is read
        return
    list(walk(recording))
    str(h.replay(recording, [h.EarlyStopping("validation/loss", patience=1), h.SaveSchedule(h.Every(steps=4))]))
    if recording.attempts:
        assert story(recording)
        assert len(brief(recording)) == 5
        assert page(recording)
        json.dumps(trace(recording), allow_nan=False)


@given(st.data())
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
    derandomize=True,
    database=None,
)
def test_what_is_left_of_a_damaged_recording_can_be_told_and_replayed(folder: Path, data: st.DataObject) -> None:
    path = folder / "damaged.recording"
    path.write_bytes(data.draw(damages((folder / INTACT).read_bytes())))
    _tell(path)


@given(st.data())
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
    derandomize=True,
    database=None,
)
def test_and_with_it_what_a_kill_left_beside_it(folder: Path, data: st.DataObject) -> None:
    path = folder / "beside.recording"
    shutil.copy(folder / INTACT, path)
    whole = tail_path(folder / INTACT).read_bytes().rstrip(b"\0")
    tail_path(path).write_bytes(data.draw(damages(whole)))
    _tell(path)


@given(st.data())
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
    derandomize=True,
    database=None,
)
def test_lines_that_are_missing_or_in_another_order_leave_the_rest(folder: Path, data: st.DataObject) -> None:
    path = folder / "missing.recording"
    head, *lines = (folder / INTACT).read_bytes().splitlines(keepends=True)
    kept = data.draw(st.lists(st.sampled_from(lines), max_size=len(lines), unique=True))
    path.write_bytes(head + b"".join(kept))
    _tell(path)


def places(value: object, where: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Return where values lie in a line's array, the array itself first."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [where, *(each for key, item in items for each in places(item, (*where, key)))]


def put(value: Any, where: tuple[Any, ...], new: object) -> Any:
    """Return a line's array with another value in one place; None where a key is to be missing."""
    if not where:
        return new
    copy = value.copy()
    copy[where[0]] = put(value[where[0]], where[1:], new)
    return copy


ODD: list[Any] = [
    None, True, -1, 0, 10**6, 2**63, 10**400, 1.5, float("nan"), float("inf"), -1e308, "", "x", "\x1b[2J", [], [[]], {},
    {"a": 1}, [None] * 9, ["<f4", "AAAA"], ["z<i8", "eJxjYBgFo2AU"],
]  # fmt: skip


@given(st.data())
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
    derandomize=True,
    database=None,
)
def test_a_forged_recording_is_told_or_refused_in_a_sentence(folder: Path, data: st.DataObject) -> None:
    """Each line fits its checksum, and one value of some line is anything."""
    lines = [parse(line) for line in (folder / INTACT).read_bytes().splitlines()]
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.integers(0, len(lines) - 1))
        where = data.draw(st.sampled_from(places(lines[number])[1:]))
        lines[number] = put(lines[number], where, data.draw(st.sampled_from(ODD)))
    path = folder / "forged.recording"
    path.write_text("".join(f"{sealed(*line)}\n" for line in lines))
    output = ["--output", str(folder / "forged.html"), "--trace", str(folder / "forged.json")]

    assert main(["explain", str(path)]) in (0, 2)
    assert main(["timeline", str(path), *output]) in (0, 2)


def test_a_short_line_cannot_claim_a_million_batches(folder: Path) -> None:
    """40 lines of 120 bytes took 9.4 GB."""
    path = folder / "large.recording"
    intact = (folder / INTACT).read_bytes().splitlines()[:2]
    place = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0]
    rows = [(1, ROWS + 1), *((number, ROWS) for number in range(2, 400))]
    blocks = [sealed("batches", each, 0, place, 1.0, count, [1, 1, 0, 0, 4, 0], None) for each, count in rows]
    path.write_bytes(b"\n".join([*intact, *(block.encode() for block in blocks)]))
    [attempt] = read(path).attempts

    assert sum(len(entry) for entry in attempt.entries if isinstance(entry, Batches)) < 1_400_000
    assert attempt.damage[0] == "line 3: a line 'batches' of another form"
    assert attempt.damage[1].endswith("more batches than a file of its size holds")
