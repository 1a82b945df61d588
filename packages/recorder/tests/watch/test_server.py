"""The server of the page: what it answers, to whom, and that it reads nothing else."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
from heliograph.packages.recorder.tests.explain.factory import Script, killed_and_resumed, recording
from heliograph.packages.recorder.tests.recordings import write
from heliograph_recorder.watch.run_list import RunList
from heliograph_recorder.watch.server import WatchServer


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    def __init__(self, server: WatchServer) -> None:
        self.server = server

    def ask(self, body: Any, path: str = "/ask", **headers: str) -> Answer:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"X_Watch_Token": self.server.token, "Content_Length": str(len(text)), **headers}
        return self.get(path, "POST", text, **headers)

    def get(self, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=30)
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders(body)
        answer = connection.getresponse()
        found = Answer(answer.status, answer.read(), dict(answer.getheaders()))
        connection.close()
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    (tmp_path / "b/deep").mkdir(parents=True)
    write(tmp_path / "a/first.recording", *killed_and_resumed().attempts)
    script = Script(run="second")
    script.start()
    script.batches(2)
    script.log(train__loss=0.5)
    write(tmp_path / "b/deep/second.recording", *recording(script).attempts)
    for number, name in enumerate(("a/first", "b/deep/second")):
        os.utime(tmp_path / f"{name}.recording", (1000 + number, 1000 + number))
    return tmp_path


@pytest.fixture
def client(folder: Path) -> Iterator[Client]:
    with WatchServer(RunList([folder])) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Client(server)
        server.shutdown()
        thread.join()


def test_it_listens_on_this_machine_only(client: Client) -> None:
    assert client.server.socket.getsockname()[0] == "127.0.0.1"
    assert client.server.url == f"http://127.0.0.1:{client.server.server_port}/?token={client.server.token}"
    assert len(client.server.token) >= 40


def test_the_page_shows_the_newest_run_at_first(client: Client) -> None:
    page = client.get("/")
    assert page.status == 200
    assert b'<script type="application/json" id="data">{"live":{"chosen":[1],"token":""}}</script>' in page.body
    assert b"connect-src &#39;self&#39;" in page.body or b"connect-src 'self'" in page.body
    assert page.headers["X-Frame-Options"] == "DENY"
    assert page.headers["Cache-Control"] == "no-store"


def test_the_page_has_the_token_of_an_address_that_has_it(client: Client) -> None:
    token = client.server.token
    assert f'"token":"{token}"'.encode() in client.get(f"/?token={token}").body
    for other in ("", "x", token[:-1], "%FF"):
        assert b'"token":""' in client.get(f"/?token={other}").body


def test_all_recordings_are_listed(client: Client) -> None:
    assert client.get("/runs").json() == [
        {
            "id": 0, "name": "a/first", "modified": 1000.0, "running": False, "status": "stopped", "remote": False,
            "parent": None,
        },
        {
            "id": 1, "name": "b/deep/second", "modified": 1001.0, "running": False, "status": "killed",
            "remote": False, "parent": None,
        },
    ]  # fmt: skip


def test_facts_come_once_for_each_version(client: Client, folder: Path) -> None:
    first = client.get("/facts?run=0").json()
    assert (first["facts"]["run"], first["facts"]["status"]) == ("digits", "stopped")
    again = client.get(f"/facts?run=0&known={first['version']}")
    assert (again.status, again.body) == (204, b"")
    assert client.get("/facts?run=1").json()["facts"]["latest"] == [["train/loss", "0.5"]]


def test_what_was_added_to_a_recording_is_in_the_next_facts(client: Client, folder: Path) -> None:
    run, path = client.server.runs.runs()[1], folder / "b/deep/second.recording"
    whole = path.read_bytes()
    found = [client.get("/facts?run=1").json()]
    for content in (whole[: whole.index(b'["asked"')], whole):
        path.write_bytes(content)
        run._next_update = 0.0  # as if time had passed
        found.append(client.get(f"/facts?run=1&known={found[-1]['version']}").json())
    curves = [[each["pieces"][0]["y"] for chart in one["facts"]["charts"] for each in chart["curves"]] for one in found]
    assert curves == [[[0.5]], [], [[0.5]]]
    assert [one["version"] for one in found] == [1, 2, 3]


def test_a_run_of_a_living_process_is_running(client: Client, folder: Path) -> None:
    lock = folder / "b/deep/second.recording.holder"
    for holder, state in (
        (f"{os.getpid()} {socket.gethostname()}", True),
        ("999999999 " + socket.gethostname(), False),
        ("1 elsewhere", None),
        ("", None),
    ):
        lock.write_text(f"{holder}\n")
        assert client.server.runs.runs()[1].is_running is state
    lock.write_text(f"{os.getpid()} {socket.gethostname()}\n")
    client.server.runs.runs()[1]._next_update = 0.0
    facts = client.get("/facts?run=1").json()["facts"]
    assert (facts["status"], facts["ended"]) == ("running", "running")
    lock.unlink()
    client.server.runs.runs()[1]._next_update = 0.0
    facts = client.get("/facts?run=1").json()["facts"]
    assert (facts["status"], facts["ended"]) == ("killed", "killed")


def test_a_file_that_is_no_recording_is_said(client: Client, folder: Path) -> None:
    (folder / "b/other.recording").write_text("no\n")
    client.server.runs._next_scan = 0.0
    assert [each["name"] for each in client.get("/runs").json()] == ["a/first", "b/deep/second", "b/other"]
    facts = client.get("/facts?run=2").json()["facts"]
    assert list(facts) == ["error"]
    assert "not a recording" in facts["error"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]", "0.0.0.0", "[", ":"]
)
def test_another_host_name_is_refused(client: Client, host: str) -> None:
    answer = client.get("/", Host=host)
    assert answer.status == 403
    assert b"<html" not in answer.body


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:9", "LOCALHOST"])
def test_names_of_this_machine_are_served(client: Client, host: str) -> None:
    assert client.get("/runs", Host=host).status == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/../../etc/passwd", 404),
        ("/%2e%2e/etc/passwd", 404),
        ("/facts?run=../../etc/passwd", 404),
        ("/facts?run=-1", 404),
        ("/facts?run=2", 404),
        ("/facts?run=99999999999999999999", 404),
        ("/facts?run=%C2%B2", 404),
        ("/facts", 404),
        ("/first.recording", 404),
        ("//[", 404),
    ],
)
def test_nothing_else_is_served(client: Client, path: str, status: int) -> None:
    assert client.get(path).status == status


@pytest.mark.parametrize("method", ["PUT", "DELETE", "HEAD", "OPTIONS"])
def test_other_methods_are_refused(client: Client, method: str) -> None:
    assert client.get("/", method).status == 501


STOP = {"run": 1, "verb": "stop", "reason": "enough"}


@pytest.mark.parametrize("token", ["", "x", "ä"])
def test_a_request_without_the_token_of_the_page_is_refused(client: Client, token: str) -> None:
    answer = client.ask(STOP, X_Watch_Token=token)
    assert (answer.status, b"no valid token" in answer.body) == (403, True)


def test_a_request_through_another_host_name_is_refused(client: Client) -> None:
    assert client.ask(STOP, Host="evil.example").status == 403


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "Expecting"),
        (b"[" * 5000, ""),
        (b"\xff", ""),
        ([], "There is no run"),
        ({**STOP, "run": 2}, "There is no run"),
        ({**STOP, "run": True}, "There is no run"),
        ({**STOP, "run": "1"}, "There is no run"),
        (
            {**STOP, "verb": "erase"},
            "stop, save, validate, log",
        ),
        ({**STOP, "verb": ["stop"]}, "The verb must be"),
        (STOP, "no Remote in "),
        ({"run": 1, "verb": "stop"}, "no Remote in "),
        ({**STOP, "reason": None}, "no Remote in "),
    ],
)
def test_a_request_that_cannot_be_made_says_why(client: Client, body: Any, why: str) -> None:
    answer = client.ask(body)
    assert answer.status == 400
    assert why in answer.body.decode()


def test_a_request_is_short_and_has_one_address(client: Client) -> None:
    assert client.ask(b"x", Content_Length="9000").status == 400
    assert client.ask(b"x", Content_Length="-1").status == 400
    assert client.ask(STOP, "/runs").status == 404
