"""The MLflow tracker."""

from __future__ import annotations

import os
import posixpath
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from time import time
from typing import Any, Final, TypeVar

from heliograph import Run
from heliograph.spi import Page, Place, Tracker, require

LONGEST: Final = 250  # characters of a name


@lru_cache
def allowed(name: str) -> str:
    text = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", name)).lstrip("/.")
    return text[:LONGEST] or "_"


def next_version(name: str, text: str, stored: Mapping[str, str]) -> str | None:
    # lr, or lr.2 and so on for a changed value; None if the value is stored.
    shown, number = name, 1
    latest = None
    while shown in stored:
        latest, number = stored[shown], number + 1
        shown = f"{name}.{number}"
    return None if latest == text else shown


def folder_of(name: str, place: Place) -> str:
    again = f"_roll_back_{place.rollbacks}" if place.rollbacks else ""
    return posixpath.join(allowed(name), f"step_{place.step}{again}")


ACTIVE: Final = "active"  # not deleted
METRICS_PER_REQUEST: Final = 1000
OTHERS_PER_REQUEST: Final = 20  # MLflow's limits are 100 items and 1 MB, and a text has up to 48 kB

# MLflow's own retries take minutes and draw their pauses from Python's global generator. Its open database connections
# would be shared with forked processes.
SETTINGS: Final = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}

T = TypeVar("T")


def send(request: Callable[..., T], *arguments: Any, **options: Any) -> T:
    # Raises ConnectionError if another attempt may succeed, else RuntimeError.
    errors = require("mlflow.exceptions", "MLflow", extra="mlflow")
    http = require("requests", "MLflow", extra="mlflow")
    try:
        return request(*arguments, **options)
    except errors.MlflowException as caught:
        error, status = caught, caught.get_http_status_code()
    except http.HTTPError as caught:  # from the artifact store
        error, status = caught, 500 if caught.response is None else caught.response.status_code
    kind = ConnectionError if status >= 500 or status in (408, 429) else RuntimeError
    raise kind(str(error)) from error


