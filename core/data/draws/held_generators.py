"""The random generators that objects hold: found however deep, so that they are seeded too."""

from __future__ import annotations

import gc
import random
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from ...system.extras import with_article
from .equality import CONTAINERS, SHAPES, Family, same
from .generators import Generator, generator_states, is_global, key_generators, seed_all
from .rng import generator_state
from .users_code import attributes_of, class_parts, function_parts, is_users, module_of

BEGIN = -1  # in place of a position: what is drawn before the first batch


class TracedLoad(NamedTuple):
    """What was loaded, the keys of the seedings on the way, and the states of all generators when each was done."""

    loaded: Any
    keys: list[tuple[int, ...]]
    states: list[Any]


class HeldGenerators:
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

    def seed(self, seed: int, epoch: int, *position: int) -> None:
        """Seed the global generators and the held ones."""
        if epoch != self._epoch:
            self._turn(seed, epoch, *position)
        seed_all(seed, epoch, *position)
        if self._search.found:
            key_generators(self._search.found, seed, epoch, *position)

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

    def traced(self, load: Callable[[], Any]) -> TracedLoad:
        """Load something that belongs to the epoch, and note what was drawn under which keys."""
        epoch, self._epoch = self._epoch, None  # so that each seeding is noticed
        self._keys, self._stood = [], []
        try:
            loaded = load()
            return TracedLoad(loaded, self._keys, [*self._stood[1:], self._states()])
        finally:
            self._epoch, self._keys = epoch, None

    def has_drawn(self, traced: TracedLoad) -> bool:
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
            f"{name} holds {with_article(kind)}, which no key reaches, so a resumed run continues with another "
            f"state of it: {'use random.Random(seed)' if kind == 'SystemRandom' else 'go by the index of the sample'}"
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
        return [generator_states(), *map(generator_state, self._search.found)]

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"_search": Search(*self._holders), "_epoch": None, "_keys": None, "_stood": []}
        return {
            "_holders": self._holders,
            "_follower": self._follower,
            **fresh,
        }  # a copy holds other generators


_BULK: Final = 1000  # a longer container is first looked through as a whole: where no generator is, no order is needed
_CHUNK: Final = 4096  # objects whose parts are listed at once, which bounds the memory


def find_generators(holder: object) -> list[Generator]:
    """Return the generators that an object holds, each once, in an order that pickling does not change.

    See `Search`.
    """
    search = Search(holder)
    search.look()
    return search.found


class Search:
    """Looks for the generators that objects hold, at any depth.

    Looked at are attributes, slots, containers of any size, object arrays, what functions close over, their defaults,
    partials and bound methods; and in code of the user's, not of libraries, what is on a class, and the globals that
    functions name. It goes level by level, in the order in which things were put in. Sets come last.

    The global generators are not among what is found, nor is anything within modules, tensors, loggers and threads.

    Args:
        holders: where to begin.

    Attributes:
        found: the generators.
        odd: what draws or counts in a way that no key reaches: `random.SystemRandom`, iterators.
        in_sets: how many generators each set holds that holds several: their order is another one in every process.
    """

    def __init__(self, *holders: object) -> None:
        self._holders = holders
        self._data: dict[int, _Data] = {}
        self.found: list[Generator] = []
        self.odd: list[object] = []
        self.in_sets: list[int] = []

    def look(self) -> bool:
        """Look again; return whether there is a generator that was not there before.

        Large containers of data are skipped while they are as long as they were.
        """
        before = {id(each) for each in self.found}
        walk = _Walk(self._data)
        walk.through(self._holders)
        self.found, self.odd, self.in_sets, self._data = walk.found, walk.odd, walk.in_sets, walk.data
        return not {id(each) for each in self.found} <= before


class _Data(NamedTuple):
    """A large container that holds no generator, its length, and the user's classes of what is in it."""

    holder: Any
    length: int
    classes: set[type]


