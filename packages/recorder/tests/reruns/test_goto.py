"""A recorded run is done again up to a step, and is alive there."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Event, main_thread
from typing import Any, cast

import heliograph as h
import pytest
import torch
from heliograph.core.data import rng
from heliograph.core.objects.equality import leaves
from heliograph.core.program import UsageError
from heliograph.events import BatchEnd
from heliograph.packages.recorder.tests.mutated_programs import Program, make
from heliograph.packages.recorder.tests.reruns.varied import State, state_of, varied
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.kit import dropout_task, random_batches, sgd
from heliograph_recorder import NotExact, Recorder, goto
from torch import nn


class Witness(h.Plugin):
    """Keeps the state before every step."""

    affects_training = False

    def __init__(self) -> None:
        self.states: dict[int, State] = {}

    @h.on(h.GradientsReady, lane=h.Lane.REPORT)
    def see(self, run: h.Run, event: h.GradientsReady) -> None:
        """Keep it."""
        if not cast("Any", run).stepping.has_stepped:  # of several optimizers, at the first one
            self.states[run.progress.steps + 1] = state_of(run)


def trained(folder: Path, make_trainer: Callable[..., Any]) -> dict[int, State]:
    """Train, and return the state before every step."""
    witness = Witness()
    trainer, options = make_trainer(folder)
    trainer.plugins.register(witness)
    trainer.fit(**options)
    return witness.states


@pytest.mark.sample(3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", range(20))
def test_any_step_of_any_program(seed: int, workers: int, tmp_path: Path) -> None:
    program = partial(make, Program(seed), workers=workers) if seed % 2 else partial(varied, seed, workers=workers)
    states = trained(tmp_path, program)
    choice = random.Random(seed)
    for step in sorted(choice.choices(sorted(states), k=12 if workers else 13)):
        with goto(tmp_path, make_of(program), step=step) as paused:
            assert paused.run.progress.steps == step - 1
            assert state_of(paused.run) == states[step]
            assert paused.comparison.first is None


def make_of(program: Callable[..., Any]) -> Callable[[Path], Any]:
    """Return a function that takes the folder, and nothing else."""

    def make_trainer(folder: Path) -> Any:
        return program(folder)

    return make_trainer


def simple(folder: Path, *plugins: Any, **options: Any) -> tuple[h.Trainer, dict[str, Any]]:
    """Return a trainer that saves every third step."""
    saving = [h.SaveSchedule(steps=3), h.Checkpoint(folder, keep_last=None)]
    trainer = h.Trainer([h.RNGCapture(1), *saving, Recorder(folder, digests=True), *plugins], device="cpu")
    batches = random_batches(5, inputs=16, outputs=1)
    return trainer, {"train": batches, "optimizer": sgd(), "epochs": 2, "task": dropout_task(), **options}


def test_it_waits_with_everything_alive_and_walks_on(tmp_path: Path) -> None:
    states = trained(tmp_path, simple)
    with goto(tmp_path, simple, step=5) as paused:
        assert_facts(repr(paused), "PausedRun", "gradients_ready", "step 4", "batch 4")
        assert paused.batch[0].shape == (4, 16)
        assert paused.gradients.keys() == {f"model.{name}" for name, _ in paused.modules["model"].named_parameters()}
        assert paused.plugins["rng_capture"].seed == 1
        assert paused.comparison.digested == 1  # since the checkpoint of step 3
        assert [type(paused.next_event()) for _ in range(4)] == [
            h.StepEnd,
            h.BatchEnd,
            h.ShouldStop,
            h.EpochEnd,
        ]
        paused.next_step()
        assert state_of(paused.run) == states[6]
        paused.next_step()
        assert state_of(paused.run) == states[7]
        result = paused.finish()
        assert (result.status, result.progress.steps, paused.event) == ("completed", 10, None)
        assert paused.result is result
        assert_facts(repr(paused), "PausedRun: ended", "step 10", "batch 10")


@pytest.mark.parametrize("step", [1, 5])
def test_a_step_that_is_not_a_later_one(step: int, tmp_path: Path) -> None:
    trained(tmp_path, simple)
    with goto(tmp_path, simple, step=5) as paused:
        with pytest.raises(ValueError, match=rf"Step {step} has begun"):
            paused.go_to_step(step)
        paused.go_to_step(7)
        assert paused.run.progress.steps == 6


def test_a_step_that_is_no_number(tmp_path: Path) -> None:
    trained(tmp_path, simple)
    wrong: Any = "6"
    with goto(tmp_path, simple, step=5) as paused:
        with pytest.raises(ValueError, match="step must be"):
            paused.go_to_step(wrong)
        paused.go_to_step(6)
        assert paused.run.progress.steps == 5


def test_where_the_function_of_go_to_fails_the_run_waits(tmp_path: Path) -> None:
    trained(tmp_path, simple)

    def fails(run: h.Run, event: h.Event) -> bool:
        return event.name == "batch_end" and run.progress.steps / 0 > 1

    with goto(tmp_path, simple, step=5) as paused:
        with pytest.raises(ZeroDivisionError):
            paused.go_to(fails)
        assert (type(paused.event), paused.run.progress.steps) == (h.BatchEnd, 5)
        assert paused.finish().status == "completed"


def test_what_a_run_does_later_is_no_difference(tmp_path: Path) -> None:
    trained(tmp_path, simple)
    with goto(tmp_path, simple, step=2) as paused:
        assert paused.comparison.first is None


def test_the_first_step_begins_at_the_start(tmp_path: Path) -> None:
    states = trained(tmp_path, simple)
    with goto(tmp_path, simple, step=1) as paused:
        assert state_of(paused.run) == states[1]


def test_nothing_of_the_run_is_changed(tmp_path: Path) -> None:
    trained(tmp_path, simple)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with goto(tmp_path, simple, step=5) as paused:
        paused.finish()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_generators_of_the_caller_are_as_they_were(tmp_path: Path) -> None:
    trained(tmp_path, simple)
    before = leaves(rng.capture())
    goto(tmp_path, simple, step=5).close()
    assert leaves(rng.capture()) == before


def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path: Path) -> None:
    states = trained(tmp_path, simple)
    newest = tmp_path / "run_epoch_1_iter_6.pth"
    newest.write_bytes(newest.read_bytes()[:-1])
    with goto(tmp_path, simple, step=8) as paused:
        assert state_of(paused.run) == states[8]
        assert len(paused.notes) == 1
        assert f"{newest} is damaged" in paused.notes[0]


def test_a_folder_that_was_moved(tmp_path: Path) -> None:
    states = trained(tmp_path / "a", simple)
    (tmp_path / "a").rename(tmp_path / "b")
    with goto(tmp_path / "b", simple, step=8) as paused:
        assert paused.comparison.digested == 1  # since the checkpoint of step 6
        assert state_of(paused.run) == states[8]


def test_another_program_is_refused_at_the_first_difference(tmp_path: Path) -> None:
    trained(tmp_path, simple)

    def other(folder: Path) -> Any:
        trainer, options = simple(folder)
        options["train"][3][0].add_(0.5)
        return trainer, options

    with pytest.raises(NotExact, match=r"4: the batch differs.*exact=False") as caught:
        goto(tmp_path, other, step=5)
    assert caught.value.difference is not None
    assert caught.value.difference.kind == "data"
    with goto(tmp_path, other, step=5, exact=False) as paused:
        assert paused.comparison.first == caught.value.difference


class Hidden(h.Plugin):
    """Has a state that no checkpoint holds."""

    def __init__(self) -> None:
        self.numbers = iter(range(100))

    @h.on(h.BatchEnd)
    def add(self, run: h.Run, event: h.BatchEnd) -> None:
        """Count."""
        next(self.numbers)


def test_an_inexact_resume_is_refused_with_its_reason(tmp_path: Path) -> None:
    def hiding(folder: Path) -> Any:
        return simple(folder, Hidden())

    trained(tmp_path, hiding)
    with pytest.raises(NotExact, match=r"cannot be repeated .*plugins\.hidden\.numbers") as caught:
        goto(tmp_path, hiding, step=5)
    assert len(caught.value.reasons) == 1
    assert caught.value.difference is None
    with goto(tmp_path, hiding, step=5, exact=False) as paused:
        assert paused.run.progress.steps == 4


def test_a_failure_of_the_training_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    trained(tmp_path, simple)

    class Failing(h.Plugin):
        """Fails."""

        affects_training = False

        @h.on(h.StepEnd)
        def fail(self, run: h.Run, event: h.StepEnd) -> None:
            """Fail at a step."""
            if run.progress.steps == 5:
                raise ZeroDivisionError("by this plugin")

    paused = goto(tmp_path, lambda folder: simple(folder, Failing()), step=5)
    with pytest.raises(ZeroDivisionError, match="by this plugin"):
        paused.next_step()
    paused.close()


def test_a_context_of_the_thread(tmp_path: Path) -> None:
    trained(tmp_path, simple)
    with goto(tmp_path, simple, step=5) as paused:
        with paused.within(torch.autograd.set_detect_anomaly(True)):
            paused.next_step()
        paused.next_step()
        assert paused.run.progress.steps == 6


@pytest.mark.parametrize(
    ("step", "error"),
    [(0, "least 1; got 0"), (11, "step 10: .* 11")],
)
def test_a_step_that_is_not_there(step: int, error: str, tmp_path: Path) -> None:
    trained(tmp_path, simple)
    with pytest.raises(ValueError, match=error):
        goto(tmp_path, simple, step=step)


def test_a_program_without_a_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, simple)

    def bare(folder: Path) -> Any:
        trainer, options = simple(folder)
        trainer.plugins.unregister("checkpoint")
        trainer.plugins.unregister("save_schedule")
        return trainer, options

    with pytest.raises(ValueError, match="has no Checkpoint"):
        goto(tmp_path, bare, step=5)


def test_what_is_not_a_program(tmp_path: Path) -> None:
    trained(tmp_path, simple)
    with pytest.raises(UsageError, match=r"^7 is not a"):
        goto(tmp_path, 7, step=5)  # type: ignore[arg-type]


def test_there_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no recording"):
        goto(tmp_path, simple, step=1)


class Pair(h.Task):
    """Two models, whose losses come one by one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(16, 1), nn.Linear(16, 1)

    def training_step(self, run: h.Run, batch: Any) -> Any:
        """Yield the losses."""
        for name, model in run.modules.items():
            yield name, (model(batch[0]) - batch[1]).square().mean()


