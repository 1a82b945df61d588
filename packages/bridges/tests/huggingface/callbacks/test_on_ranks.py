"""What a callback asks on one rank, all do; each sees which rank it is on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
from heliograph.packages.bridges.tests.huggingface.callbacks.training import Task, batches
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.kit import sgd
from heliograph.tests.ranks_pool import Pool
from heliograph_bridges.huggingface import from_huggingface
from transformers import EarlyStoppingCallback, TrainerCallback


class OnOneRank(TrainerCallback):
    """Sets flags on the second rank only."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, bool]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if args.process_index == 1 and state.global_step == 2:
            control.should_evaluate = True
        if args.process_index == 1 and state.global_step == 3:
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(("evaluate", state.global_step, state.is_world_process_zero))

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(("save", state.global_step, state.is_world_process_zero))


def ask_on_one_rank(folder: Path) -> Any:
    callback = OnOneRank()
    saving = h.Checkpoint(folder, every=h.Every(steps=3))
    trainer = h.Trainer([saving, from_huggingface(callback)], device="cpu")
    result = trainer.fit(Task(), batches(8), validation=batches(4, 1), optimizer=sgd(), epochs=2)
    return callback.seen, result.progress.steps, result.stopped_by, result.reason


def stop_early(folder: Path, epochs: int) -> Any:
    callback, task = EarlyStoppingCallback(4), Task()
    saving = [
        h.RNGCapture(1),
        h.ValidationSchedule(steps=1),
        h.Checkpoint(folder, every=h.Every(steps=1), resume="auto"),
    ]
    trainer = h.Trainer([*saving, from_huggingface(callback)], device="cpu")
    result = trainer.fit(task, batches(4), validation=batches(4, 1), optimizer=sgd(), epochs=epochs)
    weights = [each.tolist() for each in task.model.parameters()]
    return weights, result.status, result.progress.steps, callback.early_stopping_patience_counter


def test_what_one_rank_asks_all_do(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks(2).run(ask_on_one_rank, tmp_path)
    assert first[0] == [("evaluate", 3, True), ("save", 3, True)]  # the former asked for by one rank, after step 2
    assert second[0] == [("evaluate", 3, False), ("save", 3, False)]
    assert first[1:] == second[1:]
    assert first[1:3] == (3, "on_one_rank")
    assert_facts(first[3], "should_training_stop = True", "OnOneRank.on_step_end")


def test_early_stopping_on_two_ranks_continues_after_a_kill(ranks: Pool, tmp_path: Path) -> None:
    whole = ranks(2).run(stop_early, tmp_path / "whole", 9)
    ranks(2).run(stop_early, tmp_path / "parts", 1)
    resumed = ranks(2).run(stop_early, tmp_path / "parts", 9)
    assert whole[0][1:] == ("stopped", whole[0][2], 4)
    assert whole[0] == whole[1] == resumed[0] == resumed[1]
