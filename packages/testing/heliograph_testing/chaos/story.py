"""What one rank did in all attempts: its journal, which outlives its processes, and the first difference of two."""

from __future__ import annotations

import os
import pickle
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heliograph.spi import Difference, Fact

from ..resume.check import Aside
from .fault import FaultOutcome

AT_THE_END = "at the end of the run"
HEEDED = 10  # step boundaries after a SIGTERM until the process must end: a plugin may veto some stops
RUNS = ("the reference", "the other run")
Entry = dict[str, Any]
Key = tuple[int, str, str]  # training of the script; kind and moment of the fact
_trainings = Counter[int]()  # by process, because a fork counts from 0


class Journal:
    """A file with an entry per line, written at once because a kill may follow."""

    def __init__(self, path: Path) -> None:
        self._write = os.write  # a fault of the disk may replace it later
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._training = _trainings[os.getpid()]
        _trainings[os.getpid()] += 1

    def note(self, what: str, **facts: Any) -> None:
        entry = {"what": what, "training": self._training, **facts}
        self._write(self._file, b64encode(pickle.dumps(entry)) + b"\n")

    def close(self) -> None:
        os.close(self._file)


def of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}") if rank else path


def read(path: Path, start: int = 0) -> Iterator[Entry]:
    # A kill may have truncated a line.
    for line in path.read_bytes()[start:].splitlines() if path.exists() else ():
        try:
            yield pickle.loads(b64decode(line))  # noqa: S301  # written by this program
        except (ValueError, EOFError, pickle.UnpicklingError):
            continue


@dataclass
class RankStory:
    """The progress of one rank in all attempts; `training` is the number of a training in the script.

    Attributes:
        done: how many times each batch (training, number) was trained.
        facts: losses and metrics with one entry per time, and the final state of each training.
        counts: the emissions of each event.
        faults: the faults that acted, by number.
        resumed: how many attempts continued from a checkpoint.
        restarted: how many attempts repeated the first batch.
        lost: the first loss of work as text: a restart not from the newest checkpoint, a checkpoint that was announced
            but is damaged, or an ignored SIGTERM; empty if there is none.
    """

    done: Counter[tuple[int, int]] = field(default_factory=Counter)
    facts: dict[Key, list[Fact]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: dict[int, FaultOutcome] = field(default_factory=dict)
    resumed: int = 0
    restarted: int = 0
    lost: str = ""
    _began: int = 0  # attempts
    _notified: tuple[int, int] | None = None  # the training and its batches at the last SIGTERM
    _boundaries: int = 0  # step boundaries after it
    _saved: dict[int, int] = field(default_factory=dict)  # batches of the newest checkpoint per training
    _awaited: int = 0  # batches at which this attempt must continue; 0 after its first batch

    @classmethod
    def read(cls, path: Path) -> RankStory:
        story = cls()
        for entry in read(path):
            story._add(entry)
        return story

    @property
    def in_order(self) -> list[Fact]:
        return [fact for facts in self.facts.values() for fact in facts]

    def _add(self, entry: Entry) -> None:
        training = entry["training"]
        match entry["what"]:
            case "begin":
                self._began += 1
                self._notified = None
                self._awaited = self._saved.get(training, 0)
            case "resumed":
                self.resumed += 1
            case "fact":
                fact = entry["fact"]
                times = self.facts.setdefault((training, fact.what, fact.when), [])
                # The last end of a training that was stopped and continued replaces earlier ones.
                times[:] = [fact] if fact.when == AT_THE_END else [*times, fact]
            case "batch":
                batch = entry["batch"]
                self.restarted += batch == 1 and (training, 1) in self.done
                if batch <= self._awaited:
                    self._lose(
                        f"attempt {self._began} continued at batch {batch - 1}, but a checkpoint of batch "
                        f"{self._awaited} existed: Checkpoint(..., resume='auto') continues from it"
                    )
                self._awaited = 0
                self.done[training, batch] += 1
                self._boundaries += entry["ends_step"]
            case "saved":
                self._saved[training] = entry["batch"]  # after a rollback, the newest may be of an earlier batch
            case "damaged":
                self._lose(f"attempt {self._began} announced the checkpoint {entry['name']}, which is damaged")
            case "fault":
                outcome = self.faults[entry["number"]] = entry["outcome"]
                if outcome.fault.kind == "preempt":
                    self._notified, self._boundaries = (training, outcome.batches), 0
            case "end":
                self.counts.update(entry["counts"] if entry["status"] != "failed" else {})
                notified_training, notified_at = self._notified or (None, 0)
                if notified_training == training and self._boundaries > HEEDED:
                    self._lose(f"the training continued for {entry['batch'] - notified_at} batches after a SIGTERM")

    def _lose(self, text: str) -> None:
        self.lost = self.lost or text


def first_difference(
    reference: RankStory, story: RankStory, aside: Aside = frozenset(), *, only_last: bool = False
) -> str | None:
    """Return the first difference as text; `only_last` compares only the last time of repeated facts."""
    for key in {**reference.facts, **story.facts}:
        training, what, _ = key
        expected, times = reference.facts.get(key, []), story.facts.get(key, [])
        if (what, "") in aside or (what == "metrics" and not (expected and times)):
            continue
        for repetition in [[fact] for fact in times][-1 if only_last else 0 :] or [[]]:
            names = [fact.leaves.keys() for fact in repetition]  # of metrics: there may be several logs at a moment
            matching = [fact for fact in expected if [fact.leaves.keys()] == names] or expected
            for difference in Difference.between(matching[:1], repetition, names=RUNS, aside=aside):
                return f"{difference} (training {training + 1})" if training else str(difference)
    return None
