"""The folder of a fork: it holds no training when the fork begins, and a mark until something of the fork is saved."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from heliograph.builtin_callbacks.checkpoint.resume import UNSAVED_FORK

from ..format.reader import SUFFIX


def check_free(folder: Path) -> None:
    """Raise ValueError where a folder is a file, or holds a training that is not a fork without a save."""
    file = next((each for each in (folder, *folder.parents) if each.exists() and not each.is_dir()), None)
    if file is not None:
        raise ValueError(f"{file} is not a folder: give into= (--into on the command line) another one.")
    ends = (".pth",) if any(folder.rglob(UNSAVED_FORK)) else (".pth", SUFFIX)
    found = next((each for end in ends for each in folder.rglob(f"*{end}")), None)
    if found is not None:
        raise ValueError(
            f"{folder} holds a training already ({found.name}): give into= (--into on the command line) another folder."
        )


class UnsavedMarks:
    """Files by which nobody takes a fork that is not saved yet for a training that could begin or continue there.

    Args:
        folder: of the fork.
        saving: the folders that its checkpoints are written to.
        text: what the fork is.
    """

    def __init__(self, folder: Path, saving: Iterable[Path], text: str) -> None:
        self._saving = list(saving)
        self._marks, self._text = [each / UNSAVED_FORK for each in dict.fromkeys([folder, *self._saving])], text

    def write(self) -> None:
        """Mark the folders."""
        for mark in self._marks:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(self._text)

    def note_save(self, path: Path) -> None:
        """Remove the marks if what was saved is a checkpoint that can be resumed."""
        if path.parent in self._saving:
            self.remove()

    def remove(self) -> None:
        """Remove the marks; once more does nothing."""
        for mark in self._marks:
            mark.unlink(missing_ok=True)
