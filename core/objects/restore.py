"""Restore the state of objects from a saved graph, in place."""

from __future__ import annotations

import collections
import functools
import operator
import random
import sys
import types
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from ..data.generators import KINDS
from ..data.rng import set_generator_state
from ..data.users_code import unwrapped
from .equality import EMPTY, same
from .graph import (
    HOOKS,
    MISSING,
    PARAMETER_HOOKS,
    Graph,
    Node,
    Roots,
    Walk,
    inner,
    is_key,
    named_tensors,
    ordered_items,
    storage_of,
    type_name,
)

REBUILT: Final = ("text", "tuple", "array", "array view", "tensor", "tensor view", "enum", "number")
GENERATORS: Final = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in KINDS}
NEW: Final = frozenset(
    ("enum", "number", "list", "list of scalars", "dict", "dict of scalars", "map", "set", "bytes", "object", "module")
)


def restore(roots: Roots, graph: Graph, paths: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Restore the slots at some paths, in place if the objects fit. No user code runs except `load_state_dict`.

    Args:
        roots: the live objects.
        graph: the saved graph.
        paths: the slots that the training has changed; the others keep the values that the program set.

    Returns:
        The restored paths; types by path of what could not be restored.
    """
    work = _Restore(roots, graph, frozenset(paths))
    for path, value in graph.roots.items():
        work.bind(value, roots.objects.get(path, MISSING), path)
    for path, value in graph.roots.items():
        if path in roots.objects:
            work.fill(value, roots.objects[path], path)
    return work.restored, work.failed


class _LiveSlots(Walk):
    # the present values of the slots of one object, by the keys of the walk
    def of(self, node: Node, holder: Any) -> dict[str, object]:
        self.slots: dict[str, object] = {}
        if holder is not MISSING and node["slots"]:
            self.ids.clear()
            read = self.instance if node["kind"] == "object" else self.value  # a root may be an object of heliograph
            read(holder, "", 0)
        return self.slots

    def add(
        self, value: object, path: str, kind: str, depth: int, items: Iterable[tuple[str, object]], leaf: object = None
    ) -> Node:
        self.slots, self.graph.nodes = dict(items), [{"slots": {}}]
        return {"ref": 0}

    def mapping(self, value: Any, path: str, depth: int) -> object:
        # by key and by position: one key that is an object changes the kind of a saved dict
        self.slots = dict(self.attribute_slots_of(value))
        for number, (key, item) in enumerate(ordered_items(value)):
            self.slots |= {f"[key {number}]": key, f"[value {number}]": item}
            if is_key(key):
                self.slots[f"[{key!r}]"] = item
        return {}

    def content(self, node: Node, path: str, content: Any) -> Node:
        return node

    def large(self, value: Any, path: str, size: str, content: Any) -> Node:
        return {}

    def stateful(self, value: Any, path: str, depth: int) -> object:
        return self.instance(value, path, depth)


class _Restore:
    def __init__(self, roots: Roots, graph: Graph, paths: frozenset[str]) -> None:
        self.graph, self.nodes, self.paths = graph, graph.nodes, paths
        self.made: dict[int, Any] = {}  # by node
        self.filled, self.bound = set[int](), dict[int, int]()
        self.restored: list[str] = []
        self.failed: dict[str, str] = {}
        self.tensors = dict(item for path, value in roots.saved.items() for item in named_tensors(path, value))
        self.shared = {storage_of(tensor) for tensor in self.tensors.values()}
        self.live = _LiveSlots(replace(roots, objects={}))

    def bind(self, value: Any, live: Any, path: str) -> None:
        # pairs the nodes of unchanged slots with the live objects, which saved aliases then refer to
        if not (isinstance(value, dict) and "ref" in value) or path in self.paths or live is MISSING:
            return
        live = inner(live) if isinstance(live, nn.Module) else unwrapped(live)
        number = value["ref"]
        if number in self.made or id(live) in self.bound or self.nodes[number]["type"] != type_name(live):
            return
        self.made[number], self.bound[id(live)] = live, number
        live_slots = self.live.of(self.nodes[number], live)
        for key, child in self.nodes[number]["slots"].items():
            self.bind(child, live_slots.get(key, MISSING), path + key)

    def fill(self, value: Any, live: Any, path: str, *, force: bool = False) -> Any:
        """Return the restored value of a slot: `live`, changed in place, if possible.

        Args:
            value: the saved value of the slot.
            live: its present value.
            path: the path of the slot.
            force: whether the container of the slot is restored.
        """
        force = force or path in self.paths
        if live is MISSING and not force:
            return live
        if not (isinstance(value, dict) and "ref" in value):
            return self.plain(value, live, path, force=force)
        number = value["ref"]
        node = self.nodes[number]
        if number in self.filled:
            return self.made.get(number, live) if force else live
        live_module = live
        live = inner(live) if isinstance(live, nn.Module) else unwrapped(live)
        target = self.made.get(number, MISSING)
        if target is MISSING and live is MISSING and not force:  # unchanged, and missing in the present program
            return live
        if target is MISSING and self.fits(node, live):
            target = live
        self.filled.add(number)
        try:
            if target is MISSING or node["kind"] in REBUILT:
                target = self.build(number, target, path, force=force)
            if target is not MISSING:
                self.made[number], self.bound[id(target)] = target, number
                filled = target if node["kind"] == "tuple" else self.fill_slots(number, target, path, force=force)
                return live_module if filled is live else filled
            if force:
                self.failed[path] = node["type"]
        except Exception as error:  # noqa: BLE001  # an edited class, `load_state_dict`, or a property
            self.failed[path] = f"{node['type']}, {type(error).__name__} while it was restored"
        if number not in self.made:
            self.filled.discard(number)
        return live_module

    def plain(self, value: Any, live: Any, path: str, *, force: bool) -> Any:
        if isinstance(value, dict) and "skip" in value:
            if force and live is MISSING:
                self.failed[path] = value["skip"]
            return live
        if not force:
            return live
        if not isinstance(value, dict):
            return value
        return EMPTY if value["literal"] == repr(EMPTY) else int(value["literal"], 16)

    def fits(self, node: Node, live: Any) -> bool:
        if live is MISSING or type_name(live) != node["type"] or id(live) in self.bound:
            return False
        return not isinstance(live, Tensor) or (node["kind"] == "tensor" and node["leaf"][5] is None)

    def fill_slots(self, number: int, target: Any, path: str, *, force: bool) -> Any:
        node = self.nodes[number]
        kind, slots, leaf = node["kind"], node["slots"], node["leaf"]
        if kind == "large":
            if force:
                self.failed[path] = f"{node['type']}{leaf and ', '}{leaf}"
            return target
        if kind in ("array view", "tensor view"):
            return target
        if kind == "generator" and force:
            set_generator_state(target, leaf)
            self.restored.append(path)
        elif kind == "bytes" and force:
            target[:] = leaf
            self.restored.append(path)
        elif kind == "stateful":
            key = ".state_dict()"
            if force or any(name.startswith(path + key) for name in self.paths):
                target.load_state_dict(self.fill(slots[key], MISSING, path + key, force=True))
                self.restored.append(path)
            slots = {name: child for name, child in slots.items() if name != key}
        elif kind in ("list of scalars", "dict of scalars", "set") and force:
            content = self.content(number)
            if content is MISSING:
                self.failed[path] = type_name(target)
            elif not isinstance(target, frozenset):
                target.clear()
                (target.extend if kind[0] == "l" else target.update)(content)
                self.restored.append(path)
        elif kind == "map" or (kind in ("list", "dict") and force):  # the container itself changed
            slots = self.fill_items(node, target, path, force=force)
        self.fill_other_slots(node, slots, target, path, force=force)
        return target

    def content(self, number: int) -> Any:
        content = self.nodes[number]["leaf"][0]
        return self.graph.contents.get(number, MISSING) if content is None else content

    def fill_items(self, node: Node, target: Any, path: str, *, force: bool) -> dict[str, Any]:
        filled = self.fill_all(node, target, path, prefix="[", force=force)
        items = list(filled.values())
        if any(item is MISSING for item in items):  # do not restore half a container
            return {}
        is_map = node["kind"] == "map"
        live = [part for pair in ordered_items(target) for part in pair] if is_map else []
        if force or len(live) != len(items) or not all(map(operator.is_, live, items)):
            target.clear()
            if node["kind"] == "list":
                target.extend(items)
            else:
                keys, values = (items[::2], items[1::2]) if is_map else (node["leaf"], items)
                for key, value in zip(keys, values, strict=True):
                    set_item(target, key, value)
            self.restored.append(path)
        return {key: child for key, child in node["slots"].items() if key not in filled}

    def fill_all(self, node: Node, holder: Any, path: str, *, prefix: str = "", force: bool) -> dict[str, Any]:
        live = self.live.of(node, holder)
        return {
            key: self.fill(child, live.get(key, MISSING), path + key, force=force)
            for key, child in node["slots"].items()
            if key.startswith(prefix)
        }

    def fill_other_slots(self, node: Node, slots: dict[str, Any], target: Any, path: str, *, force: bool) -> None:
        live_slots = self.live.of(node, target)
        for key, child in slots.items():
            live = live_slots.get(key, MISSING)
            item = self.fill(child, live, path + key, force=force)
            if item is live or key.rpartition(".")[2] in (*HOOKS, *PARAMETER_HOOKS):
                continue
            if item is MISSING or not put_slot(target, key, item):
                self.failed[path + key] = type_name(item) if item is not MISSING else "missing"
            elif path + key not in self.restored:
                self.restored.append(path + key)

    def build(self, number: int, live: Any, path: str, *, force: bool) -> Any:
        node = self.nodes[number]
        kind, leaf = node["kind"], node["leaf"]
        if kind == "text":
            return self.graph.contents.get(number, live) if force else live
        if kind in ("tensor", "tensor view"):
            return self.tensor(number, live, path, force=force)
        if kind in ("array", "array view"):
            return self.array(number, live, path, force=force)
        if kind == "tuple":
            items = list(self.fill_all(node, live, path, force=force).values())
            if live is not MISSING and len(live) == len(items) and all(map(operator.is_, live, items)):
                return live
            is_complete = not any(item is MISSING for item in items)
            return tuple.__new__(find_class(node["type"]) or tuple, items) if is_complete else MISSING
        if kind == "method":
            holder = self.fill_all(node, live, path, force=force)[".__self__"]
            return live if live is not MISSING and not force else getattr(holder, leaf, MISSING)
        if kind == "generator":
            return self.generator(node)
        cls = find_class(node["type"])
        if kind in ("enum", "number") and (cls is None or not force):
            return live
        is_partial = kind in ("object", "module") and any(
            isinstance(child, dict) and "skip" in child and key != ".__class__" for key, child in node["slots"].items()
        )  # without its lock or logger, for example, the object would be broken
        return MISSING if cls is None or kind not in NEW or is_partial else self.create(number, cls, path)

    def create(self, number: int, cls: Any, path: str) -> Any:
        node = self.nodes[number]
        kind, leaf = node["kind"], node["leaf"]
        if kind == "enum":
            return getattr(cls, leaf, MISSING)
        if kind == "number":
            return type(leaf).__new__(cls, leaf)
        if kind == "set" and issubclass(cls, frozenset):
            return cls(self.content(number))
        if cls is collections.deque:
            return collections.deque(maxlen=leaf[-1])
        made = cls.__new__(cls)
        if isinstance(made, collections.defaultdict):
            self.failed[path] = f"{node['type']}, its factory"
        if kind == "module":
            nn.Module.__init__(made)
            parameters, buffers, not_persistent = leaf or ((), (), ())
            made._parameters, made._buffers = dict.fromkeys(parameters), dict.fromkeys(buffers)
            made._non_persistent_buffers_set = set(not_persistent)
        return made

    def generator(self, node: Node) -> Any:
        kind = GENERATORS.get(node["type"])
        if kind is np.random.Generator:
            return np.random.Generator(getattr(np.random, node["leaf"]["bit_generator"])())
        return MISSING if kind is None else (random.Random if kind is random.Random else kind)()

    def array(self, number: int, live: Any, path: str, *, force: bool) -> Any:
        node = self.nodes[number]
        leaf = node["leaf"]
        if node["kind"] == "array view":
            base = self.fill_all(node, live, path, force=force)[".base"]
            if live is not MISSING and (not force or live.base is base):
                return live
            return np.ndarray(leaf[1], leaf[0], base, leaf[3], leaf[2]) if base is not MISSING else MISSING
        if not force and live is not MISSING:
            return live
        content = self.graph.contents.get(number, MISSING)
        if content is MISSING:
            return live
        flat = np.frombuffer(content.cpu().numpy().tobytes(), dtype=leaf[0])
        array = np.array(flat.reshape(leaf[1], order=leaf[2]), order=leaf[2])  # with new memory
        same_kind = isinstance(live, np.ndarray) and (live.shape, live.dtype) == (array.shape, array.dtype)
        if same_kind and live.flags.writeable:
            if not same(np.ascontiguousarray(live), np.ascontiguousarray(array)):
                live[...] = array
                self.restored.append(path)
            return live
        return array if issubclass(find_class(node["type"]) or np.ndarray, np.ndarray) else array[()]

    def tensor(self, number: int, live: Any, path: str, *, force: bool) -> Any:
        node = self.nodes[number]
        dtype, shape, stride, offset, needs_grad, *source = node["leaf"]
        if not force and live is not MISSING:
            return live
        source_path, is_base = source or (None, False)
        if not source or source_path is not None:
            owners: Any = self.tensors if source else self.made
            base = owners.get(source_path if source else node["slots"][".base"]["ref"], MISSING)
            return base if base is MISSING or is_base else base.detach().as_strided(shape, stride, offset)
        content = self.graph.contents.get(number, MISSING)
        if content is MISSING:
            return live
        same_kind = isinstance(live, Tensor) and (str(live.dtype), list(live.shape)) == (dtype, shape)
        if same_kind and storage_of(live) not in self.shared and live.is_leaf:
            memory = torch.empty(0, dtype=live.dtype, device=live.device).set_(live.untyped_storage())
            if memory.numel() == content.numel() and (list(live.stride()), live.storage_offset()) == (stride, offset):
                memory.copy_(content)  # also changes all views
                self.restored.append(path)
                return live
        fresh = content.clone().as_strided(shape, stride, offset)
        is_parameter = node["type"].endswith("Parameter")
        return nn.Parameter(fresh, needs_grad) if is_parameter else fresh.requires_grad_(needs_grad)


def find_class(name: str) -> Any:
    # only a class that is imported already: a checkpoint imports nothing
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        value: Any = sys.modules.get(".".join(parts[:end]))
        if value is not None:
            value = functools.reduce(lambda holder, part: getattr(holder, part, None), parts[end:], value)
            return value if isinstance(value, type) else None
    return None


def set_item(holder: dict[Any, Any], key: Any, value: Any) -> None:
    base = collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict
    base.__setitem__(holder, key, value)  # not the user's method


def put_slot(holder: Any, key: str, value: Any) -> bool:
    # no `__setattr__` or property of the user runs
    if key[0] == "[" and isinstance(holder, dict):
        name = next((name for name in dict.keys(holder) if f"[{name!r}]" == key), MISSING)
        if name is MISSING:
            return False
        set_item(holder, name, value)
    elif key[0] == "[":
        if int(key[1:-1]) >= len(holder):
            return False
        holder[int(key[1:-1])] = value
    elif key[:2] == ".<" and isinstance(holder, types.FunctionType):
        cells = dict(zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True))
        if key[2:-1] not in cells:  # the function was edited
            return False
        cells[key[2:-1]].cell_contents = value
    else:
        return _put_attribute(holder, key[1:], value)
    return True


def _put_attribute(holder: Any, name: str, value: Any) -> bool:
    if isinstance(holder, types.MethodType | functools.partial):
        return False
    owner, _, last = name.partition(".")
    is_module = isinstance(holder, nn.Module)
    if is_module and (
        isinstance(value, nn.Module | nn.Parameter)
        or any(name in part for part in (holder._modules, holder._buffers, holder._parameters))
    ):
        nn.Module.__setattr__(holder, name, value)
    elif is_module and last:
        setattr(holder._parameters[owner], last, value)
    elif isinstance(holder, type | Tensor | types.FunctionType):
        setattr(holder, name, value)
    elif type(holder).__dictoffset__ and not isinstance(getattr(type(holder), name, None), types.MemberDescriptorType):
        holder.__dict__[name] = value
    else:
        object.__setattr__(holder, name, value)
    return True
