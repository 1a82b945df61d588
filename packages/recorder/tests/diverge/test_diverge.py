"""What `diverge` says of two recordings."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.events.catalogue import BatchEnd
from heliograph.packages.recorder.tests.mutated_programs import Program, train
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.tests.kit import dropout_task, fit, random_batches, sgd
from heliograph_recorder import Digests, Recorder, StepCheck, Verdicts, diverge
from heliograph_recorder.digests.checksums import checksum
from heliograph_recorder.explain.story import story
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import DigestBlock
from torch import nn


class Doing(h.Plugin):
    """Does something at the end of a batch of the run."""

    asks = ("log", "save", "stop", "end_epoch")

    def __init__(self, at: int, action: Callable[[h.Run], object]) -> None:
        self.at, self.action = at, action

    @h.on(BatchEnd)
    def act(self, run: h.Run, event: BatchEnd) -> None:
        """Do it."""
        if run.progress.batches == self.at:
            self.action(run)


def recorded(folder: Path, *plugins: Any, task: Any = None, batches: Any = None, **options: Any) -> Path:
    """Train with digests of everything, and return the recording."""
    recorder = Recorder(folder, **{"digests": Digests(gradients=1, weights=1), **options.pop("recorder", {})})
    data = random_batches(8, inputs=16, outputs=1) if batches is None else batches
    task = task or dropout_task()
    result = fit(h.RNGCapture(0), *plugins, recorder, task=task, train=data, **{"epochs": 2, **options})
    assert result.recording is not None
    return result.recording


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    one, other = recorded(tmp_path / "a"), recorded(tmp_path / "b")
    assert diverge(one, other).damage == ()
    lines = other.read_bytes().split(b"\n")
    lines[3] = b"\xff" + lines[3][1:]
    other.write_bytes(b"\n".join(lines))
    found = diverge(one, other)
    assert_each(found.damage, (str(other), "attempt 1", "line 4: damaged"))
    assert_facts(str(found), "Unreadable parts:", str(other), "attempt 1", "line 4: damaged")


def test_another_order_of_batches(tmp_path: Path) -> None:
    batches = random_batches(8, inputs=16, outputs=1)
    other = [batches[0], batches[2], batches[1], *batches[3:]]
    found = diverge(recorded(tmp_path / "a", batches=batches), recorded(tmp_path / "b", batches=other)).first
    assert found is not None
    assert (found.kind, found.epoch, found.batch, found.step) == ("data", 0, 2, 2)


def test_another_order_within_a_batch(tmp_path: Path) -> None:
    batches = random_batches(8, inputs=16, outputs=1)
    other = [*batches[:4], tuple(each.flip(0) for each in batches[4]), *batches[5:]]
    found = diverge(recorded(tmp_path / "a", batches=batches), recorded(tmp_path / "b", batches=other)).first
    assert found is not None
    assert (found.kind, found.epoch, found.batch) == ("data", 0, 5)


def test_another_shuffle(tmp_path: Path) -> None:
    one, other = (
        train(Program(seed=1), tmp_path / name, epochs=1, order=order)[0] for name, order in (("a", 1), ("b", 2))
    )
    found = diverge(one, other).first
    assert found is not None
    assert (found.kind, found.batch) == ("data", 1)


def test_other_options_of_an_optimizer(tmp_path: Path) -> None:
    def decay(run: h.Run) -> None:
        run.optimizer.param_groups[0]["weight_decay"] = 0.1

    one, other = recorded(tmp_path / "a"), recorded(tmp_path / "b", Doing(3, decay))
    found = diverge(one, other).first
    assert found is not None
    assert (found.kind, found.epoch, found.batch) == ("options", 0, 4)


@pytest.mark.parametrize("rates", [(1, 2), (torch.tensor(0.1), torch.tensor(0.2))], ids=["int", "tensor"])
def test_a_rate_of_any_kind(rates: tuple[Any, Any], tmp_path: Path) -> None:
    one, other = (recorded(tmp_path / name, optimizer=sgd(rate)) for name, rate in zip("ab", rates, strict=True))
    found = diverge(one, other).first
    assert found is not None
    assert (found.kind, found.batch) == ("learning_rate" if isinstance(rates[0], int) else "options", 1)


def test_a_rate_in_a_tensor_that_changes_in_place(tmp_path: Path) -> None:
    change = Doing(3, lambda run: run.optimizer.param_groups[0]["lr"].fill_(0.2))
    one, other = (
        recorded(tmp_path / name, *more, optimizer=partial(torch.optim.SGD, lr=torch.tensor(0.1)))
        for name, more in (("a", ()), ("b", (change,)))
    )
    found = diverge(one, other).first
    assert found is not None
    assert (found.kind, found.batch) == ("options", 4)


def test_an_option_in_a_list_that_changes_in_place(tmp_path: Path) -> None:
    def give(run: h.Run) -> None:
        run.optimizer.param_groups[0]["scales"] = [1.0, 1.0]

    def change(run: h.Run) -> None:
        run.optimizer.param_groups[0]["scales"][0] = 0.5

    one = recorded(tmp_path / "a", Doing(1, give))
    other = recorded(tmp_path / "b", Doing(1, give), Doing(3, change).named("changing"))
    found = diverge(one, other).first
    assert found is not None
    assert (found.kind, found.batch) == ("options", 4)


def test_parameters_in_another_list_are_no_other_options(tmp_path: Path) -> None:
    def turn(run: h.Run) -> None:
        group = run.optimizer.param_groups[0]
        group["params"] = list(group["params"])

    other = recorded(tmp_path / "b", Doing(3, turn))
    assert diverge(recorded(tmp_path / "a"), other).first is None


def test_the_sample_is_named_and_not_the_skip_that_it_leads_to(tmp_path: Path) -> None:
    batches = random_batches(8, inputs=16, outputs=1)
    other_batches = [*batches[:3], (batches[3][0].clone().fill_(float("nan")), batches[3][1]), *batches[4:]]
    one, other = (
        recorded(tmp_path / name, h.NaNGuard("skip"), batches=data)
        for name, data in (("a", batches), ("b", other_batches))
    )
    found = diverge(one, other).first
    assert found is not None
    assert (found.kind, found.batch) == ("data", 4)
    assert "skip_step by nan_guard" in found.text


def test_logs_of_other_batches_are_not_compared(tmp_path: Path) -> None:
    plain = {"recorder": {"digests": False}}
    for number, digests in enumerate(({}, plain)):
        one, other = (
            recorded(tmp_path / f"{name}{number}", h.LogSchedule(steps=steps), **digests)
            for name, steps in (("a", 2), ("b", 4))
        )
        assert diverge(one, other).first is None


class Ping(h.Event):
    """An event of the user's own."""


