"""Where a study lies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph.spi import require

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

PURPOSE = "A study in a database"
MEMORY = (None, "", ":memory:")  # what SQLite calls a database without a file


def is_in_memory(storage: BaseStorage) -> bool:
    """Return whether no other process could read what is stored."""
    optuna = require("optuna", "A study", extra="optuna")
    if isinstance(storage, optuna.storages.InMemoryStorage):
        return True
    url = _url_of(storage)
    return url is not None and url.drivername.startswith("sqlite") and url.database in MEMORY


def file_of(storage: BaseStorage) -> Path | None:
    """Return the file that a study lies in; None where it is on a server, or in memory."""
    if (url := _url_of(storage)) is not None:
        return _sqlite_file(url)
    journal = getattr(getattr(storage, "_backend", None), "_file_path", None)
    return None if journal is None else Path(journal).absolute()


def absolute(url: str) -> str:
    """Return the URL of a database so that a process in another folder finds the same file.

    Raises:
        FileNotFoundError: there is no folder for the file.
        ValueError: it is no URL.
    """
    try:
        parsed = _parse(url)
    except require("sqlalchemy.exc", PURPOSE, extra="optuna").ArgumentError:
        raise ValueError(
            f"storage= is the URL of a database, such as 'sqlite:///study.db' for a file, got {url!r}."
        ) from None
    file = _sqlite_file(parsed)
    if file is not None and not file.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {file.parent} for the study's database {file.name}: make it.")
    return url if file is None else parsed.set(database=str(file)).render_as_string(hide_password=False)


def _url_of(storage: BaseStorage) -> Any:
    """Return the parsed URL of a database, which Optuna wraps in a cache; None where the storage is none."""
    url = getattr(getattr(storage, "_backend", storage), "url", None)
    return _parse(url) if isinstance(url, str) else None


def _parse(url: str) -> Any:
    return require("sqlalchemy.engine", PURPOSE, extra="optuna").make_url(url)


def _sqlite_file(url: Any) -> Path | None:
    """Return the file of a database of SQLite; None where it is in memory, named in SQLite's own way, or another."""
    if not url.drivername.startswith("sqlite") or url.database in MEMORY or url.database.startswith("file:"):
        return None
    return Path(url.database).absolute()
