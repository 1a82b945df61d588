"""Make `docs/images/timeline.png` and `watch.png`: `make demo`, then `.venv/bin/python docs/picture.py runs/digits`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import heliograph as h
import torch
from heliograph_recorder import Recorder, Remote, Verdicts
from heliograph_recorder.format.reader import read
from heliograph_recorder.timeline.page import write_timeline
from heliograph_recorder.watch.run_list import RunList
from heliograph_recorder.watch.server import WatchServer
from playwright.sync_api import Browser, Page, sync_playwright
from sklearn.datasets import load_digits
from torch import nn

IMAGES = Path(__file__).parent / "images"
WIDTH = 1120
RATES = {"careful": 0.03, "bold": 0.3}


def main(run: str) -> None:
    """Write the picture of a recorded run, and that of two runs that train."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        draw_timeline(browser, run, Path(folder) / "timeline.html")
        draw_watch(browser, Path(folder) / "runs")
        browser.close()


def draw_timeline(browser: Browser, run: str, path: Path) -> None:
    """Write the picture of a recorded run."""
    write_timeline(read(run), path)
    page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
    page.goto(path.as_uri())
    page.locator('.chart[data-chart="loss"]').get_by_role("checkbox").check()
    page.locator('.chart[data-chart="loss"] .mark[data-kind="stop"]').hover()
    save(page, "timeline.png")


def draw_watch(browser: Browser, folder: Path) -> None:
    """Write the picture of two runs that train."""
    ends = Event()
    trainings = [Thread(target=train, args=(folder / name, rate, ends)) for name, rate in RATES.items()]
    for each in trainings:
        each.start()
    page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
    page.wait_for_timeout(9_000)
    with WatchServer(RunList([folder / name for name in RATES])) as server:
        Thread(target=server.serve_forever).start()
        page.goto(server.url)
        page.locator("path.curve.run-1").first.wait_for()
        page.get_by_label("Reason", exact=True).fill("it overfits")
        save(page, "watch.png")
        ends.set()
        server.shutdown()
    for each in trainings:
        each.join()


def save(page: Page, name: str) -> None:
    """Write the picture of a page down to its phases."""
    phases = page.locator("section", has=page.locator("#strip")).bounding_box()
    assert phases is not None
    end = phases["y"] + phases["height"] + 14
    page.screenshot(path=IMAGES / name, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": end})
    page.close()


class Slow(h.Plugin):
    """Lets each batch take a while, and stops the run with the picture."""

    asks = ("stop",)

    def __init__(self, ends: Event) -> None:
        self.ends = ends

    @h.on(h.BatchStart)
    def wait(self, run: h.Run, event: h.BatchStart) -> None:
        """Wait."""
        if self.ends.wait(0.015):
            run.control.stop("the picture is made")


def train(folder: Path, rate: float, ends: Event) -> None:
    """Train on handwritten digits, until the picture is made."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    batches = list(zip(torch.split(images, 64), torch.split(labels, 64), strict=True))
    plugins: list[Any] = [
        h.LogSchedule(h.Every(steps=5)),
        h.ValidationSchedule(h.Every(epochs=1)),
        h.SaveSchedule(h.Every(epochs=2)),
        h.Checkpoint(folder, keep_last=2, keep_best=1, monitor="validation/loss"),
        Verdicts(every=3),
        Remote(folder),
        Recorder(folder),
        Slow(ends),
    ]
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    task = h.Supervised(model, nn.functional.cross_entropy, metrics={"accuracy": h.accuracy})
    h.Trainer(plugins, device="cpu").fit(
        task,
        batches[:22],
        validation=batches[22:],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        epochs=1_000,
        name=folder.name,
    )


if __name__ == "__main__":
    main(sys.argv[1])
