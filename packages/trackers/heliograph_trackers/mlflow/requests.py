"""Requests to MLflow: one attempt each, small enough, and with errors that say whether another attempt may help."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from heliograph.spi import require

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
