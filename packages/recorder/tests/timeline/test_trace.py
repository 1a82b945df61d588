"""The trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from heliograph.packages.recorder.tests.explain.factory import Script, killed_and_resumed, recording
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder.timeline.trace import trace, write_trace


def events(data: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in data["traceEvents"] if event["ph"] == kind]


def test_slices_of_a_track_are_nested() -> None:
    data = trace(killed_and_resumed())
    for track in {event["tid"] for event in events(data, "X")}:
        open_until: list[int] = []
        for event in (event for event in events(data, "X") if event["tid"] == track):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1]
            assert event["dur"] >= 0
            open_until.append(event["ts"] + event["dur"])


def test_attempts_begin_at_their_wall_clock_time() -> None:
    data = trace(killed_and_resumed())
    attempts = [event for event in events(data, "X") if "attempt" in event["name"]]
    assert [(event["name"], event["ts"], event["dur"]) for event in attempts] == [
        ("training, attempt 1", 0, 6_300_000),
        ("training, attempt 2", 7_210_000_000, 7_300_000),
    ]
    args = attempts[1]["args"]
    assert_facts(args["ended"], "stopped", "early_stopping on rank 2")
    assert args["seconds in handlers"] == {
        "checkpoint": {"save_point": 0.4, "batch_end": 0.05},
        "progress": {"batch_end": 0.02},
    }


def test_epochs_phases_requests_checkpoints_and_metrics() -> None:
    data = trace(killed_and_resumed())
    names = [event["name"] for event in events(data, "X")]
    assert [name for name in names if name.startswith("epoch")] == [
        "epoch 0",
        "epoch 1",
        "epoch 0",
        "epoch 1",
        "epoch 1",
    ]
    assert {"training", "validation", "saving", "starting"} <= set(names)
    asked = {event["name"]: event for event in events(data, "i")}
    assert asked["stop"]["args"] == {
        "what": "stop",
        "by": "early_stopping",
        "reason": "validation/loss has not improved",
        "step": 12,
        "during": "validation_end",
        "times": 1,
    }
    assert asked["checkpoint_pruned"]["args"] == {"path": "ckpt/step_4.pth", "reason": "keep_last=1"}
    counted = [event["args"]["value"] for event in events(data, "C") if event["name"] == "train/loss"]
    assert counted == [2.0, 1.5, 1.4, 1.45, 0.9]  # but no NaN
    assert [event["args"]["name"] for event in events(data, "M")] == [
        "digits",
        "attempts and phases",
        "epochs",
        "control",
        "checkpoints",
    ]


def test_the_file_is_json_without_nan_and_infinity(tmp_path: Path) -> None:
    script = Script()
    script.start()
    script.emit("checkpoint_saved", path="a.pth", is_best=False, score=[float("nan"), {"x": float("inf")}])
    script.emit("log", metrics={"train/loss": float("-inf")}, asked=[])
    write_trace(recording(script), tmp_path / "trace.json")

    def refuse(name: str) -> float:
        raise AssertionError(name)

    data = json.loads((tmp_path / "trace.json").read_text(), parse_constant=refuse)
    (saved,) = events(data, "i")
    assert saved["args"]["score"] == ["nan", {"x": "inf"}]
    assert events(data, "C") == []
