"""A placeholder for objects that a recording does not contain."""

from __future__ import annotations

from typing import Any

from heliograph import NotRecorded


class Absent:
    """A placeholder in a replay: any use of it raises `NotRecorded`.

    Args:
        description: names the missing object in the error.
    """

    def __init__(self, description: str) -> None:
        self._description = description

    def __getattr__(self, name: str) -> Any:
        raise NotRecorded(self._description)

    def __getitem__(self, key: Any) -> Any:
        raise NotRecorded(self._description)

    def __iter__(self) -> Any:
        raise NotRecorded(self._description)

    def __len__(self) -> int:
        raise NotRecorded(self._description)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotRecorded(self._description)
