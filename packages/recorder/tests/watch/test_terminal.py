"""The runs as a text screen."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from heliograph.__main__ import main
from heliograph.packages.recorder.tests.explain.factory import Script, killed_and_resumed, recording
from heliograph.packages.recorder.tests.recordings import write
from heliograph_recorder.watch import terminal
from heliograph_recorder.watch.run_list import RunList
from heliograph_recorder.watch.terminal import screen, sparkline
from rich.console import Console


def text_of(*paths: Path) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(screen(RunList(paths)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_on_a_screen(tmp_path: Path) -> None:
    text = text_of(write(tmp_path / "one.recording", *killed_and_resumed().attempts))
    for part in (
        "digits: stopped by early_stopping on rank 2",
        "epoch 1, batch 6, step 14",
        "goodput 0.1%: useful training 7.",
        "train/loss           █▄▁  0.9",
        "step 8  step_8.pth  best and last",
        "early_stopping on rank 2",
    ):
        assert part in text, text


def test_recorded_texts_are_text(tmp_path: Path) -> None:
    script = Script(run="\x1b[31m[bold]x[/nothing]")
    script.start()
    text = text_of(write(tmp_path / "one.recording", *recording(script).attempts))
    assert "[bold]x[/nothing]" in text
    assert "\x1b" not in text


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "bad.recording").write_text("no\n")
    words = [word for word in text_of(tmp_path / "bad.recording").split() if word != "│"]  # a long path is wrapped
    assert "is not a recording" in " ".join(words)
    (tmp_path / "empty").mkdir()
    assert "no recording yet" in text_of(tmp_path / "empty")


def test_a_damaged_line_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "one.recording", *killed_and_resumed().attempts)
    lines = path.read_bytes().split(b"\n")
    lines[3] = lines[3][:-10] + b"0123456789"
    path.write_bytes(b"\n".join(lines))
    assert "line 4: damaged" in text_of(path)


def test_several_runs_are_listed_and_the_newest_shown_whole(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for number in range(1, terminal.RUNS + 3):
        path = write(tmp_path / f"x/{number:02}.recording", *killed_and_resumed().attempts)
        os.utime(path, (1_800_000_000 + number,) * 2)
    (tmp_path / "x/01.recording").write_text("no\n")
    os.utime(tmp_path / "x/01.recording", (1_900_000_000,) * 2)
    text = text_of(tmp_path / "x")
    rows = [line.split() for line in text.splitlines()[: terminal.RUNS]]
    assert [row[0] for row in rows] == ["01", *(f"{number:02}" for number in range(12, 3, -1))]
    assert [" ".join(row[1:-2]) for row in rows] == ["not a readable recording", *["stopped"] * 9]
    assert "and 2 more runs" in text
    assert "is not a recording" in " ".join(word for word in text.split() if word != "│")
    only = text_of(tmp_path / "x/12.recording")
    assert only.startswith("╭─ 12")


@pytest.mark.parametrize(
    ("values", "bars"), [([], ""), ([1.0], "▁"), ([0.0, 1.0], "▁█"), ([3.0] * 5, "▁▁▁▁▁"), ([0.0, 0.5, 1.0], "▁▅█")]
)
def test_a_curve_as_bars(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


def test_a_long_curve_fits_into_its_columns() -> None:
    assert len(sparkline([float(each) for each in range(1001)])) == terminal.COLUMNS


def test_the_command_prints_once_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "one.recording", *killed_and_resumed().attempts)
    assert main(["watch", str(path), "--terminal"]) == 0
    assert "digits: stopped by early_stopping" in capsys.readouterr().out


def test_without_rich_the_line_that_installs_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["watch", str(tmp_path), "--terminal"]) == 2
    assert "pip install 'heliograph[watch]'" in capsys.readouterr().err
