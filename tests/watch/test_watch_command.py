"""The command `watch`, in a process of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from heliograph.__main__ import main
from heliograph.tests.recordings import attempt, write


def test_it_prints_its_address_and_serves_until_ctrl_c(tmp_path: Path) -> None:
    write(tmp_path / "one.recording", attempt())
    line = [sys.executable, "-m", "heliograph", "watch", str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, rest = process.stdout.readline().split(maxsplit=1)
        assert rest == "(Ctrl-C ends it)\n"
        with urlopen(f"{url}runs") as answer:
            assert [each["name"] for each in json.load(answer)] == ["one"]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_a_mistake_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "none")]) == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", str(tmp_path), "--port", str(port)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"heliograph watch: There is no recording and no folder at {tmp_path / 'none'}.",
        f"heliograph watch: port {port} cannot be used: Address already in use; give another --port.",
    ]


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_port_is_a_number(port: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["watch", str(tmp_path), f"--port={port}"])
    assert end.value.code == 2