def experiment_id(client: Any, name: str) -> str:
    experiment = send(client.get_experiment_by_name, name)
    if experiment is None:
        try:
            return str(send(client.create_experiment, name))
        except RuntimeError:  # created by another run meanwhile
            experiment = send(client.get_experiment_by_name, name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage != ACTIVE:
        raise RuntimeError(f"the experiment {name} was deleted: restore it, or choose another name")
    return str(experiment.experiment_id)


ROLL_BACK: Final = "heliograph.roll_back."
LOGGED_IMAGES: Final = "mlflow.loggedImages"
IMAGE: Final = re.compile(r"images/(.+)\+step\+(\d+)\+timestamp\+(\d+)\+.+\.png")
NOTHING: Final = -1


class LoggedHistory:
    """The steps that a continued run has already, and the times of new values.

    All values of a step have one time, even if they are sent again: MLflow stores equal values once. A rollback has a
    later time than all values before it, so that the number of rollbacks before each value is known.
    """

    def __init__(self) -> None:
        self._reached: dict[tuple[str, int], int] = {}
        self._latest = 0  # milliseconds
        self._began: float | None = None

    @classmethod
    def of(cls, client: Any, run: Any) -> LoggedHistory:
        history = cls()
        turns = sorted(int(text.split()[0]) for key, text in run.data.tags.items() if key.startswith(ROLL_BACK))
        history._latest = max(turns, default=0)
        for name in run.data.metrics:
            for metric in send(client.get_metric_history, run.info.run_id, name):
                history.add(name, bisect_left(turns, metric.timestamp), metric.step)
                history._latest = max(history._latest, metric.timestamp)
        for name, step, moment in _images(client, run) if LOGGED_IMAGES in run.data.tags else ():
            history.add(name, bisect_left(turns, moment), step)
        return history

    def holds(self, name: str, place: Place) -> bool:
        return place.step <= self._reached.get((name, place.rollbacks), NOTHING)

    def add(self, name: str, rollbacks: int, step: int) -> None:
        self._reached[name, rollbacks] = max(step, self._reached.get((name, rollbacks), NOTHING))

    def time_of(self, place: Place) -> int:
        # The time of the step, not the time of writing.
        if self._began is None:
            self._began = max(time(), (self._latest + 1) / 1000) - place.seconds
        moment = round(1000 * (self._began + place.seconds))
        self._latest = max(self._latest, moment)
        return moment

    def roll_back_tag(self, place: Place, tags: Mapping[str, str]) -> dict[str, str]:
        self._began, key = None, f"{ROLL_BACK}{place.rollbacks}"
        moment = self.time_of(place)
        self._began = None  # the steps after it have later times
        return {} if key in tags else {key: f"{moment} to step {place.step}"}


def image_name(key: str) -> str:
    return f"image {key.replace('/', '~')}"


def _images(client: Any, run: Any) -> Iterator[tuple[str, int, int]]:
    for artifact in send(client.list_artifacts, run.info.run_id, "images"):
        if (match := IMAGE.fullmatch(artifact.path)) is not None:
            yield image_name(match[1]), int(match[2]), int(match[3])


UNKNOWN_IN_IMAGES: Final = re.compile(r"[^a-zA-Z0-9_\-./ ]")
STATUS: Final = {"completed": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}  # else KILLED
LONGEST_PARAMETER: Final = 6000  # characters; MLflow refuses or truncates longer ones
LONGEST_TAG: Final = 5000
TRAINING: Final = "heliograph.training"
STATUS_TAG: Final = "heliograph.status"


class MLflow(Tracker):
    """Track a run in MLflow: metrics, hyper-parameters, images, texts and files.

    The tracker is a separate client: it does not change the active run or the tracking address of the process. A run
    ends as `FINISHED` if it completed or stopped, as `FAILED`, or as `KILLED` if it was interrupted or preempted. The
    tag `heliograph.status` has the exact status, `running` until the end. A resumed run continues the same MLflow run
    without repeating values; the tags `heliograph.attempt` and `heliograph.attempt.<n>` have the attempts and their
    first steps. After a rollback, steps are repeated with the metric `rollbacks`, and a tag has the time and step.

    Values that MLflow refuses are adapted, and the result notes it: a changed name; the first 6,000
    characters of a hyper-parameter; a hyper-parameter that changed since an earlier attempt as `<name>.<n>`. Its
    databases store an infinite value as the largest number. Histograms and curves are not shown.

    During a run, MLflow makes one attempt per request in this process and waits 8 seconds for an answer, unless you set
    `MLFLOW_HTTP_REQUEST_MAX_RETRIES` and `MLFLOW_HTTP_REQUEST_TIMEOUT`. The tracker repeats failed requests itself,
    because MLflow would draw its pauses from the random generator of the training.

    Args:
        experiment: the name of the experiment, created if it does not exist.
        uri: the address, for example `http://127.0.0.1:5000` or `sqlite:///mlflow.db`; None uses MLflow's own setting,
            for example `MLFLOW_TRACKING_URI`.
        tags: further tags of the run.

    Raises:
        ImportError: mlflow is not installed.
    """

    name = "mlflow"
    collects = ("scalars",)

    def __init__(self, experiment: str, uri: str | None = None, tags: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._mlflow = require("mlflow", "MLflow", extra="mlflow")
        self.experiment, self.uri = experiment, uri
        self.tags = {str(name): str(value) for name, value in (tags or {}).items()}
        self._settings: list[str] = []  # environment variables that are set during a run
        self._client: Any = None
        self._rows: list[tuple[Place, Mapping[str, float]]] = []  # values until the next flush
        self._run_id = ""
        self._history = LoggedHistory()

    def describe(self, run: Run) -> str:
        return f"logs to the experiment {self.experiment} of MLflow"

    def prepare(self, run: Run) -> None:
        # Creating the client takes seconds for a database.
        with suppress(ConnectionError, RuntimeError):  # open() fails again, and the result warns
            self._connect()

    def _connect(self) -> None:
        self._settings += [name for name in SETTINGS if name not in os.environ]
        os.environ.update({name: SETTINGS[name] for name in self._settings})
        self._client = send(self._mlflow.MlflowClient, self.uri)

    def open(self, page: Page) -> str:
        self._rows = []
        if self._client is None:
            self._connect()
        self._history = LoggedHistory()
        experiment = experiment_id(self._client, self.experiment)
        run = self._find(page, experiment)
        tags = {"heliograph.attempt": str(page.attempt), STATUS_TAG: "running"}
        if run is None:
            run_tags = self._mlflow.tracking.context.registry.resolve_tags({TRAINING: page.training_id})
            run = send(self._client.create_run, experiment, tags=run_tags, run_name=page.name)
        else:
            send(self._client.update_run, run.info.run_id, status="RUNNING")
            if page.resumed_at is not None:
                tags[f"heliograph.attempt.{page.attempt}"] = f"resumed at step {page.resumed_at}"
                self._history = LoggedHistory.of(self._client, run)
        self._run_id = run.info.run_id
        self._log(tags=self.tags | tags)
        return self._run_id

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        self._rows.append((place, values))

    def flush(self) -> None:
        metrics, rollbacks = [], {}
        for place, values in self._rows:
            if place.rollbacks:
                rollbacks[place.step] = place
            metrics += [self._metric(place, self._shown(name), value) for name, value in values.items()]
        metrics += [self._metric(place, "rollbacks", place.rollbacks) for place in rollbacks.values()]
        self._log([metric for metric in metrics if metric is not None])
        for place in rollbacks.values():
            self._history.add("rollbacks", place.rollbacks, place.step)

    def discard(self) -> None:
        self._rows = []

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        # MLflow does not allow a stored value to change.
        run = send(self._client.get_run, self._run_id)
        stored, new = run.data.params, {}
        for name, value in values.items():
            text = str(value)
            if len(text) > LONGEST_PARAMETER:
                self._remark(f"{name} has {len(text)} characters, only {LONGEST_PARAMETER} are shown")
            version = next_version(self._shown(name), text[:LONGEST_PARAMETER], stored)
            if version is not None:
                new[version] = text[:LONGEST_PARAMETER]
                if version != self._shown(name):
                    self._remark(f"{name} has changed since an earlier attempt: its value is shown as {version}")
        self._log(parameters=new)

    def write_image(self, place: Place, name: str, image: Any) -> None:
        key = UNKNOWN_IN_IMAGES.sub("_", name)
        if not self._history.holds(image_name(key), place):
            place_in_time = {"step": place.step, "timestamp": self._history.time_of(place)}
            send(self._client.log_image, self._run_id, image, key=key, synchronous=True, **place_in_time)

    def write_text(self, place: Place, name: str, text: str) -> None:
        send(self._client.log_text, self._run_id, text, f"{folder_of(name, place)}.txt")

    def write_file(self, place: Place, name: str, path: Path) -> None:
        send(self._client.log_artifact, self._run_id, str(path), folder_of(name, place))

    def roll_back(self, place: Place) -> None:
        tags = send(self._client.get_run, self._run_id).data.tags
        self._log(tags=self._history.roll_back_tag(place, tags))

    def finish(self, status: str) -> None:
        self._log(tags={STATUS_TAG: status})
        send(self._client.set_terminated, self._run_id, STATUS.get(status, "KILLED"))

    def close(self) -> None:
        super().close()
        self._client = None
        while self._settings:
            os.environ.pop(self._settings.pop(), None)

    def _metric(self, place: Place, name: str, value: float) -> Any:
        if self._history.holds(name, place):
            return None
        return self._mlflow.entities.Metric(name, float(value), self._history.time_of(place), place.step)

    def _find(self, page: Page, experiment: str) -> Any:
        # An earlier request without an answer may have created the run.
        if page.id is None:
            query = f"tags.`{TRAINING}` = '{page.training_id}'"
            return next(iter(send(self._client.search_runs, [experiment], query)), None)
        try:
            run = send(self._client.get_run, page.id)
        except RuntimeError as error:
            self._remark(f"cannot continue run {page.id} ({error}): started a new one")
            return None
        if run.info.lifecycle_stage == ACTIVE:
            return run
        self._remark(f"run {page.id} was deleted: started a new one")
        return None

    def _log(
        self,
        metrics: Sequence[Any] = (),
        parameters: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        entities = self._mlflow.entities
        pairs = [entities.Param(*pair) for pair in (parameters or {}).items()]
        notes = [entities.RunTag(name, text[:LONGEST_TAG]) for name, text in (tags or {}).items()]
        for kind, items, size in (
            ("metrics", metrics, METRICS_PER_REQUEST),
            ("params", pairs, OTHERS_PER_REQUEST),
            ("tags", notes, OTHERS_PER_REQUEST),
        ):
            for first in range(0, len(items), size):
                chunk = {kind: items[first : first + size]}
                send(self._client.log_batch, self._run_id, synchronous=True, **chunk)

    def _remark(self, text: str) -> None:
        super()._remark(f"{self.name}: {text}")

    def _shown(self, name: str) -> str:
        if (shown := allowed(name)) != name:
            self._remark(f"the name {name!r} is not allowed and is shown as {shown!r}")
        return shown
