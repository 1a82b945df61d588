"""Recordings for the tests of `explain` and `timeline`, written event by event as a recorder would."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from heliograph.events import Request
from heliograph.events.control import Verb
from heliograph_recorder.format.records import (
    AttemptRecord,
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

SIZE = 4  # samples of a batch
SECONDS = 0.5  # of a batch


class Script:
    """An attempt that is being written; each method advances `counters` and `clock`.

    Args:
        fields: of the attempt, where they differ from the defaults.
    """

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.entries: list[Entry] = []
        self.counters, self.clock = Counters(), 0.0
        self.count = 0
        self.rows: dict[tuple[str, str], HandlerTime] = {}

    def emit(self, event: str, seconds: float = 0.0, /, **data: Any) -> None:
        self.clock += seconds
        self.counters = replace(self.counters, seconds=round(self.counters.seconds + seconds, 2))
        self.entries.append(EventEntry(event, self.clock, self.counters, data))

    def start(self, *, fit: bool = True) -> None:
        if fit:
            self.emit("train_start")
            self.epoch()

    def epoch(self, *, resumed: bool = False) -> None:
        self.emit("epoch_start", 0.1, epoch=self.counters.epoch, resumed=resumed, batches=8)

    def end_epoch(self, *asked: int) -> None:
        done = self.counters
        self.counters = replace(done, epoch=done.epoch + 1, batch=0, earlier_batches=done.batches)
        self.emit("epoch_end", epoch=done.epoch, asked=list(asked))

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
                tuple(round(100 * (first.seconds + SECONDS * number)) for number in numbers),
                tuple(first.steps + number for number in numbers),
                (first.skipped_steps,) * count,
                (first.skipped_batches,) * count,
                tuple(first.samples + SIZE * number for number in numbers),
                (0,) * count,
                (0,) * count,
                losses,
            )
        )

    def request(self, verb: Verb, by: str, reason: str, event: str = "batch_end", **more: Any) -> int:
        times, at = more.pop("times", 1), self.counters
        request = Request(verb, by, reason, at.epoch, at.batch, at.steps, event=event, **more)
        self.entries.append(RequestEntry(self.count, request))
        if times > 1:
            self.entries.append(RepeatEntry(self.count, times))
        self.count += 1
        return self.count - 1

    def log(self, **metrics: float) -> None:
        asked = self.request("log", "log_schedule", "every 2 steps")
        self.emit("log", metrics=_named(metrics), asked=[asked])

    def validation(self, **metrics: float) -> None:
        asked = self.request("validation", "validation_schedule", "every 4 steps")
        self.emit("validation_start", asked=[asked], batches=3)
        self.counters = replace(self.counters, validations=self.counters.validations + 1)
        self.emit("validation_end", 0.4, metrics=_named(metrics), batches=[["", 3]])

    def save(self, path: str, *, best: bool = False) -> None:
        asked = self.request("save", "save_schedule", "every 4 steps")
        self.emit("save_point", asked=[asked])
        self.emit("checkpoint_saved", 0.2, path=path, is_best=best, training="")

    def load(self, path: str | None, counters: Counters) -> None:
        self.counters = replace(counters, seconds=counters.seconds)
        more = {"in_boundary": False, "planned_steps": None, "training": ""}
        self.emit("checkpoint_loaded", path=path, origin=asdict(counters), **more)

    def add_time(self, plugin: str, event: str, seconds: float, *, timed: int = 10, emissions: int = 10) -> None:
        row = HandlerTime(plugin, event, timed, emissions, seconds, seconds / 2)
        self.rows[plugin, event] = row

    def close(self, status: str, reason: str, **more: Any) -> None:
        defaults: dict[str, Any] = {"by": None, "rank": None, "metrics": {}, "best": None, "last": None, "notes": []}
        defaults["warnings"] = []
        self.emit("run_closed", status=status, reason=reason, **defaults | more)

    def attempt(self) -> AttemptRecord:
        defaults: dict[str, Any] = {
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
        times = (TimesEntry(tuple(self.rows.values())),) if self.rows else ()
        return AttemptRecord(entries=(*self.entries, *times), **defaults | self.fields)


def recording(*scripts: Script) -> Recording:
    return Recording(Path("runs/digits.recording"), tuple(script.attempt() for script in scripts))


def killed_and_resumed() -> Recording:
    """A run that is killed within its second epoch, resumed from a checkpoint, rolled back once, and stopped."""
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
    second.emit("train_start")
    second.load("ckpt/step_4.pth", saved)
    second.emit("plugin_changed", plugin="progress", change="disabled", by="the caller")
    second.epoch(resumed=True)
    second.batches(4)
    second.end_epoch()
    second.log(train__loss=1.45, train__accuracy=0.42)
    second.validation(validation__loss=1.2, validation__accuracy=0.6)
    second.save("ckpt/step_8.pth", best=True)
    rolled_back_to = second.counters
    second.emit("checkpoint_pruned", path="ckpt/step_4.pth", reason="keep_last=1")
    second.epoch()
    second.batches(2)
    second.request("skip_step", "roll_back", "the loss is nan", "gradients_ready")
    second.request("roll_back", "roll_back", "the loss is nan", "gradients_ready")
    second.log(train__loss=float("nan"), train__accuracy=0.1)
    second.load("ckpt/step_8.pth", rolled_back_to)
    second.epoch()
    second.request("skip_batch", "roll_back", "its loss was NaN before the roll-back", "batch_start")
    second.batches(4)
    second.emit("plugin_failed", plugin="jsonl_log", event="log", error="OSError: no space left")
    second.log(train__loss=0.9, train__accuracy=0.7)
    second.validation(validation__loss=1.0, validation__accuracy=0.65)
    stop = second.request("stop", "early_stopping", "validation/loss has not improved", "validation_end", rank=2)
    second.request("veto_stop", "minimum", "at least 13 steps", "should_stop", times=2)
    second.batches(2)
    second.request("save", "someone", "too late", "train_end")
    second.emit("train_end", asked=[stop])
    second.add_time("checkpoint", "save_point", 0.4)
    second.add_time("checkpoint", "batch_end", 0.01, timed=2, emissions=10)
    second.add_time("progress", "batch_end", 0.02, timed=10, emissions=10)
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
