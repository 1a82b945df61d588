"""The storages of studies: files, databases and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph.spi import require

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

PURPOSE = "A study in a database"
MEMORY = (None, "", ":memory:")  # names of a database without a file


def is_in_memory(storage: BaseStorage) -> bool:
    optuna = require("optuna", "A study", extra="optuna")
    if isinstance(storage, optuna.storages.InMemoryStorage):
        return True
    url = _url_of(storage)
    return url is not None and url.drivername.startswith("sqlite") and url.database in MEMORY


def file_of(storage: BaseStorage) -> Path | None:
    # None for a server or memory.
    if (url := _url_of(storage)) is not None:
        return _sqlite_file(url)
    journal = getattr(getattr(storage, "_backend", None), "_file_path", None)
    return None if journal is None else Path(journal).absolute()


def absolute(url: str) -> str:
    # A process in another folder must find the same file.
    try:
        parsed = _parse(url)
    except require("sqlalchemy.exc", PURPOSE, extra="optuna").ArgumentError:
        raise ValueError(
            f"storage= must be the URL of a database, for example 'sqlite:///study.db', got {url!r}."
        ) from None
    file = _sqlite_file(parsed)
    if file is not None and not file.parent.is_dir():
        raise FileNotFoundError(f"The folder {file.parent} of the database {file.name} does not exist: create it.")
    return url if file is None else parsed.set(database=str(file)).render_as_string(hide_password=False)


def _url_of(storage: BaseStorage) -> Any:
    # Optuna wraps a database in a cache.
    url = getattr(getattr(storage, "_backend", storage), "url", None)
    return _parse(url) if isinstance(url, str) else None


def _parse(url: str) -> Any:
    return require("sqlalchemy.engine", PURPOSE, extra="optuna").make_url(url)


def _sqlite_file(url: Any) -> Path | None:
    if not url.drivername.startswith("sqlite") or url.database in MEMORY or url.database.startswith("file:"):
        return None
    return Path(url.database).absolute()
