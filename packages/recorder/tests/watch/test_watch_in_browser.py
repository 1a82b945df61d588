"""The page of `watch` in a real browser, while a training runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from getpass import getuser
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import heliograph as h
import pytest
from heliograph.packages.recorder.tests.browsers import launched_browser
from heliograph.packages.recorder.tests.watch.pages import watched
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph_recorder import Recorder, Remote
from heliograph_recorder.remote.sockets import host_name
from playwright.sync_api import Browser, Locator, Page


class Gate(h.Plugin):
    """Lets the training do so many steps as the test allows, and stops it where the test says why."""

    asks = ("stop",)

    def __init__(self) -> None:
        self.allowed: Queue[int] = Queue()
        self.left, self.reason = 0, ""

    @h.on(h.BatchStart)
    def wait(self, run: h.Run, event: h.BatchStart) -> None:
        while not self.left:
            self.left = self.allowed.get(timeout=60)
        self.left -= 1
        if self.reason:
            run.control.stop(self.reason)


class Training:
    """A training in a thread, which goes as far as it is allowed to."""

    def __init__(self, folder: Path, *plugins: Any, epochs: int = 100, name: str = "live") -> None:
        self.gate, self.result = Gate(), list[h.RunResult]()
        always = [self.gate, h.LogSchedule(h.Every(steps=1)), h.ValidationSchedule(h.Every(epochs=1))]
        self.trainer = h.Trainer([*always, Recorder(folder), *plugins], device="cpu")
        self.options: dict[str, Any] = {"validation": class_batches(2), "epochs": epochs, "name": name}
        self.thread = Thread(target=self.fit)

    def fit(self) -> None:
        self.result.append(self.trainer.fit(linear_classifier(), class_batches(8), optimizer=sgd(), **self.options))

    def step_until(self, found: Locator) -> None:
        """Allow one step more again and again: a request is seen after a step, and may come too late for one."""
        for _ in range(100):
            self.gate.allowed.put(1)
            found.page.wait_for_timeout(200)
            if found.is_visible():
                return
        found.wait_for(timeout=20_000)

    def __enter__(self) -> Training:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.gate.reason = self.gate.reason or "the test has ended"
        self.gate.allowed.put(1)
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched_browser() as browser:
        yield browser


VERTICES = """([metric, expected]) => {
    const curves = [...document.querySelectorAll(`path.curve:not(.lost)[data-metric="${metric}"]`)];
    const counts = curves.map(curve => (curve.getAttribute("d") || "").match(/[ML]/g)?.length ?? 0);
    return counts.reduce((sum, count) => sum + count, 0) === expected;
}"""


def wait_for_vertices(page: Page, expected: int, metric: str = "train/loss") -> None:
    """Wait until a curve has so many points: the log of a step follows the step."""
    page.wait_for_function(VERTICES, arg=[metric, expected], timeout=20_000)


def wait_for_step(page: Page, step: int) -> None:
    page.locator("#facts dd", has_text=re.compile(rf"step {step}$")).wait_for(timeout=20_000)


def test_curves_grow_while_the_training_runs(browser: Browser, tmp_path: Path) -> None:
    with Training(tmp_path) as training, watched(browser, tmp_path) as page:
        training.gate.allowed.put(5)
        wait_for_step(page, 5)
        assert page.locator("#status").inner_text() == "running"
        assert page.title() == "live: running"
        wait_for_vertices(page, 5)
        page.get_by_label("log scale").first.check()
        page.get_by_label("Filter by request").fill("log_sched")
        training.gate.allowed.put(7)
        wait_for_step(page, 12)
        wait_for_vertices(page, 12)
        wait_for_vertices(page, 1, "validation/loss")
        assert page.get_by_label("log scale").first.is_checked()  # what its reader chose stays
        assert page.get_by_label("Filter by request").input_value() == "log_sched"
        assert page.locator("#requests tbody tr").count() == 1
        training.gate.reason = "it is enough"
        training.gate.allowed.put(1)
        page.locator("#status.stopped").wait_for(timeout=20_000)
        assert "it is enough" in page.locator("#why").inner_text()


def test_a_stop_from_the_page_stops_the_run_and_names_who_asked(browser: Browser, tmp_path: Path) -> None:
    with Training(tmp_path, Remote(tmp_path)) as training, watched(browser, tmp_path) as page:
        training.gate.allowed.put(3)
        wait_for_step(page, 3)
        page.locator("#remote").wait_for(timeout=20_000)
        page.get_by_label("Reason", exact=True).fill("it has learned enough")
        page.get_by_label("Learning rate", exact=True).fill("0.05")
        page.get_by_role("button", name="Set").click()
        training.step_until(page.locator("#answer", has_text="accepted"))
        page.get_by_role("button", name="Stop").click()
        training.step_until(page.locator("#status.stopped"))
        assert "learned enough (through" in page.locator("#why").inner_text()
        page.locator("#remote").wait_for(state="hidden", timeout=20_000)  # the list of runs comes by itself
    (result,) = training.result
    asked = {request.verb: (request.by, request.reason) for request in result.history if "watch" in request.reason}
    assert asked.keys() == {"stop", "set_learning_rate"}
    assert asked["stop"][0] == f"{getuser()}@{host_name()}"
    assert_facts(asked["stop"][1], "it has learned enough", "watch")


@pytest.mark.whole
def test_without_the_token_the_page_shows_everything_and_asks_for_nothing(browser: Browser, tmp_path: Path) -> None:
    with Training(tmp_path, Remote(tmp_path)) as training, watched(browser, tmp_path) as page:
        training.gate.allowed.put(3)
        page.goto(page.url.partition("?")[0])
        wait_for_step(page, 3)
        assert page.locator("#remote").is_hidden()


@pytest.mark.whole
def test_without_a_remote_there_are_no_buttons(browser: Browser, tmp_path: Path) -> None:
    with Training(tmp_path) as training, watched(browser, tmp_path) as page:
        training.gate.allowed.put(3)
        wait_for_step(page, 3)
        assert page.locator("#remote").is_hidden()


def test_runs_are_compared(browser: Browser, tmp_path: Path) -> None:
    for name in ("one", "other"):
        with Training(tmp_path / name, name=name, epochs=2) as training:
            training.gate.allowed.put(16)
            training.thread.join(60)
    with watched(browser, tmp_path / "one", tmp_path / "other") as page:
        page.locator("path.curve.run-1").first.wait_for(timeout=20_000)
        assert page.locator('path.curve.run-0[data-metric="train/loss"]').count() == 1
        assert page.locator('path.curve.run-1[data-metric="train/loss"]').count() == 1
        assert page.locator("h1").inner_text() == "one"
        page.get_by_label("one/one_").uncheck()
        page.locator("path.curve.train").first.wait_for(timeout=20_000)
        assert page.locator("h1").inner_text() == "other"
        assert page.locator("path.curve.run-1").count() == 0
