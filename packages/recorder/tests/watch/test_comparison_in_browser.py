"""Several runs on the page of `watch` in a real browser: forks beside their parents, and the details of each run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from heliograph.packages.recorder.tests.browsers import launched_browser
from heliograph.packages.recorder.tests.explain.factory import Script, recording
from heliograph.packages.recorder.tests.recordings import write
from heliograph.packages.recorder.tests.watch.pages import watched
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder.format.records import EventEntry
from playwright.sync_api import Browser, Page

PARTED = 7  # the step after which the fork differs


def train(script: Script, steps: int, factor: float) -> None:
    """Log after every two steps, with a loss that is known."""
    for _ in range(steps // 2):
        script.batches(2)
        script.log(train__loss=factor * 10.0 / script.counters.steps)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched_browser() as browser:
        yield browser


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a run, one that was forked from it after 7 steps, and one of its own."""
    for name in ("parent", "fork", "other"):
        (tmp_path / name).mkdir()
    parent = Script(run="parent")
    parent.start()
    train(parent, 4, 1.0)
    parent.save("ckpt/step_4.pth")
    saved = parent.counters
    train(parent, 8, 1.0)
    parent.close("completed", "12 steps")
    path = write(tmp_path / "parent/p.recording", *recording(parent).attempts)

    fork = Script(run="fork", name="f1")
    fork.emit("train_start")
    fork.load("ckpt/step_4.pth", saved)
    loaded = fork.entries.pop()
    assert isinstance(loaded, EventEntry)
    parent_of_fork = {"step": PARTED, "recording": str(path)}
    fork.entries.append(replace(loaded, data={**loaded.data, "forked_from": parent_of_fork}))
    fork.epoch(resumed=True)
    train(fork, 2, 1.0)
    train(fork, 8, 0.5)
    fork.request("end_epoch", "ann@laptop", "it is enough")
    fork.close("stopped", "seen enough", by="ann@laptop")
    write(tmp_path / "fork/f.recording", *recording(fork).attempts)

    other = Script(run="other", name="o1")
    other.start()
    train(other, 12, 2.0)
    write(tmp_path / "other/o.recording", *recording(other).attempts)
    return tmp_path


def points(page: Page, hue: str) -> list[tuple[float, float]]:
    """Return the corners of the curve of a run."""
    path = page.locator(f'path.curve{hue}[data-metric="train/loss"]').first.get_attribute("d") or ""
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", path)]


def test_a_fork_begins_on_the_curve_of_its_parent(browser: Browser, folder: Path) -> None:
    with watched(browser, folder / "parent", folder / "other", folder / "fork") as page:
        page.locator("path.curve.tone-0").first.wait_for(timeout=20_000)
        parent, fork = points(page, ".run-0:not(.tone-0)"), points(page, ".run-0.tone-0")
        assert (len(parent), len(points(page, ".run-1")), len(fork)) == (6, 6, 5)  # of the fork, 8 to 14, and its begin
        at = dict(zip((2, 4, 6, 8, 10, 12), parent, strict=True))
        (x, y), (after, _) = fork[:2]
        assert x == pytest.approx((at[6][0] + at[8][0]) / 2, abs=0.02)
        assert y == pytest.approx((at[6][1] + at[8][1]) / 2, abs=0.02)
        assert after == pytest.approx(at[8][0], abs=0.02)
        assert page.title() == "parent, other, fork"
        mark = page.locator('.mark[data-kind="fork"]').first
        assert_facts(mark.get_attribute("aria-label"), "fork of p", "step 7", str(folder / "parent/p.recording"))
        row = page.locator("#list tr", has_text="fork/f").inner_text()
        assert "parent/p at step 7" in row
        assert page.locator("#list tr", has_text="other/o").inner_text().count("fork") == 0
        page.get_by_text("Time", exact=True).first.click()  # each from its own start, as it is recorded
        assert len(points(page, ".run-0.tone-0")) == 5


def test_a_fork_alone_names_its_parent_and_can_show_it(browser: Browser, folder: Path) -> None:
    with watched(browser, folder / "fork") as page:
        page.get_by_role("button", name="Show it beside").click(timeout=20_000)
        assert "parent/p at step 7" in page.locator("#parent").inner_text()
        page.locator("path.curve.tone-0").first.wait_for(timeout=20_000)
        assert page.locator("#parent button").count() == 0
        assert page.locator("h1").inner_text() == "fork"
        assert points(page, ".run-1:not(.tone-0)")  # the parent


def test_without_its_parent_a_fork_names_it(browser: Browser, folder: Path) -> None:
    (folder / "parent/p.recording").unlink()
    with watched(browser, folder / "fork") as page:
        page.locator("#list", has_text="fork of p at").wait_for(timeout=20_000)
        assert_facts(page.locator("#parent").inner_text(), "fork of p", "step 7")


def test_the_details_are_those_of_the_run_that_is_chosen(browser: Browser, folder: Path) -> None:
    with watched(browser, folder / "parent", folder / "fork") as page:
        page.locator("path.curve.tone-0").first.wait_for(timeout=20_000)
        assert page.locator("h1").inner_text() == "parent"
        assert page.locator("#checkpoints tbody tr").count() == 1
        page.locator("#which").get_by_text("fork", exact=True).click()
        page.locator("#requests", has_text="ann@laptop").wait_for(timeout=20_000)
        assert (page.locator("h1").inner_text(), page.locator("#status").inner_text()) == (
            "fork",
            "stopped by ann@laptop",
        )
        assert page.locator("#checkpoints .empty").inner_text() == "none"
        assert {each.strip() for each in page.locator(".each h2:visible .of").all_inner_texts()} == {"fork"}
        assert "marks of" in page.locator("#key").inner_text()
        assert page.locator('.mark[data-kind="decision"]').count() > 0
        assert page.locator(".curve.run-0:not(.tone-0)").count() > 0  # the curves stay
        page.get_by_label("fork/f").uncheck()
        page.locator("#which").wait_for(state="hidden", timeout=20_000)
        assert (page.locator("h1").inner_text(), page.locator(".of").count()) == ("parent", 0)
