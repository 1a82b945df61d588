"""Every built-in plugin can be given in a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from heliograph.packages.cli.tests.conftest import cached_parser
from heliograph.plugins.discovery import discover
from heliograph_cli.command import make
from heliograph_cli.parser import parse

OPTIONS: dict[str, Any] = {
    "batch_transform": {"transform": "torch.nn.Identity"},
    "checkpoint": {"folder": "out", "every": {"epochs": 1}, "resume": {"path": "auto", "batch_change": "linear"}},
    "checkpoint_label": {"label": "loss_{validation/loss:.3f}"},
    "compile": {"mode": "reduce-overhead"},
    "cut_mix": {"classes": 10},
    "csv_log": {"path": "out/log.csv"},
    "exception_pass_through": {"train": ["builtins.ValueError"]},
    "export": {"path": "out/model.pt2"},
    "file_log": {"folder": "out"},
    "gradient_accumulation": {"n": {"0": 1, "3": 4}},
    "gradient_clipping": {"norm": 1.0},
    "jsonl_log": {"path": "out/log.jsonl"},
    "late_results": {"folder": "out"},
    "learning_rate": {"per": "step"},
    "log_schedule": {"fraction": 0.1, "at_end": True},
    "mixup": {"classes": 10},
    "mlflow": {"experiment": "digits", "uri": "sqlite:///mlflow.db"},
    "prediction_writer": {"folder": "out"},
    "preemption": {"signals": [15], "deadline": 60},
    "profile": {"folder": "out"},
    "recorder": {"folder": "out", "digests": {"gradients": 10, "weights": 0}},
    "remote": {"folder": "out"},
    "rule_controller": {"source": "rules.yaml"},
    "save_schedule": {"when": {"steps": [1, 10]}},
    "tensorboard": {"folder": "out"},
    "trackio": {"project": "digits"},
    "validation_schedule": {"epochs": 1, "after": 3},
    "verify_resume": {"on_difference": "raise"},
    "wandb": {"project": "digits", "mode": "offline"},
    "weights_checkpoint": {"folder": "out", "every": {"epochs": 1}},
}
RULES = """
controllers:
  - {name: first, triggers: [on_log], rule: "True", operations: [hfcontrols.should_training_stop]}
"""
CANNOT = {"optuna": "its trial is an object of a study, which a program makes"}
BUILT_IN = [each.name for each in discover() if each.package.startswith("heliograph")]
REST = "task: lesson.Own\ntrain: lesson.data\n"


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - set(CANNOT)))
def test_a_built_in_is_made_of_a_configuration_and_of_what_is_saved_of_it(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = cached_parser("fit")
    monkeypatch.syspath_prepend(folder)
    (folder / "rules.yaml").write_text(RULES)
    (folder / "one.yaml").write_text(f"{REST}trainer: {json.dumps({'plugins': {name: OPTIONS.get(name)}})}\n")
    config = parse(parser, ["one.yaml"])
    plugin, *_ = make(parser, config, "fit")[0].plugins
    assert plugin.name == name
    saved = parser.dump(config, format="yaml")
    (folder / "two.yaml").write_text(saved)
    again = parse(parser, ["two.yaml"])
    assert parser.dump(again, format="yaml") == saved
    other, *_ = make(parser, again, "fit")[0].plugins
    assert type(other) is type(plugin)


def test_those_that_cannot_say_why_not(folder: Path) -> None:
    assert set(CANNOT) <= set(BUILT_IN)
    assert set(OPTIONS) <= set(BUILT_IN)
