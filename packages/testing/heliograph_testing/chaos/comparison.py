"""The facts of a training, read from its journal and checkpoints, and the first difference of two trainings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph.spi import Difference, Fact, Store, leaves

from .journal import Entry, quality_of, read, unpack

if TYPE_CHECKING:
    from collections.abc import Mapping

AT_THE_END = "at the end of the run"
PARTS = ("modules", "optimizers", "schedulers", "control", "epoch_begun", "at_save_point")
OF_A_PROCESS = (".lock", ".holder", ".steps", ".verified.jsonl")  # files that stay after a kill


def facts_of(last: Path) -> list[Fact]:
    # Facts of the folder of the last checkpoint that must be equal.
    names = sorted(path.name for path in last.parent.iterdir())
    hidden = [name for name in names if name.startswith(".") and not name.endswith(OF_A_PROCESS)]
    checkpoints = [name for name in names if name.endswith(".pth") and not name.startswith(".")]
    facts: dict[str, Any] = {"leftovers": hidden or "none"}
    facts["checkpoints"] = {name: quality_of(last.with_name(name)) for name in checkpoints}
    try:
        state = Store(last.parent, last.stem).load(last)
    except (OSError, ValueError) as error:
        facts["last_checkpoint"] = str(error).replace(str(last.parent), "")  # equal in every copy
    else:
        progress = {name: value for name, value in state["progress"].items() if "seconds" not in name}
        compared = {part: state[part] for part in PARTS if part in state}
        facts["last_checkpoint"] = {"name": last.name, "progress": progress, **compared}
    return [Fact(what, AT_THE_END, (0, 0, 0), leaves(value)) for what, value in facts.items()]


def is_of_end(facts: Mapping[str, Fact]) -> bool:
    # Whether the last checkpoint was saved at the end of the training.
    if "last_checkpoint" not in facts:
        return False
    ended, saved = facts["progress"].leaves, facts["last_checkpoint"].leaves
    return all(saved.get(f"progress.{name}") == ended[name] for name in ("epoch", "batch", "earlier_batches"))


Place = tuple[int, int]  # training of the script, from 0, and finished batches
HEEDED = 10  # step boundaries after a SIGTERM until the process must end: a plugin may veto some stops
Key = tuple[int, str, str]  # training of the script; kind and moment of the fact
RUNS = ("the reference", "the other run")


@dataclass
class RankStory:
    """The progress of one rank in all attempts.

    Attributes:
        done: how many times each batch was trained.
        facts: losses and metrics with one entry per time, and the final state of each training.
        ends: the journal entry for the end of each training.
        faults: the faults that acted, with the plugin that noticed them.
        outside: files that were written outside the folder.
        began: the number of attempts.
        resumed: how many attempts continued from a checkpoint.
        restarted: how many attempts repeated the first batch.
        lost: the first loss of work as text: a restart not from the newest checkpoint, a checkpoint that was announced
            but is not intact, or an ignored SIGTERM; empty if there is none.
        recording: the recording of the last training, if any.
    """

    done: Counter[Place] = field(default_factory=Counter)
    facts: dict[Key, list[Fact]] = field(default_factory=dict)
    ends: dict[int, Entry] = field(default_factory=dict)
    faults: list[Entry] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    began: int = 0
    resumed: int = 0
    restarted: int = 0
    lost: str = ""
    recording: Path | None = None
    _notified: tuple[int, int] | None = None  # the training and its batches at the last SIGTERM
    _boundaries: int = 0  # step boundaries after it
    _resumes: bool = False  # whether this attempt uses resume="auto"
    _saved: dict[int, int] = field(default_factory=dict)  # batches of the newest checkpoint per training
    _awaited: dict[int, int] = field(default_factory=dict)  # batches at which each resumed training must continue

    def add(self, training: int, fact: Fact) -> None:
        # The last end of a training that was stopped and continued replaces earlier ones.
        times = self.facts.setdefault((training, fact.what, fact.when), [])
        times[:] = [fact] if fact.when == AT_THE_END else [*times, fact]

    def begin(self, entry: Entry) -> None:
        self.began += 1
        self._notified = None
        self._resumes = entry["resumes"]
        if (saved := self._saved.get(entry["training"])) is not None:
            self._awaited[entry["training"]] = saved

    def note_fault(self, entry: Entry) -> None:
        self.faults.append(entry)
        if entry["kind"] == "preempt":
            self._notified, self._boundaries = (entry["training"], entry["batch"]), 0

    def note_batch(self, entry: Entry) -> None:
        self.arrive(entry["training"], entry["batch"] - 1, is_resume=False)
        self.done[entry["training"], entry["batch"]] += 1
        self._boundaries += entry["ends_step"]

    def end(self, entry: Entry) -> None:
        self.outside += entry["outside"]
        self.recording = None if entry["recording"] is None else Path(entry["recording"])
        if entry["status"] != "failed":
            self.ends[entry["training"]] = entry
        training, batch = self._notified or (None, 0)
        if training == entry["training"] and self._boundaries > HEEDED and not self.lost:
            self.lost = f"the training continued for {entry['batch'] - batch} batches after a SIGTERM"

    def note_save(self, entry: Entry) -> None:
        # After a rollback, the newest checkpoint may be of an earlier batch.
        self._saved[entry["training"]] = entry["batch"]
        if entry["quality"] != "intact" and not self.lost:
            self.lost = f"attempt {self.began} announced the checkpoint {entry['name']}, which is {entry['quality']}"

    def arrive(self, training: int, batch: int, *, is_resume: bool) -> None:
        self.resumed += is_resume
        self.restarted += not is_resume and batch == 0 and (training, 1) in self.done
        saved = self._awaited.pop(training, None)
        if saved is None or batch >= saved or self.lost:
            return
        where = "began from the start" if batch == 0 else f"continued at batch {batch}"
        fix = "" if self._resumes else ": Checkpoint(..., resume='auto') continues from it"
        self.lost = f"attempt {self.began} {where}, but a checkpoint of batch {saved} existed{fix}"

    @property
    def in_order(self) -> list[Fact]:
        return [fact for facts in self.facts.values() for fact in facts]

    @property
    def batches_done(self) -> int:
        return self.done.total()

    @property
    def counts(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for end in self.ends.values():
            total.update(end["counts"])
        return total


def story_of(path: Path) -> RankStory:
    story = RankStory()
    for entry in read(path):
        kind = entry["what"]
        if kind == "begin":
            story.begin(entry)
        elif kind == "saved":
            story.note_save(entry)
        elif kind == "resumed":
            story.arrive(entry["training"], entry["batch"], is_resume=True)
        elif kind == "batch":
            story.note_batch(entry)
        elif kind == "fact":
            story.add(entry["training"], unpack(entry["fact"]))
        elif kind == "fault":
            story.note_fault(entry)
        elif kind == "noticed":
            next(fault for fault in reversed(story.faults) if fault["number"] == entry["number"]).update(
                by=entry["by"], answer=entry["answer"]
            )
        elif kind == "end":
            story.end(entry)
    for training, end in story.ends.items():
        for fact in facts_of(Path(end["last"])) if end["last"] is not None else ():
            story.add(training, fact)
    return story


def first_difference(
    reference: RankStory,
    story: RankStory,
    aside: frozenset[tuple[str, str]] = frozenset(),
    *,
    only_last: bool = False,
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
