"""A run that is asked from outside: what it answers, what it does, what its history says."""

from __future__ import annotations

import getpass
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.recorder.tests.remote.conversation import PATIENCE, open_sockets, raw, read_lines, train
from heliograph.packages.tests.facts import assert_each
from heliograph.tests import kit
from heliograph_recorder import Recorder, Remote, replay
from heliograph_recorder.remote import plugin as remote_plugin
from heliograph_recorder.remote.client import RemoteRun, attach
from heliograph_recorder.remote.messages import decode, encode
from heliograph_recorder.remote.server import Server
from heliograph_recorder.remote.sockets import host_name, short
from heliograph_testing import check_plugin

ME = f"{getpass.getuser()}@{host_name()}"
KEPT = "so that a kill does not lose"


def test_it_keeps_the_rules_of_plugins(tmp_path: Path) -> None:
    check_plugin(lambda: Remote(tmp_path))


@pytest.mark.parametrize("wait", [False, True])
def test_every_request_is_in_the_history_with_its_asker(tmp_path: Path, wait: bool) -> None:
    def talk(run: RemoteRun) -> list[Any]:
        return [
            run.log("to see", wait=wait),
            run.validate("to judge", wait=wait),
            run.save("to keep", wait=wait),
            run.set_learning_rate(0.05, "too fast", wait=wait),
            run.disable("ema", "not needed", wait=wait),
            run.enable("ema", "needed", wait=wait),
        ]

    answers, result = train(tmp_path, talk, h.EMA(0.9))
    assert [each.state for each in answers] == ["served" if wait else "accepted"] * 6
    own = [each for each in result.history if each.by == ME and not each.reason.startswith(KEPT)]
    assert {each.event for each in own} <= {"batch_end", "validation_batch_end"}  # the next one may come that early
    assert [(each.what, each.reason) for each in own] == [
        ("log", "to see"),
        ("validation", "to judge"),
        ("save", "to keep"),
        ("set_learning_rate 0.05", "too fast"),
        ("disable_plugin ema", "not needed"),
        ("enable_plugin ema", "needed"),
    ]
    places = [(each.epoch, each.batch, each.step) for each in answers]
    assert places == [(each.epoch, each.batch, each.step) for each in own]  # served at the boundary after that batch
    assert result.last_checkpoint is not None
    assert result.progress.validations == 1


def test_a_stop_is_that_of_who_asked(tmp_path: Path) -> None:
    answer, result = train(tmp_path, lambda run: run.stop("seen enough", wait=True))
    assert (result.status, result.stopped_by, result.reason) == ("stopped", ME, "seen enough")
    at = f"epoch {result.progress.epoch}, batch {result.progress.batch}, step {result.progress.steps}"
    assert str(answer).startswith(f"served at {at}: ")
    assert "seen enough" in str(answer)


def test_the_end_of_an_epoch(tmp_path: Path) -> None:
    answer, result = train(tmp_path, lambda run: run.end_epoch("next", wait=True), after=3)
    (asked,) = [each for each in result.history if each.verb == "end_epoch"]
    assert (answer.state, answer.epoch, answer.batch) == ("served", asked.epoch, asked.batch)
    assert result.progress.epoch > asked.epoch


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda run: run.end_epoch("why", wait=True), "end_epoch"),
        (lambda run: run.set_learning_rate(0.05, "why", wait=True), "set_learning_rate 0.05"),
        (lambda run: run.disable("ema", "why", wait=True), "disable_plugin ema"),
        (lambda run: run.log("why", wait=True), None),
    ],
)
def test_what_a_kill_would_lose_is_saved_with_it(tmp_path: Path, ask: Any, what: str | None) -> None:
    answer, result = train(tmp_path, ask, h.EMA(0.9), after=3)
    saves = [(each.reason, each.step) for each in result.history if (each.verb, each.by) == ("save", ME)]
    assert saves == ([] if what is None else [(f"{KEPT} {what}", answer.step)])
    if what is None:
        assert result.last_checkpoint is None
        return
    assert result.last_checkpoint is not None
    state = torch.load(result.last_checkpoint, weights_only=True)
    assert state["progress"]["steps"] == answer.step
    assert state["control"]["end_epoch"] is (what == "end_epoch")
    assert state["control"].get("switches", {}) == ({"ema": False} if "ema" in what else {})
    rates = [group["lr"] for each in state["optimizers"].values() for group in each["param_groups"]]
    assert (rates == [0.05]) == (what == "set_learning_rate 0.05")


