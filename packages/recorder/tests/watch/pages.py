"""The page of some runs, served and opened in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from heliograph_recorder.watch.run_list import RunList
from heliograph_recorder.watch.server import WatchServer
from playwright.sync_api import Browser, Page


@contextmanager
def watched(browser: Browser, *paths: Path) -> Iterator[Page]:
    """Serve the page of these runs, and open it; there may be no error on it, and no request elsewhere."""
    messages, requests = list[str](), list[str]()
    with served(*paths) as url, browser.new_context(viewport={"width": 1200, "height": 900}) as context:
        page = context.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(url)
        yield page
    assert messages == []
    assert [each for each in requests if not each.startswith(url.partition("?")[0])] == []


@contextmanager
def served(*paths: Path) -> Iterator[str]:
    """Serve the page of these runs; give its address."""
    with WatchServer(RunList(paths)) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()
