"""Every hook of a callback, in order, beside the same training in Lightning's own Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from heliograph import GradientAccumulation, GradientClipping, Trainer, ValidationSchedule
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests import kit
from heliograph_bridges.lightning import from_lightning

HOOKS = [name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
WINDOW = """
train_batch_start {first} | {step} {epoch} train
before_backward {a} | {step} {epoch} train
after_backward | {step} {epoch} train
train_batch_end {a} {first} | {step} {epoch} train
train_batch_start {second} | {step} {epoch} train
before_backward {b} | {step} {epoch} train
after_backward | {step} {epoch} train
before_optimizer_step {norm} | {step} {epoch} train
before_zero_grad {norm_then} | {next} {epoch} train
train_batch_end {b} {second} | {next} {epoch} train
validation_start | {next} {epoch} validate
validation_epoch_start | {next} {epoch} validate
validation_batch_start 0 | {next} {epoch} validate
validation_batch_end 0 | {next} {epoch} validate
validation_epoch_end | {next} {epoch} validate
validation_end | {next} {epoch} validate
"""
NUMBERS = [  # of each window: the losses of its batches, divided by two, and the norm before the gradients are clipped
    ("0.2549", "0.5625", "0.6255"),
    ("0.2811", "0.4165", "0.4160"),
    ("0.2546", "0.5619", "0.6248"),
    ("0.2805", "0.4165", "0.4154"),
]


def lines(text: str, **values: Any) -> list[str]:
    return text.strip().format(**values).split("\n")


def window(number: int) -> list[str]:
    a, b, norm = NUMBERS[number]
    first = number % 2 * 2
    place = {"first": first, "second": first + 1, "step": number, "next": number + 1, "epoch": number // 2}
    return lines(WINDOW, a=a, b=b, norm=norm, norm_then="0.0100", **place)


HERE = [
    *lines("setup fit | 0 0 train\nfit_start | 0 0 train\ntrain_start | 0 0 train\ntrain_epoch_start | 0 0 train"),
    *window(0),
    *window(1),
    *lines("train_epoch_end | 2 0 train\ntrain_epoch_start | 2 1 train"),
    *window(2),
    *window(3),
    *lines("train_epoch_end | 4 1 train\ntrain_end | 4 2 train\nfit_end | 4 2 train\nteardown fit | 4 2 train"),
]


class Recorder(pl.Callback):
    """Writes a line for each hook: its numbers, then the step, the epoch and the stage."""

    def __init__(self) -> None:
        self.lines: list[str] = []


def norm_of(module: Any) -> str:
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    return f"{float(torch.stack([each.norm() for each in gradients]).norm()) if gradients else 0.0:.4f}"


def facts(hook: str, module: Any, given: tuple[Any, ...]) -> str:
    if hook == "on_train_batch_end":
        return f"{given[0]['loss']:.4f} {given[2]}"
    if "batch_start" in hook or "batch_end" in hook:
        return str(given[-1])
    if hook == "on_before_backward":
        return f"{given[0]:.4f}"
    if hook in ("on_before_optimizer_step", "on_before_zero_grad"):
        return norm_of(module)
    return str(getattr(given[0], "value", given[0])) if given else ""


def recording(hook: str) -> Callable[..., None]:
    def record(self: Recorder, trainer: Any, module: Any, *given: Any, **named: Any) -> None:
        what = f"{hook.removeprefix('on_')} {facts(hook, module, (*given, *named.values()))}".strip()
        stage = trainer.state.stage.value
        self.lines.append(f"{what} | {trainer.global_step} {trainer.current_epoch} {stage}")

    return record


for name in HOOKS:
    setattr(Recorder, name, recording(name))


def test_the_hooks_come_in_this_order_with_these_numbers() -> None:
    recorder = Recorder()
    plugins = [GradientAccumulation(2), GradientClipping(norm=0.01), ValidationSchedule(steps=1)]
    trainer = Trainer([*plugins, from_lightning(recorder)], device="cpu")
    result = kit.fit(trainer, train=kit.class_batches(4), validation=kit.class_batches(1), epochs=2)
    assert recorder.lines == HERE
    (warning,) = result.warnings
    assert_facts(warning, "on_sanity_check_start", "on_sanity_check_end", "Recorder")


def test_what_is_different_in_lightnings_own_trainer(lightning_fit: Callable[..., Any]) -> None:
    """The sanity check, and `on_before_zero_grad`, which comes before each window's first backward pass there."""
    recorder = Recorder()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01, "val_check_interval": 0.5}
    lightning_fit([recorder], max_epochs=2, **options)
    start = next(number for number, line in enumerate(recorder.lines) if line.startswith("train_start"))
    sanity = [line for line in recorder.lines[:start] if line.endswith("sanity_check")]
    assert [line.partition(" ")[0] for line in sanity] == [
        "sanity_check_start",
        "validation_start",
        "validation_epoch_start",
        "validation_batch_start",
        "validation_batch_end",
        "validation_epoch_end",
        "validation_end",
        "sanity_check_end",
    ]
    zeroed = [line for line in recorder.lines if line.startswith("before_zero_grad")]
    assert zeroed == [f"before_zero_grad 0.0000 | {step} {step // 2} train" for step in range(4)]
    after = [recorder.lines[number + 1] for number, line in enumerate(recorder.lines) if line in zeroed]
    assert all(line.startswith("before_backward") for line in after)
    rest = [line for line in recorder.lines if line not in (*sanity, *zeroed)]
    assert rest == [line for line in HERE if not line.startswith("before_zero_grad")]
