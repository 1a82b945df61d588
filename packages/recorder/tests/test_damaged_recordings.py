"""A damaged recording is read or refused; what is read can be explained and replayed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.__main__ import main
from heliograph.packages.recorder.tests.recordings import fit
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder import Recorder, replay
from heliograph_recorder.explain.story import brief, story
from heliograph_recorder.format.checksum import format_line, parse_line
from heliograph_recorder.format.lines import ROWS
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import Batches, walk
from heliograph_recorder.format.tail import tail_path
from heliograph_recorder.timeline.page import page
from heliograph_recorder.timeline.trace import trace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

INTACT = "intact.recording"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of a run that is killed at its 13th step."""
    folder = tmp_path_factory.mktemp("runs")

    class Copier(h.Plugin):
        @h.on(h.BatchEnd, lane=h.Lane.REPORT)
        def copy(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.steps == 13:
                assert run.report.recording is not None
                shutil.copy(run.report.recording, folder / INTACT)
                shutil.copy(tail_path(run.report.recording), tail_path(folder / INTACT))

    plugins = [
        h.LogSchedule(h.Every(steps=2)),
        h.ValidationSchedule(h.Every(epochs=1)),
        h.EarlyStopping("validation/loss", patience=2),
        h.SaveSchedule(h.Every(steps=4)),
        h.Checkpoint(folder / "saved", keep_last=2),
        Recorder(folder / "recorded", losses=True, sample=3),
        Copier(),
    ]
    fit(plugins)
    assert len(read(folder / INTACT).attempts[0].entries) > 20
    return folder


@st.composite
def damages(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw a damaged file: pieces of it are replaced, removed or added."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(0, 200))
        added = draw(st.binary(max_size=8))
        data = data[:at] + added + (b"" if draw(st.integers(0, 9)) == 0 else data[at + length :])
    return data


def _explain_and_replay(path: Path) -> None:
    """Read, explain and replay a recording."""
    try:
        recording = read(path)
    except ValueError as error:
        assert "is not a recording of heliograph" in str(error) or "is empty" in str(error)  # noqa: PT017  # reading may also succeed
        return
    list(walk(recording))
    str(replay(recording, [h.EarlyStopping("validation/loss", patience=1), h.SaveSchedule(h.Every(steps=4))]))
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
def test_a_damaged_recording_can_be_explained_and_replayed(folder: Path, data: st.DataObject) -> None:
    path = folder / "damaged.recording"
    path.write_bytes(data.draw(damages((folder / INTACT).read_bytes())))
    _explain_and_replay(path)


@given(st.data())
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
    derandomize=True,
    database=None,
)
def test_a_recording_with_a_damaged_tail_can_be_explained_and_replayed(folder: Path, data: st.DataObject) -> None:
    path = folder / "tail.recording"
    shutil.copy(folder / INTACT, path)
    whole = tail_path(folder / INTACT).read_bytes().rstrip(b"\0")
    tail_path(path).write_bytes(data.draw(damages(whole)))
    _explain_and_replay(path)


@given(st.data())
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
    derandomize=True,
    database=None,
)
def test_a_recording_with_missing_or_reordered_lines_can_be_explained_and_replayed(
    folder: Path, data: st.DataObject
) -> None:
    path = folder / "missing.recording"
    head, *lines = (folder / INTACT).read_bytes().splitlines(keepends=True)
    kept = data.draw(st.lists(st.sampled_from(lines), max_size=len(lines), unique=True))
    path.write_bytes(head + b"".join(kept))
    _explain_and_replay(path)


def paths(value: object, where: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Return the paths of all values in a line's array, the array itself first."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [where, *(each for key, item in items for each in paths(item, (*where, key)))]


def put(value: Any, where: tuple[Any, ...], new: object) -> Any:
    """Return a line's array with one value replaced."""
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
def test_a_forged_recording_is_explained_or_refused(folder: Path, data: st.DataObject) -> None:
    """Each line matches its checksum, but some values are wrong."""
    lines = [parse_line(line) for line in (folder / INTACT).read_bytes().splitlines()]
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.integers(0, len(lines) - 1))
        where = data.draw(st.sampled_from(paths(lines[number])[1:]))
        lines[number] = put(lines[number], where, data.draw(st.sampled_from(ODD)))
    path = folder / "forged.recording"
    path.write_text("".join(f"{format_line(*line)}\n" for line in lines))
    output = ["--output", str(folder / "forged.html"), "--trace", str(folder / "forged.json")]

    assert main(["explain", str(path)]) in (0, 2)
    assert main(["timeline", str(path), *output]) in (0, 2)


def test_a_short_line_cannot_claim_a_million_batches(folder: Path) -> None:
    """40 lines of 120 bytes took 9.4 GB."""
    path = folder / "large.recording"
    intact = (folder / INTACT).read_bytes().splitlines()[:2]
    counters = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0]
    rows = [(1, ROWS + 1), *((number, ROWS) for number in range(2, 400))]
    blocks = [format_line("batches", each, 0, counters, 1.0, count, [1, 1, 0, 0, 4, 0], None) for each, count in rows]
    path.write_bytes(b"\n".join([*intact, *(block.encode() for block in blocks)]))
    [attempt] = read(path).attempts

    assert sum(len(entry) for entry in attempt.entries if isinstance(entry, Batches)) < 1_400_000
    assert_facts(attempt.damage[0], "line 3", "'batches'", "unexpected")
    assert_facts(attempt.damage[1], "more batches")
