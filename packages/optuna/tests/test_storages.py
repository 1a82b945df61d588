"""Where studies lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from heliograph_optuna.storages import absolute, file_of, is_in_memory
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import create_study


def test_files_are_found_behind_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    database, journal = RDBStorage("sqlite:///study.db"), JournalStorage(JournalFileBackend("study.log"))
    cached = create_study(storage=database)._storage

    assert file_of(database) == file_of(cached) == tmp_path / "study.db"
    assert file_of(journal) == tmp_path / "study.log"
    assert not any(map(is_in_memory, (database, cached, journal)))


@pytest.mark.parametrize("storage", [InMemoryStorage(), RDBStorage("sqlite://"), RDBStorage("sqlite:///:memory:")])
def test_memory_is_no_file(storage: InMemoryStorage | RDBStorage) -> None:
    assert is_in_memory(storage)
    assert file_of(storage) is None


def test_only_a_file_s_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()

    assert absolute("sqlite:///study.db") == f"sqlite:///{tmp_path}/study.db"
    assert absolute("sqlite+pysqlite:///a/study.db?timeout=5") == f"sqlite+pysqlite:///{tmp_path}/a/study.db?timeout=5"
    for other in (
        f"sqlite:///{tmp_path}/study.db",
        "sqlite://",
        "sqlite:///file:study.db?uri=true",
        "mysql://me:x@host/db",
    ):
        assert absolute(other) == other
