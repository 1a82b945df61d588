"""The configuration of a run, saved beside its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from heliograph import Lane, Plugin, Run, TrainStart, on
from heliograph.core.checkpoint.storage.files import write_whole
from heliograph.core.system.numbered_files import find_numbered, make_numbered
from heliograph.spi import on_main

END = ".config.yaml"
OWNER = re.compile(r"\A# training ([0-9a-f]+)")


class ConfigFile(Plugin):
    """Save the configuration of a run as `<run>.config.yaml`, where it can be read and used again.

    A resumed run finds its own file, and notes what has changed since. A file of another training stays: this one's is
    then called `<run>-2.config.yaml`.

    Args:
        text: the configuration.
        values: the same, as `flat_values` has it.
        folder: where to save it; None saves nothing, and the run notes it.
        load: reads the values of a former text.
        begun: gets an entry when the training begins.
    """

    affects_training = False
    rehearses = False

    def __init__(self, text: str, values: Mapping[str, Any], folder: Path | None, load: Any, begun: list[bool]) -> None:
        self.text, self.values, self.folder, self._load, self._begun = text, values, folder, load, begun

    @on(TrainStart, lane=Lane.REPORT)
    def save(self, run: Run, event: TrainStart) -> None:
        """Save, now that it is known which training this is."""
        self._begun.append(True)
        folder = self.folder
        if folder is None:
            run.note("the configuration is not saved: give --folder=..., or add the plugin checkpoint")
            return
        for note in on_main(run.engine, lambda: list(self._save(folder, run.name, run.checkpoints.training_id))):
            run.note(note)

    def _save(self, folder: Path, name: str, training_id: str) -> Iterator[str]:
        """Write the file; yield what has changed since a former one of the same training."""
        path, former = _own_path(folder, name, training_id)
        text = f"# training {training_id}\n{self.text}"
        if text == former:
            return
        if former is not None:
            changes = "; ".join(differences(self._load(former), self.values))
            yield f"the configuration has changed since this training was begun: {changes or 'only its comments'}"
        write_whole(path, lambda aside: _write(aside, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _own_path(folder: Path, name: str, training_id: str) -> tuple[Path, str | None]:
    """Return the path for a training, and what it wrote there before; a new name is claimed by an empty file."""
    first = folder / f"{name}{END}"
    for path in find_numbered(first, END):
        text = path.read_text(encoding="utf-8", errors="replace")
        owner = OWNER.match(text)
        if owner is not None and owner[1] == training_id:
            return path, text
    return make_numbered(first, END), None


def flat_values(config: Any, key: str = "") -> dict[str, Any]:
    """Return the values of a configuration by the words that lead to them, as `optimizer.lr`.

    An object is its class path, with its arguments below it: `{"optimizer": "torch.optim.SGD", "optimizer.lr": 0.1}`.
    """
    if isinstance(config, dict) and "class_path" in config:
        arguments = {**config.get("init_args", {}), **config.get("dict_kwargs", {})}
        return {key: config["class_path"], **flat_values(arguments, key)}
    if isinstance(config, dict):
        items = list(config.items())
    elif isinstance(config, list) and any(isinstance(each, dict) for each in config):
        items = list(enumerate(config))
    else:
        return {key: config}
    found: dict[str, Any] = {}
    for name, value in items:
        found |= flat_values(value, f"{key}.{name}" if key else str(name))
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return what has changed, in words."""
    return [
        f"{key} {_shown(old, key)} -> {_shown(new, key)}"
        for key in sorted({*old, *new})
        if key not in old or key not in new or old[key] != new[key]
    ]


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "(none)"