def test_of_several_optimizers_it_is_before_the_first_one(tmp_path: Path) -> None:
    def pair(folder: Path) -> Any:
        optimizers = {"one": sgd(), "other": sgd(0.01)}
        return simple(folder, task=Pair(), optimizer=optimizers)

    trained(tmp_path, pair)
    with goto(tmp_path, pair, step=5) as paused:
        for step in (5, 6):
            place = paused.run.stepping.optimizer_name, paused.run.progress.steps, paused.run.progress.batches
            assert place == ("one", step - 1, step - 1)
            paused.next_step()


class Dropping(h.Plugin):
    """Drops the gradients of the fourth batch."""

    asks = ("skip_step",)

    @h.on(h.GradientsReady)
    def drop(self, run: h.Run, event: h.GradientsReady) -> None:
        """Drop them."""
        if run.progress.batches == 3:
            run.control.skip_step("they are bad")


def test_gradients_that_are_dropped_are_of_no_step(tmp_path: Path) -> None:
    def dropping(folder: Path) -> Any:
        return simple(folder, Dropping())

    trained(tmp_path, dropping)
    with goto(tmp_path, dropping, step=3) as paused:
        assert (paused.run.progress.steps, paused.run.progress.batches) == (2, 2)
        paused.next_step()
        assert (paused.run.progress.steps, paused.run.progress.batches) == (3, 4)


