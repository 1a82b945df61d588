"""Hostile clients, in small: `python packages/tests/torture/hostile.py` sends 100,000 messages."""

from __future__ import annotations

import json
from multiprocessing.pool import ThreadPool
from pathlib import Path
from random import Random
from typing import Any

import pytest
from heliograph.packages.recorder.tests.remote.conversation import raw, read_lines, train
from heliograph.packages.tests.torture.hostile import attacked, message, problems
from heliograph_recorder import Remote
from heliograph_recorder.remote import server as server_module
from heliograph_recorder.remote.messages import LONGEST, STATUS, VERBS, Command, decode, encode, read_command
from heliograph_recorder.remote.server import CLIENTS


def test_a_training_under_attack_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    found = attacked(tmp_path, 200, "0", processes=4, calm=5, make_pool=ThreadPool)
    assert found.sent == 200
    assert found.growth >= 0
    assert [each for each in problems(found) if "memory" not in each] == []


def test_random_messages_are_commands_or_refused_in_words() -> None:
    """Whatever comes, a thread that is not guarded reads it."""
    draws = Random(0)
    read = [attempt(line) for _ in range(5_000) for line in message(draws, malformed=False).split(b"\n")]
    commands = [each for each in read if isinstance(each, Command)]
    assert len(commands) > 100
    assert all(each.ask == STATUS or (each.reason and each.ask in VERBS) for each in commands)
    assert all(isinstance(each, Command) or each.isprintable() for each in read)


def test_what_attackers_send_over_the_socket_is_no_request() -> None:
    """It needs no token there: what they send has to be malformed."""
    draws = Random(2)
    read = [attempt(line) for _ in range(5_000) for line in message(draws, malformed=True).split(b"\n")]
    assert [each for each in read if isinstance(each, Command)] == []


def attempt(line: bytes) -> Command | str:
    """Return the command in a line, or why there is none."""
    try:
        return read_command(line)
    except ValueError as error:
        return str(error)


def test_random_changes_of_a_command_are_commands_or_refused() -> None:
    draws = Random(1)
    good = encode({"ask": "set-lr", "reason": "why", "value": 0.5, "wait": True, "user": "ann@node"})
    for _ in range(20_000):
        line = bytearray(good)
        for _ in range(draws.randrange(1, 4)):
            line[draws.randrange(len(line))] = draws.randrange(256)
        read = attempt(bytes(line))
        assert isinstance(read, Command) or read.isprintable()


@pytest.mark.parametrize("word", ["stop", "log", "end-epoch"])
def test_a_good_command_is_read(word: str) -> None:
    line = encode({"ask": word, "reason": "why\n", "wait": True, "user": "ann@node"})
    assert read_command(line) == Command(word, "why", wait=True, user="ann@node")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"ask": "eval", "reason": "x"}, "one of stop, save,"),
        ({"ask": "stop"}, "1 to 500"),
        ({"ask": "stop", "reason": "x" * 501}, "1 to 500"),
        ({"ask": "stop", "reason": "x", "more": 1.0}, "'more'"),
        ({"ask": "stop", "reason": 1.0}, "'reason' .* a str"),
        ({"ask": "enable", "reason": "x", "target": "a\x1b[2J"}, "printable"),
        ({"ask": "set-lr", "reason": "x"}, "set-lr takes"),
        ({"ask": "set-lr", "reason": "x", "value": 1e999}, "set-lr takes"),
        ({"ask": "stop", "reason": "x", "user": "u" * 101}, "at most 100"),
    ],
)
def test_a_field_that_is_not_as_it_has_to_be(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_command(json.dumps(fields).encode())


@pytest.mark.parametrize("line", [b"", b"[]", b"1", b"null", b'"x"', b"{", b"\xff", b"[" * 5000, b"9" * 5000])
def test_what_is_no_object_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="a message is"):
        decode(line)


def test_a_message_without_end_is_cut_off(tmp_path: Path) -> None:
    def talk(run: Any) -> list[dict[str, Any]]:
        with raw(run.address) as connection:
            connection.sendall(b"a" * LONGEST)
            return read_lines(connection)

    messages, _ = train(tmp_path, talk)
    assert [message["state"] for message in messages] == ["refused"]
    assert str(LONGEST) in messages[0]["text"]


def test_a_connection_has_one_command(tmp_path: Path) -> None:
    def talk(run: Any) -> list[list[str]]:
        states = []
        for line in (b'{"ask":"status"}', b"nonsense"):
            with raw(run.address) as connection:
                connection.sendall(line + b'\n{"ask":"stop","reason":"too late"}\n')
                states.append([message["state"] for message in read_lines(connection)])
        return states

    states, result = train(tmp_path, talk)
    assert states == [["status"], ["refused"]]
    assert result.stopped_by == "talking"


def test_only_so_many_are_connected_and_the_others_are_sent_away(tmp_path: Path) -> None:
    remote = Remote(tmp_path, tcp=0)

    def talk(run: Any) -> list[Any]:
        connections = [raw(remote.address) for _ in range(CLIENTS)]
        try:
            for each in connections:
                each.sendall(b'{"ask"')
            with raw(remote.address) as other:
                answer = read_lines(other)
            return [answer, run.status()["run"]]  # over the other way there is room
        finally:
            for each in connections:
                each.close()

    (answer, name), _ = train(tmp_path, talk, remote=remote)
    assert [message["state"] for message in answer] == ["refused"]
    assert f"{CLIENTS} clients" in answer[0]["text"]
    assert name == "run"


def test_who_sends_nothing_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PATIENCE", 0.05)

    def talk(run: Any) -> list[dict[str, Any]]:
        with raw(run.address) as connection:
            connection.sendall(b'{"ask":')
            return read_lines(connection)

    assert train(tmp_path, talk)[0] == []


def test_an_error_in_the_thread_is_a_warning_and_the_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr(server_module, "read_command", fail)

    def talk(run: Any) -> list[dict[str, Any]]:
        with raw(run.address) as connection:
            connection.sendall(b"x\n")
            return read_lines(connection)

    messages, result = train(tmp_path, talk)
    assert messages == []
    assert any("ZeroDivisionError: unforeseen" in warning for warning in result.warnings)
