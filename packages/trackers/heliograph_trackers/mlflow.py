"""Runs of MLflow."""

from __future__ import annotations

import os
import posixpath
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, Final, TypeVar

from heliograph import Page, Place, Run, Tracker
from heliograph.spi import require

LONGEST: Final = 200  # MLflow takes 250, for tags with a prefix, too
TAG: Final = "heliograph.{kind}."


class Names:
    """The names under which metrics or hyper-parameters are in a run of MLflow.

    A name that MLflow refuses gets another, and a tag of the run with its true one, so that a resumed run continues the
    same curves.

    Args:
        kind: `metric` or `parameter`.
        taken: those that are in the run.
        tags: of the run.

    Attributes:
        tags: those that the run lacks.
    """

    def __init__(self, kind: str, taken: Iterable[str], tags: Mapping[str, str]) -> None:
        self._prefix = TAG.format(kind=kind)
        self._true = {name: tags.get(self._prefix + name, name) for name in taken}
        self._shown = {true: name for name, true in self._true.items()}
        self.tags: dict[str, str] = {}

    def show(self, name: str) -> str:
        """Return the name for a name."""
        if name not in self._shown:
            text = short = allowed(name)
            number = 1
            while text in self._true:
                number += 1
                text = f"{short}-{number}"
            self._true[text], self._shown[name] = name, text
            if text != name:
                self.tags[self._prefix + text] = name
        return self._shown[name]

    def take_new(self) -> dict[str, str]:
        """Return the true names of those that the run has tags for now, and had none."""
        new = {key.removeprefix(self._prefix): name for key, name in self.tags.items()}
        self.tags.clear()
        return new


def allowed(name: str) -> str:
    """Return a name with other characters for those that MLflow refuses."""
    text = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", name)).lstrip("/.")
    return text[:LONGEST] or "_"


def next_version(name: str, text: str, held: Mapping[str, str]) -> str | None:
    """Return the name for a value: `lr`, or `lr.2` and so on where it has had others; None where it is there."""
    shown, number = name, 1
    latest = None
    while shown in held:
        latest, number = held[shown], number + 1
        shown = f"{name}.{number}"
    return None if latest == text else shown


def folder_of(name: str, place: Place) -> str:
    """Return where among the artifacts something is kept: its name and step, below the folder that it is in."""
    again = f"_roll_back_{place.rollbacks}" if place.rollbacks else ""
    return posixpath.join(allowed(name), f"step_{place.step}{again}")


ACTIVE: Final = "active"  # neither a run nor an experiment that was deleted
METRICS_PER_REQUEST: Final = 1000
OTHERS_PER_REQUEST: Final = 20  # MLflow takes 100, but also no more than a megabyte, and a long text has up to 48 kB

# MLflow would try again itself, for minutes, with pauses that it draws from Python's global generator. It would also
# leave its connections to a database open, for the processes that the training forks to share.
SETTINGS: Final = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}

T = TypeVar("T")


class Settings:
    """The settings of MLflow while a run lasts: variables of the process, where the user has set none."""

    def __init__(self) -> None:
        self._set: list[str] = []

    def apply(self) -> None:
        """Set them."""
        for name, value in SETTINGS.items():
            if name not in os.environ:
                os.environ[name] = value
                self._set.append(name)

    def take_back(self) -> None:
        """Unset those that were not set."""
        for name in self._set:
            os.environ.pop(name, None)
        self._set.clear()