class _Walk:
    """One search."""

    def __init__(self, known: dict[int, _Data]) -> None:
        self.found: list[Generator] = []
        self.odd: list[object] = []
        self.in_sets: list[int] = []
        self.data: dict[int, _Data] = {}
        self._known = known
        self._seen: set[int] = set()
        self._seen_data: set[int] = set()
        self._classes: set[type] = set()
        self._sets: list[Any] = []
        self._kept: list[Any] = []  # made on the way: were they gone, another object could have their id

    def through(self, holders: Iterable[object]) -> None:
        """Look through all that can be reached."""
        self._descend(self._admitted(holders))
        of_data = {kind for each in self.data.values() for kind in each.classes}
        for kind in sorted(of_data, key=lambda each: (module_of(each), each.__qualname__)):
            self._descend(self._admitted(self._class_parts(kind)))
        outer, self._sets = self._sets, []
        for each in outer:
            before, pending = len(self.found), [each]
            while pending:
                self._descend(self._admitted(self._items(pending.pop(), set)))
                pending, self._sets = pending + self._sets, []
            if len(self.found) > before + 1:
                self.in_sets.append(len(self.found) - before)

    def _descend(self, level: list[Any]) -> None:
        while level:
            below: list[Any] = []
            for each in level:
                below += self._admitted(self._parts(each), is_private=SHAPES[type(each)].is_private)
            level = below

    def _admitted(self, parts: Iterable[Any], *, is_private: bool = False) -> list[Any]:
        """Return those of the parts that are to be looked into, each once; note what is found."""
        admitted = []
        for part in parts:
            family = SHAPES[type(part)].family
            if family is Family.LEAF or id(part) in self._seen:
                continue
            self._seen.add(id(part))
            if family is Family.GENERATOR:
                self.found += [] if is_global(part) else [part]
            elif family is Family.ODD:
                self.odd += [] if is_private and not isinstance(part, random.Random) else [part]
            elif family is Family.SET:
                self._sets.append(part)
            else:
                admitted.append(part)
        return admitted

    def _parts(self, holder: Any) -> Iterable[Any]:
        kind = type(holder)
        shape = SHAPES[kind]
        if kind in CONTAINERS or shape.family is Family.ARRAY:
            return self._items(holder, shape.base)
        if shape.family is Family.CLASS:
            return self._class_parts(holder, whole=True)
        if shape.family is Family.CODE:
            return _code_parts(holder)
        parts = [*attributes_of(holder).values(), *(_slot(each, holder) for each in shape.slots)]
        if shape.base is not None:
            parts += [*self._items(holder, shape.base), getattr(holder, "default_factory", None)]
        elif shape.is_private:  # what the collector lists has no order that a copy keeps, but a library's own order
            parts += [each for each in gc.get_referents(holder) if not isinstance(each, type)]
        if kind not in self._classes:
            parts += self._class_parts(kind)
        return parts

    def _items(self, holder: Any, base: Any) -> Sequence[Any]:
        """Return what a container holds; nothing where that is much, and nothing but data."""
        if not isinstance(holder, base):  # a frozenset
            base = frozenset
        length = holder.size if base is np.ndarray else base.__len__(holder)
        if length <= _BULK:
            return self._listed(holder, base)
        known = self._known.get(id(holder))
        if known is None or known.holder is not holder or known.length != length:
            items = self._listed(holder, base)
            classes = _classes_of_data(items, self._seen_data)
            if classes is None:
                return items
            known = _Data(holder, length, classes)
        self.data[id(holder)] = known
        return ()

    def _listed(self, holder: Any, base: type) -> Sequence[Any]:
        items = CONTAINERS[base](holder)
        if base is np.ndarray:
            self._kept.append(items)
        return items

    def _class_parts(self, kind: type, *, whole: bool = False) -> Iterator[Any]:
        self._classes.add(kind)
        return class_parts(kind, whole=whole)


def _classes_of_data(items: Sequence[Any], done: set[int]) -> set[type] | None:
    """Return the user's classes of what is below these items, None where there is more than data.

    It looks in any order, for a fraction of what it costs to look in the right one.

    Args:
        items: the beginning.
        done: what was looked at before, by its id; added to where there is nothing but data.
    """
    seen, classes = set[int](), set[type]()
    level = _sift(items, classes)
    while level:
        below: list[Any] = []
        for start in range(0, len(level), _CHUNK):
            part = [each for each in level[start : start + _CHUNK] if id(each) not in done]
            held = _sift(gc.get_referents(*part), classes)
            if held:
                part = [each for each in part if id(each) not in seen]
                seen.update(map(id, part))
                held = _sift(gc.get_referents(*part), classes)
            if held is None:
                return None
            below += held
        level = below
    if level is None:
        return None
    done |= seen
    return classes


def _sift(items: Sequence[Any], classes: set[type]) -> list[Any] | None:
    """Return the items that may hold more, None where one is more than data; add the user's classes among them."""
    deeper = set()
    for kind in set(map(type, items)):
        family = SHAPES[kind].family
        some: Any = () if family in (Family.LEAF, Family.HOLDER) else [each for each in items if type(each) is kind]
        if family in (Family.HOLDER, Family.SET):
            deeper.add(kind)
        elif family is Family.CLASS:
            classes.update(each for each in some if is_users(module_of(each)))
        elif family is Family.ARRAY:
            if any(each.dtype.hasobject for each in some):
                return None
        elif family is not Family.LEAF:
            return None
    return [each for each in items if type(each) in deeper] if deeper else []


def _code_parts(code: Any) -> Iterator[Any]:
    if isinstance(code, types.FunctionType):
        yield from function_parts(code)
    elif isinstance(code, partial):
        yield from (code.func, code.args, code.keywords, code.__dict__)
    elif isinstance(code, property):
        yield from (code.fget, code.fset)
    else:
        yield getattr(code, "__self__", None)
        yield getattr(code, "__func__", None)


def _slot(descriptor: Any, holder: object) -> object:
    try:
        return descriptor.__get__(holder)
    except AttributeError:  # not set yet
        return None


def set_epoch(loader: Any, epoch: int) -> None:
    """Pass the epoch to a loader or sampler that shuffles by it."""
    for each in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(setter := getattr(each, "set_epoch", None)):
            setter(epoch)
