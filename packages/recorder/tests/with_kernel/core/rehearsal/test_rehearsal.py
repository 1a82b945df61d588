"""What a rehearsal does and reports."""

from __future__ import annotations

from pathlib import Path

from heliograph import (
    FileLog,
    JsonlLog,
    TensorBoard,
)
from heliograph.tests.core.rehearsal.test_rehearsal import planned, rehearse
from heliograph_recorder import Recorder


def test_files_of_built_ins_go_elsewhere(tmp_path: Path) -> None:
    loggers = [JsonlLog(tmp_path / "log.jsonl"), TensorBoard(tmp_path / "board"), FileLog(tmp_path / "logs")]
    found = rehearse(planned(tmp_path, *loggers, Recorder(tmp_path / "recordings")))
    assert found.ok
    assert set(found.redirected) == {"checkpoint", "jsonl_log", "tensorboard", "file_log", "recorder"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [tmp_path / "runs" / ".verified.jsonl"]