def ask(request: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Return what MLflow answers to a request.

    Raises:
        ConnectionError: there was no answer, or one that another attempt may change.
        RuntimeError: the request was refused.
    """
    errors = require("mlflow.exceptions", "MLflow", extra="mlflow")
    http = require("requests", "MLflow", extra="mlflow")
    try:
        return request(*arguments, **options)
    except errors.MlflowException as error:
        status = error.get_http_status_code()
        kind = ConnectionError if status >= 500 or status in (408, 429) else RuntimeError
        raise kind(str(error)) from error
    except http.HTTPError as error:  # from the store of artifacts
        status = 500 if error.response is None else error.response.status_code
        kind = ConnectionError if status >= 500 or status in (408, 429) else RuntimeError
        raise kind(str(error)) from error


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield all items, at most `size` at a time."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


def experiment_id(client: Any, name: str) -> str:
    """Return the id of an experiment, which is made where it is missing.

    Raises:
        RuntimeError: it was deleted.
    """
    found = ask(client.get_experiment_by_name, name)
    if found is None:
        try:
            return str(ask(client.create_experiment, name))
        except RuntimeError:  # another run has just made it
            found = ask(client.get_experiment_by_name, name)
            if found is None:
                raise
    if found.lifecycle_stage != ACTIVE:
        raise RuntimeError(f"the experiment {name} was deleted: restore it, or choose another name")
    return str(found.experiment_id)


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


UNKNOWN_IN_IMAGES: Final = re.compile(r"[^a-zA-Z0-9_\-./ ]")
STATUS: Final = {"completed": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}  # others are KILLED
LONGEST_PARAMETER: Final = 6000  # characters; MLflow refuses longer ones, or cuts them itself
LONGEST_TAG: Final = 5000
TRAINING: Final = "heliograph.training"
STATUS_TAG: Final = "heliograph.status"


class MLflow(Tracker):
    """Show a run in MLflow: metrics, hyper-parameters, images, texts and files.

    It talks to MLflow as a client: neither the active run nor the tracking address of the process is changed. A run
    ends as `FINISHED` where it was completed or stopped, as `FAILED`, or as `KILLED` where it was interrupted or
    preempted; the tag `heliograph.status` says which, and `running` until then. A resumed run continues the same one:
    what was logged already is not added again, and the tags `heliograph.attempt` and `heliograph.attempt.<n>` say since
    which step. After a roll back the same steps come again, with the metric `rollbacks` beside them and a tag that says
    when and where to.

    What MLflow does not take is written as it can be, and said in the result: another name, with the true one as tag;
    the first 6,000 characters of a hyper-parameter; one that has changed since an earlier attempt as `<name>.<n>`. Its
    databases keep an infinite value as the largest number. Histograms and curves are not shown.

    While a run lasts, MLflow makes one attempt for each request in this process and waits 8 seconds for an answer,
    unless you set `MLFLOW_HTTP_REQUEST_MAX_RETRIES` and `MLFLOW_HTTP_REQUEST_TIMEOUT`: the tracker repeats attempts,
    and the pauses of MLflow's own would be drawn from the generator that the training may use.

    Args:
        experiment: the name of the experiment; made where it is missing.
        uri: where MLflow is, such as `http://127.0.0.1:5000` or `sqlite:///mlflow.db`; None for what the process has
            set for MLflow, such as `MLFLOW_TRACKING_URI`.
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
        self._settings = Settings()
        self._client: Any = None
        self._rows: list[tuple[Place, Mapping[str, float]]] = []  # what is collected
        self._run_id = ""
        self._history = History()
        self._names = Names("metric", (), {})

    def describe(self, run: Run) -> str:
        """Say where the run is shown."""
        return f"logs to the experiment {self.experiment} of MLflow"

    def prepare(self, run: Run) -> None:
        """Make the client before the training, which takes seconds where the address is one of a database."""
        self._settings.apply()
        with suppress(ConnectionError, RuntimeError):  # `open` meets it again, and the result says so
            self._client = ask(self._mlflow.MlflowClient, self.uri)

    def open(self, page: Page) -> str:
        """Begin a run, or continue one."""
        self._rows = []
        if self._client is None:
            self._settings.apply()
            self._client = ask(self._mlflow.MlflowClient, self.uri)
        self._history = History()
        experiment = experiment_id(self._client, self.experiment)
        run = self._find(page, experiment)
        tags = {"heliograph.attempt": str(page.attempt), STATUS_TAG: "running"}
        if run is None:
            given = self._mlflow.tracking.context.registry.resolve_tags({TRAINING: page.training_id})
            run = ask(self._client.create_run, experiment, tags=given, run_name=page.name)
        else:
            ask(self._client.update_run, run.info.run_id, status="RUNNING")
            if page.resumed_at is not None:
                tags[f"heliograph.attempt.{page.attempt}"] = f"resumed at step {page.resumed_at}"
                self._history = History.of(self._client, run)
        self._run_id = run.info.run_id
        self._names = Names("metric", run.data.metrics, run.data.tags)
        self._log(tags=self.tags | tags)
        return self._run_id

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        """Collect values of curves."""
        self._rows.append((place, values))

    def flush(self) -> None:
        """Add the collected values to their curves, but for what a former attempt has added."""
        rows, self._rows = self._rows, []
        try:
            self._send(rows)
        except self.outages:
            self._rows = rows
            raise

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        """Write what the run does not have yet; MLflow lets no value be changed."""
        run = ask(self._client.get_run, self._run_id)
        held, new = run.data.params, {}
        names = Names("parameter", held, run.data.tags)
        for name, value in values.items():
            text = str(value)
            if len(text) > LONGEST_PARAMETER:
                self._remark(f"{name} has {len(text)} characters, of which {LONGEST_PARAMETER} are shown")
            version = next_version(names.show(name), text[:LONGEST_PARAMETER], held)
            if version is not None:
                new[version] = text[:LONGEST_PARAMETER]
                if version != names.show(name):
                    self._remark(f"{name} has changed since an earlier attempt: its value is shown as {version}")
        self._log(parameters=new, tags=names.tags)
        self._remark_names(names)

    def write_image(self, place: Place, name: str, image: Any) -> None:
        """Add an image to those of its name, but for one that a former attempt has added."""
        key = UNKNOWN_IN_IMAGES.sub("_", name)
        if not self._history.holds(image_name(key), place):
            time = self._history.time_of(place)
            ask(self._client.log_image, self._run_id, image, key=key, step=place.step, timestamp=time, synchronous=True)
            self._history.note_sent(place)

    def write_text(self, place: Place, name: str, text: str) -> None:
        """Keep a text as `<name>/<step>.txt` among the artifacts."""
        ask(self._client.log_text, self._run_id, text, f"{folder_of(name, place)}.txt")

    def write_file(self, place: Place, name: str, path: Path) -> None:
        """Keep a file as `<name>/<step>/<its own name>` among the artifacts."""
        ask(self._client.log_artifact, self._run_id, str(path), folder_of(name, place))

    def roll_back(self, place: Place) -> None:
        """Note when the training went back, and where to."""
        held = ask(self._client.get_run, self._run_id).data.tags
        self._log(tags=self._history.turn(place, held))

    def finish(self, status: str) -> None:
        """Set the run's status."""
        self._log(tags={STATUS_TAG: status})
        ask(self._client.set_terminated, self._run_id, STATUS.get(status, "KILLED"))

    def close(self) -> None:
        """Close the run, and take the settings of MLflow back."""
        super().close()
        self._client = None
        self._settings.take_back()

    def _send(self, rows: Sequence[tuple[Place, Mapping[str, float]]]) -> None:
        metrics, went_back = [], {}
        for place, values in rows:
            if place.rollbacks:
                went_back[place.step] = place
            shown = {self._names.show(name): value for name, value in values.items()}
            metrics += [self._metric(place, name, value) for name, value in shown.items()]
        metrics += [self._metric(place, "rollbacks", place.rollbacks) for place in went_back.values()]
        self._log([each for each in metrics if each is not None], tags=self._names.tags)
        for place, _ in rows:
            self._history.note_sent(place)
        for place in went_back.values():
            self._history.add("rollbacks", place.rollbacks, place.step)
        self._remark_names(self._names)

    def _metric(self, place: Place, name: str, value: float) -> Any:
        """Return a value as MLflow takes it, or None where the run has it."""
        if self._history.holds(name, place):
            return None
        return self._mlflow.entities.Metric(name, float(value), self._history.time_of(place), place.step)

    def _find(self, page: Page, experiment: str) -> Any:
        """Return the run to continue; None for a new one. A request without an answer may have made one already."""
        if page.id is None:
            query = f"tags.`{TRAINING}` = '{page.training_id}'"
            return next(iter(ask(self._client.search_runs, [experiment], query)), None)
        try:
            run = ask(self._client.get_run, page.id)
        except RuntimeError as error:
            self._remark(f"its run {page.id} cannot be continued ({error}): this is a new one")
            return None
        if run.info.lifecycle_stage == ACTIVE:
            return run
        self._remark(f"its run {page.id} was deleted: this is a new one")
        return None

    def _log(
        self,
        metrics: Sequence[Any] = (),
        parameters: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        entities = self._mlflow.entities
        pairs = [entities.Param(*each) for each in (parameters or {}).items()]
        notes = [entities.RunTag(name, text[:LONGEST_TAG]) for name, text in (tags or {}).items()]
        for kind, items, size in (
            ("metrics", metrics, METRICS_PER_REQUEST),
            ("params", pairs, OTHERS_PER_REQUEST),
            ("tags", notes, OTHERS_PER_REQUEST),
        ):
            for some in chunks(items, size):
                ask(self._client.log_batch, self._run_id, synchronous=True, **{kind: some})

    def _remark(self, text: str) -> None:
        super()._remark(f"{self.name}: {text}")

    def _remark_names(self, names: Names) -> None:
        for shown, name in names.take_new().items():
            self._remark(f"it does not take the name {name!r}, which is shown as {shown!r}")
