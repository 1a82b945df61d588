"""The trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from heliograph.builtin_callbacks.recorder.timeline.trace import trace, write_trace
from heliograph.tests.builtin_callbacks.recorder.explain.factory import Script, killed_and_resumed, recording


def events(told: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in told["traceEvents"] if event["ph"] == kind]


def test_slices_of_a_track_are_nested() -> None:
    told = trace(killed_and_resumed())
    for track in {event["tid"] for event in events(told, "X")}:
        open_until: list[int] = []
        for event in (event for event in events(told, "X") if event["tid"] == track):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1]
            assert event["dur"] >= 0
            open_until.append(event["ts"] + event["dur"])


def test_attempts_lie_where_the_clock_on_the_wall_had_them() -> None:
    told = trace(killed_and_resumed())
    attempts = [event for event in events(told, "X") if "attempt" in event["name"]]
    assert [(event["name"], event["ts"], event["dur"]) for event in attempts] == [
        ("training, attempt 1", 0, 6_300_000),
        ("training, attempt 2", 7_210_000_000, 7_300_000),
    ]
    args = attempts[1]["args"]
    assert args["ended"] == "stopped by early_stopping on rank 2"
    assert args["seconds in handlers"] == {
        "checkpoint": {"save_point": 0.4, "batch_end": 0.05},
        "progress": {"batch_end": 0.02},
    }


def test_epochs_phases_requests_checkpoints_and_metrics_are_there() -> None:
    told = trace(killed_and_resumed())
    names = [event["name"] for event in events(told, "X")]
    assert [name for name in names if name.startswith("epoch")] == [
        "epoch 0",
        "epoch 1",
        "epoch 0",
        "epoch 1",
        "epoch 1",
    ]
    assert {"training", "validation", "saving", "starting"} <= set(names)
    asked = {event["name"]: event for event in events(told, "i")}
    assert asked["stop"]["args"] == {
        "by": "early_stopping",
        "reason": "validation/loss has not improved",
        "step": 12,
        "during": "validation_end",
        "times": 1,
    }
    assert asked["checkpoint_pruned"]["args"] == {"path": "ckpt/step_4.pth", "reason": "keep_last=1"}
    counted = [event["args"]["value"] for event in events(told, "C") if event["name"] == "train/loss"]
    assert counted == [2.0, 1.5, 1.4, 1.45, 0.9]  # but no NaN
    assert [event["args"]["name"] for event in events(told, "M")] == [
        "digits",
        "attempts and phases",
        "epochs",
        "control",
        "checkpoints",
    ]


def test_the_file_is_json_without_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    script = Script()
    script.start()
    script.happen("checkpoint_saved", path="a.pth", is_best=False, score=[float("nan"), {"x": float("inf")}])
    script.happen("log", metrics={"train/loss": float("-inf")}, asked=[])
    write_trace(recording(script), tmp_path / "trace.json")

    def refuse(name: str) -> float:
        raise AssertionError(name)

    told = json.loads((tmp_path / "trace.json").read_text(), parse_constant=refuse)
    (saved,) = events(told, "i")
    assert saved["args"]["score"] == ["nan", {"x": "inf"}]
    assert events(told, "C") == []
