"""The arguments, the state and the keywords that a callback is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.bridges.tests.huggingface.callbacks.training import Task, batches, train_here
from heliograph.tests.kit import sgd
from heliograph_bridges.huggingface import from_huggingface
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments


class Looks(TrainerCallback):
    """Calls a function with what it is given, at the end of a training and of its evaluations."""

    def __init__(self, look: Callable[..., object], at: str = "on_train_end") -> None:
        setattr(self, at, lambda args, state, control, **given: self.seen.append(look(args, state, given)))
        self.seen: list[Any] = []


def seen(look: Callable[..., object], *plugins: Any, args: Any = None, at: str = "on_train_end", **options: Any) -> Any:
    """Train, and return what was seen last."""
    callback = Looks(look, at)
    train_here(*plugins, from_huggingface(callback, args), **{"epochs": 2, **options})
    return callback.seen[-1]


def test_the_state_is_a_trainer_state_that_is_kept_up_to_date(tmp_path: Path) -> None:
    plugins = [
        h.GradientAccumulation(2),
        h.LogSchedule(steps=3),
        h.ValidationSchedule(epochs=1),
        h.Checkpoint(tmp_path, every=h.Every(epochs=1), keep_best=1, monitor="validation/loss"),
    ]
    state = seen(lambda args, state, given: state, *plugins)
    assert isinstance(state, TrainerState)
    assert (state.global_step, state.epoch, state.max_steps, state.num_train_epochs) == (6, 2.0, 6, 2)
    assert [sorted(row) for row in state.log_history] == [
        ["epoch", "learning_rate", "loss", "step"],
        ["epoch", "eval_loss", "step"],
    ] * 2
    losses = {row["step"]: row["eval_loss"] for row in state.log_history if "eval_loss" in row}
    assert state.best_metric == min(losses.values()) == losses[state.best_global_step or 0]
    assert state.best_model_checkpoint is not None
    assert Path(state.best_model_checkpoint).is_relative_to(tmp_path)
    assert state.is_world_process_zero
    assert state.is_local_process_zero


def test_the_arguments_are_those_of_the_run(tmp_path: Path) -> None:
    names = {
        "output_dir": str(tmp_path),
        "num_train_epochs": 2,
        "max_steps": -1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.1,
        "logging_strategy": "steps",
        "logging_steps": 3,
        "eval_strategy": "epoch",
        "eval_steps": None,
        "save_strategy": "steps",
        "load_best_model_at_end": False,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "world_size": 1,
        "process_index": 0,
        "device": torch.device("cpu"),
        "fp16": False,
        "rank_of_lora": 8,
    }
    plugins = [h.GradientAccumulation(2), h.LogSchedule(steps=3), h.ValidationSchedule(epochs=1)]
    saving = [h.SaveSchedule(seconds=60), h.Checkpoint(tmp_path)]
    assert seen(lambda args, state, given: {name: getattr(args, name) for name in names}, *plugins, *saving,
                args={"rank_of_lora": 8}) == names  # fmt: skip
    text = seen(lambda args, state, given: args.to_json_string() + str(args.to_sanitized_dict()), args={"tags": ["a"]})
    assert '"num_train_epochs": 2' in text
    assert "'tags': \"['a']\"" in text


def test_an_argument_that_is_not_known_says_how_to_give_it() -> None:
    with pytest.raises(AttributeError, match=r"args=\{'ref_model_sync_steps': \.\.\.\}\), or pass"):
        seen(lambda args, state, given: args.ref_model_sync_steps)


def test_real_arguments_are_used_as_they_are(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, logging_steps=7, eval_steps=0.5, report_to=[])
    given, logging, evaluation = seen(
        lambda args, state, given: (args, state.logging_steps, state.eval_steps), args=args
    )
    assert given is args
    assert (logging, evaluation) == (7, 5)


@pytest.mark.parametrize(("metric", "greater"), [("loss", False), ("eval_loss", False), ("validation/score", True)])
def test_the_best_metric_is_the_one_that_the_arguments_name(metric: str, greater: bool) -> None:
    class Scores(Task):
        def validation_step(self, run: h.Run, batch: Any) -> Any:
            return {"loss": super().validation_step(run, batch), "score": float(run.progress.steps % 3)}

    callback = Looks(lambda args, state, given: (state.best_metric, state.best_global_step, state.log_history))
    plugins = [h.ValidationSchedule(steps=1), from_huggingface(callback, {"metric_for_best_model": metric})]
    h.Trainer(plugins, device="cpu").fit(Scores(), batches(4), validation=batches(2, 1), optimizer=sgd(), epochs=1)
    best, step, history = callback.seen[-1]
    values = {row["step"]: row["eval_score" if greater else "eval_loss"] for row in history}
    assert best == (max if greater else min)(values.values()) == values[step]


def test_a_metric_that_is_not_there_is_said_to_who_reads_it() -> None:
    class Reads(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            assert state.best_metric is None

    plugins = [h.ValidationSchedule(epochs=1), from_huggingface(Reads(), {"metric_for_best_model": "los"})]
    result = train_here(*plugins, epochs=1)
    assert "no metric 'eval_los'" in result.warnings[0]
    assert "Did you mean 'eval_loss'?" in result.warnings[0]


def test_the_keywords_are_the_parts_of_the_run() -> None:
    train, validation = batches(5), batches(2, 1)
    task, callback = Task(), Looks(lambda args, state, given: given)
    tokenizer = object()
    plugins = [h.LearningRate("step"), from_huggingface(callback, processing_class=tokenizer)]
    schedule = h.ValidationSchedule(epochs=1)
    h.Trainer([*plugins, schedule], device="cpu").fit(
        task, train, validation=validation, optimizer=sgd(), scheduler=h.warmup_linear(1), epochs=1
    )
    (given,) = callback.seen
    assert given["model"] is task.model
    assert given["processing_class"] is tokenizer
    assert isinstance(given["optimizer"], torch.optim.SGD)
    assert isinstance(given["lr_scheduler"], torch.optim.lr_scheduler.LRScheduler)
    assert (given["train_dataloader"], given["eval_dataloader"]) == (train, validation)


def test_the_rate_that_is_logged_is_the_one_that_the_step_was_made_with() -> None:
    callback = Looks(lambda args, state, given: given["logs"]["learning_rate"], "on_log")
    plugins = [h.LearningRate("step"), h.LogSchedule(steps=1), from_huggingface(callback)]
    h.Trainer(plugins, device="cpu").fit(
        Task(), batches(4), optimizer=sgd(), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), epochs=1
    )
    assert callback.seen == [0.1, 0.05, 0.025, 0.0125]


def test_several_sets_are_one_evaluation_and_several_modules_one_model() -> None:
    class Two(Task):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 1)

        def training_step(self, run: h.Run, batch: Any) -> Any:
            return super().training_step(run, batch) + self.head.weight.sum()

    metrics = Looks(lambda args, state, given: given["metrics"], "on_evaluate")
    loaders = Looks(lambda args, state, given: given["eval_dataloader"], "on_prediction_step")
    model = Looks(lambda args, state, given: given["model"])
    task, sets = Two(), {"short": batches(1, 1), "long": batches(2, 2)}
    plugins = [h.ValidationSchedule(epochs=1), *map(from_huggingface, (metrics, loaders, model))]
    for number, plugin in enumerate(plugins[1:]):
        plugin.named(f"looks_{number}")
    h.Trainer(plugins, device="cpu").fit(task, batches(2), validation=sets, optimizer=sgd(0.01), epochs=1)
    assert [set(each) for each in metrics.seen] == [{"eval_short_loss", "eval_long_loss", "epoch"}]
    assert loaders.seen == [sets["short"], sets["long"], sets["long"]]
    assert model.seen[0]["head"] is task.head
    assert model.seen[0]["model"] is task.model


def test_a_test_and_a_prediction() -> None:
    predicted = Looks(lambda args, state, given: given["metrics"], "on_predict")
    steps = Looks(lambda args, state, given: given["model"], "on_prediction_step")
    trainer = h.Trainer([from_huggingface(predicted), from_huggingface(steps).named("steps")], device="cpu")
    task = h.Supervised(nn.Linear(4, 1), nn.functional.mse_loss)
    result = trainer.test(task, batches(2))
    trainer.predict(task, batches(3))
    assert predicted.seen == [{"test_loss": result.metrics["test/loss"]}, {}]
    assert steps.seen == [task.model] * 5