def test_a_run_goes_back_to_what_was_saved_before_somebody_lowered_its_rate(tmp_path: Path) -> None:
    class GoesWrong(h.Plugin):
        lowered = False

        @h.on(h.ChangeServed)
        def note(self, run: h.Run, event: h.ChangeServed) -> None:
            self.lowered = True

        @h.on(h.BatchStart)
        def spoil(self, run: h.Run, event: h.BatchStart) -> None:
            if run.progress.batches == 2:
                run.control.request_save("while it is good")
            if self.lowered:  # once: what was lowered is forgotten then
                run.batch = [run.batch[0] * float("nan"), *run.batch[1:]]
                self.lowered = False

    roll_back = h.RollBack()
    answer, result = train(
        tmp_path, lambda run: run.set_learning_rate(0.01, "it explodes", wait=True), roll_back, GoesWrong(), after=5
    )
    assert (answer.state, roll_back.times) == ("served", 1)
    (back,) = [each for each in result.notes if each.startswith("rolled back")]
    assert "run_epoch_0_iter_3.pth" in back
    assert [each.by for each in result.history if each.verb == "save"] == ["goes_wrong"]


class SeesSaves(h.Plugin):
    """Looks at saves, as observers do."""

    @h.on(h.SavePoint, lane=h.Lane.REPORT)
    def note(self, run: h.Run, event: h.SavePoint) -> None:
        """Do nothing."""