def test_events_that_plugins_emit_are_not_compared(tmp_path: Path) -> None:
    class Pings(h.Plugin):
        """Emits a custom event."""

        def __init__(self, every: int) -> None:
            self.every = every

        @h.on(BatchEnd)
        def ping(self, run: h.Run, event: BatchEnd) -> None:
            """Emit it."""
            if run.progress.batches % self.every == 0:
                run.emit(Ping())

        @h.on(Ping)
        def pong(self, run: h.Run, event: Ping) -> None:
            """Receive it."""

    one, other = (recorded(tmp_path / name, Pings(every), epochs=1) for name, every in (("a", 2), ("b", 3)))
    assert diverge(one, other).is_equal


def test_an_empty_batch_is_another_one(tmp_path: Path) -> None:
    class Constant(h.Supervised):
        """Trains on nothing."""

        def training_step(self, run: h.Run, batch: Any) -> torch.Tensor:
            """Return a constant loss."""
            return next(self.model.parameters()).sum()

    def trained(name: str, batch: Any) -> Path:
        torch.manual_seed(0)
        task = Constant(nn.Linear(2, 1), nn.functional.mse_loss)
        return recorded(tmp_path / name, task=task, batches=[[1], batch, [1]], epochs=1)

    found = diverge(trained("a", []), trained("b", [2])).first
    assert found is not None
    assert (found.kind, found.batch) == ("data", 2)


