"""The generators that objects hold: found, and seeded by where a batch is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..batch import set_epoch
from ..rng import generator_state
from .equality import same
from .generators import drawn, key_generators, seed_all
from .search import Search

BEGIN = -1  # in place of a position: what is drawn before the first batch


class Traced(NamedTuple):
    """What was loaded, the keys of the seedings on the way, and the states of all generators when each was done."""

    loaded: Any
    keys: list[tuple[int, ...]]
    states: list[Any]


class Held:
    """The generators that objects hold, found in the process that uses them, again in every epoch.

    Worker processes that are forked inherit what was found; those that live on look for themselves.

    Args:
        holders: what may hold generators.
        follower: gets the epoch by its `set_epoch` when that changes, in whichever process it is.
    """

    def __init__(self, *holders: Any, follower: Any = None) -> None:
        self._holders, self._follower = holders, follower
        self._search = Search(*holders)
        self._epoch: int | None = None
        self._keys: list[tuple[int, ...]] | None = None  # of the seedings since a trace began
        self._stood: list[Any] = []

    def seed(self, seed: int, epoch: int, *place: int) -> None:
        """Seed the global generators and the held ones."""
        if epoch != self._epoch:
            self._turn(seed, epoch, *place)
        seed_all(seed, epoch, *place)
        if self._search.found:
            key_generators(self._search.found, seed, epoch, *place)

    def begin(self, seed: int, epoch: int) -> None:
        """Look for generators, and set the epoch: what is drawn then is the same in every process."""
        self._epoch = epoch
        self._search.look()
        if hasattr(self._follower, "set_epoch"):
            self.seed(seed, epoch, BEGIN)
            set_epoch(self._follower, epoch)
            self._search.look()

    def arrive(self, seed: int, epoch: int) -> None:
        """Begin an epoch, unless it has begun here."""
        if epoch != self._epoch:
            self.begin(seed, epoch)

    def traced(self, load: Callable[[], Any]) -> Traced:
        """Load something that belongs to the epoch, and note what was drawn under which keys."""
        epoch, self._epoch = self._epoch, None  # so that each seeding is noticed
        self._keys, self._stood = [], []
        try:
            loaded = load()
            return Traced(loaded, self._keys, [*self._stood[1:], self._states()])
        finally:
            self._epoch, self._keys = epoch, None

    def has_drawn(self, traced: Traced) -> bool:
        """Return whether anything was drawn in a load."""
        for key, states in zip(traced.keys, traced.states, strict=True):
            self.seed(*key)
            if not same(self._states(), states):
                return True
        return False

    def look(self) -> bool:
        """Look again; return whether a generator has been made since."""
        return self._search.look()

    def unkeyed(self, name: str) -> list[str]:
        """Return a sentence for each kind of what no key reaches.

        Args:
            name: of what holds it.
        """
        kinds = dict.fromkeys(type(each).__qualname__ for each in self._search.odd)
        sentences = [
            f"{name} holds a {kind}, which no key reaches, so a resumed run continues with another state of it: "
            f"{'use random.Random(seed)' if kind == 'SystemRandom' else 'go by the index of the sample'}"
            for kind in kinds
        ]
        if self._search.in_sets:
            sentences.append(
                f"{name} holds {max(self._search.in_sets)} generators in a set, whose order is another one in every "
                f"process: hold them in a list"
            )
        return sentences

    def _turn(self, *key: int) -> None:
        if self._keys is None:
            self.begin(*key[:2])
        else:
            self._keys.append(key)
            self._stood.append(self._states())

    def _states(self) -> list[Any]:
        """Return the states of all generators, to be compared."""
        return [drawn(), *map(generator_state, self._search.found)]

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"_search": Search(*self._holders), "_epoch": None, "_keys": None, "_stood": []}
        return {
            "_holders": self._holders,
            "_follower": self._follower,
            **fresh,
        }  # a copy holds other generators
