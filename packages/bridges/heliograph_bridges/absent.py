"""What no recording of a run holds."""

from __future__ import annotations

from typing import Any

from heliograph import NotRecorded


class Absent:
    """Stands in a replay for what is not recorded: any use of it raises `NotRecorded`.

    Args:
        what: it is, for the error.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise NotRecorded(self._what)

    def __getitem__(self, key: Any) -> Any:
        raise NotRecorded(self._what)

    def __iter__(self) -> Any:
        raise NotRecorded(self._what)

    def __len__(self) -> int:
        raise NotRecorded(self._what)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `NotRecorded`."""
        raise NotRecorded(self._what)
