"""Storage in memory, whose operations fail while a test says so."""

from __future__ import annotations

from typing import Any, ClassVar

from fsspec.implementations.memory import MemoryFileSystem

ALL = frozenset({"ls", "put_file", "mv", "cat_ranges", "rm_file", "info", "get_file"})


class FlakyStorage(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Storage that raises in the operations in `failing`, and keeps their names and files in `calls`."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failing: ClassVar[set[str]] = set()
    calls: ClassVar[list[tuple[str, str]]] = []

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(str(path).replace("flaky://", "memory://"))

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, also of hidden ones and shards."""
        return sorted(path.removeprefix(f"/{folder}/") for path in self.store if path.startswith(f"/{folder}/"))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._call("ls", path)
        return super().ls(path, detail=detail, **options)

    def put_file(self, source: str, target: str, **options: Any) -> None:
        super().put_file(source, target, **options)
        if "put_file" in self.failing:  # half of it was sent
            self.store[target].truncate(self.store[target].size // 2)
        self._call("put_file", target)

    def mv(self, source: str, target: str, **options: Any) -> None:
        self._call("mv", target)
        super().mv(source, target, **options)

    def cat_ranges(self, paths: list[str], *values: Any, **options: Any) -> Any:
        self._call("cat_ranges", "")
        return super().cat_ranges(paths, *values, **options)

    def rm_file(self, path: str) -> None:
        self._call("rm_file", path)
        super().rm_file(path)

    def info(self, path: str, **options: Any) -> Any:
        self._call("info", path)
        return super().info(path, **options)

    def get_file(self, source: str, target: str, **options: Any) -> None:
        self._call("get_file", source)
        super().get_file(source, target, **options)

    def _call(self, operation: str, path: str) -> None:
        self.calls.append((operation, path.rpartition("/")[2]))
        if operation in self.failing:
            raise ConnectionError(f"{operation}: the storage is out of reach")
