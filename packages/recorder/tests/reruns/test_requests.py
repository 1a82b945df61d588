"""What people requested of a run is requested again where it was, when the run is done again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.events import Request
from heliograph.packages.recorder.tests.mutated_programs import Program, make
from heliograph.packages.recorder.tests.reruns.failing import Failing
from heliograph.packages.recorder.tests.reruns.people import People
from heliograph.packages.recorder.tests.reruns.test_goto import Witness, simple
from heliograph.packages.recorder.tests.reruns.varied import state_of, varied
from heliograph_recorder import NotExact, Remote, diverge, drill, fork, goto
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import RequestEntry
from heliograph_recorder.remote.client import RemoteRun
from heliograph_recorder.remote.sockets import sockets_in


def program_of(seed: int) -> Callable[[Path], Any]:
    """Return a random program."""
    return partial(make, Program(seed)) if seed % 2 else partial(varied, seed)


def steered(folder: Path, make_trainer: Callable[[Path], Any], *people: h.Plugin) -> Witness:
    """Train with people who ask, and return who has seen the states."""
    witness = Witness()
    trainer, options = make_trainer(folder)
    for each in (*people, witness):
        trainer.plugins.register(each)
    trainer.fit(**options)
    return witness


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(20))
def test_any_step_of_a_run_that_people_have_steered(seed: int, tmp_path: Path) -> None:
    people, program, draws = People(seed), program_of(seed), random.Random(seed)
    states = steered(tmp_path, lambda folder: program(folder), people).states
    assert len(set(people.accepted)) > 1
    asked = requests(tmp_path)
    assert len(asked) >= len(people.accepted)
    for share in (0.0, 0.4, 0.6, 0.6, 1.0):  # each change is saved: with fewer checkpoints, requests lie on the way
        for each in tmp_path.glob("*.pth"):
            if draws.random() < share:
                each.unlink()
        with goto(tmp_path, lambda folder: program(folder), step=draws.choice(sorted(states))) as paused:
            assert state_of(paused.run) == states[paused.run.progress.steps + 1]
            paused.finish()
            assert paused.comparison.first is None
            assert paused.notes == []
            made = made_by_people(paused.run.control.history)
            assert made == asked[len(asked) - len(made) :]
    assert made == asked  # from the beginning


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(20))
def test_a_fork_with_nothing_changed_has_the_requests_of_its_parent(seed: int, tmp_path: Path) -> None:
    at, program = 5, program_of(seed)
    steered(tmp_path / "x", lambda folder: program(folder), People(seed, until=at - 1))
    fork(tmp_path / "x", lambda folder: program(folder), at=at, into=tmp_path / "y")
    assert diverge(tmp_path / "x", tmp_path / "y").first is None


class Asking(h.Plugin):
    """Sends a command over the socket before a batch, and waits until the run has it."""

    policy = "observer"
    draws = False

    def __init__(self, folder: Path, **commands: dict[str, Any]) -> None:
        self.folder, self.commands = folder, {int(name[2:]): each for name, each in commands.items()}

    @h.on(h.BatchStart)
    def send(self, run: h.Run, event: h.BatchStart) -> None:
        """Send what is due."""
        command = self.commands.pop(run.progress.batches, None)
        if command is not None:
            (socket,) = sockets_in(self.folder)
            exchange = RemoteRun(socket)._exchange({"reason": "tired", **command}, 10.0)
            assert next(exchange)["state"] == "queued"
            exchange.close()  # type: ignore[attr-defined]  # it is a generator


def remote(folder: Path, *plugins: Any, **options: Any) -> Any:
    """Return a program that can be asked."""
    schedule: list[h.Plugin] = [h.ValidationSchedule(steps=4, at_end=False), h.LogSchedule(steps=4)]
    return simple(
        folder,
        Remote(folder),
        h.GradientClipping(0.1),
        *schedule,
        *plugins,
        validation=VALIDATION,
        epochs=3,
        **options,
    )


VALIDATION = simple(Path())[1]["train"][:2]


def requests(path: Path) -> list[tuple[str, str, str, int]]:
    """Return the recorded requests of people."""
    entries = [each for attempt in read(path).attempts for each in attempt.entries]
    return made_by_people(each.request for each in entries if isinstance(each, RequestEntry))


def made_by_people(history: Iterable[Request]) -> list[tuple[str, str, str, int]]:
    """Return the requests of people."""
    return [(each.what, each.by, each.reason, each.step) for each in history if each.through]


PARTS = ("modules", "optimizers", "gradients")
STEERED: dict[str, dict[str, Any]] = {
    "at3": {"ask": "set-lr", "value": 0.02},
    "at4": {"ask": "disable", "target": "gradient_clipping"},
    "at6": {"ask": "validate"},
    "at7": {"ask": "end-epoch"},
    "at8": {"ask": "enable", "target": "gradient_clipping"},
}


def test_requests_over_the_socket_are_repeated_in_the_name_of_who_made_them(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    states = steered(folder, remote, Asking(folder, **STEERED)).states
    asked = requests(folder)
    assert [each[0].split()[0] for each in asked if each[0] != "save"] == [
        "set_learning_rate", "disable_plugin", "validation", "end_epoch", "enable_plugin",
    ]  # fmt: skip
    for step, first in ((1, 0.02), (5, "disable_plugin"), (8, "validation"), (9, "enable_plugin")):
        with goto(folder, remote, step=step) as paused:
            assert state_of(paused.run) == states[step]
            paused.finish()
            assert paused.comparison.first is None
            made = made_by_people(paused.run.control.history)
            assert str(first) in made[0][0]
            assert made == asked[len(asked) - len(made) :]
            assert any(note.startswith("remote is left out") for note in paused.notes)


def resuming(folder: Path, *plugins: Any) -> Any:
    """Return a program that resumes."""
    trainer, options = remote(folder, *plugins)
    trainer.plugins["checkpoint"].resume = h.Resume("auto")
    return trainer, options


def test_a_plugin_that_a_resume_has_disabled_again_is_disabled_once(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    asking = Asking(folder, at1={"ask": "disable", "target": "gradient_clipping"})
    with pytest.raises(RuntimeError, match="killed"):
        steered(folder, resuming, asking, Failing(6))
    states = steered(folder, resuming).states
    for _ in range(2):
        with goto(folder, resuming, step=9) as paused:
            assert state_of(paused.run) == states[9]
            assert paused.comparison.first is None
        for each in folder.glob("*.pth"):
            each.unlink()  # so that it begins before the kill
    forked = fork(folder, remote, at=7, into=tmp_path / "y")
    assert forked.recording is not None
    assert diverge(folder, forked.recording).first is None


def test_what_a_killed_attempt_was_asked_for_after_its_last_save_is_not_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    asking = Asking(folder, at1={"ask": "set-lr", "value": 0.02}, at4={"ask": "validate"})
    with pytest.raises(RuntimeError, match="killed"):
        steered(folder, resuming, asking, Failing(6))
    states = steered(folder, resuming, Asking(folder, at7={"ask": "log"})).states
    for step, begins in ((9, 6), (9, 0)):
        with goto(folder, resuming, step=step) as paused:
            assert state_of(paused.run) == states[step]
            assert paused.comparison.first is None
            assert paused.comparison.digested == 8 - begins
        for each in folder.glob("*.pth"):
            each.unlink()


def test_a_request_that_cannot_be_repeated_is_refused_with_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    steered(folder, remote, Asking(folder, at1={"ask": "disable", "target": "gradient_clipping"}))
    for each in folder.glob("*.pth"):
        each.unlink()  # so that it begins before the request

    def without(place: Path) -> Any:
        trainer, options = remote(place)
        trainer.plugins.unregister("gradient_clipping")
        return trainer, options

    with pytest.raises(NotExact, match=r"disable_plugin gradient_clipping, .*, step") as caught:
        goto(folder, without, step=3)
    assert "no plugin 'gradient_clipping'" in str(caught.value)
    with goto(folder, without, step=3, exact=False) as paused:
        assert any("cannot repeat" in each for each in paused.notes)
    with pytest.raises(NotExact, match="cannot repeat"):
        fork(folder, without, at=3, into=tmp_path / "y")
    assert not (tmp_path / "y").exists()


def test_a_plugin_that_is_left_out_stays_so(tmp_path: Path) -> None:
    folder = tmp_path / "x"

    class Reporting(h.Plugin):
        """Reports elsewhere."""

        policy = "observer"
        draws = False
        rehearses = False
        seen = 0

        @h.on(h.StepEnd)
        def report(self, run: h.Run, event: h.StepEnd) -> None:
            """Report."""
            type(self).seen += 1

    def reporting(place: Path) -> Any:
        return remote(place, Reporting())

    commands = {"at0": {"ask": "disable", "target": "reporting"}, "at1": {"ask": "enable", "target": "reporting"}}
    steered(folder, reporting, Asking(folder, **commands))
    seen = Reporting.seen
    with goto(folder, reporting, step=5) as paused:  # the loaded state says that it was enabled
        paused.finish()
        assert paused.comparison.first is None
    for each in folder.glob("*.pth"):
        each.unlink()  # so that it begins before the requests
    with pytest.raises(NotExact, match="plugin 'reporting' is left"):
        goto(folder, reporting, step=3)
    assert Reporting.seen == seen


class Speaking(h.Plugin):
    """A plugin of a program, which asks in the names of others."""

    @h.on(h.BatchEnd)
    def ask(self, run: h.Run, event: h.BatchEnd) -> None:
        """Ask."""
        if run.progress.batches == 3:
            run.control.set_learning_rate(0.02, "it is late", by="ann@home")
        if run.progress.batches == 5:
            run.control.request_log("for the report", by="bob")


@pytest.mark.parametrize("is_there", [True, False])
def test_what_a_plugin_asks_in_the_names_of_others_is_requested_by_it_alone_if_it_is_there(
    is_there: bool, tmp_path: Path
) -> None:
    states = steered(tmp_path, lambda folder: simple(folder, Speaking())).states
    asked = [("set_learning_rate 0.02", "ann@home", "it is late", 3), ("log", "bob", "for the report", 5)]
    assert requests(tmp_path) == asked
    for path in tmp_path.glob("*.pth"):
        path.unlink()  # so that it begins before the requests
    with goto(tmp_path, lambda folder: simple(folder, *([Speaking()] * is_there)), step=7) as paused:
        assert state_of(paused.run) == states[7]
        assert made_by_people(paused.run.control.history) == asked
        assert paused.comparison.first is None


def test_what_was_asked_after_the_step_is_not_asked_of_a_fork(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    steered(folder, remote, Asking(folder, at3={"ask": "set-lr", "value": 0.02}, at7={"ask": "set-lr", "value": 0.03}))
    fork(folder, remote, at=5, into=tmp_path / "y")
    found = diverge(folder, tmp_path / "y").first
    assert found is not None
    assert (found.kind, found.step) == ("request", 8)


def test_the_batch_after_a_steered_run_is_drilled(tmp_path: Path) -> None:
    commands = {"at3": {"ask": "set-lr", "value": 0.02}}
    for name, rate in (("a", 0.1), ("b", 0.1001)):
        folder = tmp_path / name

        def program(place: Path, rate: float = rate) -> Any:
            def late(run: h.Run, event: h.BatchStart) -> None:
                if run.progress.batches == 5:
                    run.optimizer.param_groups[0]["lr"] *= rate

            trainer, options = remote(place)
            trainer.bus.on(h.BatchStart, late)
            return trainer, options

        steered(folder, program, Asking(folder, **commands))
        made = {**locals().get("made", {}), name: program}
    drilled = drill(tmp_path / "a", tmp_path / "b", made["a"], made["b"])
    assert drilled.divergence.first is not None
    assert drilled.divergence.first.step == 6
    assert drilled.repeats == (True, True)
    (note,) = drilled.notes
    assert note.startswith("remote is left out")
    assert f"In the rerun, {drilled.notes[0]}.\n" in f"{drilled}\n"
