"""What a run of MLflow holds already, since metrics are only ever added there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from time import time
from typing import Any, Final

from ..records import Place
from .requests import ask

ROLL_BACK: Final = "heliograph.roll_back."
NOTHING: Final = -1


class History:
    """The steps that a run held when it was continued, and the times of what is added.

    The values of a step have one time, however often they are sent: MLflow keeps equal ones once. Times only grow, so
    that it can be said of each value how often the training had gone back before it.
    """

    def __init__(self) -> None:
        self._reached: dict[tuple[str, int], int] = {}
        self._latest = 0  # milliseconds
        self._place: Place | None = None
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
        return history

    def holds(self, name: str, place: Place) -> bool:
        """Return whether a metric is there for a step."""
        return place.step <= self._reached.get((name, place.rollbacks), NOTHING)

    def add(self, name: str, rollbacks: int, step: int) -> None:
        """Note that a metric is there."""
        self._reached[name, rollbacks] = max(step, self._reached.get((name, rollbacks), NOTHING))

    def time_of(self, place: Place) -> int:
        """Return the time of a place, in milliseconds since 1970: when it was, not when it is written."""
        if place is not self._place:
            if self._began is None:
                self._began = time() - place.seconds
            self._place = place
            self._latest = max(self._latest + 1, int(1000 * (self._began + place.seconds)))
        return self._latest

    def turn(self, place: Place, tags: Mapping[str, str]) -> dict[str, str]:
        """Return the tag of a roll back, which a run has once, however often that is repeated after a resume."""
        self._began = time() - place.seconds
        key = f"{ROLL_BACK}{place.rollbacks}"
        return {} if key in tags else {key: f"{self.time_of(place)} to step {place.step}"}