@pytest.mark.parametrize("name", ["recorder", "preemption", "sees_saves", "checkpoint"])
def test_to_disable_one_that_handles_saves_is_saved_unless_it_alone_writes_them(tmp_path: Path, name: str) -> None:
    plugins = [Recorder(tmp_path), h.Preemption(), SeesSaves()]
    answer, result = train(tmp_path, lambda run: run.disable(name, "tired", wait=True), *plugins, after=3)
    assert answer.state == "served"
    if name == "checkpoint":
        assert result.last_checkpoint is None
        return
    assert result.last_checkpoint is not None
    state = torch.load(result.last_checkpoint, weights_only=True)
    assert (state["control"]["switches"], state["progress"]["steps"]) == ({name: False}, answer.step)


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda run: run.enable("eam", "why"), r"Did you mean 'ema'\?"),
        (lambda run: run.disable("remote", "why"), "remote cannot disable itself"),
        (lambda run: run.set_learning_rate(0.1, "why", optimizer="other"), "no optimizer 'other'"),
        (
            lambda run: run.set_learning_rate(1e39, "why"),
            r"torch\.float32 .* 1e\+39",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_and_no_request(tmp_path: Path, ask: Any, why: str) -> None:
    answer, result = train(tmp_path, ask, h.EMA(0.9))
    assert answer.state == "refused"
    assert re.search(why, answer.text)
    assert {each.by for each in result.history} == {"talking"}
    assert [each for each in result.warnings if "refused" in each] == []


def test_without_validation_data_and_without_a_plugin_that_saves(tmp_path: Path) -> None:
    def talk(run: RemoteRun) -> list[str]:
        first = run.validate("why").text
        run.disable("checkpoint", "why", wait=True)
        run.disable("save_schedule", "why", wait=True)
        return [first, run.save("why").text]

    texts, _ = train(tmp_path, talk, validation=None)
    assert ["validation data" in texts[0], "saves" in texts[1]] == [True, True]


class Against(h.Plugin):
    """Takes back, or vetoes, what somebody outside asks for."""

    affects_training = False

    def __init__(self, verb: str) -> None:
        self.verb = verb

    @h.on(h.BatchEnd, lane=h.Lane.REPORT)
    def act(self, run: h.Run, event: h.BatchEnd) -> None:
        asked = run.control.open_requests().get("save" if self.verb == "veto_save" else self.verb)
        if asked is None or "@" not in asked.by:
            return
        if self.verb == "veto_save":
            run.control.veto_save("not now")
        else:
            run.control.withdraw(asked.verb, "not now")  # type: ignore[arg-type]  # one that can be


@pytest.mark.parametrize("verb", ["log", "validation", "save", "stop", "end_epoch", "veto_save"])
def test_who_waits_learns_who_took_it_back(tmp_path: Path, verb: str) -> None:
    method = {"validation": "validate", "veto_save": "save"}.get(verb, verb)
    answer, result = train(tmp_path, lambda run: getattr(run, method)("please", wait=True), Against(verb))
    assert answer.state == "unserved"
    assert answer.text.endswith("by against (not now).")
    assert result.stopped_by == "talking"


def test_a_veto_of_a_stop_postpones_the_answer(tmp_path: Path) -> None:
    class AtLeast(h.Plugin):
        @h.on(h.ShouldStop)
        def hold_on(self, run: h.Run, event: h.ShouldStop) -> None:
            if run.control.should_stop and run.progress.epoch < 3:
                run.control.veto_stop("three epochs")

    answer, result = train(tmp_path, lambda run: run.stop("now", wait=True), AtLeast())
    assert (answer.state, answer.epoch, result.progress.epoch) == ("served", 3, 3)


def test_a_roll_back_drops_what_was_asked_for(tmp_path: Path) -> None:
    class Back(h.Plugin):
        saved: Any = None

        @h.on(h.BatchEnd, lane=h.Lane.REPORT)
        def act(self, run: h.Run, event: h.BatchEnd) -> None:
            if self.saved is None:
                self.saved = run.state_dict()
            elif run.control.should_log:
                run.roll_back(self.saved)

    answer, _ = train(tmp_path, lambda run: run.log("why", wait=True), Back())
    assert answer.state == "unserved"
    assert "rolled back" in answer.text


class Never(h.Plugin):
    """Vetoes each stop; as the training data, an epoch that lasts until there is one."""

    vetoed = False

    @h.on(h.ShouldStop)
    def hold_on(self, run: h.Run, event: h.ShouldStop) -> None:
        if run.control.stop_request is not None:
            self.vetoed = True
            run.control.veto_stop("never")

    def __iter__(self) -> Iterator[Any]:
        for batch in cycle(kit.class_batches(2)):
            yield batch
            if self.vetoed:
                return


def test_a_run_that_ends_first_says_so(tmp_path: Path) -> None:
    never = Never()
    ask: Any = lambda run: run.stop("now", wait=True)  # noqa: E731
    answer, result = train(tmp_path, ask, never, data=never, steps=None, epochs=1)
    assert result.status == "completed"
    assert answer.state == "unserved"
    assert "completed" in answer.text


def test_a_request_in_the_last_moment_has_an_answer(tmp_path: Path) -> None:
    server, path = Server(dict), tmp_path / "socket"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short(path) as name:
        listener.bind(name)
    listener.listen()
    server.add(listener)
    server.start()
    with raw(path) as connection:
        connection.sendall(encode({"ask": "stop", "reason": "now"}))
        queued = decode(connection.recv(4096))
        server.close()  # nothing has read the inbox
        assert [queued["state"], *(line["state"] for line in read_lines(connection))] == ["queued", "unserved"]


class Waits(h.Plugin):
    """Holds the run in a validation until a function has been called from another thread."""

    def __init__(self) -> None:
        from threading import Event

        self.entered, self.left = Event(), Event()

    @h.on(h.ValidationBatchEnd)
    def hold(self, run: h.Run, event: h.ValidationBatchEnd) -> None:
        self.entered.set()
        assert self.left.wait(PATIENCE)


def test_a_status_is_answered_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    waits = Waits()

    def talk(run: RemoteRun) -> dict[str, Any]:
        run.validate("why")
        assert waits.entered.wait(PATIENCE)
        try:
            return run.status()
        finally:
            waits.left.set()

    status, _ = train(tmp_path, talk, waits, h.EMA(0.9))
    assert (status["phase"], status["evaluated"]) == ("validation", 1)
    assert status["process"] == os.getpid()
    assert (status["run"], status["learning_rates"]) == ("run", {"optimizer": 0.1})
    assert status["plugins"]["ema"] is True
    assert status["planned_steps"] == 1_000_000


def test_what_is_asked_in_a_validation_is_requested_there_and_served_after_it(tmp_path: Path) -> None:
    waits = Waits()

    def talk(run: RemoteRun) -> Any:
        run.validate("why")
        assert waits.entered.wait(PATIENCE)
        with raw(run.address) as connection:
            connection.sendall(b'{"ask":"stop","reason":"enough"}\n')
            assert connection.recv(4096)  # queued
            waits.left.set()
            return read_lines(connection)

    class Watch(h.Plugin):
        stops: tuple[str, ...] = ()

        @h.on(h.ValidationEnd)
        def look(self, run: h.Run, event: h.ValidationEnd) -> None:
            assert run.control.stop_request is not None
            self.stops = (run.control.stop_request.by, run.control.stop_request.event)

    watch = Watch()
    _, result = train(tmp_path, talk, waits, watch)
    assert watch.stops == (ME, "validation_batch_end")
    assert (result.stopped_by, result.reason, result.progress.validations) == (ME, "enough", 1)


def test_control_characters_of_a_reason_are_escaped(tmp_path: Path) -> None:
    _, result = train(tmp_path, lambda run: run.log("a\x1b[2Jb\nc\u202ed"))
    assert [each.reason for each in result.history if each.by == ME] == ["a\\x1b[2Jb c\\u202ed"]


@pytest.mark.parametrize("reason", ["", "   ", "a" * 501, None])
def test_a_reason_is_needed(reason: Any) -> None:
    with pytest.raises(ValueError, match="1 to 500 characters"):
        RemoteRun(Path("nowhere")).stop(reason)


# The socket.


def test_the_socket_is_for_its_user_alone_and_gone_after_the_run(tmp_path: Path) -> None:
    def talk(run: RemoteRun) -> tuple[int, list[str]]:
        return stat.S_IMODE(Path(run.address).stat().st_mode), sorted(each.name for each in tmp_path.glob("*remote*"))  # type: ignore[arg-type]

    (mode, names), _ = train(tmp_path, talk)
    assert mode == 0o600
    assert len(names) == 1
    assert list(tmp_path.glob("*remote*")) == []


def test_a_long_path_works(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["a-folder-with-a-long-name"] * 6)
    status, _ = train(folder, lambda run: attach(folder).status())
    assert len(os.fsencode(folder)) > 107
    assert status["run"] == "run"


def test_a_link_in_the_place_of_a_socket_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heliograph_recorder.remote.sockets.token_hex", lambda _: "0" * 8)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"remote-{host_name()}-00000000.sock").symlink_to(victim)
    (tmp_path / f"remote-{host_name()}-00000000.token").symlink_to(victim)
    status, _ = train(tmp_path, lambda run: run.status(), remote=Remote(tmp_path, tcp=0))
    assert status["run"] == "run"
    assert victim.read_text() == "precious"


KILLED = """
import os, sys, heliograph as h
from heliograph_recorder import Remote
from heliograph.tests import kit
class Die(h.Plugin):
    @h.on(h.BatchEnd)
    def die(self, run, event):
        os.kill(os.getpid(), 9)
kit.fit(Remote(sys.argv[1], tcp=0), Die())
"""


def test_the_socket_of_a_killed_run_is_recognised_and_removed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -9
    (left,) = tmp_path.glob("*.sock")
    with pytest.raises(LookupError, match=rf"No active run .*{left.name}.* killed"):
        attach(tmp_path)
    names, _ = train(tmp_path, lambda run: [attach(tmp_path).address, *tmp_path.glob("remote-*")])
    assert names[0] == names[1] != left
    assert len(names) == 2  # and no token of the killed run


def test_two_runs_in_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    remote = Remote(tmp_path)
    values = list[Any]()

    def talk(run: RemoteRun) -> None:
        program = [sys.executable, "-c", LIVING, str(tmp_path)]
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            path = Path(other.stdout.readline().strip())
            with pytest.raises(LookupError, match=rf"active runs: .*\(process {other.pid}\)"):
                attach(tmp_path)
            values.append(attach(path).log("the other", wait=True).state)
            values.append(run.log("this", wait=True).state)
            values.append(attach(path).stop("the other", wait=True).state)
        values.append(attach(tmp_path).address == run.address)

    train(tmp_path, talk, remote=remote)
    assert values == ["served", "served", "served", True]


LIVING = """
import sys, heliograph as h
from heliograph_recorder import Remote
from heliograph.tests import kit
remote = Remote(sys.argv[1])
class Say(h.Plugin):
    @h.on(h.TrainStart, after=("remote",))
    def say(self, run, event):
        print(remote.path, flush=True)
kit.fit(remote, Say(), steps=10**9)
"""


def test_a_folder_without_sockets_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(remote_plugin, "listen", refuse)
    result = kit.fit(Remote(tmp_path))
    (warning,) = result.warnings
    assert f"{tmp_path}: [Errno 95]" in warning


def test_a_forked_process_keeps_no_connection_open(tmp_path: Path) -> None:
    """A worker of a loader may live a little longer than a run that is killed."""

    class Fork(h.Plugin):
        child = 0

        @h.on(h.BatchEnd)
        def fork(self, run: h.Run, event: h.BatchEnd) -> None:
            if not self.child:
                self.child = os.fork()
                if not self.child:
                    os._exit(open_sockets())

    before, fork = open_sockets(), Fork()
    answer, _ = train(tmp_path, lambda run: run.log("after it", wait=True), fork, after=2)
    _, status = os.waitpid(fork.child, 0)
    assert os.waitstatus_to_exitcode(status) == before
    assert answer.state == "served"


# TCP.


def test_over_tcp_the_token_is_needed_and_the_asker_is_who_they_say(tmp_path: Path) -> None:
    remote = Remote(tmp_path, tcp=0)

    def talk(run: RemoteRun) -> list[Any]:
        assert remote.address is not None
        where = "{}:{}".format(*remote.address)
        (file,) = tmp_path.glob("*.token")
        mode, token = stat.S_IMODE(file.stat().st_mode), file.read_text()
        with pytest.raises(PermissionError, match="the token"):
            attach(where, token="x" * 40).status()
        wrong = attach(where, token="x" * 40).stop("no").state
        return [mode, wrong, attach(where, token=token).status()["run"], attach(where, token=token).log("yes").state]

    values, result = train(tmp_path, talk, remote=remote)
    assert values == [0o600, "refused", "run", "accepted"]
    assert_each(
        [(each.verb, each.by) for each in result.history if "127.0.0.1" in each.by],
        ("log", ME, "own account", "127.0.0.1"),
    )
    assert list(tmp_path.glob("*.token")) == []


def test_a_token_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(tmp_path, tcp="127.0.0.1:0", token="a-token-of-my-own")

    def talk(run: RemoteRun) -> Any:
        assert remote.address is not None
        return attach("{}:{}".format(*remote.address)).status()["run"]

    monkeypatch.setenv("HELIOGRAPH_TOKEN", "a-token-of-my-own")
    value, _ = train(tmp_path, talk, remote=remote)
    assert value == "run"


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="IPv6 is not available")
def test_an_address_of_ipv6(tmp_path: Path) -> None:
    remote = Remote(tmp_path, tcp="[::1]:0", token="a-token-of-my-own")

    def talk(run: RemoteRun) -> Any:
        assert remote.address is not None
        return attach(f"[::1]:{remote.address[1]}", token="a-token-of-my-own").status()["run"]

    assert train(tmp_path, talk, remote=remote)[0] == "run"


