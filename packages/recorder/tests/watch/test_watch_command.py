"""The command `watch`, in a process of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import webbrowser
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest
from heliograph.__main__ import main
from heliograph.packages.recorder.tests.recordings import attempt, write
from heliograph_recorder.watch.server import WatchServer


def test_it_prints_its_address_and_serves_until_ctrl_c(tmp_path: Path) -> None:
    write(tmp_path / "one.recording", attempt())
    line = [sys.executable, "-m", "heliograph", "watch", str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, rest = process.stdout.readline().split(maxsplit=1)
        assert rest == "(Ctrl-C ends it)\n"
        with urlopen(urljoin(url, "runs")) as answer:
            assert [each["name"] for each in json.load(answer)] == ["one"]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_a_mistake_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").touch()
    assert main(["watch", str(tmp_path / "notes.txt")]) == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", str(tmp_path), "--port", str(port)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert str(tmp_path / "notes.txt") in lines[0]
    assert f"port {port} cannot be used" in lines[1]


def test_what_is_not_there_yet_is_named_with_its_whole_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", "late", "--terminal"]) == 0
    shown = capsys.readouterr()
    assert str(tmp_path / "late") in shown.err
    assert "no recording yet" in shown.out
    assert str(tmp_path)[:40] in shown.out


@pytest.mark.parametrize("options", [["--once"], ["--once", "--json"]])
def test_once_needs_what_it_prints(tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path), str(tmp_path / "nowhere"), *options]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"heliograph watch: {tmp_path / 'nowhere'} does not exist.\n")


@pytest.mark.parametrize("command", ["watch", "status", "explain", "timeline"])
def test_a_url_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, "s3://bucket/run"])
    assert "on this machine, got s3://bucket/run\n" in capsys.readouterr().err


def test_once_prints_the_state_of_all_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "one.recording", attempt())
    (tmp_path / "torn.recording").write_text("no recording\n")
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert "one" in capsys.readouterr().out
    assert main(["watch", str(tmp_path), "--once", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    one, torn = facts["runs"]
    assert (facts["schema"], one["schema"], one["status"]) == ("heliograph.watch/1", "heliograph.run/1", "killed")
    assert torn.keys() == {"recording", "error"}
    assert "torn.recording" in torn["error"]
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path), "--json"])
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path), "--once", "--open"])
    assert "remove --open" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536", "abc", "²", ""])
def test_a_port_is_a_number(port: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["watch", str(tmp_path), f"--port={port}"])
    assert end.value.code == 2
    assert f"to 65535, got {port!r}\n" in capsys.readouterr().err


def test_a_browser_gets_the_address_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each user can see the arguments of a browser."""
    opened = list[str]()

    def show(url: str) -> bool:
        opened.append(Path(url.removeprefix("file://")).read_text())
        return False

    def stop(server: WatchServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(webbrowser, "open", show)
    monkeypatch.setattr(WatchServer, "serve_forever", stop)
    assert main(["watch", str(tmp_path), "--open"]) == 0
    captured = capsys.readouterr()
    url = captured.out.split()[0]
    assert opened == [f'<meta http-equiv="refresh" content="0; url={url}">']
    assert "no browser" in captured.err
    assert url in captured.err
