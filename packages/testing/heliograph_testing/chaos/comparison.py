"""What a training did, read from a journal, and the first difference between two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint_facts import facts_of
from .journal import Entry, read, read_end

if TYPE_CHECKING:
    from heliograph.spi import Leaf

Place = tuple[int, int]  # which training of the script, counted from 0, and finished batches with this one
HEEDED = 10  # step boundaries by which a process that gets a SIGTERM has ended: a plugin may veto the stop at some
Moment = tuple[Place, str, int]  # an event, and how many epochs are finished at it
BY_THE_CLOCK = ("metrics.", "plugins.")  # values that may differ from run to run


@dataclass
class Story:
    """What one rank did, in all attempts.

    Attributes:
        losses: of each batch, one entry for every time that it was done: the losses, as hexadecimal numbers.
        metrics: of each log and validation, by its place and the name of the event, the same.
        ends: of each training that came to its end, the entry of the journal.
        facts: what it ended with, by the path of the value.
        faults: the faults that have acted, each with who has noticed it.
        outside: files that were written outside of the folder.
        began: how many times a training began.
        resumed: how many of these continued from a checkpoint.
        restarted: how many of these did its first batch once more.
        lost: in words, the first restart that did not continue from the newest checkpoint, checkpoint that was
            announced and is not intact, or notice that was ignored; empty for none.
        recording: the recording of the last training, None where the script makes none.
    """

    losses: dict[Place, list[list[str]]] = field(default_factory=dict)
    metrics: dict[Moment, list[dict[str, str]]] = field(default_factory=dict)
    ends: dict[int, Entry] = field(default_factory=dict)
    facts: dict[int, dict[str, Leaf]] = field(default_factory=dict)
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
        self.losses.setdefault((entry["training"], entry["batch"]), []).append(entry["losses"])
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
        self.restarted += not is_resume and batch == 0 and (training, 1) in self.losses
        saved = self._awaited.pop(training, None)
        if saved is None or batch >= saved or self.lost:
            return
        where = "began from the start" if batch == 0 else f"continued at batch {batch}"
        mend = "" if self._resumes else ": Checkpoint(..., resume='auto') continues from it"
        self.lost = f"attempt {self.began} {where}, and there was a checkpoint of batch {saved}{mend}"

    @property
    def batches_done(self) -> int:
        """How many batches were done, those that were repeated included."""
        return sum(map(len, self.losses.values()))

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
        elif what == "metrics":
            event, epoch, batch = entry["at"]
            story.metrics.setdefault(((entry["training"], batch), event, epoch), []).append(entry["values"])
        elif what == "fault":
            story.meet(entry)
        elif what == "noticed":
            next(each for each in reversed(story.faults) if each["number"] == entry["number"]).update(
                by=entry["by"], answer=entry["answer"]
            )
        elif what == "end":
            story.end(entry)
    for training, end in story.ends.items():
        story.facts[training] = read_end(path, training)
        if end["last"] is not None:
            story.facts[training] |= facts_of(Path(end["last"]))
    return story


def first_difference(
    reference: Story, other: Story, aside: Collection[str] = (), *, only_last: bool = False
) -> str | None:
    """Return the first difference of a training from another, in words; None where they are equal, bit for bit.

    Args:
        reference: of a training without faults.
        other: of one that should equal it.
        aside: paths of values that are not compared.
        only_last: of a batch that was done several times, compare only the last one, which counts.
    """
    for place, expected in reference.losses.items():
        done: list[Any] = other.losses.get(place, [None])
        for losses in done[-1:] if only_last else done:
            if losses != expected[0]:
                return _of_losses(place, expected[0], losses)
    if more := other.losses.keys() - reference.losses.keys():
        return f"{_name(min(more))} was done, and not without faults"
    for moment, measured in reference.metrics.items():
        for values in other.metrics.get(moment, [])[-1 if only_last else 0 :]:
            if found := _of_metrics(moment, measured, values, aside):
                return found
    for training, facts in reference.facts.items():
        for path in differing(facts, other.facts.get(training, {})):
            if path not in aside:
                return _of_values(path, facts.get(path), other.facts.get(training, {}).get(path))
    return None


def varying(one: Story, other: Story) -> set[str]:
    """Return the paths of metrics and plugin states that differ between two trainings without faults."""
    measured = {
        f"metrics.{name}"
        for moment, values in one.metrics.items()
        for pair in zip(values, other.metrics.get(moment, []), strict=False)
        for name in differing(*pair)
    }
    return measured | {
        path
        for training, facts in one.facts.items()
        for path in differing(facts, other.facts.get(training, {}))
        if path.startswith(BY_THE_CLOCK)
    }


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> Iterator[str]:
    """Yield the paths of the values that differ."""
    yield from (path for path in {**one, **other} if one.get(path) != other.get(path))


def _of_losses(place: Place, expected: list[str], losses: list[str] | None) -> str:
    if losses is None:
        return f"{_name(place)} was not done"
    both = (" and ".join(f"{float.fromhex(each)!r}" for each in some) or "nothing" for some in (losses, expected))
    return f"the loss of {_name(place)} is {next(both)} instead of {next(both)}"


def _of_values(path: str, expected: Leaf | None, found: Leaf | None) -> str:
    shown = [_shown(each) for each in (found, expected)]
    return f"at the end {path} is {shown[0]} instead of {shown[1]}"


def _shown(leaf: Leaf | None) -> Any:
    if leaf is None:
        return "missing"
    if getattr(leaf.sample, "size", 1) > 1:
        return f"{leaf.kind} with digest {leaf.digest.hex()[:8]}"
    return repr(leaf.sample)


def _of_metrics(
    moment: Moment, measured: Sequence[Mapping[str, str]], values: Mapping[str, str], aside: Collection[str]
) -> str | None:
    """Return how metrics differ from all that were measured at this moment; several logs can come at one."""
    found: list[str] = []
    for each in sorted(measured, key=lambda each: each.keys() != values.keys(), reverse=True):  # the likeliest last
        if not (names := [name for name in differing(each, values) if f"metrics.{name}" not in aside]):
            return None
        found = [names[0], _number(values.get(names[0])), _number(each.get(names[0]))]
    return f"{found[0]} in the {moment[1]} after {_name(moment[0])} is {found[1]} instead of {found[2]}"


def _number(text: str | None) -> str:
    return "missing" if text is None else repr(float.fromhex(text))


def _name(place: Place) -> str:
    return f"batch {place[1]}" + (f" of training {place[0] + 1}" if place[0] else "")
