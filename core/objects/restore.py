"""Restore the state of objects from a saved graph, in place."""

from __future__ import annotations

import ast
import collections
import functools
import sys
import types
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from ..data.rng import KINDS, set_generator_state
from .equality import same
from .graph import (
    MISSING,
    STATE,
    Graph,
    Node,
    Parts,
    Roots,
    Walk,
    is_reference,
    labeled_items,
    named_tensors,
    storage_of,
    type_name,
    unwrap,
)

REBUILT: Final = ("constant", "tuple", "array", "array view", "tensor", "tensor view", "enum")
NEW: Final = ("list", "dict", "scalars", "object", "module")
CONSTANTS: Final[dict[str, Any]] = {  # a checkpoint calls no other class
    "builtins.str": str, "builtins.frozenset": frozenset, "builtins.int": ast.literal_eval,
    "builtins.bytes": ast.literal_eval,
}  # fmt: skip
GENERATORS: Final = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in KINDS}


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


class _Restore:
    def __init__(self, roots: Roots, graph: Graph, paths: frozenset[str]) -> None:
        self.graph, self.nodes, self.paths = graph, graph.nodes, paths
        self.made: dict[int, Any] = {}  # by node
        self.filled, self.bound = set[int](), set[int]()  # nodes; ids of live objects
        self.restored: list[str] = []
        self.failed: dict[str, str] = {}
        self.tensors = dict(item for path, value in roots.saved.items() for item in named_tensors(path, value))
        self.shared = {storage_of(tensor) for tensor in self.tensors.values()}
        self.live = Walk(replace(roots, objects={}))

    def bind(self, value: Any, live: Any, path: str) -> None:
        # pairs the nodes of unchanged slots with the live objects, which saved aliases then refer to
        if not is_reference(value) or path in self.paths or live is MISSING:
            return
        live, number = unwrap(live), value["ref"]
        if number in self.made or id(live) in self.bound or self.nodes[number]["type"] != type_name(live):
            return
        self.made[number] = live
        self.bound.add(id(live))
        live_slots = self.live_slots(self.nodes[number], live)
        for key, child in self.nodes[number]["slots"].items():
            self.bind(child, live_slots.get(key, MISSING), path + key)

    def live_slots(self, node: Node, live: Any) -> dict[str, Any]:
        if live is MISSING or not node["slots"]:
            return {}
        # a root may be an object of heliograph; the state of a stateful object is not read
        read = self.live.instance if node["kind"] in ("object", "stateful") else self.live.take_apart
        parts = read(live, "")
        return dict(parts.slots) if isinstance(parts, Parts) else {}

    def fill(self, value: Any, live: Any, path: str, *, force: bool = False) -> Any:
        """Return the restored value of a slot: `live`, changed in place, if possible.

        Args:
            value: the saved value of the slot.
            live: its present value.
            path: the path of the slot.
            force: whether the container of the slot is restored.
        """
        force = force or path in self.paths
        if not is_reference(value):
            if force and live is MISSING and isinstance(value, dict):
                self.failed[path] = value["skip"]
            return value if force and not isinstance(value, dict) else live
        number, wrapper, live = value["ref"], live, unwrap(live)
        node = self.nodes[number]
        if number in self.filled:
            return self.made.get(number, wrapper) if force else wrapper
        target = self.made.get(number, live if self.fits(node, live) else MISSING)
        if target is MISSING and not force:  # the program was edited
            return wrapper
        self.filled.add(number)
        try:
            if node["kind"] in REBUILT:
                target = self.build(number, target, path, force=force)
            elif target is MISSING:
                target = self.create(number)
            if target is not MISSING:
                self.made[number] = target
                self.bound.add(id(target))
                self.fill_parts(number, target, path, force=force)
                return wrapper if target is live else target
            self.failed[path] = node["type"]
        except Exception as error:  # noqa: BLE001  # an edited class, or `load_state_dict`
            self.failed[path] = f"{node['type']}, {type(error).__name__} while it was restored"
        if number not in self.made:
            self.filled.discard(number)
        return wrapper

    def fits(self, node: Node, live: Any) -> bool:
        if live is MISSING or type_name(live) != node["type"] or id(live) in self.bound:
            return False
        return not isinstance(live, Tensor) or (node["kind"] == "tensor" and not node["leaf"][5])

    def fill_parts(self, number: int, target: Any, path: str, *, force: bool) -> None:
        node = self.nodes[number]
        kind, slots = node["kind"], node["slots"]
        if kind == "generator" and force:
            set_generator_state(target, node["leaf"])
            self.restored.append(path)
        elif kind == "scalars" and force:
            content = self.graph.contents[number]
            target.clear()
            (target.update if isinstance(target, set | dict) else target.extend)(content)
            self.restored.append(path)
        elif kind == "large" and force:
            self.failed[path] = self.graph.large.get(path) or node["type"]
        elif kind == "stateful" and (force or any(name.startswith(path + STATE) for name in self.paths)):
            target.load_state_dict(self.fill(slots[STATE], MISSING, path + STATE, force=True))
            self.restored.append(path)
        if kind in ("tuple", "array view", "tensor view"):  # built of its slots
            return
        live_slots = self.live_slots(node, target)
        items = {
            key: self.fill(child, live_slots.get(key, MISSING), path + key, force=force)
            for key, child in slots.items()
            if key != STATE
        }
        if kind in ("list", "dict") and force:
            self.set_items(node, target, items, path)
            items = {key: item for key, item in items.items() if key[0] != "["}
        for key, item in items.items():
            if item is not live_slots.get(key, MISSING):
                self.put(target, key, item, path + key)

    def set_items(self, node: Node, target: Any, items: dict[str, Any], path: str) -> None:
        content = {key: item for key, item in items.items() if key[0] == "["}
        if any(item is MISSING for item in content.values()):  # do not restore half a container
            return
        target.clear()
        if node["kind"] == "list":
            target.extend(content.values())
        else:
            for number, key in enumerate(node["leaf"]):
                if isinstance(key, dict):
                    set_item(target, content[f"[key {number}]"], content[f"[value {number}]"])
                else:
                    set_item(target, key, content[f"[{key!r}]"])
        self.restored.append(path)

    def put(self, holder: Any, key: str, value: Any, path: str) -> None:
        try:
            put_slot(holder, key, value)
        except Exception as error:  # noqa: BLE001  # a shorter list, an edited function or class
            self.failed[path] = f"{type_name(value)}, {type(error).__name__} while it was restored"
        else:
            if path not in self.restored:
                self.restored.append(path)

    def build(self, number: int, live: Any, path: str, *, force: bool) -> Any:
        node = self.nodes[number]
        kind, slots, leaf = node["kind"], node["slots"], node["leaf"]
        live_slots = self.live_slots(node, live)
        if kind in ("tuple", "array view"):
            items = [
                self.fill(child, live_slots.get(key, MISSING), path + key, force=force) for key, child in slots.items()
            ]
            is_same = list(map(id, items)) == list(map(id, live_slots.values()))
            if is_same and (kind == "tuple" or not force):
                return live
            if any(item is MISSING for item in items):
                return MISSING
            if kind == "tuple":
                return tuple.__new__(find_class(node["type"]), items)
            return np.ndarray(leaf[1], leaf[0], items[0], leaf[3], leaf[2])
        if not force:
            return live
        cls = find_class(node["type"])
        if kind == "enum":
            return getattr(cls, leaf)
        if kind == "tensor view" or (kind == "tensor" and leaf[5]):
            return self.tensor_view(node)
        content = self.graph.contents.get(number, MISSING)
        if content is MISSING:
            return live
        if kind == "constant":
            return CONSTANTS[node["type"]](content)
        return self.array(leaf, content, cls, live, path) if kind == "array" else self.tensor(node, content, live, path)

    def create(self, number: int) -> Any:
        node = self.nodes[number]
        kind, cls = node["kind"], find_class(node["type"])
        if kind == "generator":
            generator: Any = GENERATORS[node["type"]]
            bits = getattr(np.random, node["leaf"]["bit_generator"])() if generator is np.random.Generator else None
            return generator() if bits is None else generator(bits)
        if cls is None or kind not in NEW or issubclass(cls, collections.defaultdict):  # a factory is not saved
            return MISSING
        if kind in ("object", "module") and any(
            isinstance(child, dict) and "skip" in child and key != ".__class__" for key, child in node["slots"].items()
        ):  # without its lock or logger, for example, the object would be broken
            return MISSING
        if cls is collections.deque:
            return collections.deque(maxlen=node["leaf"][1])
        made = cls.__new__(cls)
        if kind == "module":
            nn.Module.__init__(made)
            parameters, buffers, not_persistent = node["leaf"] or ((), (), ())
            made._parameters, made._buffers = dict.fromkeys(parameters), dict.fromkeys(buffers)
            made._non_persistent_buffers_set = set(not_persistent)
        return made

    def array(self, leaf: Any, content: Tensor, cls: type, live: Any, path: str) -> Any:
        flat = np.frombuffer(content.cpu().numpy().tobytes(), dtype=leaf[0])
        array = np.array(flat.reshape(leaf[1]), order=leaf[2])  # with new memory
        is_same_kind = isinstance(live, np.ndarray) and (live.shape, live.dtype) == (array.shape, array.dtype)
        if not (is_same_kind and live.flags.writeable):
            return array if issubclass(cls, np.ndarray) else array[()]
        if not same(np.ascontiguousarray(live), np.ascontiguousarray(array)):
            live[...] = array
            self.restored.append(path)
        return live

    def tensor(self, node: Node, content: Tensor, live: Any, path: str) -> Any:
        dtype, shape, stride, offset, needs_grad, *_ = node["leaf"]
        is_same_kind = isinstance(live, Tensor) and (str(live.dtype), list(live.shape)) == (dtype, shape)
        if is_same_kind and storage_of(live) not in self.shared and live.is_leaf:
            memory = torch.empty(0, dtype=live.dtype, device=live.device).set_(live.untyped_storage())
            if memory.numel() == content.numel() and (list(live.stride()), live.storage_offset()) == (stride, offset):
                memory.copy_(content)  # also changes all views
                self.restored.append(path)
                return live
        fresh = content.clone().as_strided(shape, stride, offset)
        is_parameter = node["type"].endswith("Parameter")
        return nn.Parameter(fresh, needs_grad) if is_parameter else fresh.requires_grad_(needs_grad)

    def tensor_view(self, node: Node) -> Any:
        _, shape, stride, offset, _, *source = node["leaf"]
        base = self.tensors.get(source[0], MISSING) if source else self.made.get(node["slots"][".base"]["ref"], MISSING)
        is_whole = bool(source) and source[1]
        return base if base is MISSING or is_whole else base.detach().as_strided(shape, stride, offset)


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


def put_slot(holder: Any, key: str, value: Any) -> None:
    # no `__setattr__` of the user runs
    owner, _, name = key[1:].rpartition(".")
    if isinstance(holder, dict) and key[0] == "[":
        set_item(holder, next(name for label, name, _ in labeled_items(holder) if label == key), value)
    elif key[0] == "[":
        holder[int(key[1:-1])] = value
    elif isinstance(holder, types.FunctionType) and key[:2] == ".<":
        cells = dict(zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True))
        cells[key[2:-1]].cell_contents = value
    elif isinstance(holder, nn.Module) and owner:  # an attribute of a parameter
        setattr(holder._parameters[owner], name, value)
    elif isinstance(holder, nn.Module):
        nn.Module.__setattr__(holder, name, value)
    elif isinstance(holder, type | Tensor | types.FunctionType):
        setattr(holder, key[1:], value)
    else:
        object.__setattr__(holder, key[1:], value)
