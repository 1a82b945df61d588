"""`check_tracker` passes honest trackers, and finds what others do wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from heliograph import TensorBoard
from heliograph.spi import Page, Place, Tracker
from heliograph_testing import check_tracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

Points = dict[str, list[tuple[int, float]]]


class Lines(Tracker):
    """A correct tracker of a few lines: one file per training, a line for each value."""

    name = "lines"
    is_local = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.path = folder

    def open(self, page: Page) -> str:
        self.path = self.folder / f"{page.training_id}.txt"
        self.path.touch()
        return self.path.name

    def last_steps(self) -> Mapping[str, int]:
        return {name: points[-1][0] for name, points in read(self.folder).items()}

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{name} {place.step} {value}\n" for name, value in values.items())

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        assert values == {"rate": 0.01, "layers": "[4, 2]", "deep": False, "kind": "linear"}

    def roll_back(self, place: Place) -> None:
        kept = [line for line in self.path.read_text().splitlines() if int(line.split()[1]) <= place.step]
        self.path.write_text("".join(f"{line}\n" for line in kept))

    def finish(self, status: str) -> None:
        (self.folder / "status").write_text(status)


def read(folder: Path) -> Points:
    (path,) = folder.glob("*.txt")
    points: Points = {}
    for line in path.read_text().splitlines():
        name, step, value = line.split()
        points.setdefault(name, []).append((int(step), float(value)))
    return points


def read_status(folder: Path) -> str:
    return (folder / "status").read_text()


def check(make: Callable[[Path], Tracker], **options: Any) -> None:
    check_tracker(make, read, read_status=read_status, **options)


def test_an_honest_tracker_passes() -> None:
    check(Lines)


def test_tensorboard_passes() -> None:
    def curves(folder: Path) -> Points:
        reader = EventAccumulator(str(folder))
        reader.Reload()
        return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}

    check_tracker(TensorBoard, curves)


class Forgetful(Lines):
    """Writes again what the killed run has written."""

    def last_steps(self) -> Mapping[str, int]:
        return {}


class Twice(Lines):
    """Begins another page at a resume."""

    def open(self, page: Page) -> str:
        self.path = self.folder / f"{len(list(self.folder.iterdir()))}.txt"
        self.path.touch()
        return self.path.name


class Rounding(Lines):
    """Shows other values than those that were logged."""

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        super().write_scalars(place, {name: round(value) for name, value in values.items()})


class Optimistic(Lines):
    """Shows every run as completed."""

    def finish(self, status: str) -> None:
        super().finish("completed")


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Forgetful, r"\[1, 2,.* 3, 4"),
        (Twice, "not enough|too many"),
        (Rounding, "shown as .*step 1,"),
        (Optimistic, "ended stopped .* 'completed'"),
    ],
)
def test_what_is_wrong_is_found(kind: Any, found: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=found):
        check(kind)


def test_the_page_may_have_words_of_its_own() -> None:
    words = {"completed": "FINISHED", "stopped": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}

    class Other(Lines):
        def finish(self, status: str) -> None:
            super().finish(words[status])

    check(Other, statuses=words)
