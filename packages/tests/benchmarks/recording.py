"""What a recorder, a rule, `Remote` and `Verdicts` cost per step, beside the same loop without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import heliograph as h
from heliograph.packages.tests.benchmarks.harness import Seconds, Train, Turns, differences, race, sgd, tiny_model
from heliograph.packages.tests.benchmarks.usual import LOG
from heliograph_recorder import Recorder, Remote, Verdicts
from heliograph_rules import RuleController
from torch.nn.functional import mse_loss

EPOCHS = 3
NOBODY, NOBODY_AGAIN = "no handlers", "no handlers, once more (control)"
RECORDER, LOSSES, DIGESTS = "Recorder", "Recorder(losses=True)", "Recorder(digests=True)"
REMOTE, VERDICTS = "Remote, no requests", "Verdicts, and the losses of its logs"
LOGS_READ, VERDICTS_READ = "a log every 50 steps that is read", "Verdicts, where a log every 50 steps is read anyway"
STEP_RULE = "a rule on step_end"
LOGGED, LOG_RULE = "a log every 50 steps", "a rule on log"
OFTEN = 10  # steps from a log to the next where the cost of a log is measured
LOGS, LOGS_RECORDED = f"a log every {OFTEN} steps", f"a log every {OFTEN} steps, and Recorder"
METRICS = [{"name": "state", "class": "TrainingState"}]
NEVER = {"name": "never", "rule": 'state["global_step"] < 0', "operations": ["hfcontrols.should_training_stop"]}

Plugins = Callable[[], Sequence[Any]]


class Reads(h.Plugin):
    """Handles logs, so that the loop computes their metrics without a recorder, too."""

    @h.on(h.Log)
    def read(self, run: h.Run, event: h.Log) -> None:
        """Do nothing."""


def nothing() -> Sequence[Any]:
    """Return no plugins."""
    return ()


def rule(trigger: str) -> Any:
    """Return a controller of one rule, which is never true."""
    return RuleController({"controller_metrics": METRICS, "controllers": [{**NEVER, "triggers": [trigger]}]})


def with_plugins(plugins: Plugins) -> Train:
    """Return a fit with these plugins."""

    def fit(loader: Turns, epochs: int) -> None:
        trainer = h.Trainer(plugins(), device="cpu")
        trainer.fit(h.Supervised(tiny_model(), mse_loss), loader, optimizer=sgd, epochs=epochs)

    return fit


def race_recorder(seed: int) -> Seconds:
    """Time the loop with and without a recorder, a rule, `Remote` or `Verdicts`."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        log = partial(h.LogSchedule, h.Every(steps=LOG))
        variants = {
            NOBODY: with_plugins(nothing),
            NOBODY_AGAIN: with_plugins(nothing),
            RECORDER: with_plugins(lambda: [Recorder(folder / "plain")]),
            LOSSES: with_plugins(lambda: [Recorder(folder / "losses", losses=True)]),
            DIGESTS: with_plugins(lambda: [Recorder(folder / "digests", digests=True)]),
            REMOTE: with_plugins(lambda: [Remote(folder / "remote")]),
            VERDICTS: with_plugins(lambda: [Verdicts()]),
            LOGS_READ: with_plugins(lambda: [log(), Reads()]),
            VERDICTS_READ: with_plugins(lambda: [log(), Reads(), Verdicts()]),
            STEP_RULE: with_plugins(lambda: [rule("on_step_end")]),
            LOGGED: with_plugins(lambda: [log()]),
            LOG_RULE: with_plugins(lambda: [log(), rule("on_log")]),
        }
        return race(variants, EPOCHS, seed)


def race_recorded_logs(seed: int) -> Seconds:
    """Time the loop with and without a recorder, with many logs and with none."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        log = partial(h.LogSchedule, h.Every(steps=OFTEN))
        variants = {
            NOBODY: with_plugins(nothing),
            RECORDER: with_plugins(lambda: [Recorder(folder / "plain")]),
            LOGS: with_plugins(lambda: [log(), Reads()]),
            LOGS_RECORDED: with_plugins(lambda: [log(), Reads(), Recorder(folder / "logs")]),
        }
        return race(variants, EPOCHS, seed)


def per_log(seconds: Seconds) -> float:
    """Return what a recorder adds to a log, in microseconds: the median, from the result of `race_recorded_logs`."""
    with_logs, without = differences(seconds, LOGS_RECORDED, LOGS), differences(seconds, RECORDER, NOBODY)
    return (median(with_logs) - median(without)) * OFTEN
