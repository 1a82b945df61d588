"""Make `docs/images/timeline.png`: `make demo`, then `.venv/bin/python docs/picture.py runs/digits`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from heliograph.builtin_callbacks.recorder.format.reader import read
from heliograph.builtin_callbacks.recorder.timeline.page import write_timeline
from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parent / "images/timeline.png"


def main(run: str) -> None:
    """Write the picture of a recorded run."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "timeline.html"
        write_timeline(read(run), path)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1120, "height": 900}, color_scheme="light")
        page.goto(path.as_uri())
        page.locator('.chart[data-chart="loss"]').get_by_role("checkbox").check()
        page.locator('.chart[data-chart="loss"] .mark[data-kind="stop"]').hover()
        phases = page.locator("#strip").bounding_box()
        assert phases is not None
        end = phases["y"] + phases["height"] + 60
        page.screenshot(path=PICTURE, full_page=True, clip={"x": 0, "y": 0, "width": 1120, "height": end})
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
