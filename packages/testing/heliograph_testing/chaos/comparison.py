"""What a training did, read from a journal, and the first difference between two of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from heliograph.spi import Difference, Fact

from .checkpoint_facts import AT_THE_END, facts_of
from .journal import Entry, read, unpack

Place = tuple[int, int]  # which training of the script, counted from 0, and finished batches with this one
HEEDED = 10  # step boundaries by which a process that gets a SIGTERM has ended: a plugin may veto the stop at some
Key = tuple[int, str, str]  # which training of the script; what, and when
RUNS = ("the reference", "the other run")


@dataclass
class Story:
    """What one rank did, in all attempts.

    Attributes:
        done: how many times each batch was done.
        facts: the losses and metrics, one entry for every time; and what each training ended with.
        ends: of each training that came to its end, the entry of the journal.
        faults: the faults that have acted, each with who has noticed it.
        outside: files that were written outside of the folder.
        began: how many times a training began.
        resumed: how many of these continued from a checkpoint.
        restarted: how many of these did its first batch once more.
        lost: in words, the first restart that did not continue from the newest checkpoint, checkpoint that was
            announced and is not intact, or notice that was ignored; empty for none.
        recording: the recording of the last training, None where the script makes none.
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
    _notified: tuple[int, int] | None = None  # the training, and its batches, before the last SIGTERM of this attempt
    _boundaries: int = 0  # that came after it
    _resumes: bool = False  # whether this attempt has a plugin with resume="auto"
    _saved: dict[int, int] = field(default_factory=dict)  # the batches of the newest checkpoint of each training
    _awaited: dict[int, int] = field(default_factory=dict)  # of those at whose beginning it was there

    def add(self, training: int, fact: Fact) -> None:
        """Take a fact; of several ends of a training, which was stopped and continued, the last one counts."""
        times = self.facts.setdefault((training, fact.what, fact.when), [])
        times[:] = [fact] if fact.when == AT_THE_END else [*times, fact]

    def begin(self, entry: Entry) -> None:
        """Take the beginning of an attempt."""
        self.began += 1
        self._notified = None
        self._resumes = entry["resumes"]
        if (saved := self._saved.get(entry["training"])) is not None:
            self._awaited[entry["training"]] = saved

    def meet(self, entry: Entry) -> None:
        """Take a fault that has acted."""
        self.faults.append(entry)
        if entry["kind"] == "preempt":
            self._notified, self._boundaries = (entry["training"], entry["batch"]), 0

    def note_batch(self, entry: Entry) -> None:
        """Take a batch that was done."""
        self.arrive(entry["training"], entry["batch"] - 1, is_resume=False)
        self.done[entry["training"], entry["batch"]] += 1
        self._boundaries += entry["ends_step"]

    def end(self, entry: Entry) -> None:
        """Take the end of a training."""
        self.outside += entry["outside"]
        self.recording = None if entry["recording"] is None else Path(entry["recording"])
        if entry["status"] != "failed":
            self.ends[entry["training"]] = entry
        training, batch = self._notified or (None, 0)
        if training == entry["training"] and self._boundaries > HEEDED and not self.lost:
            self.lost = f"the training continued for {entry['batch'] - batch} batches after a SIGTERM"

    def note_save(self, entry: Entry) -> None:
        """Take a checkpoint that was announced; one after a roll-back is of an earlier batch."""
        self._saved[entry["training"]] = entry["batch"]
        if entry["quality"] != "intact" and not self.lost:
            self.lost = f"attempt {self.began} announced the checkpoint {entry['name']}, which is {entry['quality']}"

    def arrive(self, training: int, batch: int, *, is_resume: bool) -> None:
        """Take where an attempt continues; that counts once."""
        self.resumed += is_resume
        self.restarted += not is_resume and batch == 0 and (training, 1) in self.done
        saved = self._awaited.pop(training, None)
        if saved is None or batch >= saved or self.lost:
            return
        where = "began from the start" if batch == 0 else f"continued at batch {batch}"
        mend = "" if self._resumes else ": Checkpoint(..., resume='auto') continues from it"
        self.lost = f"attempt {self.began} {where}, and there was a checkpoint of batch {saved}{mend}"

    @property
    def in_order(self) -> list[Fact]:
        """All facts."""
        return [fact for facts in self.facts.values() for fact in facts]

    @property
    def batches_done(self) -> int:
        """How many batches were done, those that were repeated included."""
        return self.done.total()

    @property
    def counts(self) -> Counter[str]:
        """How often each event was emitted."""
        total: Counter[str] = Counter()
        for end in self.ends.values():
            total.update(end["counts"])
        return total


def story_of(path: Path) -> Story:
    """Return what a journal says."""
    story = Story()
    for entry in read(path):
        what = entry["what"]
        if what == "begin":
            story.begin(entry)
        elif what == "saved":
            story.note_save(entry)
        elif what == "resumed":
            story.arrive(entry["training"], entry["batch"], is_resume=True)
        elif what == "batch":
            story.note_batch(entry)
        elif what == "fact":
            story.add(entry["training"], unpack(entry["fact"]))
        elif what == "fault":
            story.meet(entry)
        elif what == "noticed":
            next(each for each in reversed(story.faults) if each["number"] == entry["number"]).update(
                by=entry["by"], answer=entry["answer"]
            )
        elif what == "end":
            story.end(entry)
    for training, end in story.ends.items():
        for fact in facts_of(Path(end["last"])) if end["last"] is not None else ():
            story.add(training, fact)
    return story


def first_difference(
    reference: Story, other: Story, aside: frozenset[tuple[str, str]] = frozenset(), *, only_last: bool = False
) -> str | None:
    """Return the first difference of a training from another, in words; None where they are equal, bit for bit.

    Args:
        reference: of a training without faults.
        other: of one that should equal it.
        aside: (what, path) of values that are not compared; see `Difference.between`.
        only_last: of what was done several times, compare only the last time, which counts.
    """
    for key in {**reference.facts, **other.facts}:
        expected, found = reference.facts.get(key, []), other.facts.get(key, [])[-1 if only_last else 0 :]
        training, what, _ = key
        if (what, "") in aside or (what == "metrics" and not (expected and found)):
            continue
        in_training = f" (training {training + 1})" if training else ""
        if not (expected and found):
            return f"{next(Difference.between(expected[:1], found[:1], names=RUNS))}{in_training}"
        for fact in found:
            # One of several logs at a moment must be equal. The likeliest is the one with the same metrics.
            alike = sorted(expected, key=lambda one: one.leaves.keys() != fact.leaves.keys())
            differences = [next(Difference.between([one], [fact], names=RUNS, aside=aside), None) for one in alike]
            if all(differences):
                return f"{differences[0]}{in_training}"
    return None