def test_nothing_continues_after_the_end(tmp_path: Path) -> None:
    trained(tmp_path, simple)
    with goto(tmp_path, simple, step=9) as paused:
        paused.finish()
        for proceed in (paused.next_event, paused.next_step, paused.finish):
            with pytest.raises(RuntimeError, match="The training has ended"):
                proceed()
    with pytest.raises(RuntimeError, match="has ended"):
        paused.next_event()


def test_a_context_that_cannot_be_entered(tmp_path: Path) -> None:
    trained(tmp_path, simple)
    with goto(tmp_path, simple, step=5) as paused:
        with pytest.raises(ZeroDivisionError), paused.within(contextmanager(lambda: iter([1 // 0]))()):
            pass
        paused.next_step()
        with pytest.raises(RuntimeError, match="is not paused"), paused.within(nullcontext()):
            paused.finish()


def test_an_interrupt_lets_it_wait_at_its_next_event(tmp_path: Path) -> None:
    trained(tmp_path, simple)
    with goto(tmp_path, simple, step=5) as paused:

        def interrupt(run: h.Run, event: h.Event) -> bool:
            if isinstance(event, h.BatchStart):
                while not received.wait(0.05):  # one that comes right before the lock is waited for does not wake it
                    signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)
            return False

        def receive(signum: int, frame: Any) -> None:
            received.set()
            raise KeyboardInterrupt

        received = Event()
        before = signal.signal(signal.SIGINT, receive)
        try:
            with pytest.raises(KeyboardInterrupt):
                paused.go_to(interrupt)
        finally:
            signal.signal(signal.SIGINT, before)
        paused.next_step()
        assert paused.run.progress.steps >= 5


def test_an_interrupt_within_the_lock_does_not_block_the_end(tmp_path: Path) -> None:
    trained(tmp_path, simple)
    paused = goto(tmp_path, simple, step=5)
    lock = paused._thread._changed
    lock.acquire()  # as a Ctrl-C right after `with` has taken it leaves it
    try:
        paused.close()
    finally:
        lock.release()
    assert not paused._thread._thread.is_alive()


def test_draws_at_the_prompt_do_not_disturb_it(tmp_path: Path) -> None:
    states = trained(tmp_path, simple)
    with goto(tmp_path, simple, step=5) as paused:
        torch.rand(3)
        random.random()
        paused.next_step()
        assert state_of(paused.run) == states[6]


def test_closing_twice_puts_nothing_back_twice(tmp_path: Path) -> None:
    trained(tmp_path, simple)
    paused = goto(tmp_path, simple, step=5)
    paused.close()
    before = random.random()
    paused.close()
    assert random.random() != before


def test_a_program_that_handles_signals(tmp_path: Path) -> None:
    def preemptible(folder: Path) -> Any:
        return simple(folder, h.Preemption())

    states = trained(tmp_path, preemptible)
    with goto(tmp_path, preemptible, step=5) as paused:
        assert state_of(paused.run) == states[5]
        (note,) = paused.notes
        assert note.startswith("preemption is left out")


def test_a_plugin_that_writes_in_a_way_of_its_own_is_named(tmp_path: Path) -> None:
    class Writing(h.Plugin):
        """Writes."""

        affects_training = False

        @h.on(BatchEnd)
        def write(self, run: h.Run, event: BatchEnd) -> None:
            """Write."""

    trained(tmp_path, simple)
    with goto(tmp_path, lambda folder: simple(folder, Writing()), step=5) as paused:
        (note,) = paused.notes
        assert note.startswith("writing has no rehearse(folder)")


def test_two_saves_of_the_same_step(tmp_path: Path) -> None:
    def saving_twice(folder: Path) -> Any:
        return simple(folder, h.SaveSchedule(epochs=1).named("epochs"), h.SaveSchedule(steps=5).named("steps"))

    states = trained(tmp_path, saving_twice)
    (tmp_path / "run_epoch_1_iter_5.pth").unlink()
    with goto(tmp_path, saving_twice, step=6) as paused:
        assert state_of(paused.run) == states[6]
