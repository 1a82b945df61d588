"""A folder of checkpoints in remote storage, through fsspec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from io import SEEK_SET, BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.callbacks import Callback
from fsspec.core import url_to_fs
from fsspec.registry import available_protocols, known_implementations
from heliograph.spi import Entry, clean, read_manifest

SUFFIX, PINNED = ".pth", ".pinned"
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}  # an upload is complete or invisible
TAIL = 2**17  # bytes: longer than any manifest


class _Tail(BytesIO):
    """The end of a file, with the positions of the whole file."""

    def __init__(self, content: bytes, size: int) -> None:
        super().__init__(content)
        self._begin = size - len(content)

    def seek(self, position: int, whence: int = SEEK_SET) -> int:
        return super().seek(position - self._begin if whence == SEEK_SET else position, whence) + self._begin


class _Moves(Callback):  # type: ignore[misc]  # fsspec has no types
    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def call(self, *_: Any, **__: Any) -> None:
        self._act()


class RemoteFolder:
    """A folder of checkpoints in remote storage, from one thread at a time.

    A checkpoint ends with its manifest. Where an upload can be seen before it is complete, it has a hidden name until
    then.

    Args:
        url: for example `s3://bucket/run`.

    Attributes:
        entries: the checkpoints by file name.
        problems: the errors of files without a usable manifest, by file name.
        pinned: the names of pinned checkpoints.
        damaged: file names and digests of checkpoints whose data does not match their manifests.
        is_listed: whether these attributes are known.

    Raises:
        ValueError: fsspec does not have the protocol, or the URL contains credentials, a query or a wildcard.
        ImportError: the package for the protocol is not installed.
    """

    def __init__(self, url: str) -> None:
        self.protocol, separator, rest = url.partition("://")
        if not separator or not rest.strip("/"):
            raise ValueError(
                f"Checkpoint({url!r}) is not the URL of a folder: pass it as a string such as 's3://bucket/run'."
            )
        if unsupported := set("@?#*[]").intersection(rest):
            place = f"{self.protocol}://{rest.rpartition('@')[2].partition('?')[0]}"  # without secrets
            raise ValueError(
                f"Checkpoint({place!r}): the URL contains {' '.join(sorted(unsupported))}. It must be a plain "
                f"address; fsspec reads credentials from the environment, as in FSSPEC_{self.protocol.upper()}_KEY."
            )
        try:
            fsspec.get_filesystem_class(self.protocol)
        except ImportError as error:
            package = known_implementations[self.protocol]["class"].split(".")[0]
            package = f"'fsspec[{self.protocol}]'" if package == "fsspec" else package
            raise ImportError(f"Checkpoint({url!r}): {error}: pip install {package}") from None
        except ValueError:
            near = get_close_matches(self.protocol, available_protocols()) or ["s3", "gs", "abfs", "sftp"]
            raise ValueError(
                f"Checkpoint({url!r}): fsspec has no protocol {self.protocol!r}; try {', '.join(near)}."
            ) from None
        self.url = url.rstrip("/")
        self.entries: dict[str, Entry] = {}
        self.problems: dict[str, ValueError] = {}
        self._sizes: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.damaged: set[tuple[str, str]] = set()
        self.is_listed = False

    @property
    def _files(self) -> Any:
        return url_to_fs(self.url)[0]  # cached; some file systems connect when they are created

    @property
    def _path(self) -> str:
        return str(url_to_fs(self.url)[1]).rstrip("/")

    def list(self) -> None:
        """Read the names and manifests.

        Raises:
            FileNotFoundError: there is no such bucket.
            Exception: the storage cannot be read.
        """
        files = self._files
        files.invalidate_cache()
        try:
            infos = [info for info in files.ls(self._path, detail=True) if info["type"] == "file"]
        except FileNotFoundError as error:
            if "bucket does not exist" in str(error):
                raise
            infos = []
        names = [PurePosixPath(info["name"]).name for info in infos]
        self.pinned = {f"{name.removesuffix(PINNED)}{SUFFIX}" for name in names if name.endswith(PINNED)}
        self.entries, self.problems, self._sizes = {}, {}, {}
        self._read(
            {
                name: info["size"]
                for name, info in zip(names, infos, strict=True)
                if name.endswith(SUFFIX) and name[0] != "."
            }
        )
        self.is_listed = True

    def has(self, entry: Entry) -> bool:
        """Return whether the content of a local checkpoint is here, possibly under another name."""
        facts = entry.sha256, entry.judged_by
        if (present := self.entries.get(entry.path.name)) is not None:
            return (present.sha256, present.judged_by) == facts
        return any((present.sha256, present.judged_by) == facts for present in self.entries.values())

    def size_of(self, entry: Entry) -> int:
        """Return the bytes of all files of a checkpoint here."""
        shards = 0 if entry.shards is None else int(self._files.du(f"{self._path}/{entry.shards[0]}"))
        return self._sizes[entry.path.name] + shards

    def refusal(self, entry: Entry) -> str:
        """Return why a local checkpoint may not be uploaded; an empty text if it may."""
        name = entry.path.name
        present, problem = self.entries.get(name), self.problems.get(name)
        if present is not None and present.training != entry.training:
            return f"{self.url}/{name} is of another training: use another URL, or another name= in fit"
        if problem is not None and type(problem) is not ValueError:  # else it is damaged
            return f"{problem} Remove it there, or use another URL"
        return ""

    def upload(self, entry: Entry, files: Sequence[Path], moved: Callable[[], object]) -> None:
        """Upload the files of a checkpoint, its manifest last, and read the manifest again.

        Args:
            entry: the checkpoint.
            files: its files; the first has the manifest.
            moved: called whenever bytes were sent.

        Raises:
            Exception: it could not be uploaded; no file has its name, unless an earlier version was there.
        """
        folder, name = entry.path.parent, entry.path.name
        hidden = f"{self._path}/.{name.partition('_epoch_')[0]}.tmp"  # each upload replaces what a failed one left
        for file in [*files[1:], files[0]]:
            self._put(file, hidden, f"{self._path}/{file.relative_to(folder).as_posix()}", _Moves(moved))
        self.damaged.discard((name, entry.sha256))
        self._read({name: self._files.info(f"{self._path}/{name}")["size"]})
        if name not in self.entries or self.entries[name].sha256 != entry.sha256:
            raise OSError(f"{self.url}/{name} differs from {entry.path} after the upload")

    def pin(self, name: str) -> None:
        self._files.pipe_file(f"{self._path}/{name.removesuffix(SUFFIX)}{PINNED}", b"")
        self.pinned.add(name)

    def download(self, entry: Entry, folder: Path) -> Path:
        """Download a checkpoint and its shards; return its path."""
        if entry.shards is not None:
            (folder / entry.shards[0]).mkdir()
            for source in self._files.ls(f"{self._path}/{entry.shards[0]}", detail=False):
                self._files.get_file(source, str(folder / entry.shards[0] / PurePosixPath(source).name))
        path = folder / entry.path.name
        self._files.get_file(f"{self._path}/{path.name}", str(path))
        return path

    def remove(self, name: str) -> None:
        """Remove a checkpoint and its shards; one that was pinned meanwhile stays."""
        if self._exists(f"{name.removesuffix(SUFFIX)}{PINNED}"):
            self.pinned.add(name)
            return
        shards = self.entries[name].shards
        if self._exists(name):
            self._files.rm_file(f"{self._path}/{name}")
        if shards is not None and self._exists(shards[0]):
            self._files.rm(f"{self._path}/{shards[0]}", recursive=True)
        del self.entries[name]

    def _exists(self, name: str) -> bool:
        try:  # `exists` of fsspec is False in an outage, too
            self._files.info(f"{self._path}/{name}")
        except FileNotFoundError:
            return False
        return True

    def _put(self, file: Path, hidden: str, target: str, callback: Callback) -> None:
        if self.protocol in OBJECT_STORES:
            self._files.put_file(str(file), target, callback=callback)
            return
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(file), hidden, callback=callback)
        self._files.mv(hidden, target)

    def _read(self, sizes: dict[str, int]) -> None:
        paths = [f"{self._path}/{name}" for name in sizes]
        begins = [max(0, size - TAIL) for size in sizes.values()]
        tails = self._files.cat_ranges(paths, begins, [*sizes.values()], on_error="return") if paths else []
        for (name, size), tail in zip(sizes.items(), tails, strict=True):
            self.entries.pop(name, None)
            self.problems.pop(name, None)
            if isinstance(tail, FileNotFoundError):  # removed since it was listed
                continue
            if isinstance(tail, BaseException):
                raise tail
            try:
                entry = read_manifest(Path(name), source=_Tail(tail, size))
                if (name, entry.sha256) in self.damaged:
                    raise ValueError(f"{name} is damaged.")
                self.entries[name], self._sizes[name] = entry, size
            except ValueError as error:
                self.problems[name] = error


def local_folder(url: str) -> Path:
    """Return the folder on this machine for a URL: `runs/s3/bucket/run` for `s3://bucket/run`."""
    protocol, _, path = url.partition("://")
    return Path("runs", protocol, *(clean(part) for part in path.split("/") if part))