def test_a_batch_that_cannot_be_read_costs_its_digest_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: Any) -> Any:
        if isinstance(value, tuple):  # a batch
            raise RuntimeError("of an unknown kind")
        return checksum(value)

    monkeypatch.setattr("heliograph_recorder.digests.collector.checksum", refuse)
    paths = [recorded(tmp_path / name) for name in "ab"]
    divergence = diverge(*paths)
    assert (divergence.first, divergence.digested) == (None, 16)
    ending = [each for each in read(paths[0]).attempts[0].entries if getattr(each, "event", "") == "run_closed"]
    warnings: list[str] = ending[0].data["warnings"]  # type: ignore[union-attr]
    assert sum("RuntimeError: of an unknown" in warning for warning in warnings) == 1


def test_a_step_without_gradients_costs_no_digest(tmp_path: Path) -> None:
    class Changing(h.Plugin):
        """Drops gradients."""

        @h.on(h.GradientsReady)
        def change(self, run: h.Run, event: h.GradientsReady) -> None:
            """Drop them."""
            if run.progress.batches == 5:
                for each in run.modules["model"].parameters():
                    each.grad = None

    paths = [recorded(tmp_path / name, Changing(), epochs=1) for name in "ab"]
    divergence = diverge(*paths)
    assert (divergence.first, divergence.digested) == (None, 8)


def test_a_weight_that_changed_between_steps_is_found_after_them(tmp_path: Path) -> None:
    def flip(run: h.Run) -> None:
        with torch.no_grad():
            next(run.modules["model"].parameters()).view(torch.int32)[0, 0] ^= 1

    one, other = recorded(tmp_path / "a"), recorded(tmp_path / "b", Doing(3, flip))
    found = diverge(one, other).first
    assert found is not None
    assert (found.kind, found.batch) == ("weights", 3)


def test_a_toggled_plugin(tmp_path: Path) -> None:
    def disable(run: h.Run) -> None:
        run.plugins.disable("gradient_norm")

    one, other = (
        recorded(tmp_path / name, h.GradientNorm(), *more) for name, more in (("a", ()), ("b", (Doing(5, disable),)))
    )
    found = diverge(one, other).first
    assert found is not None
    assert (found.kind, found.batch) == ("plugin", 5)
    assert found.text.startswith("gradient_norm was disabled")


def test_requests_that_do_not_act_on_the_training_are_not_compared(tmp_path: Path) -> None:
    one = recorded(tmp_path / "a")
    other = recorded(tmp_path / "b", Doing(3, lambda run: run.control.request_log("a look", by="somebody")))
    assert diverge(one, other).is_equal


def test_a_run_that_ends_earlier(tmp_path: Path) -> None:
    one = recorded(tmp_path / "a", epochs=2)
    other = recorded(tmp_path / "b", Doing(6, lambda run: run.control.stop("enough")))
    divergence = diverge(one, other)
    assert divergence.first is not None
    assert (divergence.first.kind, divergence.first.batch, divergence.batches) == ("length", 7, 6)
    assert_facts(divergence.first.text, "stopped by doing", "enough")


def test_other_settings_are_listed(tmp_path: Path) -> None:
    one, other = (recorded(tmp_path / name, hyper_parameters={"width": width}) for name, width in (("a", 1), ("b", 2)))
    assert_each(diverge(one, other).settings, ("width: 1 and 2",))