def test_a_port_that_is_taken_fails_the_run_at_its_start(tmp_path: Path) -> None:
    remote, port = Remote(tmp_path, tcp=0), 0
    trainer = h.Trainer([remote], device="cpu")

    def fit() -> h.RunResult:
        return trainer.fit(kit.linear_classifier(), kit.class_batches(2), optimizer=kit.sgd(), epochs=1)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        remote.tcp = "127.0.0.1", port
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}: .+\. Give another"):
            fit()
    assert list(tmp_path.iterdir()) == []
    remote.tcp = "127.0.0.1", 0
    assert fit().status == "completed"  # it is an observer again


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tcp": "here"}, "host:port; got 'here'"),
        ({"tcp": 70000}, "TCP address"),
        ({"tcp": -1}, "TCP address"),
        ({"tcp": True}, "TCP address"),
        ({"tcp": ":80"}, "TCP address"),
        ({"tcp": 0, "token": "short"}, "characters; got 5"),
        ({"token": "a-token-of-my-own"}, "token= needs TCP"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Remote("runs/x", **options)


def test_attach_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HELIOGRAPH_TOKEN", raising=False)
    with pytest.raises(LookupError, match=r"has no Remote\("):
        attach(tmp_path)
    with pytest.raises(LookupError, match="neither a folder"):
        attach(tmp_path / "missing")
    with pytest.raises(ValueError, match="set HELIOGRAPH_TOKEN"):
        attach("127.0.0.1:80")
    with pytest.raises(ValueError, match="is for host:port"):
        attach(tmp_path, token="a-token-of-my-own")


# What it does not do.


def test_it_changes_no_bit_while_nobody_asks(tmp_path: Path) -> None:
    weights = []
    for plugins in ([], [Remote(tmp_path)]):
        task = kit.dropout_task()
        data = kit.random_batches(20, inputs=16, outputs=1)
        h.Trainer([h.RNGCapture(), *plugins], device="cpu").fit(task, data, optimizer=torch.optim.Adam, epochs=2)
        weights.append(torch.cat([each.detach().flatten() for each in task.model.parameters()]))
    assert torch.equal(*weights)


def test_a_plugin_that_is_switched_on_in_a_run_listens(tmp_path: Path) -> None:
    remote = Remote(tmp_path)
    paths = []

    class Late(h.Plugin):
        @h.on(h.BatchEnd)
        def act(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.batches == 1:
                run.plugins.register(remote)
            elif run.progress.batches in (2, 4):
                paths.append(remote.path)
                (run.plugins.disable if run.progress.batches == 2 else run.plugins.enable)("remote")
            elif run.progress.batches in (3, 5):
                paths.append(remote.path)

    kit.fit(Late(), train=kit.class_batches(6))
    assert [path is not None for path in paths] == [True, False, False, True]


def test_a_replay_says_what_it_does_not_hold(tmp_path: Path) -> None:
    result = kit.fit(Recorder(tmp_path), train=kit.class_batches(3))
    assert result.recording is not None
    replayed = replay(result.recording, [Remote(tmp_path)])
    assert "connections to `Remote`" in str(replayed)
