"""Trainings with a recorder that kill themselves: `python recorder_kills.py FOLDER POINT...`, a child for each point.

A point is `<name>:<where>:<number>`: killed at the so-many-th `batch`, `validation` batch, or `save`; or `before`,
`within` or `after` the so-many-th write of the recorder.
`none` is not killed. Children of one name share a folder, so that later ones resume.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import heliograph as h
import torch
from heliograph.packages.recorder.tests.recordings import fit
from heliograph.tests.kills import Killer, in_a_child
from heliograph_recorder.format import writer
from heliograph_recorder.plugin import Recorder


class Witness(Killer):
    """Notes every batch, after all other plugins, and kills."""

    affects_training = False  # each attempt is killed elsewhere

    def __init__(self, path: Path, where: str, number: int) -> None:
        super().__init__(where, number)
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @h.on(h.BatchEnd, lane=h.Lane.REPORT)
    def note(self, run: h.Run, event: h.BatchEnd) -> None:
        at = run.progress
        line = f"{at.epoch} {at.batch} {at.steps} {at.samples} {at.seconds} {run.stepping.window}\n"
        os.write(self.file, line.encode())
        self.act("batch")

    @h.on(h.ValidationBatchEnd)
    def act_in_validation(self, run: h.Run, event: h.ValidationBatchEnd) -> None:
        self.act("validation")

    @h.on(h.SavePoint, lane=h.Lane.PERSIST)
    def act_in_save(self, run: h.Run, event: h.SavePoint) -> None:
        self.act("save")


def patch_writes(witness: Witness) -> None:
    """Kill within the recorder's own writes."""
    write = os.write

    def killing(file: int, data: bytes) -> int:
        if not data.startswith(b"0 ") and not data.startswith(b"1 "):  # the witness's own
            witness.act("before")
            if witness.where == "within" and witness.left == 1:
                write(file, data[: len(data) // 2])
            witness.act("within")
            done = write(file, data)
            witness.act("after")
            return done
        return write(file, data)

    writer.os.write = killing  # type: ignore[attr-defined]


def train(folder: Path, where: str, number: int) -> None:
    """Train until the kill comes."""
    witness = Witness(folder / "witness", where, number)
    if where in ("before", "within", "after"):
        patch_writes(witness)
    plugins = [
        Recorder(folder),
        h.GradientAccumulation(2),
        h.LogSchedule(h.Every(steps=3)),
        h.ValidationSchedule(h.Every(steps=4)),
        h.SaveSchedule(h.Every(steps=5)),
        h.Checkpoint(folder / "checkpoints", resume="auto"),
        witness,
    ]
    fit(plugins, batches=20, epochs=2)


def main(folder: Path, points: list[str]) -> None:
    """Fork a child for each point, and wait for its end."""
    torch.set_num_threads(1)
    fit([h.ValidationSchedule(h.Every(epochs=1))], batches=1, epochs=1)  # imports for all children
    for point in points:
        name, where, number = point.split(":")
        (folder / name).mkdir(exist_ok=True)
        in_a_child(partial(train, folder / name, where, int(number)), killed=where != "none", about=point)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
