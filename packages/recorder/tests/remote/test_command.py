"""`python -m heliograph ask`: what it prints, and how it exits."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.__main__ import main
from heliograph.packages.recorder.tests.remote.conversation import train
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder import Remote, attach
from heliograph_recorder.remote import sockets
from heliograph_recorder.remote.client import RemoteAnswer, RemoteRun
from heliograph_recorder.remote.sockets import listen


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs commands on a training, and returns (status, stdout, stderr) of each."""

    def run(*commands: list[str], address: Any = None, plugins: tuple[h.Plugin, ...] = (), **options: Any) -> Any:
        def talk(_: RemoteRun) -> list[tuple[int, str, str]]:
            found = []
            for command in commands:
                capsys.readouterr()
                status = main(["ask", address() if address else str(tmp_path), *command])
                found.append((status, *capsys.readouterr()))
            return found

        return train(tmp_path, talk, *plugins, **options)

    return run


def test_every_verb(ask: Any) -> None:
    verbs = (["log"], ["validate"], ["save"], ["end-epoch"], ["set-lr", "3e-4"], ["disable", "ema"], ["enable", "ema"])
    commands = [[*verb, "--reason", "to see", *wait] for verb in verbs for wait in ([], ["--wait"])]
    found, result = ask(*commands, plugins=(h.EMA(0.9),))
    assert [status for status, _, _ in found] == [0] * len(commands)
    assert [out.partition(" ")[0] for _, out, _ in found] == ["accepted", "served"] * len(verbs)
    assert [each.what for each in result.history if each.reason == "to see"] == [
        what
        for what in (
            "log",
            "validation",
            "save",
            "end_epoch",
            "set_learning_rate 0.0003",
            "disable_plugin ema",
            "enable_plugin ema",
        )
        for _ in range(2)
    ]


def test_a_stop(ask: Any) -> None:
    ((status, out, err),), result = ask(["stop", "--reason", "enough", "--wait"])
    assert (status, err) == (0, "")
    assert out.startswith("served at epoch ")
    assert "enough" in out
    assert result.reason == "enough"


def test_a_reason_that_is_not_given_says_where_the_request_came_from(ask: Any, tmp_path: Path) -> None:
    verbs = (["log"], ["validate"], ["save"], ["end-epoch"], ["set-lr", "3e-4"], ["disable", "ema"], ["enable", "ema"])
    found, result = ask(*verbs, ["stop", "--wait"], plugins=(h.EMA(0.9),))
    assert [status for status, _, _ in found] == [0] * 8
    assert "command line" in result.reason
    assert len([each for each in result.history if each.reason == result.reason]) == 8

    _, result = train(tmp_path, lambda run: (run.set_learning_rate(0.1), run.disable("ema"), run.stop()), h.EMA(0.9))
    assert [each.verb for each in result.history if "attach()" in each.reason][:2] == [
        "set_learning_rate",
        "disable_plugin",
    ]
    assert "attach()" in result.reason


def test_the_status_is_json(ask: Any) -> None:
    ((status, out, _),), _ = ask(["status"])
    assert status == 0
    assert json.loads(out)["run"] == "run"


def test_what_is_refused_exits_with_1(ask: Any) -> None:
    ((status, out, _),), _ = ask(["enable", "eam", "--reason", "why"], plugins=(h.EMA(0.9),))
    assert status == 1
    assert "Did you mean 'ema'?" in out


def test_over_tcp_with_a_token_in_a_file(ask: Any, tmp_path: Path) -> None:
    remote = Remote(tmp_path, tcp=0, token="a-token-of-my-own")
    (tmp_path / "token").write_text("a-token-of-my-own\n")
    (tmp_path / "other").write_text("a-token-of-another\n")

    def address() -> str:
        assert remote.address is not None
        return "{}:{}".format(*remote.address)

    log = ["log", "--reason", "to see", "--token-file"]
    commands = [[*log, str(tmp_path / "token")], [*log, str(tmp_path / "other")], ["status"]]
    found, _ = ask(*commands, address=address, remote=remote)
    assert [status for status, _, _ in found] == [0, 1, 2]
    assert "the token" in found[1][1]
    assert {name for name in ("HELIOGRAPH_TOKEN", "token=", "--token-file") if name not in found[2][2]} == set()


