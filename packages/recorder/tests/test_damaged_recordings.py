"""A damaged recording is read or refused; what is read can be explained, and replayed unless lines are missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import heliograph as h
import pytest
from heliograph.packages.recorder.tests.recordings import fit
from heliograph_recorder import Recorder, replay
from heliograph_recorder.explain.story import story
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import Recording, walk
from heliograph_recorder.timeline.page import page
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


def _read_and_explain(path: Path) -> Recording | None:
    """Read and explain a recording; return None if it is refused."""
    try:
        recording = read(path)
    except ValueError as error:
        assert "is not a recording of heliograph" in str(error) or "is empty" in str(error)  # noqa: PT017  # reading may also succeed
        return None
    list(walk(recording))
    if recording.attempts:
        assert story(recording)
        assert page(recording)
    return recording


def _replay_or_refuse(recording: Recording) -> None:
    """Replay a recording, which is refused if entries follow a damaged line."""
    plugins = [h.EarlyStopping("validation/loss", patience=1), h.SaveSchedule(h.Every(steps=4))]
    if not any(attempt.has_gap for attempt in recording.attempts):
        assert str(replay(recording, plugins))
        return
    with pytest.raises(ValueError, match="a replay needs every entry"):
        replay(recording, plugins)


@given(st.data())
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
    derandomize=True,
    database=None,
)
def test_a_damaged_recording_can_be_explained_and_is_replayed_or_refused(folder: Path, data: st.DataObject) -> None:
    path = folder / "damaged.recording"
    path.write_bytes(data.draw(damages((folder / INTACT).read_bytes())))
    if (recording := _read_and_explain(path)) is not None:
        _replay_or_refuse(recording)


@given(st.data())
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
    derandomize=True,
    database=None,
)
def test_a_recording_with_missing_or_reordered_lines_can_be_explained(folder: Path, data: st.DataObject) -> None:
    path = folder / "missing.recording"
    head, *lines = (folder / INTACT).read_bytes().splitlines(keepends=True)
    kept = data.draw(st.lists(st.sampled_from(lines), max_size=len(lines), unique=True))
    path.write_bytes(head + b"".join(kept))
    _read_and_explain(path)


@pytest.mark.parametrize("length", [0.3, 0.6, 0.9])
def test_a_recording_that_was_cut_short_is_replayed(folder: Path, length: float) -> None:
    data = (folder / INTACT).read_bytes()
    path = folder / "cut.recording"
    path.write_bytes(data[: int(length * len(data))].rstrip(b"\n")[:-3])
    recording = read(path)
    (attempt,) = recording.attempts
    assert len(attempt.damage) == 1
    assert not attempt.has_gap
    (note,) = replay(recording, [h.SaveSchedule(h.Every(steps=4))]).notes
    assert "cut short" in note
