"""The training data of a run: its phases, its position, and what a resume with it is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from ...events import Progress
from .draws import digest
from .guarantee import Guarantee, weaker
from .probe import hidden_state
from .reading import Reading
from .source import Source
from .sources import IterableSource, MapSource, source_of

UNCAPTURED = "no plugin keeps the state of the random generators: add RNGCapture()"


def _nobody(done: int, batches: int) -> None:
    """Hear nothing: a validation begins at its first batch."""


class TrainingData:
    """See `run.data`. The order of samples is a pure function of (seed, epoch), the draws of loading of the position.

    Args:
        loaders: one for each phase.
        rank: this process among `world_size`, from 0.
        world_size: how many processes train together.
        per_sample: whether draws are keyed by sample instead of by batch.

    Attributes:
        seed: of the order and of the draws; None until the first epoch begins.
        phase: which of the loaders is read, from 0.
        advances: whether the next epoch reads the next phase's loader.
    """

    def __init__(self, loaders: Sequence[Any], rank: int = 0, world_size: int = 1, *, per_sample: bool = False) -> None:
        self._sources = [source_of(each, rank, world_size, per_sample=per_sample) for each in loaders]
        self._evaluated: dict[int, Source] = {}
        self.phase = 0
        self.advances = False
        self.seed: int | None = None
        self._captured = False
        self._hidden: list[str] = []
        self._doubts: list[tuple[Guarantee, str]] = []

    @property
    def source(self) -> Source | None:
        """What is read now; None where there is nothing to train on."""
        return self._sources[self.phase] if self._sources else None

    @property
    def is_last_phase(self) -> bool:
        """Whether no phase follows."""
        return self.phase + 1 >= len(self._sources)

    def key(self, seed: int) -> None:
        """Draw by this seed, and keep everything that loading does apart from the training's random stream."""
        self.seed, self._captured = seed, True

    def advance(self) -> None:
        """Go on to the next phase where that was asked for."""
        if self.advances:
            self.phase, self.advances = self.phase + 1, False

    def open(self, progress: Progress, tell: Callable[[int, int], None]) -> Iterator[Any]:
        """Return the batches of the epoch that are not consumed yet.

        Args:
            progress: where the run is.
            tell: called with (done, all) while batches are read again to reach the position.
        """
        assert self.source is not None
        if self.seed is None:
            self.seed = torch.initial_seed()
        seed = self.seed % 2**63
        return self.source.open(Reading(seed, progress.epoch, progress.batch, self._captured, tell))

    def evaluate(self, loader: Any, number: int, validations: int) -> Iterator[Any]:
        """Return the batches of a validation set; what a `DataLoader` draws is keyed as in the training.

        Args:
            loader: as the user gave it.
            number: of the set, among those of the validation.
            validations: how many there were before.
        """
        if self.seed is None or not self._captured or not isinstance(loader, DataLoader):
            return iter(loader)
        source = self._evaluated.setdefault(id(loader), source_of(loader, 0, 1))
        if not isinstance(source, MapSource | IterableSource):
            return iter(loader)
        seed = int.from_bytes(digest(self.seed, number, size=7, purpose=b"validation"), "little")
        return source.open(Reading(seed, validations, 0, True, _nobody))

    def doubt(self, level: Guarantee, reason: str) -> None:
        """Lower the guarantee."""
        if (level, reason) not in self._doubts:
            self._doubts.append((level, reason))

    def guarantee(self) -> tuple[Guarantee, tuple[str, ...]]:
        """Return what a resume of this run is worth, with the reasons why it is not exact."""
        level, reasons = ("exact", ()) if self.source is None else self.source.worth()
        doubts = [*self._doubts, *(("order-exact", sentence) for sentence in self._hidden)]
        if not self._captured:
            doubts.append(("order-exact", UNCAPTURED))
        for doubt, reason in doubts:
            level, reasons = weaker(level, doubt), (*reasons, reason)
        return level, reasons

    def probe(self) -> list[str]:
        """Load a batch twice under one key, on a copy of the dataset; return what differs, and remember it.

        Finds state that a dataset hides from the keys (a counter, a generator out of sight, the clock), unless it shows
        so rarely that one batch does not show it.
        """
        sources = [source for source in self._sources if isinstance(source, MapSource)]
        self._hidden = [sentence for source in sources for sentence in hidden_state(source, self.seed or 0)]
        return list(self._hidden)

    def state_dict(self, progress: Progress) -> dict[str, Any]:
        """Return the position, as plain types."""
        doubts = [[level, reason] for level, reason in self._doubts]
        place = {"seed": self.seed, "phase": self.phase, "advances": self.advances, "doubts": doubts}
        if self.source is None:
            return {**place, "source": None, "state": {}}
        own = self.source.state_dict(between_epochs=progress.batch == 0)
        return {**place, "source": dict(self.source.kind), "state": own}

    def load_state_dict(self, state: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            ValueError: the phase does not exist, or the position lies amid an epoch of other data.
        """
        if not 0 <= state["phase"] < max(1, len(self._sources)):
            raise ValueError(
                f"The checkpoint is of training phase {state['phase']}, there are {len(self._sources)}: resume with "
                f"the phases that it was written with."
            )
        self.phase, self.advances, before = state["phase"], state["advances"], state["source"]
        self.seed = self.seed if state["seed"] is None else state["seed"]
        for level, reason in state["doubts"]:  # what came in once stays in
            self.doubt(level, reason)
        if self.source is None:
            return
        if before is None:
            self.doubt("not exact", "the checkpoint says nothing of the order of its samples: it was migrated")
        elif before != self.source.kind:
            self._check_change(before, self.source.kind, amid=progress["batch"] > 0)
        if before is not None and before["source"] == self.source.kind["source"]:
            self.source.load_state_dict(state["state"])

    def close(self) -> None:
        """Let worker processes go."""
        for source in (*self._sources, *self._evaluated.values()):
            source.close()

    def _check_change(self, before: Mapping[str, Any], now: Mapping[str, Any], *, amid: bool) -> None:
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        changes = ", ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in names)
        if amid:
            raise ValueError(
                f"The checkpoint stands amid an epoch of other data ({changes}), so its position would mean other "
                f"samples: resume with the same data, or from a checkpoint at an epoch's end."
            )
        self.doubt("not exact", f"the data changed at the resume: {changes}")
