"""What a run of MLflow holds already, since metrics are only ever added there."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from time import time
from typing import Any, Final

from heliograph.spi import Place

from .requests import ask

ROLL_BACK: Final = "heliograph.roll_back."
LOGGED_IMAGES: Final = "mlflow.loggedImages"
IMAGE: Final = re.compile(r"images/(.+)\+step\+(\d+)\+timestamp\+(\d+)\+.+\.png")
NOTHING: Final = -1


class History:
    """The steps that a run held when it was continued, and the times of what is added.

    The values of a step have one time, however often they are sent: MLflow keeps equal ones once. Times only grow, so
    that it can be said of each value how often the training had gone back before it.
    """

    def __init__(self) -> None:
        self._reached: dict[tuple[str, int], int] = {}
        self._latest = 0  # milliseconds
        self._times: dict[int, tuple[Place, int]] = {}  # of what is being sent, by identity
        self._began: float | None = None

    @classmethod
    def of(cls, client: Any, run: Any) -> History:
        """Read the history of a run."""
        history = cls()
        turns = sorted(int(text.split()[0]) for key, text in run.data.tags.items() if key.startswith(ROLL_BACK))
        history._latest = max(turns, default=0)
        for name in run.data.metrics:
            for metric in ask(client.get_metric_history, run.info.run_id, name):
                history.add(name, bisect_left(turns, metric.timestamp), metric.step)
                history._latest = max(history._latest, metric.timestamp)
        for name, step, moment in _images(client, run) if LOGGED_IMAGES in run.data.tags else ():
            history.add(name, bisect_left(turns, moment), step)
        return history

    def holds(self, name: str, place: Place) -> bool:
        """Return whether a metric, or an image of an `image_name`, is there for a step."""
        return place.step <= self._reached.get((name, place.rollbacks), NOTHING)

    def add(self, name: str, rollbacks: int, step: int) -> None:
        """Note that it is there."""
        self._reached[name, rollbacks] = max(step, self._reached.get((name, rollbacks), NOTHING))

    def time_of(self, place: Place) -> int:
        """Return the time of a place, in milliseconds since 1970: when it was, not when it is written."""
        if id(place) not in self._times:
            if self._began is None:
                self._began = time() - place.seconds
            self._latest = max(self._latest + 1, int(1000 * (self._began + place.seconds)))
            self._times[id(place)] = place, self._latest
        return self._times[id(place)][1]

    def note_sent(self, place: Place) -> None:
        """Note that MLflow has what was sent: the same will not be sent again."""
        self._times.pop(id(place), None)

    def turn(self, place: Place, tags: Mapping[str, str]) -> dict[str, str]:
        """Return the tag of a roll back, which a run has once, however often that is repeated after a resume."""
        self._began = time() - place.seconds
        key = f"{ROLL_BACK}{place.rollbacks}"
        return {} if key in tags else {key: f"{self.time_of(place)} to step {place.step}"}


def image_name(key: str) -> str:
    """Return the name of an image in the history, apart from those of metrics."""
    return f"image {key.replace('/', '~')}"


def _images(client: Any, run: Any) -> Iterator[tuple[str, int, int]]:
    """Yield of each image its name, step and time, which are in the name of its file."""
    for each in ask(client.list_artifacts, run.info.run_id, "images"):
        if (found := IMAGE.fullmatch(each.path)) is not None:
            yield image_name(found[1]), int(found[2]), int(found[3])
