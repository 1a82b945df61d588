"""The page as a file; `packages/recorder/tests/test_timeline_in_browser.py` tests it in a browser."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from heliograph.packages.recorder.tests.explain.factory import Script, killed_and_resumed, recording
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph_recorder.timeline.page import facts, page, write_timeline


def embedded(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_policy_allows_only_the_script_and_the_style_of_the_page() -> None:
    text = page(killed_and_resumed())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    own = {}
    for tag in ("script", "style"):
        found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert found is not None
        own[tag] = b64encode(sha256(found[1].encode()).digest()).decode()
    assert policy[1].split("; ") == [
        "default-src 'none'",
        f"script-src 'sha256-{own['script']}'",
        f"style-src 'sha256-{own['style']}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_the_page_contains_no_url() -> None:
    text = page(killed_and_resumed()).replace("http://www.w3.org/2000/svg", "")  # a name, never loaded
    assert "://" not in text
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.parametrize(
    "hostile", ["</script><script>alert(1)</script>", "<!--<script>", "{{SCRIPT}}", "\u2028 & \\u003c", "]]>"]
)
def test_recorded_texts_are_escaped(hostile: str) -> None:
    script = Script(run=hostile)
    script.start()
    script.batches(1)
    script.emit("log", metrics={f"train/{hostile}": 1.0}, asked=[])
    script.request("end_epoch", hostile, hostile)
    script.close("failed", hostile, notes=[hostile])
    text = page(recording(script))
    data = embedded(text)
    assert data["run"] == hostile
    assert data["notes"] == [hostile]
    assert data["requests"][0][2] == hostile
    assert text.count("<script") == 2
    assert text.count("</script") == 2
    assert "{{DATA}}" not in text


def test_nan_and_infinity_are_strings() -> None:
    script = Script()
    script.start()
    for value in (1.0, float("nan"), float("inf"), 0.1 + 0.2):
        script.batches(1)
        script.emit("log", metrics={"train/loss": value}, asked=[])
    (chart,) = embedded(page(recording(script)))["charts"]
    assert chart["curves"][0]["pieces"] == [
        {"attempt": 1, "lost": False, "x": [1, 2, 3, 4], "t": [0.6, 1.1, 1.6, 2.1], "y": [1.0, "nan", "inf", 0.3]}
    ]


def test_the_page_holds_the_facts() -> None:
    data = facts(killed_and_resumed())
    assert data["status"] == "stopped"
    assert_facts(data["ended"], "stopped", "early_stopping on rank 2")
    assert [(each["number"], each["gap"]) for each in data["attempts"]] == [(1, ""), (2, "2 h")]
    assert_each([each["ended"] for each in data["attempts"]], ("killed",), ("stopped", "early_stopping on rank 2"))
    assert [(kind, step) for kind, step, *_ in data["marks"]] == [
        ("pruned", 4),
        ("plugin", 4),
        ("best", 8),
        ("decision", 10),
        ("decision", 10),
        ("decision", 8),
        ("plugin", 12),
        ("stop", 12),
        ("decision", 12),
    ]
    assert [(each["step"], each["left"], each["title"]) for each in data["returns"]] == [
        (4, 11, "attempt 2: resumed"),
        (8, 10, "rolled back"),
    ]
    assert [row[:3] for row in data["costs"]] == [
        ["checkpoint", "save_point", 0.4],
        ["checkpoint", "batch_end", pytest.approx(0.05)],
        ["progress", "batch_end", 0.02],
    ]
    assert data["checkpoints"][0] == [4, 0, "step_4.pth", "", True, 8, "keep_last=1"]
    assert data["checkpoints"][1] == [8, 1, "step_8.pth", "best and last", True, None, ""]
    first, second = data["attempts"]
    assert first["lost"] == ""
    assert_facts(second["lost"], "resumed: 7 steps", "3.60 s", "rolled back: 2 steps", "1.10 s")
    assert data["warnings"] == []
    assert data["folder"] == "ckpt"


def test_the_best_and_the_last_checkpoint_are_marked() -> None:
    script = Script()
    script.start()
    for step, best in ((1, False), (2, True), (3, False), (4, False)):
        script.batches(1)
        script.save(f"step_{step}.pth", best=best)
    data = facts(recording(script))
    assert [row[3] for row in data["checkpoints"]] == ["", "best", "", "last"]
    assert [(kind, title) for kind, _, _, title, _ in data["marks"]] == [
        ("kept", "checkpoint, step 1"),
        ("best", "best checkpoint, step 2"),
        ("kept", "checkpoint, step 3"),
        ("last", "last checkpoint, step 4"),
    ]


def test_the_page_has_the_warnings_of_all_attempts_once() -> None:
    scripts = [Script(), Script(name="a2"), Script(name="a3")]
    for script, warnings in zip(scripts, (["One."], ["One.", "Two."], None), strict=True):
        script.start()
        script.batches(1)
        script.close("completed", "done", **({} if warnings is None else {"warnings": warnings}))
    assert facts(recording(*scripts))["warnings"] == ["One.", "Two."]


def test_an_older_page_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("an older one")
    write_timeline(killed_and_resumed(), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page(killed_and_resumed())


def test_the_page_of_a_long_run_stays_small() -> None:
    script = Script()
    script.start()
    for step in range(20_000):
        script.emit("log", 0.1, metrics={"train/loss": 1.0 / (1 + step)}, asked=[])
    text = page(recording(script))
    (chart,) = embedded(text)["charts"]
    assert chart["curves"][0]["total"] == 20_000
    assert sum(len(piece["x"]) for piece in chart["curves"][0]["pieces"]) <= 2_000
    assert len(text) < 300_000


def test_the_page_holds_what_was_measured_and_judged() -> None:
    script = Script(world_size=2)
    script.start()
    script.batches(20)
    by_rank = {
        "batch": [0.5, 0.5],
        "load": [0.2, 0.01],
        "forward": [0.1, 0.1],
        "memory": [2, 3],
        "device_memory": [0, 0],
    }
    counts = {"seconds": 10.0, "batches": 20, "sampled": 20, "validations": 0, "saves": 0}
    script.emit("measured", **counts, **by_rank, validation=0.0, save=0.0)
    script.emit("verdict", kind="input_bound", holds=True, value=0.4, text="it waits")
    script.emit("verdict", kind="input_bound", holds=False, value=0.1, text="it waits less")
    data = facts(recording(script))
    assert data["ranks"] == [(0, 0.5, 0.2, 0.1, 2, 0), (1, 0.5, 0.01, 0.1, 3, 0)]
    assert [kind for kind, _ in data["findings"]] == ["input_bound", "straggler"]
    assert data["goodput"] == pytest.approx(6.0 / 10.1)
    assert dict(data["parts"]) == {
        "useful training": pytest.approx(6.0),
        "waiting for data": pytest.approx(4.0),
        "starting": pytest.approx(0.1),
    }
    assert_each(
        [(kind, title, lines) for kind, _, _, title, lines in data["marks"]],
        ("verdict", "input_bound, step 20", "it waits"),
        ("verdict", "input_bound no longer", "step 20", "it waits less"),
    )


@pytest.mark.parametrize(
    ("is_running", "state"), [(None, "killed, or still running"), (True, "running"), (False, "killed")]
)
def test_a_run_without_an_end_is_what_is_known_of_its_process(is_running: bool | None, state: str) -> None:
    scripts = [Script(), Script(name="a2")]
    for script in scripts:
        script.start()
    data = facts(recording(*scripts), is_running=is_running)
    assert (data["ended"], [each["ended"] for each in data["attempts"]]) == (state, ["killed", state])
    assert data["status"] == ("running" if is_running else "killed")