@pytest.mark.parametrize(
    ("state", "wait", "status"),
    [
        ("accepted", False, 0),
        ("accepted", True, 3),
        ("served", True, 0),
        ("refused", False, 1),
        ("unserved", True, 1),
        ("queued", False, 3),
        ("lost", True, 3),
    ],
)
def test_the_exit_status(
    state: Any, wait: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RemoteRun(Path("nowhere"))
    monkeypatch.setattr("heliograph_recorder.remote.client.attach", lambda *_, **__: run)
    monkeypatch.setattr(run, "ask", lambda *_, **__: RemoteAnswer(state, "so\x1b[2J", 1, 2, 3))
    assert main(["ask", "x", "stop", "--reason", "why", *(["--wait"] if wait else [])]) == status
    out = capsys.readouterr().out
    assert out.startswith(f"{state} at epoch 1,")
    assert out.endswith("step 3: so\\x1b[2J\n")


def test_where_no_run_lives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", str(tmp_path), "status"]) == 2
    assert_facts(capsys.readouterr().err, "heliograph ask: ", "No active run")
    assert main(["ask", str(tmp_path / "missing"), "status"]) == 2


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with the socket of a run that never answers, as one whose process is suspended."""
    monkeypatch.setattr("heliograph_recorder.remote.client.SOON", 0.05)
    listener, _ = listen(tmp_path)
    with listener:
        yield tmp_path


def test_a_run_that_does_not_answer_is_not_called_dead(silent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", str(silent), "status", "--timeout", "0.05"]) == 3
    assert "within 0.05 seconds" in capsys.readouterr().err
    assert main(["ask", str(silent), "stop", "--reason", "enough"]) == 3
    assert capsys.readouterr().out.startswith("queued: ")


def test_ctrl_c_is_one_line(silent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RemoteRun, "ask", interrupt)
    assert main(["ask", str(silent), "stop", "--reason", "enough"]) == 130
    err = capsys.readouterr().err
    assert "interrupted" in err
    assert err.count("\n") == 1


def test_options_before_the_verb_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run, given = RemoteRun(Path("nowhere")), list[Any]()

    def ask(verb: str, reason: str, *, wait: bool, timeout: float | None, **_: Any) -> RemoteAnswer:
        given.append((reason, wait, timeout))
        return RemoteAnswer("served", "done")

    monkeypatch.setattr("heliograph_recorder.remote.client.attach", lambda *_, **__: run)
    monkeypatch.setattr(run, "ask", ask)
    monkeypatch.setattr(run, "status", lambda *, timeout: given.append(timeout))
    options = ["--reason", "why", "--wait", "--timeout", "7"]
    for number in (0, 2, 3, 5):
        assert main(["ask", *options[:number], "x", "stop", *options[number:]]) == 0
    assert given == [("why", True, 7.0)] * 4
    assert main(["ask", "--timeout", "7", "x", "status"]) == main(["ask", "x", "status", "--timeout", "7"]) == 0
    assert given[4:] == [7.0, 7.0]


@pytest.mark.parametrize("address", [Path("nowhere"), ("nowhere", 1)])
def test_the_time_counts_what_it_takes_to_connect(address: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[float]()

    def connect(_: object, timeout: float) -> None:
        given.append(timeout)
        raise TimeoutError

    monkeypatch.setattr("heliograph_recorder.remote.client.monotonic", lambda: 100.0)
    monkeypatch.setattr("heliograph_recorder.remote.client.connect", connect)
    monkeypatch.setattr("socket.create_connection", connect)
    for seconds in (2.0, 60.0, None):
        with pytest.raises(TimeoutError, match="does not answer"):
            RemoteRun(address).stop("enough", timeout=seconds)
    assert given == [2.0, 5.0, 5.0]


def test_to_find_a_run_waits_for_no_answer(silent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[float]()

    def connect(path: Path, timeout: float) -> socket.socket:
        given.append(timeout)
        return sockets.connect(path, timeout)

    monkeypatch.setattr("heliograph_recorder.remote.client.connect", connect)
    assert str(attach(silent)).startswith(f"RemoteRun({silent}")
    assert given == [0.0]


@pytest.mark.parametrize(
    "words",
    [
        ["x", "set-lr", "--reason", "y"],
        ["x", "dance"],
        ["x"],
        ["--wait", "x", "status"],
        ["x", "status", "--reason", "y"],
    ],
)
def test_a_wrong_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["ask", *words])
    assert exit_.value.code == 2
    assert "usage: heliograph ask" in capsys.readouterr().err


def test_a_learning_rate_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ask", "x", "set-lr", "fast", "--reason", "why"])
    assert "0.01; got 'fast'" in capsys.readouterr().err
    given: list[Any] = ["fast", True, np.True_, torch.tensor(True), -1.0, 0.0, float("nan"), float("inf")]
    for rate in given:
        with pytest.raises(ValueError, match=rf"learning rate .* got {re.escape(repr(rate))}"):
            RemoteRun(Path("nowhere")).set_learning_rate(rate, "why")


@pytest.mark.parametrize("timeout", [0, -3.0, float("nan"), float("inf"), True, 1e10])
def test_a_timeout_is_more_than_zero(timeout: Any) -> None:
    run = RemoteRun(Path("nowhere"))
    for ask in (lambda: run.status(timeout=timeout), lambda: run.log("why", timeout=timeout)):
        with pytest.raises(ValueError, match="timeout must be"):
            ask()


@pytest.mark.parametrize("name", ["", "x" * 101, "a\x1b[2J", 5])
def test_a_plugin_has_a_name(name: Any) -> None:
    run = RemoteRun(Path("nowhere"))
    for ask in (run.enable, run.disable):
        with pytest.raises(ValueError, match="1 to 100 printable"):
            ask(name, "why")


def test_a_reason_that_is_too_long_is_not_repeated() -> None:
    with pytest.raises(ValueError, match=r"got .{20,40}, 5000 characters\.$"):
        RemoteRun(Path("nowhere")).stop("why? " * 1000)


def test_why_a_run_cannot_be_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConnectionError, match=r"x\.sock .* has ended"):
        RemoteRun(tmp_path / "x.sock").status()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "y.sock"))
    with pytest.raises(ConnectionError, match=r"y\.sock .* was killed"):
        RemoteRun(tmp_path / "y.sock").status()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    (tmp_path / "token").write_text("t" * 20)
    assert main(["ask", f"localhost:{port}", "status", "--token-file", str(tmp_path / "token")]) == 2
    text = f"heliograph ask: localhost:{port} cannot"
    assert capsys.readouterr().err.startswith(text)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, heliograph.__main__; from heliograph_recorder import attach, RemoteRun; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
