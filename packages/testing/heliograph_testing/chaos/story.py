"""What one rank did in all attempts, read from its journal and checkpoints, and the first difference of two ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from heliograph.spi import Difference, Fact, Store, leaves

from ..resume.check import Aside
from .fault import FaultOutcome
from .journal import Entry, read

if TYPE_CHECKING:
    from collections.abc import Iterator

AT_THE_END = "at the end of the run"
OF_A_PROCESS = (".lock", ".holder", ".steps", ".verified.jsonl")  # files that stay after a kill
HEEDED = 10  # step boundaries after a SIGTERM until the process must end: a plugin may veto some stops
RUNS = ("the reference", "the other run")
Key = tuple[int, str, str]  # training of the script; kind and moment of the fact


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
    _ends: dict[int, Entry] = field(default_factory=dict)  # the last end of each training
    _began: int = 0  # attempts
    _notified: tuple[int, int] | None = None  # the training and its batches at the last SIGTERM
    _boundaries: int = 0  # step boundaries after it
    _saved: dict[int, int] = field(default_factory=dict)  # batches of the newest checkpoint per training
    _awaited: dict[int, int] = field(default_factory=dict)  # batches at which each resumed training must continue

    @classmethod
    def read(cls, path: Path) -> RankStory:
        story = cls()
        for entry in read(path):
            story._add(entry)
        for training, end in story._ends.items():
            story.counts.update(end["counts"])
            for fact in _facts_of(end) if end["last"] is not None else ():
                story._add_fact(training, fact)
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
                if training in self._saved:
                    self._awaited[training] = self._saved[training]
            case "resumed":
                self.resumed += 1
                self._arrive(training, entry["batch"])
            case "fact":
                self._add_fact(training, entry["fact"])
            case "batch":
                self.restarted += entry["batch"] == 1 and (training, 1) in self.done
                self._arrive(training, entry["batch"] - 1)
                self.done[training, entry["batch"]] += 1
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
                self._end(entry)

    def _add_fact(self, training: int, fact: Fact) -> None:
        # The last end of a training that was stopped and continued replaces earlier ones.
        times = self.facts.setdefault((training, fact.what, fact.when), [])
        times[:] = [fact] if fact.when == AT_THE_END else [*times, fact]

    def _arrive(self, training: int, batch: int) -> None:
        saved = self._awaited.pop(training, 0)
        if batch < saved:
            self._lose(
                f"attempt {self._began} continued at batch {batch}, but a checkpoint of batch {saved} existed: "
                f"Checkpoint(..., resume='auto') continues from it"
            )

    def _end(self, entry: Entry) -> None:
        if entry["status"] != "failed":
            self._ends[entry["training"]] = entry
        training, batch = self._notified or (None, 0)
        if training == entry["training"] and self._boundaries > HEEDED:
            self._lose(f"the training continued for {entry['batch'] - batch} batches after a SIGTERM")

    def _lose(self, text: str) -> None:
        self.lost = self.lost or text


def _facts_of(end: Entry) -> Iterator[Fact]:
    # Facts of the folder of the last checkpoint that must be equal; its state is in the journal.
    last: Path = end["last"]
    names = sorted(path.name for path in last.parent.iterdir())
    hidden = [name for name in names if name.startswith(".") and not name.endswith(OF_A_PROCESS)]
    checkpoints = [name for name in names if name.endswith(".pth") and not name.startswith(".")]
    qualities = {"last": last.name, **{name: _quality_of(last.with_name(name)) for name in checkpoints}}
    for what, value in {"leftovers": hidden or "none", "checkpoints": qualities}.items():
        yield Fact(what, AT_THE_END, (0, 0, 0), leaves(value))


def _quality_of(path: Path) -> str:
    try:
        Store(path.parent, path.stem).verify(path)
    except (OSError, ValueError):
        return "damaged"
    return "intact"


def first_difference(
    reference: RankStory, story: RankStory, aside: Aside = frozenset(), *, only_last: bool = False
) -> str | None:
    """Return the first difference as text; `only_last` compares only the last time of repeated facts."""
    for key in {**reference.facts, **story.facts}:
        expected, actual = reference.facts.get(key, []), story.facts.get(key, [])[-1 if only_last else 0 :]
        training, kind, _ = key
        if (kind, "") in aside or (kind == "metrics" and not (expected and actual)):
            continue
        in_training = f" (training {training + 1})" if training else ""
        if not (expected and actual):
            return f"{next(Difference.between(expected[:1], actual[:1], names=RUNS))}{in_training}"
        for fact in actual:
            # One of several logs at a moment must be equal, probably one with the same metrics.
            candidates = sorted(expected, key=lambda other: other.leaves.keys() != fact.leaves.keys())
            differences = [
                next(Difference.between([candidate], [fact], names=RUNS, aside=aside), None) for candidate in candidates
            ]
            if all(differences):
                return f"{differences[0]}{in_training}"
    return None
