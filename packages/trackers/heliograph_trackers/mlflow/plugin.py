"""Runs of MLflow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from heliograph import Run
from heliograph.spi import Page, Place, Tracker, require

from .history import History, image_name
from .names import Names, folder_of, next_version
from .requests import ACTIVE, METRICS_PER_REQUEST, OTHERS_PER_REQUEST, Settings, ask, chunks, experiment_id

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
