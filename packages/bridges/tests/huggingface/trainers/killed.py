"""A training that kills itself within a step, and the one that resumes it: each in a child of this process.

Run it with a folder: what is left at the end lies in `result.json` there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from heliograph import EarlyStopping, Plugin, Run, StepEnd, on
from heliograph.packages.bridges.tests.huggingface.trainers.trainings import make
from heliograph.tests.kills import Killer, in_a_child
from heliograph_recorder import Recorder
from heliograph_rules import RuleController

RULES = """
controller_metrics:
  - name: loss
    class: EvalMetrics
operations:
  - name: control
    class: HFControls
controllers:
  - name: late
    triggers: [on_evaluate]
    rule: loss["eval_loss"] > 1.5
    patience:
      patience_threshold: 4
    operations: [control.should_training_stop]
"""
STEPS = 9


class KillAt(Killer):
    """Kills the process at a step."""

    @on(StepEnd)
    def count(self, run: Run, event: StepEnd) -> None:
        self.act("step")


def train(folder: Path, *extra: Plugin, losses: list[float], resume: bool) -> None:
    """Train, and write down what plugins have counted."""
    (folder / "rules.yaml").write_text(RULES, encoding="utf-8")
    plugins = [EarlyStopping(patience=99), RuleController(folder / "rules.yaml"), Recorder(folder / "records"), *extra]
    trainer, callback = make(
        folder / "run", *plugins, max_steps=STEPS, losses=losses, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=2,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    assert callback.result is not None
    early, result = callback.plugins[EarlyStopping], callback.result
    found = {"readings": early.failed_readings, "best": early.best, "by": result.stopped_by, "notes": result.notes}
    found |= {"step": trainer.state.global_step, "steps": result.progress.steps, "samples": result.progress.samples}
    (folder / "result.json").write_text(json.dumps(found), encoding="utf-8")


def main(folder: Path) -> None:
    """Kill a training in its fifth step, of which four are saved; resume it."""
    losses = [float(number) for number in range(1, 20)]
    first = KillAt("step", 5)
    in_a_child(lambda: train(folder, first, losses=losses, resume=False), killed=True, about="the first training")
    in_a_child(
        lambda: train(folder, KillAt("step", 99), losses=losses[4:], resume=True), killed=False, about="the second one"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
