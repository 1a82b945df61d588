"""What all trackers have in common, with one that writes to a list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from heliograph import Every, LogSchedule, Page, Place, Tracker, Trainer
from heliograph_recorder import Recorder, replay

Make = Callable[..., Any]


class Pages(Tracker):
    """Writes to a store that outlives it, as a server would."""

    name = "pages"
    patience = 0.2

    def __init__(self, store: dict[str, Any], fails: Callable[[str], Exception | None] = lambda kind: None) -> None:
        super().__init__()
        self.store, self.fails = store, fails
        self.threads: set[str] = set()
        self.opened: list[Page] = []

    def _note(self, kind: str, *row: Any) -> None:
        if (error := self.fails(kind)) is not None:
            raise error
        self.threads.add(threading.current_thread().name)
        self.page["rows"].append((kind, *row))

    @property
    def page(self) -> dict[str, Any]:
        page: dict[str, Any] = self.store[self.made]
        return page

    def open(self, page: Page) -> str:
        if (error := self.fails("open")) is not None:
            raise error
        self.opened.append(page)
        known = [name for name, each in self.store.items() if each["training"] == page.training_id]
        self.made = page.id or (known[0] if known else f"page-{len(self.store)}")
        self.store.setdefault(self.made, {"rows": [], "status": "running", "training": page.training_id})
        return self.made

    def last_steps(self) -> Mapping[str, int]:
        return {name: row[1] for row in self.page["rows"] if row[0] == "scalars" for name in row[2]}

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        self._note("scalars", place.step, dict(values), place.rollbacks)

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        self._note("hyper_parameters", dict(values))

    def write_image(self, place: Place, name: str, image: Any) -> None:
        self._note("image", place.step, name, image)

    def write_text(self, place: Place, name: str, text: str) -> None:
        self._note("text", place.step, name, text)

    def finish(self, status: str) -> None:
        self._note("finish")
        self.page["status"] = status


def steps(page: Mapping[str, Any], name: str = "train/loss") -> list[int]:
    return [row[1] for row in page["rows"] if row[0] == "scalars" and name in row[2]]


def fit(
    plugins: list[Any],
    task: Any,
    batches: Any,
    sgd: Any,
    then: Callable[[Trainer], None] = lambda trainer: None,
    **more: Any,
) -> Any:
    trainer = Trainer([LogSchedule(Every(steps=1)), *plugins], device="cpu")
    then(trainer)
    return trainer.fit(task, batches, optimizer=sgd, **{"epochs": 1, **more})


def test_a_recording_is_replayed_onto_a_page(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    fit([Recorder(tmp_path)], task(), batches(3), sgd)
    tracker = Pages({})
    replayed = replay(tmp_path, [tracker])

    assert (replayed.unheld, replayed.failed) == ({}, {})
    assert steps(tracker.store["page-0"]) == [1, 2, 3]