def test_without_digests_counters_and_losses_are_compared(tmp_path: Path) -> None:
    plain = {"recorder": {"digests": False, "losses": True}}
    torch.manual_seed(0)
    other_task = dropout_task()
    with torch.no_grad():
        next(other_task.model.parameters()).mul_(1.01)
    one, other = recorded(tmp_path / "a", **plain), recorded(tmp_path / "b", task=other_task, **plain)
    divergence = diverge(one, other)
    assert divergence.first is not None
    assert (divergence.first.kind, divergence.first.batch, divergence.digested) == ("loss", 1, 0)
    assert "Recorder(digests=True)" in str(divergence)


@pytest.mark.parametrize(("recorder", "is_equal"), [({"digests": False}, False), ({"losses": True}, True), ({}, True)])
def test_runs_without_digests_and_losses_are_not_called_equal(
    recorder: dict[str, bool], is_equal: bool, tmp_path: Path
) -> None:
    options = {"digests": False, **recorder} if "losses" in recorder else recorder
    divergence = diverge(*(recorded(tmp_path / name, recorder=options) for name in "ab"))
    assert divergence.first is None
    assert divergence.is_equal is is_equal
    assert str(divergence).startswith("No difference in" if is_equal else "These runs cannot be")


def test_a_log_is_compared_without_digests_and_losses(tmp_path: Path) -> None:
    plain = {"recorder": {"digests": False}}
    one, other = (
        recorded(tmp_path / name, h.LogSchedule(steps=4), optimizer=sgd(rate), **plain)
        for name, rate in (("a", 0.1), ("b", 0.11))
    )
    found = diverge(one, other).first
    assert found is not None
    assert (found.kind, found.batch) == ("metric", 4)
    assert found.text.startswith("a log with train/loss")


class Seconds(h.Plugin):
    """Adds what no two runs have alike to a validation."""

    count = 0

    @h.on(h.ValidationEnd, lane=h.Lane.MEASURE)
    def add(self, run: h.Run, event: h.ValidationEnd) -> None:
        """Add it."""
        Seconds.count += 1
        event.metrics["validation/waited"] = float(Seconds.count)


def test_metrics_that_plugins_add_may_be_of_the_clock(tmp_path: Path) -> None:
    validation = random_batches(2, inputs=16, outputs=1)
    one, other = (
        recorded(tmp_path / name, h.ValidationSchedule(epochs=1), Seconds(), validation=validation) for name in "ab"
    )
    assert diverge(one, other).first is None


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    saving = h.SaveSchedule(steps=3)
    whole = recorded(tmp_path / "a", saving, h.Checkpoint(tmp_path / "a" / "ckpt"))
    folder = tmp_path / "b"
    checkpoint = h.Checkpoint(folder / "ckpt", resume="auto")

    with pytest.raises(RuntimeError, match="killed"):
        recorded(folder, saving, checkpoint, Doing(11, fail))
    resumed = recorded(folder, h.SaveSchedule(steps=3), h.Checkpoint(folder / "ckpt", resume="auto"))
    assert len(read(resumed).attempts) == 2
    divergence = diverge(whole, resumed)
    assert (divergence.first, divergence.digested, divergence.batches) == (None, 16, 16)


def fail(run: h.Run) -> None:
    """End an attempt."""
    raise RuntimeError("killed")


def test_a_plugin_that_a_resume_disables_again_is_no_difference(tmp_path: Path) -> None:
    def train(folder: Path, *more: h.Plugin) -> Path:
        off = Doing(2, lambda run: run.control.disable_plugin("gradient_clipping", "enough", by="ann@home"))
        saving = h.SaveSchedule(steps=3), h.Checkpoint(folder, resume="auto")
        return recorded(folder, *saving, h.GradientClipping(0.1), off, *more)

    whole, folder = train(tmp_path / "a"), tmp_path / "b"
    with pytest.raises(RuntimeError, match="killed"):
        train(folder, Doing(8, fail).named("failing"))
    resumed = train(folder)
    assert diverge(whole, resumed).is_equal
    attempts = read(resumed).attempts
    changes = [each for record in attempts for each in record.entries if getattr(each, "event", "") == "plugin_changed"]
    assert [each.data for each in changes] == [  # type: ignore[union-attr]
        {"plugin": "gradient_clipping", "change": "disabled", "by": "ann@home"},
        {"plugin": "gradient_clipping", "change": "disabled", "by": "the loaded state"},
    ]
    text = story(read(resumed))
    assert "gradient_clipping was disabled" in text
    assert "gradient_clipping was disabled when" in text
    assert "1 plugin disabled" in text


