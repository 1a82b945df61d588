"""Finding the random generators that objects hold, however deep and among however much data."""

from __future__ import annotations

import gc
import random
import types
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from .equality import CONTAINERS, SHAPES, Family
from .generators import Generator, is_global
from .users_code import attributes_of, class_parts, function_parts, is_users, module_of

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

        Large containers of data are passed over while they are as long as they were.
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
            self._descend(self._admitted(self._of_class(kind)))
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
            return self._of_class(holder, whole=True)
        if shape.family is Family.CODE:
            return _code_parts(holder)
        parts = [*attributes_of(holder).values(), *(_slot(each, holder) for each in shape.slots)]
        if shape.base is not None:
            parts += [*self._items(holder, shape.base), getattr(holder, "default_factory", None)]
        elif shape.is_private:  # what the collector lists has no order that a copy keeps, but a library's own order
            parts += [each for each in gc.get_referents(holder) if not isinstance(each, type)]
        if kind not in self._classes:
            parts += self._of_class(kind)
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

    def _of_class(self, kind: type, *, whole: bool = False) -> Iterator[Any]:
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
    level = _sifted(items, classes)
    while level:
        below: list[Any] = []
        for start in range(0, len(level), _CHUNK):
            part = [each for each in level[start : start + _CHUNK] if id(each) not in done]
            held = _sifted(gc.get_referents(*part), classes)
            if held:
                part = [each for each in part if id(each) not in seen]
                seen.update(map(id, part))
                held = _sifted(gc.get_referents(*part), classes)
            if held is None:
                return None
            below += held
        level = below
    if level is None:
        return None
    done |= seen
    return classes


def _sifted(items: Sequence[Any], classes: set[type]) -> list[Any] | None:
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
