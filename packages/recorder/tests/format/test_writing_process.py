"""Which process writes a recording."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from heliograph_recorder.format.reader import is_being_written, writing_process
from heliograph_recorder.format.writer import RecordingWriter


def test_the_process_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (writing_process(tmp_path / "x.recording"), is_being_written(tmp_path / "x.recording")) == (0, None)
    writer = RecordingWriter.create(tmp_path, "x")
    assert (writing_process(writer.path), is_being_written(writer.path)) == (os.getpid(), True)
    lock, holder = (writer.path.with_name(f"{writer.path.name}.{end}") for end in ("lock", "holder"))
    holder.write_text(f"{os.getpid()} another_host\n")
    assert (writing_process(writer.path), is_being_written(writer.path)) == (None, None)
    holder.write_text(f"{os.getpid()} {socket.gethostname()}\n")
    os.utime(holder, (0, 0))  # the clock was set
    assert writing_process(writer.path) == os.getpid()
    lock.rename(tmp_path / "held")
    lock.touch()
    holder.write_text(f"{os.getpid()} {socket.gethostname()}\n")
    os.utime(holder, (0, 0))  # of a process that was there before this one
    assert (writing_process(writer.path), is_being_written(writer.path)) == (0, False)
    monkeypatch.setattr(time, "clock_gettime", refuse)  # on another system
    assert writing_process(writer.path) == os.getpid()
    writer.close()


def refuse(*_: object) -> None:
    raise OSError


@pytest.mark.parametrize("command", ["explain", "watch"])
def test_it_is_found_out_without_torch(command: str, tmp_path: Path) -> None:
    code = (
        f"import sys; from heliograph.__main__ import main; main(['{command}', {str(tmp_path)!r}, *sys.argv[1:]]); "
        "print('torch' in sys.modules)"
    )
    line = [sys.executable, "-c", code, *["--terminal"] * (command == "watch")]
    RecordingWriter.create(tmp_path, "x").close()
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
