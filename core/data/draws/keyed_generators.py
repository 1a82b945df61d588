"""The random generators of data objects: seeded with the global ones, by the position of what is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ...objects.equality import same
from ...system.extras import with_article
from .generator_search import search
from .generators import generator_states, key_generators, seed_all
from .rng import generator_state

BEGIN = -1  # in place of a position: what is drawn before the first batch


class TracedLoad(NamedTuple):
    """What was loaded, the keys of the seedings on the way, and the states of all generators when each was done."""

    loaded: Any
    keys: list[tuple[int, ...]]
    states: list[Any]


class KeyedGenerators:
    """The random generators of objects: searched in the process that uses them, again in every epoch.

    Forked worker processes inherit what was found; those that outlive an epoch search again.

    Args:
        holders: objects that may hold generators.
        follower: gets the epoch by its `set_epoch` when the epoch changes, in whichever process it is.
    """

    def __init__(self, *holders: Any, follower: Any = None) -> None:
        self._holders, self._follower = holders, follower
        self._findings = search()
        self._epoch: int | None = None
        self._keys: list[tuple[int, ...]] | None = None  # of the seedings since a trace began
        self._states_before: list[Any] = []  # each of these seedings

    def seed(self, seed: int, epoch: int, *position: int) -> None:
        """Seed the global generators and those of the objects."""
        if epoch != self._epoch:
            if self._keys is None:
                self.begin(seed, epoch)
            else:
                self._keys.append((seed, epoch, *position))
                self._states_before.append(self._states())
        seed_all(seed, epoch, *position)
        if self._findings.generators:
            key_generators(self._findings.generators, seed, epoch, *position)

    def begin(self, seed: int, epoch: int) -> None:
        """Search for generators, and set the epoch: what is drawn then is the same in every process."""
        self._epoch = epoch
        self.look()
        if hasattr(self._follower, "set_epoch"):
            self.seed(seed, epoch, BEGIN)
            set_epoch(self._follower, epoch)
            self.look()

    def arrive(self, seed: int, epoch: int) -> None:
        """Begin an epoch, unless it has begun here."""
        if epoch != self._epoch:
            self.begin(seed, epoch)

    def traced(self, load: Callable[[], Any]) -> TracedLoad:
        """Load something that belongs to the epoch, and note what was drawn under which keys."""
        epoch, self._epoch = self._epoch, None  # so that each seeding is noticed
        self._keys, self._states_before = [], []
        try:
            loaded = load()
            return TracedLoad(loaded, self._keys, [*self._states_before[1:], self._states()])
        finally:
            self._epoch, self._keys = epoch, None

    def has_drawn(self, traced: TracedLoad) -> bool:
        """True if anything was drawn in a load."""
        for key, states in zip(traced.keys, traced.states, strict=True):
            self.seed(*key)
            if not same(self._states(), states):
                return True
        return False

    def look(self) -> bool:
        """Search again; return whether a generator has been made since."""
        before = self._findings  # alive until the ids are compared
        self._findings = search(*self._holders)
        return not set(map(id, self._findings.generators)) <= set(map(id, before.generators))

    def unkeyed(self, name: str) -> list[str]:
        """Return a sentence for each kind of object that cannot be seeded.

        Args:
            name: of what holds it.
        """
        kinds = dict.fromkeys(type(value).__qualname__ for value in self._findings.unseedable)
        sentences = [
            f"{name} holds {with_article(kind)}, which no key reaches, so a resumed run continues with another "
            f"state of it: {'use random.Random(seed)' if kind == 'SystemRandom' else 'go by the index of the sample'}"
            for kind in kinds
        ]
        if self._findings.in_sets:
            sentences.append(
                f"{name} holds {max(self._findings.in_sets)} generators in a set, whose order is another one in every "
                f"process: hold them in a list"
            )
        return sentences

    def _states(self) -> list[Any]:
        return [generator_states(), *map(generator_state, self._findings.generators)]

    def __reduce__(self) -> tuple[Any, ...]:  # a copy holds other generators
        return partial(KeyedGenerators, follower=self._follower), self._holders


def set_epoch(loader: Any, epoch: int) -> None:
    """Pass the epoch to a loader or sampler that shuffles by it."""
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(setter := getattr(part, "set_epoch", None)):
            setter(epoch)
