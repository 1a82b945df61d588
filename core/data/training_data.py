"""The training data of a run: phases, position, and the facts for a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ...events import Progress, TrainStart
from ...events.bus import is_within
from ...events.progress import ResumeFacts
from .sizes import Share
from .source import SEEKED, Reading
from .source_choice import source_of

if TYPE_CHECKING:
    from ...events import Engine
    from .evaluation_data import EvaluationData
    from .last_batch import LastBatch
    from .source import Source

logger = logging.getLogger("heliograph")
CHANGED_BATCH = "the last batch before the checkpoint differed when the loader was read again"
GENERATORS = "random generators"
UNCAPTURED = "no plugin saves their state: add RNGCapture()"
LOADER = "train loader"


class TrainingData:
    """The implementation of `run.data`: sample order by (seed, epoch), random draws of loading by position.

    With an engine of several ranks, each reads its share, and the constructor is a collective.

    Args:
        loaders: one for each phase.
        engine: connects the ranks; None for a single process.
        note: called with a line for the result.
        per_sample: whether draws are keyed by sample instead of by batch.
        run: the run that reads; None if nothing is read.

    Attributes:
        seed: of the order and of the draws; None until the first epoch begins.
        phase: the index of the current loader.
        stream: the stream of the current batch; None if the batch has all streams, or there is one.
        evaluation_batches: batches of the running or last evaluation, of all its sets; None if unknown.
        advances: whether the next epoch reads the loader of the next phase.
        together: total samples of the current batches of all ranks, if these may differ in size; else None.
    """

    def __init__(
        self,
        loaders: Sequence[Any],
        engine: Engine | None = None,
        note: Callable[[str], None] = logger.info,
        *,
        per_sample: bool = False,
        run: Any = None,
    ) -> None:
        self._reader = run
        self.stream: str | None = None
        self.evaluation_batches: int | None = None
        self._note, self._noted = note, set[str]()
        self._engine = engine if engine is not None and engine.world_size > 1 else None
        rank, world_size = (0, 1) if self._engine is None else (self._engine.rank, self._engine.world_size)
        self._share = Share(rank, world_size)
        share, engine = self._share, self._engine
        self._sources = [source_of(loader, share, per_sample=per_sample, engine=engine) for loader in loaders]
        if self._engine is not None and self._sources:
            from .position import agree

            agree(self._sources, self._engine, self.note_once)
        self.phase = 0
        self.advances = False
        self.seed: int | None = None
        self.together: int | None = None
        self._captured = self._probes = self._seed_is_agreed = False
        self._untracked: dict[str, str] = {}
        self.hidden: list[str] = []  # sentences about hidden state of the loader
        self.differences: list[str] = []
        self.expected: bytes | None = None  # the digest of the last batch before the snapshot

    @property
    def source(self) -> Source | None:
        return self._sources[self.phase] if self._sources else None

    @property
    def train_loader(self) -> Any:
        return None if self.source is None else self.source.loader

    @property
    def length(self) -> int | None:
        return None if self.source is None else self.source.length

    @property
    def validation_loaders(self) -> Mapping[str, Any]:
        return {} if self._reader is None else self._reader.settings.evaluations.get("validation", {})

    @property
    def validation_sets(self) -> tuple[str, ...]:
        return tuple(self.validation_loaders)

    @property
    def in_hand(self) -> bool:
        return self._reader is not None and bool(self._reader.work.in_hand)

    @property
    def is_last_batch(self) -> bool:
        return self._reader is not None and bool(self._reader.is_last_batch())

    @property
    def batch_size(self) -> int | None:
        return None if self.source is None else self.source.layout.batch_size

    @property
    def layouts(self) -> list[dict[str, Any]]:
        # Plain types.
        return [source.layout.state_dict() for source in self._sources]

    @property
    def lengths(self) -> list[int | None]:
        # Of this process; None if unknown.
        return [source.length for source in self._sources]

    @property
    def is_last_phase(self) -> bool:
        return self.phase + 1 >= len(self._sources)

    def key_draws(self, seed: int, *, probe: bool = True) -> None:
        """Key all draws of loading by this seed, apart from the random stream of the training.

        Args:
            seed: of the order and of the draws.
            probe: whether the first batch of a loader is loaded twice and compared.

        Raises:
            RuntimeError: no handler of `TrainStart` is running.
        """
        if not is_within(TrainStart.name):
            raise RuntimeError("run.data.key_draws has no effect here: call it in a handler of TrainStart.")
        self.key(seed, probe=probe)

    def key(self, seed: int, *, probe: bool = True) -> None:
        self.seed, self._captured, self._probes = seed, True, probe

    def ask_to_advance(self, *, between_epochs: bool) -> bool:
        # Returns whether the current epoch is to end. Between two epochs the next phase begins at once.
        if self.is_last_phase:
            return False
        self.advances = True
        if between_epochs:
            self.advance()
        return not between_epochs

    def advance(self) -> None:
        if self.advances:
            self.phase, self.advances = self.phase + 1, False

    def open(
        self,
        progress: Progress,
        report: Callable[[int, int], None],
        *,
        is_over: bool = False,
        ahead: bool = True,
        saves: bool = True,
    ) -> Iterator[Any]:
        """Return the remaining batches of the epoch.

        Args:
            progress: the position of the run.
            report: called with (done, all) while batches are read again to reach the position.
            is_over: whether the ranks had ended the epoch there.
            ahead: whether one item is read ahead if the length is unknown.
            saves: whether a state may be saved, so that the last batch is needed for its digest.
        """
        assert self.source is not None
        self.agree_on_seed()
        assert self.seed is not None
        place = progress.epoch, progress.batch
        checker, ahead = self._checker(progress), ahead and self.source.length is None
        reading = Reading(self.seed % 2**63, *place, self._captured, report, is_over, checker, self._probes, ahead)
        batches = self.source.open(reading)
        return self.last.follow(batches, progress, self.source) if saves and self.is_replayed else batches

    def agree_on_seed(self) -> None:
        # A collective: all ranks use the seed of the main rank.
        if self.seed is None:
            self.seed = torch.initial_seed()
        if self._engine is not None and not self._seed_is_agreed:
            self.seed, self._seed_is_agreed = self._engine.broadcast(self.seed), True

    def evaluate(self, loader: Any, number: int, validations: int, limit: float | None = None) -> Iterator[Any]:
        """Return the batches of a validation set; draws of a `DataLoader` are keyed as in the training.

        Args:
            loader: as the user gave it.
            number: of the set within the validation.
            validations: the number of earlier ones.
            limit: the number or fraction of its batches to read; None for all.
        """
        seed = self.seed if self._captured or self._engine is not None else None
        return self.evaluations.open(loader, number, validations, seed, limit)

    def sum_of_all_ranks(self, size: int) -> int:
        return size * self._share.world_size if self.together is None else self.together

    def note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note(text)
            if self._engine is None or self._engine.is_main:
                logger.warning("%s", text)

    def report_untracked(self, path: str, kind: str) -> None:
        if path == LOADER:  # of another rank
            for text in kind.split("; "):
                self.report_hidden(text)
        else:
            self._untracked[path] = kind

    def report_difference(self, text: str) -> None:
        if text not in self.differences:
            self.differences.append(text)

    def resume_facts(self) -> ResumeFacts:
        self.collect()
        position, sentences = SEEKED if self.source is None else self.source.certainty()
        loader = "; ".join(dict.fromkeys((*sentences, *self.hidden)))
        untracked = ({LOADER: loader} if loader else {}) | self._untracked
        if not self._captured:
            untracked[GENERATORS] = UNCAPTURED
        return ResumeFacts(untracked, tuple(self.differences), position)

    def state_dict(self, progress: Progress) -> dict[str, Any]:
        self.collect()
        facts = {"hidden": list(self.hidden), "differences": list(self.differences)}
        place = {"seed": self.seed, "phase": self.phase, "advances": self.advances, "facts": facts}
        if (source := self.source) is None:
            return {**place, "source": None, "layout": None, "state": {}}
        source_state, layout = source.state_dict(progress.batch), source.layout.state_dict()
        last = self.last.digest(progress.batch) if self.is_replayed and progress.batch else None
        return {**place, "source": dict(source.kind), "layout": layout, "state": source_state, "last_batch": last}

    def load_state_dict(self, state: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, Any]:
        """Continue from a saved position; return the saved progress in batches of this run.

        Raises:
            ValueError: the phase does not exist, or the position is within an epoch of different data, or within a
                batch.
        """
        from .position import load

        return load(self, state, progress)

    def close(self) -> None:
        for source in self._sources:
            source.close()
        if "evaluations" in vars(self):
            self.evaluations.close()

    @cached_property
    def evaluations(self) -> EvaluationData:
        from .evaluation_data import EvaluationData

        return EvaluationData(self._share, self.note_once, self._engine)

    @cached_property
    def last(self) -> LastBatch:
        from .last_batch import LastBatch

        return LastBatch()

    @property
    def is_replayed(self) -> bool:
        # Whether reaching a position needs a replay.
        return self.source is not None and self.source.certainty()[0] == "replayed"

    def _checker(self, progress: Progress) -> Callable[[Any], None]:
        # Compares the last batch of a replay with the last batch before the snapshot.
        expected, number = self.expected, progress.batch
        self.expected = None

        def check(batch: Any) -> None:
            actual = self.last.read_again(number, batch)
            if expected is not None and actual != expected:
                self.report_difference(CHANGED_BATCH)

        return check

    def report_hidden(self, text: str) -> None:
        if text not in self.hidden:
            self.hidden.append(text)

    def collect(self) -> None:
        # Worker processes may have found hidden state in the first batches.
        for source in self._sources:
            for text in source.hidden():
                self.report_hidden(text)
