"""Recordings for the tests of what is told of them, written event by event as a recorder would."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from heliograph.builtin_callbacks.recorder.format.records import (
    Attempt,
    Batches,
    Counters,
    Entry,
    EventEntry,
    HandlerTime,
    Recording,
    RepeatEntry,
    RequestEntry,
    TimesEntry,
)
from heliograph.events import Request
from heliograph.events.control import Verb

SIZE = 4  # samples of a batch
SECONDS = 0.5  # of a batch


class Script:
    """An attempt that is being written; `counters` and `clock` go on by themselves.

    Args:
        about: other fields of the attempt than the usual ones.
    """

    def __init__(self, **about: Any) -> None:
        self.about = about
        self.entries: list[Entry] = []
        self.counters, self.clock = Counters(), 0.0
        self.asks = 0
        self.rows: dict[tuple[str, str], HandlerTime] = {}

    def happen(self, event: str, took: float = 0.0, /, **data: Any) -> None:
        self.clock += took
        self.counters = replace(self.counters, seconds=round(self.counters.seconds + took, 2))
        self.entries.append(EventEntry(event, self.clock, self.counters, data))

    def start(self, *, fit: bool = True) -> None:
        if fit:
            self.happen("train_start")
            self.epoch()

    def epoch(self, *, resumed: bool = False) -> None:
        self.happen("epoch_start", 0.1, epoch=self.counters.epoch, resumed=resumed, batches=8)

    def end_epoch(self, *asked: int) -> None:
        done = self.counters
        self.counters = replace(done, epoch=done.epoch + 1, batch=0, earlier_batches=done.batches)
        self.happen("epoch_end", epoch=done.epoch, asked=list(asked))

    def batches(self, count: int, losses: tuple[float, ...] | None = None) -> None:
        first, numbers = self.counters, range(1, count + 1)
        self.clock += SECONDS * count
        self.counters = replace(
            first,
            batch=first.batch + count,
            steps=first.steps + count,
            samples=first.samples + SIZE * count,
            seconds=first.seconds + SECONDS * count,
        )
        self.entries.append(
            Batches(
                first,
                self.clock,
                tuple(first.steps + number for number in numbers),
                (first.skipped_steps,) * count,
                (first.skipped_batches,) * count,
                tuple(first.samples + SIZE * number for number in numbers),
                (0,) * count,
                tuple(round(100 * (first.seconds + SECONDS * number)) for number in numbers),
                losses,
            )
        )

    def ask(self, verb: Verb, by: str, reason: str, event: str = "batch_end", **more: Any) -> int:
        times, at = more.pop("times", 1), self.counters
        request = Request(verb, by, reason, at.epoch, at.batch, at.steps, event=event, **more)
        self.entries.append(RequestEntry(self.asks, request))
        if times > 1:
            self.entries.append(RepeatEntry(self.asks, times))
        self.asks += 1
        return self.asks - 1

    def log(self, **metrics: float) -> None:
        asked = self.ask("log", "log_schedule", "every 2 steps")
        self.happen("log", metrics=_named(metrics), asked=[asked])

    def validation(self, **metrics: float) -> None:
        asked = self.ask("validation", "validation_schedule", "every 4 steps")
        self.happen("validation_start", asked=[asked], batches=3)
        self.counters = replace(self.counters, validations=self.counters.validations + 1)
        self.happen("validation_end", 0.4, metrics=_named(metrics), batches=[["", 3]])

    def save(self, path: str, *, best: bool = False) -> None:
        asked = self.ask("save", "save_schedule", "every 4 steps")
        self.happen("save_point", asked=[asked])
        self.happen("checkpoint_saved", 0.2, path=path, is_best=best)

    def load(self, path: str | None, counters: Counters) -> None:
        self.counters = replace(counters, seconds=counters.seconds)
        self.happen("checkpoint_loaded", path=path, origin=asdict(counters))

    def spend(self, plugin: str, event: str, seconds: float, *, timed: int = 10, emissions: int = 10) -> None:
        row = HandlerTime(plugin, event, timed, emissions, seconds, seconds / 2)
        self.rows[plugin, event] = row

    def close(self, status: str, reason: str, **more: Any) -> None:
        usual: dict[str, Any] = {"by": None, "rank": None, "metrics": {}, "best": None, "last": None, "notes": []}
        self.happen("run_closed", status=status, reason=reason, **usual | more)

    def attempt(self) -> Attempt:
        usual: dict[str, Any] = {
            "name": "a1",
            "phase": "train",
            "began": "2026-01-01T10:00:00+00:00",
            "run": "digits",
            "world_size": 1,
            "max_epochs": 4,
            "max_steps": None,
            "validation_sets": ("",),
            "optimizers": ("optimizer",),
            "hyper_parameters": {"lr": 0.1},
            "versions": {"heliograph": "0.1.0", "torch": "2.8.0", "python": "3.11.9"},
            "losses": False,
            "plan": {},
        }
        spent = (TimesEntry(tuple(self.rows.values())),) if self.rows else ()
        return Attempt(entries=(*self.entries, *spent), **usual | self.about)


def recording(*scripts: Script) -> Recording:
    return Recording(Path("runs/digits.recording"), tuple(script.attempt() for script in scripts))


def killed_and_resumed() -> Recording:
    """A run that is killed amid its second epoch, goes on from a checkpoint, rolls back once and is stopped."""
    first = Script()
    first.start()
    first.batches(4)
    first.log(train__loss=2.0, train__accuracy=0.3)
    first.validation(validation__loss=1.9, validation__accuracy=0.35)
    first.save("ckpt/step_4.pth", best=True)
    saved = first.counters
    first.batches(4)
    first.end_epoch()
    first.epoch()
    first.log(train__loss=1.5, train__accuracy=0.4)
    first.batches(3)
    first.log(train__loss=1.4, train__accuracy=0.41)

    second = Script(began="2026-01-01T12:00:10+00:00", name="a2", hyper_parameters={"lr": 0.05})
    second.happen("train_start")
    second.load("ckpt/step_4.pth", saved)
    second.happen("plugin_changed", plugin="progress", change="disabled", by="the caller")
    second.epoch(resumed=True)
    second.batches(4)
    second.end_epoch()
    second.log(train__loss=1.45, train__accuracy=0.42)
    second.validation(validation__loss=1.2, validation__accuracy=0.6)
    second.save("ckpt/step_8.pth", best=True)
    back = second.counters
    second.happen("checkpoint_pruned", path="ckpt/step_4.pth", reason="keep_last=1")
    second.epoch()
    second.batches(2)
    second.ask("skip_step", "roll_back", "the loss is nan", "gradients_ready")
    second.ask("roll_back", "roll_back", "the loss is nan", "gradients_ready")
    second.log(train__loss=float("nan"), train__accuracy=0.1)
    second.load("ckpt/step_8.pth", back)
    second.epoch()
    second.ask("skip_batch", "roll_back", "its loss was no number when it was last here", "batch_start")
    second.batches(4)
    second.happen("plugin_failed", plugin="jsonl_log", event="log", error="OSError: no space left")
    second.log(train__loss=0.9, train__accuracy=0.7)
    second.validation(validation__loss=1.0, validation__accuracy=0.65)
    stop = second.ask("stop", "early_stopping", "validation/loss has not improved", "validation_end", rank=2)
    second.ask("veto_stop", "minimum", "at least 13 steps", "should_stop", times=2)
    second.batches(2)
    second.ask("save", "someone", "too late", "train_end")
    second.happen("train_end", asked=[stop])
    second.spend("checkpoint", "save_point", 0.4)
    second.spend("checkpoint", "batch_end", 0.01, timed=2, emissions=10)
    second.spend("progress", "batch_end", 0.02, timed=10, emissions=10)
    second.close(
        "stopped",
        "validation/loss has not improved",
        by="early_stopping",
        rank=2,
        metrics={"train/loss": 0.9, "validation/loss": 1.0},
        best="ckpt/step_8.pth",
        last="ckpt/step_8.pth",
        notes=["rolled back at step 10"],
    )
    return recording(first, second)


def _named(metrics: dict[str, float]) -> dict[str, float]:
    return {name.replace("__", "/"): value for name, value in metrics.items()}
