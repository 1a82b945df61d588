"""Names that MLflow takes, for names that it refuses."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Final

from heliograph.spi import Place

LONGEST: Final = 200  # MLflow takes 250, for tags with a prefix, too
TAG: Final = "heliograph.{kind}."


class Names:
    """The names under which metrics or hyper-parameters are in a run of MLflow.

    A name that MLflow refuses gets another, and a tag of the run with its true one, so that a resumed run continues the
    same curves.

    Args:
        kind: `metric` or `parameter`.
        taken: those that are in the run.
        tags: of the run.

    Attributes:
        tags: those that the run lacks.
    """

    def __init__(self, kind: str, taken: Iterable[str], tags: Mapping[str, str]) -> None:
        self._prefix = TAG.format(kind=kind)
        self._true = {name: tags.get(self._prefix + name, name) for name in taken}
        self._shown = {true: name for name, true in self._true.items()}
        self.tags: dict[str, str] = {}

    def show(self, name: str) -> str:
        """Return the name for a name."""
        if name not in self._shown:
            text = short = allowed(name)
            number = 1
            while text in self._true:
                number += 1
                text = f"{short}-{number}"
            self._true[text], self._shown[name] = name, text
            if text != name:
                self.tags[self._prefix + text] = name
        return self._shown[name]

    def take_new(self) -> dict[str, str]:
        """Return the true names of those that the run has tags for now, and had none."""
        new = {key.removeprefix(self._prefix): name for key, name in self.tags.items()}
        self.tags.clear()
        return new


def allowed(name: str) -> str:
    """Return a name with other characters for those that MLflow refuses."""
    text = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", name)).lstrip("/.")
    return text[:LONGEST] or "_"


def next_version(name: str, text: str, held: Mapping[str, str]) -> str | None:
    """Return the name for a value: `lr`, or `lr.2` and so on where it has had others; None where it is there."""
    shown, number = name, 1
    latest = None
    while shown in held:
        latest, number = held[shown], number + 1
        shown = f"{name}.{number}"
    return None if latest == text else shown


def folder_of(name: str, place: Place) -> str:
    """Return where among the artifacts something is kept: its name and step, below the folder that it is in."""
    again = f"_roll_back_{place.rollbacks}" if place.rollbacks else ""
    return posixpath.join(allowed(name), f"step_{place.step}{again}")
