"""Copy the checkpoints of a folder to remote storage in the background, and fetch them from there."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Collection
from math import inf
from pathlib import Path
from threading import Condition, Thread
from time import monotonic, sleep, time
from typing import TypeVar

import heliograph as h
from heliograph.builtin_callbacks.checkpoint.folder import reasons_to_keep
from heliograph.spi import (
    Entry,
    MissingManifestError,
    Monitor,
    ProcessEngine,
    Store,
    clean,
    describe_error,
    known_names,
    read_manifest,
)

from .remote_folder import RemoteFolder, local_folder

T = TypeVar("T")
Resume = str | Path | None
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # seconds before an upload is tried again; the last one repeats
READ_PAUSES = (0.5, 2.0, 5.0)  # seconds before reading is tried again
TICK = 0.1  # seconds between two looks at the progress
READ_LIMIT = 20.0  # seconds after which it is not tried again
PATIENCE = 60.0  # seconds without progress that the end of a run waits for uploads
FINAL = (FileNotFoundError, PermissionError)
SHOWN_AFTER = 5.0  # seconds of waiting that are reported
SHOWN = 5  # names in a message
SHORTEST = 80  # bytes at the beginning of a run's name that the names of all its files have
logger = logging.getLogger("heliograph")


class RemoteCopy:
    """The copy of a `Checkpoint`'s folder in remote storage.

    One thread uploads what is missing there, the newest first, and removes what retention has removed here, as soon as
    a newer checkpoint is there. After a failure it tries again, with growing pauses. The run never waits for it, except
    at its end.

    Args:
        url: for example `s3://bucket/run`.
        keep_last: as for `Checkpoint`.
        keep_best: as for `Checkpoint`.
        monitor: as for `Checkpoint`.

    Attributes:
        url: the URL without a slash at the end.
        folder: the folder on this machine.

    Raises:
        ValueError: the URL cannot be used.
        ImportError: the package for the protocol is not installed.
    """

    def __init__(self, url: str, *, keep_last: int | None, keep_best: int, monitor: Monitor | None) -> None:
        self._remote = RemoteFolder(url)
        self.url, self.folder = self._remote.url, local_folder(url)
        self._keep_last, self._keep_best, self._monitor = keep_last, keep_best, monitor
        self._uploads: Uploads | None = None
        self._warning = ""  # about the storage at the start

    def entries(self) -> tuple[list[Entry], list[ValueError]]:
        """Return the checkpoints there, the newest first, and the errors of files without a usable manifest.

        Raises:
            FileNotFoundError: there is no such bucket.
            PermissionError: the storage refuses to list it.
            OSError: it cannot be reached.
        """
        try:
            _patiently(self._remote.list)
        except Exception as error:  # noqa: BLE001  # each storage raises its own
            problem = f"{self.url} cannot be listed: {describe_error(error)}".rstrip(".")
            if isinstance(error, FINAL):
                raise type(error)(f"{problem}. Check the URL and the credentials.") from None
            raise OSError(problem) from None  # the chain of a storage has a hundred lines
        return sorted(self._remote.entries.values(), key=_order, reverse=True), [*self._remote.problems.values()]

    def size_of(self, entry: Entry) -> int:
        """Return the bytes of all files of a checkpoint there."""
        return self._remote.size_of(entry)

    def is_pinned(self, entry: Entry) -> bool:
        return entry.path.name in self._remote.pinned

    def fetch(self, store: Store, resume: Resume) -> tuple[Resume, list[str]]:
        """Download the checkpoint to resume, and the best ones, unless the local folder has them or a newer one.

        Returns:
            What to resume, and notes.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            PermissionError: the storage refuses to list it.
            OSError: it cannot be read, and the local folder does not have the checkpoint to resume.
        """
        self._warning, notes = "", list[str]()
        self._remote.is_listed = False
        is_url = "://" in str(resume)
        if is_url and not str(resume).startswith(f"{self.url}/"):
            raise ValueError(
                f"resume={resume!r} is not in {self.url}, the URL of Checkpoint: pass a file there, or a local file."
            )
        try:
            self.entries()
        except FINAL:
            raise
        except OSError as error:
            if is_url or (resume == "auto" and not store.entries()[0]):
                raise OSError(
                    f"resume={resume!r} finds no checkpoint, because {error}. Nothing was started. Start again when "
                    f"it can be reached, or set resume=None for a new training."
                ) from None
            self._warning = f"{error}. Uploads are tried again; checkpoints of other machines are not seen."
            return resume, notes
        for name, problem in self._remote.problems.items() if resume == "auto" else ():
            if name.startswith(f"{clean(store.run_name, SHORTEST)}") and "_epoch_" in name:
                if type(problem) not in (ValueError, MissingManifestError):
                    raise problem  # another schema: this file may be the newest
                notes.append(f"skipped: {self.url}/{name}: {problem}")
        try:
            return self._fetch(store, resume, notes), notes
        except ValueError:
            raise
        except Exception as error:  # noqa: BLE001  # each storage raises its own
            kind = type(error) if isinstance(error, FINAL) else OSError
            text = f"A checkpoint in {self.url} cannot be fetched: {describe_error(error)}".rstrip(".")
            raise kind(f"{text}. Nothing was started.") from None

    def check(self, store: Store) -> None:
        """Refuse to start if another training, which is not on this machine, has the run's name there.

        Raises:
            ValueError: it has.
        """
        local = {entry.training for entry in store.entries()[0]}
        for entry in self._remote.entries.values():
            if entry.run_name == store.name and entry.training not in {store.training_id, *local}:
                raise ValueError(
                    f"{self.url} holds another training under the name {store.name!r}, for example {entry.path.name}. "
                    f"Continue it with resume='auto', or give this run another name= or URL."
                )

    def update(self, run: h.Run, removed: Collection[Path] = ()) -> None:
        """Upload and remove in the background what has changed."""
        if self._uploads is None:
            run.note(f"checkpoints are copied from {self.folder} to {self.url}")
            if self._warning:
                run.warn(self._warning)
                logger.warning(self._warning)
            self._uploads = Uploads(self._remote, Store(self.folder, run.name), self._reasons_to_keep)
        self._uploads.request(run.checkpoints.training_id, {path.name for path in removed})

    def finish(self, run: h.Run) -> None:
        """Wait until everything is uploaded, as long as there is progress; warn of what is missing."""
        if self._uploads is None:  # the run did not start
            return
        self.update(run)  # a metric may have been written into a manifest
        uploads, self._uploads = self._uploads, None
        engine = run.engine
        with engine.writing():
            missing = uploads.end(engine.timeout / 2 if isinstance(engine, ProcessEngine) else inf)  # other ranks wait
        if missing:
            names = ", ".join(sorted(missing)[:SHOWN]) + f" and {len(missing) - SHOWN} more" * (len(missing) > SHOWN)
            reason = uploads.problem.rstrip(".") or "The storage did not finish in time"
            run.warn(
                f"Not uploaded from {self.folder} to {self.url}: {names}. {reason}. To upload them, start the program "
                f"again on this machine with resume='auto'."
            )
        elif uploads.failures:
            run.note(f"{self.url} has all checkpoints, after {uploads.failures} failures: {uploads.problem}")

    def _fetch(self, store: Store, resume: Resume, notes: list[str]) -> Resume:
        local, remote = store.entries()[0], [*self._remote.entries.values()]
        training, wanted = None, None
        if resume == "auto":
            family = [entry for entry in (*local, *remote) if entry.family == store.run_name]
            training = max(family, key=lambda entry: entry.order).training if family else None
        elif resume is not None and "://" in str(resume):
            wanted = self._find(str(resume), store.run_name)
            training = wanted.training
        elif resume is not None and Path(resume).is_file():
            training = read_manifest(Path(resume)).training
        if training is None:
            return resume
        of_training = (entry for entry in remote if (entry.family, entry.training) == (store.run_name, training))
        candidates = sorted(of_training, key=_order, reverse=True)
        reasons = self._reasons_to_keep(candidates, keep_last=1)
        for entry in candidates:
            if reasons[entry.path.name].startswith("among the best"):
                self._take_in(store, entry, notes)
        damaged = list[str]()
        for entry in candidates:  # also for a path: the training branches if there is a newer one
            if _intact(store, entry, or_newer=True) is not None or self._take_in(store, entry, notes) is not None:
                break
            damaged.append(entry.path.name)
        if damaged:
            self._warning = f"Damaged checkpoints in {self.url} are not used: {', '.join(damaged[:SHOWN])}."
        if wanted is None:
            return resume
        path = self._take_in(store, wanted, notes)
        if path is None:
            raise ValueError(f"{resume} is damaged: choose another checkpoint, or resume='auto'.")
        return path

    def _find(self, url: str, run_name: str) -> Entry:
        name = url.removeprefix(f"{self.url}/")
        if (entry := self._remote.entries.get(name)) is None:
            reason = self._remote.problems.get(name, f"no such file.{known_names(name, self._remote.entries)}")
            raise FileNotFoundError(f"{url}: {reason}")
        if entry.family != run_name:
            raise ValueError(
                f"{url} is of run {entry.family!r}, and this run is {run_name!r}: set name={entry.family!r}."
            )
        return entry

    def _take_in(self, store: Store, entry: Entry, notes: list[str]) -> Path | None:
        """Download and verify a checkpoint, unless it is here; return None if it is damaged or has been removed."""
        name = entry.path.name
        if (path := _intact(store, entry)) is not None or name not in self._remote.entries:
            return path
        scratch = store.scratch("fetched")
        shutil.rmtree(scratch, ignore_errors=True)  # a killed process left it
        scratch.mkdir()
        try:
            free = shutil.disk_usage(scratch).free
            if 2 * entry.size > free:  # it is copied once more
                raise OSError(
                    errno.ENOSPC,
                    f"{name} needs {2 * entry.size / 1e6:.1f} MB in {self.folder}, {free / 1e6:.1f} MB are free",
                )
            path = _patiently(lambda: self._download(entry, scratch))
            store.verify(path)
            path = store.take_in(path).path
        except (ValueError, FileNotFoundError) as error:
            notes.append(f"skipped: {self.url}/{name}: {error}")
            logger.warning("resume %s", notes[-1])
            self._remote.damaged.add((name, entry.sha256))
            self._remote.problems[name] = ValueError(str(error))
            del self._remote.entries[name]
            return None
        finally:
            shutil.rmtree(scratch)
        notes.append(f"fetched {path} from {self.url}")
        return path

    def _download(self, entry: Entry, scratch: Path) -> Path:
        shutil.rmtree(scratch)
        scratch.mkdir()
        return self._remote.download(entry, scratch)

    def _reasons_to_keep(self, entries: Collection[Entry], keep_last: int | None = None) -> dict[str, str]:
        keep_last = keep_last or self._keep_last
        if keep_last is None:
            return {entry.path.name: "all are kept" for entry in entries}
        reasons = reasons_to_keep(
            sorted(entries, key=_order, reverse=True),
            keep_last=keep_last,
            keep_best=self._keep_best,
            monitor=self._monitor,
            is_pinned=lambda path: path.name in self._remote.pinned,
            damage_to=lambda _: "",
        )
        return {path.name: reason for path, reason in reasons.items()}


def _order(entry: Entry) -> tuple[int, float, str]:
    return entry.order


def _intact(store: Store, wanted: Entry, *, or_newer: bool = False) -> Path | None:
    for entry in store.entries()[0]:
        is_newer = or_newer and entry.training == wanted.training and entry.order > wanted.order
        if is_newer or entry.sha256 == wanted.sha256:
            try:
                return store.verify(entry.path).path
            except (ValueError, FileNotFoundError):  # resuming notes it
                continue
    return None


def _patiently(work: Callable[[], T]) -> T:
    began = monotonic()
    for seconds in READ_PAUSES:
        try:
            return work()
        except Exception as error:  # each storage raises its own
            is_late = monotonic() - began > READ_LIMIT  # file systems of fsspec try again, too
            if isinstance(error, FINAL) or is_late or getattr(error, "errno", None) == errno.ENOSPC:
                raise
            logger.warning("reading failed, retrying in %s s: %s", seconds, describe_error(error))
        sleep(seconds)
    return work()


class Uploads:
    """The thread that makes the remote folder like the local one.

    Args:
        remote: the remote folder, which only the thread uses from now on.
        store: the local folder.
        reasons_to_keep: returns, for the checkpoints of a training, why each is kept, by file name.

    Attributes:
        failures: how often the storage failed.
        problem: the last failure.
    """

    def __init__(
        self, remote: RemoteFolder, store: Store, reasons_to_keep: Callable[[Collection[Entry]], dict[str, str]]
    ) -> None:
        self.failures, self.problem = 0, ""
        self._remote, self._store, self._reasons_to_keep = remote, store, reasons_to_keep
        self._training, self._removed = "", set[str]()
        self._unusable = dict[Path, str]()  # local checkpoints that are not uploaded, and why
        self._changed = Condition()
        self._is_due = self._is_busy = self._is_ending = self._is_ended = False
        self._began, self._moved_at = time(), monotonic()
        Thread(target=self._work, name="heliograph-uploads", daemon=True).start()

    def request(self, training: str, removed: Collection[str]) -> None:
        """Compare the folders of a training again; `removed` were removed here by retention."""
        with self._changed:
            self._training, self._is_due = training, True
            self._removed.update(removed)
            self._changed.notify_all()

    def end(self, longest: float = inf) -> list[str]:
        """Wait as long as there is progress, end the thread, and return the names of missing checkpoints.

        `longest` is the longest wait in seconds.
        """
        with self._changed:
            self._is_ending, self._moved_at = True, monotonic()
            self._changed.notify_all()
            began, is_silent = monotonic(), True
            try:
                while (self._is_due or self._is_busy) and monotonic() < min(self._moved_at + PATIENCE, began + longest):
                    if is_silent and monotonic() > began + SHOWN_AFTER:
                        is_silent = False
                        logger.warning("waiting for uploads to %s", self._remote.url)
                    self._changed.wait(TICK)
            finally:
                self._is_ended = True
                self._changed.notify_all()
        local = Store(self._store.folder, self._store.run_name, self._training).own()
        return [entry.path.name for entry in local if not (self._remote.is_listed and self._remote.has(entry))]

    def _work(self) -> None:
        pauses = iter(PAUSES)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due or self._is_ended)
                if self._is_ended:
                    return
                self._is_due, self._is_busy = False, True
            try:
                self._mirror()
                pauses = iter(PAUSES)
            except Exception as error:  # noqa: BLE001  # each storage raises its own
                self._report(error)
                self._remote.is_listed = False  # it may have happened nevertheless
                with self._changed:
                    self._is_due = True
                    if self._changed.wait_for(lambda: self._is_ending, next(pauses, PAUSES[-1])):
                        self._changed.wait_for(lambda: self._is_ended, PAUSES[0])
            finally:
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    def _report(self, error: Exception) -> None:
        self.failures += 1
        self.problem = describe_error(error)
        if self.failures == 1:
            logger.warning(
                "upload to %s failed, it is tried again in the background: %s", self._remote.url, self.problem
            )

    def _mirror(self) -> None:
        if not self._remote.is_listed:
            self._remote.list()
        while not self._is_ended and (entry := self._next()) is not None:
            self._upload(entry)
        if not self._is_ended:
            self._remove()

    def _next(self) -> Entry | None:
        for entry in self._own():
            if self._remote.has(entry) or entry.path in self._unusable:
                continue
            if refusal := self._remote.refusal(entry):
                self._skip(entry.path, refusal)
                continue
            return entry
        return None

    def _own(self) -> list[Entry]:
        return [entry for entry in self._store.entries()[0] if entry.training == self._training]

    def _upload(self, entry: Entry) -> None:
        try:
            if entry.saved_at < self._began:  # what this run saves is intact
                self._store.verify(entry.path)
            self._remote.upload(entry, self._store.files_of(entry.path), self._move)
        except ValueError as error:
            self._skip(entry.path, str(error))
        except FileNotFoundError:
            if entry.path.exists():
                raise  # otherwise retention has removed it
        self._move()

    def _skip(self, path: Path, reason: str) -> None:
        self._unusable[path] = self.problem = reason
        logger.warning("%s is not uploaded to %s: %s", path, self._remote.url, reason)

    def _remove(self) -> None:
        remote, folder = self._remote, self._store.folder
        for entry in self._own():
            if self._store.is_pinned(entry.path) and entry.path.name not in remote.pinned:
                remote.pin(entry.path.name)
        reasons = self._reasons_to_keep(
            [entry for entry in remote.entries.values() if entry.training == self._training]
        )
        with self._changed:
            removed = {name for name in reasons if not reasons[name]} | self._removed
        for name in removed:
            old = remote.entries.get(name)
            if old is not None and not (folder / name).exists():
                if not any(entry.family == old.family and entry.order > old.order for entry in remote.entries.values()):
                    continue  # until a newer one is there
                remote.remove(name)
                self._move()
            self._removed.discard(name)

    def _move(self) -> None:
        self._moved_at = monotonic()