def test_a_resumed_run_with_plugins_that_emit_events_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    def train(folder: Path, *more: h.Plugin) -> Path:
        saving = h.SaveSchedule(steps=3), h.Checkpoint(folder, resume="auto")
        return recorded(folder, *saving, StepCheck(every=3), Verdicts(), *more)

    whole, folder = train(tmp_path / "a"), tmp_path / "b"
    train(folder, Doing(6, lambda run: run.control.stop("enough")))
    resumed = train(folder)
    checked = [
        sum(getattr(each, "event", "") == "step_checked" for record in read(path).attempts for each in record.entries)
        for path in (whole, resumed)
    ]
    assert checked == [5, 4]  # a resumed attempt does not check its first step
    assert diverge(whole, resumed).is_equal


class GoingBack(h.Plugin):
    """Keeps the state of the first save point, and goes back to it once."""

    def __init__(self) -> None:
        self.saved: Any = None
        self.is_back = False

    @h.on(h.SavePoint)
    def keep(self, run: h.Run, event: h.SavePoint) -> None:
        """Keep it."""
        self.saved = self.saved or deepcopy(run.state_dict())

    @h.on(BatchEnd)
    def go_back(self, run: h.Run, event: BatchEnd) -> None:
        """Go back."""
        if run.progress.batches == 6 and not self.is_back:
            self.is_back = True
            run.roll_back(self.saved)


def test_a_roll_back_to_a_save_is_no_difference(tmp_path: Path) -> None:
    rolled = recorded(tmp_path / "b", h.SaveSchedule(steps=3), GoingBack())
    whole = recorded(tmp_path / "a", h.SaveSchedule(steps=3))
    divergence = diverge(rolled, whole)
    assert (divergence.first, divergence.digested) == (None, 16)


def test_a_recorder_that_is_switched_off_leaves_a_gap(tmp_path: Path) -> None:
    off = Doing(3, lambda run: run.plugins.disable("recorder")).named("off")
    on = Doing(6, lambda run: run.plugins.enable("recorder")).named("on")
    path = recorded(tmp_path / "a", off, on, epochs=1)
    blocks = [each for each in read(path).attempts[0].entries if isinstance(each, DigestBlock)]
    batches = [each.first + index for each in blocks for index in range(len(each))]
    assert batches == [1, 2, 3, 7, 8]


@pytest.mark.parametrize("digests", [None, 1, "yes"])
def test_digests_are_true_false_or_digests(digests: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"Recorder\(digests=\) takes"):
        Recorder(tmp_path, digests=digests)


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_how_often_is_a_whole_number(value: Any) -> None:
    with pytest.raises(ValueError, match="weights must be"):
        Digests(weights=value)


def test_the_same_recording_twice(tmp_path: Path) -> None:
    path = recorded(tmp_path / "a", epochs=1)
    with pytest.raises(ValueError, match="give two recordings"):
        diverge(path, tmp_path / "a")


def test_a_recording_without_a_training(tmp_path: Path) -> None:
    task = dropout_task()
    trainer = h.Trainer([Recorder(tmp_path / "b")])
    result = trainer.validate(task, random_batches(2, inputs=16, outputs=1))
    assert result.recording is not None
    with pytest.raises(ValueError, match="has no training"):
        diverge(recorded(tmp_path / "a", epochs=1), result.recording)
