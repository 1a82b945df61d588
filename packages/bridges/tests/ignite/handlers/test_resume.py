"""Handlers of Ignite continue in a resumed run, on ranks and in a replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import heliograph.packages.bridges.tests.ignite.quietly
import pytest
import torch
from heliograph.packages.bridges.tests.kills import KilledError, Kills
from heliograph.packages.tests.facts import assert_each
from heliograph.tests.kit import random_batches, sgd
from heliograph.tests.ranks_pool import Pool
from heliograph_bridges.ignite import from_ignite
from heliograph_recorder import Recorder, replay
from heliograph_testing import check_plugin
from ignite.engine import Engine, Events
from ignite.handlers import EarlyStopping, EMAHandler, LinearCyclicalScheduler, TerminateOnNan, Timer
from torch import nn


def stop_early(trainer: Engine, evaluator: Engine) -> None:
    handler = EarlyStopping(6, lambda engine: -engine.state.metrics["loss"], trainer)
    evaluator.add_event_handler(Events.COMPLETED, handler)


def run_with(folder: Path, script: Any, kill: int = 0, epochs: int = 4, task: Any = None, optimizer: Any = None) -> Any:
    """Train with a validation and a save at every step; return the weights and the result."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1)) if task is None else task.model
    task = h.Supervised(model, nn.functional.mse_loss) if task is None else task
    saving = [h.ValidationSchedule(steps=1), h.Checkpoint(folder, every=h.Every(steps=1), resume="auto")]
    plugins = [h.RNGCapture(1), *saving, from_ignite(script), *([Kills(kill)] if kill else [])]
    train, validation = (random_batches(6, 2, outputs=1, seed=seed) for seed in (0, 1))
    result = h.Trainer(plugins, device="cpu").fit(
        task, train, validation=validation, optimizer=optimizer or sgd(), epochs=epochs
    )
    return [each.tolist() for each in model.parameters()], result


@pytest.mark.parametrize("kill", [1, 5, 7])
def test_early_stopping_stops_at_the_same_step_after_a_kill(tmp_path: Path, kill: int) -> None:
    weights, whole = run_with(tmp_path / "whole", stop_early)
    assert whole.stopped_by == "stop_early"
    last = whole.progress.steps
    assert 7 <= last < 24
    with pytest.raises(KilledError):
        run_with(tmp_path / "killed", stop_early, kill=last if kill == 7 else kill)
    again, resumed = run_with(tmp_path / "killed", stop_early)
    assert (resumed.stopped_by, resumed.progress.steps) == ("stop_early", last)
    assert again == weights
    assert resumed.resume.reasons == ()


def test_a_scheduler_and_a_value_in_the_state_continue(tmp_path: Path) -> None:
    def train(folder: Path, kill: int = 0) -> Any:
        torch.manual_seed(0)
        task = h.Supervised(nn.Linear(4, 1), nn.functional.mse_loss)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
        seen: list[int] = []

        def script(trainer: Engine) -> None:
            LinearCyclicalScheduler(optimizer, "lr", start_value=0.2, end_value=0.0, cycle_size=5).attach(trainer)
            trainer.state_dict_user_keys.append("count")
            vars(trainer.state)["count"] = 0

            @trainer.on(Events.ITERATION_COMPLETED)
            def count(engine: Engine) -> None:
                vars(engine.state)["count"] += 1

            @trainer.on(Events.COMPLETED)
            def show(engine: Engine) -> None:
                seen.append(vars(engine.state)["count"])

        weights, _ = run_with(folder, script, kill, 2, task, optimizer)
        return weights, seen

    whole = train(tmp_path / "whole")
    with pytest.raises(KilledError):
        train(tmp_path / "killed", kill=3)
    assert train(tmp_path / "killed") == whole
    assert whole[1] == [12]


def test_a_handler_without_a_state_starts_fresh_and_the_resume_says_so(tmp_path: Path) -> None:
    def train(kill: int = 0) -> Any:
        torch.manual_seed(0)
        task = h.Supervised(nn.Linear(4, 1), nn.functional.mse_loss)
        return run_with(tmp_path, lambda trainer: EMAHandler(task.model).attach(trainer), kill, 2, task)[1]

    with pytest.raises(KilledError):
        train(kill=3)
    result = train()
    assert result.resume.reasons
    assert any("EMAHandler.ema_model" in reason for reason in result.resume.reasons)


def test_other_options_are_reported_and_a_stop_is_not_repeated_with_them(tmp_path: Path) -> None:
    def patient(trainer: Engine, evaluator: Engine) -> None:
        handler = EarlyStopping(19, lambda engine: -engine.state.metrics["loss"], trainer)
        evaluator.add_event_handler(Events.COMPLETED, handler)

    def train(script: Any) -> Any:
        script.__name__ = "stop_early"
        return run_with(tmp_path, script)[1]

    first, same, other = train(stop_early), train(stop_early), train(patient)
    assert same.progress.steps == first.progress.steps < other.progress.steps
    assert any("EarlyStopping.patience = 6" in each for each in other.resume.reasons)


def on_two_ranks(folder: Path, epochs: int) -> Any:
    weights, result = run_with(folder, stop_early, epochs=epochs)
    return weights, result.status, result.progress.steps


def stop_on_the_second(folder: Path) -> Any:
    def script(trainer: Engine) -> None:
        @trainer.on(Events.ITERATION_COMPLETED(once=2))
        def stop(engine: Engine) -> None:
            if torch.distributed.get_rank() == 1:
                engine.terminate()

    _, result = run_with(folder, script)
    return result.progress.steps, result.stopped_by, result.reason


def test_on_two_ranks(ranks: Pool, tmp_path: Path) -> None:
    stopped = ranks(2).run(stop_on_the_second, tmp_path / "second")
    assert_each(stopped, *[("(2, 'script'", "trainer.terminate()", "Events.ITERATION_COMPLETED", "trainer")] * 2)
    whole = ranks(2).run(on_two_ranks, tmp_path / "whole", 9)
    ranks(2).run(on_two_ranks, tmp_path / "parts", 1)
    resumed = ranks(2).run(on_two_ranks, tmp_path / "parts", 9)
    assert whole[0][1] == "stopped"
    assert whole[0] == whole[1] == resumed[0] == resumed[1]


def test_in_a_replay(tmp_path: Path) -> None:
    trainer = h.Trainer([Recorder(tmp_path), h.ValidationSchedule(steps=1)], device="cpu")
    torch.manual_seed(0)
    task = h.Supervised(nn.Linear(4, 1), nn.functional.mse_loss)
    trainer.fit(
        task,
        random_batches(6, 2, outputs=1),
        validation=random_batches(6, 2, outputs=1, seed=1),
        optimizer=sgd(),
        epochs=4,
    )

    replayed = replay(tmp_path, [from_ignite(stop_early)])
    assert "the model" in str(replayed.unheld["stop_early"])


def stop_after_one(trainer: Engine, evaluator: Engine) -> None:
    handler = EarlyStopping(1, lambda engine: engine.state.metrics["loss"], trainer)
    evaluator.add_event_handler(Events.COMPLETED, handler)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda: from_ignite(stop_after_one),
        lambda: from_ignite(TerminateOnNan(), Events.ITERATION_COMPLETED),
        lambda: from_ignite(Timer()),
    ],
    ids=["EarlyStopping", "TerminateOnNan", "Timer"],
)
def test_handlers(make: Callable[[], object]) -> None:
    check_plugin(make)
