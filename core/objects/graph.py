"""Capture objects as a graph of plain nodes, and compare two graphs.

A slot holds a scalar, a tuple of scalars, `{"ref": 3}` for node 3, `{"skip": "module.Type"}` for a value that is not
captured, or `{"literal": "0x..."}` for a scalar that `torch.load(weights_only=True)` cannot read. A node has a `kind`,
the `type` of its object, a `leaf` (its content besides slots), a `digest` of content that is not plain, and `slots` by
key, for example `.weight`, `[0]`, `['loss']`. Two slots with the same reference are aliases.
"""

from __future__ import annotations

import collections
import enum
import functools
import io
import pickle
import random
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from ..data.generators import KINDS, is_global
from ..data.rng import generator_state
from ..data.users_code import attributes, cell_content, is_ours, is_users, slot_names, unwrapped
from ..engines.options import COMPILED
from .equality import EMPTY, SCALARS, digest_of, is_scalar, scalar_bits

Node = dict[str, Any]
MISSING: Final[Any] = object()
LISTENERS: Final = "run.listeners."  # functions connected to the bus; their growing containers are logs
MOST_BYTES: Final = 16 << 20  # of a saved tensor or array; a larger one is only compared
MOST_PICKLED: Final = 1 << 20  # bytes of an object that can only be compared by its pickle
MOST_ITEMS: Final = 1000  # of a dict whose items are compared one by one, and of a container of objects
MOST_NODES: Final = 20_000  # of one root
DEEPEST: Final = 60
# Immutable, or without influence on the training.
HARMLESS: Final = (
    types.BuiltinFunctionType, types.ModuleType, types.GenericAlias, types.MethodWrapperType, types.CodeType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.MappingProxyType, types.TracebackType,
    types.FrameType, property, staticmethod, classmethod, functools.cached_property, range, slice, type(Ellipsis),
    type(NotImplemented), type(vars(collections.namedtuple("Named", "field"))["field"]), torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo, np.dtype, np.ufunc, weakref.ref,
    weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
)  # fmt: skip
HARMLESS_MODULES: Final = frozenset({
    "__future__", "_abc", "_ctypes", "_frozen_importlib", "_frozen_importlib_external", "_pytest", "_queue", "_struct",
    "_thread", "abc", "argparse", "blinker", "concurrent", "contextlib", "ctypes", "datetime", "decimal", "enum",
    "fractions", "importlib", "inspect", "logging", "matplotlib", "pathlib", "pytest", "re", "rich", "socket",
    "subprocess", "tempfile", "threading", "torch._dynamo", "torch._ops", "torch.cuda", "torch.distributed",
    "torch.futures", "torch.jit", "torch.profiler", "torch.utils.hooks", "torch.utils.tensorboard", "tqdm", "typing",
    "typing_extensions", "unittest", "uuid", "wandb", "warnings", "zipimport", "zoneinfo",
})  # fmt: skip
HARMLESS_TYPES: Final = frozenset({"_csv.writer", "_struct.Struct"})
MODULE_ATTRIBUTES: Final = frozenset({*vars(nn.Module()), "_compiled_call_impl"}) - {"training"}
HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PARAMETER_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
SNAPSHOT: Final = frozenset({"schema", "training_id", "objects"})  # keys of what `run.state_dict()` returns
IMMUTABLE: Final = ("text", "tuple", "number", "enum")
_PLAIN_SIZE: Final = type("Plain", (), {}).__basicsize__


@dataclass(slots=True)
class Roots:
    """The objects at which the walk starts.

    Attributes:
        objects: objects by path; their state is saved and restored.
        saved: stateful objects by path that the checkpoint holds anyway; they are only referenced.
        data: objects whose contents may be the data set; they are not captured.
        owned: ids of parameters whose gradients the loop clears.
        with_modes: whether the train or eval mode of modules is state.
    """

    objects: Mapping[str, object]
    saved: Mapping[str, object] = field(default_factory=dict)
    data: Iterable[object] = ()
    owned: frozenset[int] = frozenset()
    with_modes: bool = True


@dataclass(slots=True)
class Graph:
    """The state of all objects that are reachable from some roots.

    Attributes:
        nodes: the objects.
        roots: slot values by path.
        untracked: types by path, of objects that could not be captured.
        contents: live tensors, arrays or bytes by the number of the node with their digest.
    """

    nodes: list[Node] = field(default_factory=list)
    roots: dict[str, Any] = field(default_factory=dict)
    untracked: dict[str, str] = field(default_factory=dict)
    contents: dict[int, Any] = field(default_factory=dict)

    def digest(self, number: int) -> str:
        # the walk digests no content at paths that have changed already
        return str(self.nodes[number]["digest"]) or digest_of(self.contents[number])

    def state_dict(self, needed: Iterable[int]) -> dict[str, Any]:
        contents = {number: plain_content(self.contents[number]) for number in needed if number in self.contents}
        return {"nodes": self.nodes, "roots": self.roots, "untracked": self.untracked, "contents": contents}


def plain_content(content: Any) -> Any:
    if not isinstance(content, np.ndarray):
        return content.detach() if isinstance(content, Tensor) else content
    flat = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())


class Namespace:
    """Holds the variables of a module, or the attributes of an object that its `state_dict` lacks."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self.__dict__ = variables


def type_name(value: object) -> str:
    # of a sharded module, the class that the user wrote
    kind = type(value)
    if isinstance(value, nn.Module) and kind.__name__.startswith("FSDP"):
        kind = next((base for base in kind.__mro__[1:] if not base.__module__.startswith("torch.distributed")), kind)
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__  # the script in a spawned process
    return f"{module}.{kind.__qualname__}"


def is_by_user(value: Any) -> bool:
    return is_users(str(value.__module__ or ""))


def is_stateful(kind: type) -> bool:
    names = set[str]().union(*map(vars, kind.__mro__))  # not by `getattr`: a metaclass may raise anything
    return {"state_dict", "load_state_dict"} <= names


@functools.cache
def family(kind: type) -> str:
    if kind in SCALARS:
        return "scalar"
    if issubclass(kind, HARMLESS):
        return "skip"
    for name, kinds in FAMILIES.items():
        if issubclass(kind, kinds):
            return name
    if issubclass(kind, nn.Module):
        return "module"
    package = kind.__module__
    parts = package.split(".")
    packages = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    if is_stateful(kind) and not is_ours(package):
        return "stateful"
    if packages & HARMLESS_MODULES or is_ours(package) or f"{package}.{kind.__qualname__}" in HARMLESS_TYPES:
        return "skip"
    if kind.__basicsize__ > _PLAIN_SIZE + 8 * sum(1 for _ in slot_names(kind)):
        return "opaque"  # a base class in C has unreadable state
    return "object" if kind.__dictoffset__ or any(slot_names(kind)) else "opaque"


FAMILIES: Final[dict[str, tuple[type, ...]]] = {
    "tensor": (Tensor,),
    "array": (np.ndarray, np.generic),
    "dict": (dict,),
    "sequence": (list, tuple, collections.deque),
    "set": (set, frozenset),
    "bytes": (bytearray,),
    "enum": (enum.Enum,),
    "number": (int, float, complex, str, bytes),
    "generator": KINDS,
    "file": (io.IOBase,),
    "cache": (functools._lru_cache_wrapper,),
    "function": (types.FunctionType,),
    "method": (types.MethodType,),
    "partial": (functools.partial,),
    "class": (type,),
}


def inner(module: nn.Module) -> nn.Module:
    wrapped = module._modules.get(COMPILED)
    return module if wrapped is None else wrapped


def user_hooks(holder: Any, name: str) -> list[Any]:
    hooks = (getattr(holder, name, None) or {}).values()
    return [hook for hook in hooks if isinstance(hook, types.FunctionType | types.MethodType) and is_by_user(hook)]


def named_tensors(path: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, nn.Module):
        for prefix, module in value.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    yield f"{path}.{prefix}.{name}", tensor
    elif isinstance(value, torch.optim.Optimizer):
        parameters = [parameter for group in value.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            for name, tensor in value.state.get(parameter, {}).items():
                if isinstance(tensor, Tensor):
                    yield f"{path}.state[{number}].{name}", tensor


def storage_of(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def capture_graph(roots: Roots, changed_paths: Iterable[str] = ()) -> Graph:
    return Walk(roots, frozenset(changed_paths)).graph


class Walk:
    def __init__(self, roots: Roots, changed_paths: frozenset[str] = frozenset()) -> None:
        self.graph, self.roots, self.changed_paths = Graph(), roots, changed_paths
        self.encoders: dict[str, Callable[[Any, str, int], object]] = {
            "tensor": self.tensor, "array": self.array, "dict": self.mapping, "sequence": self.sequence,
            "set": self.set, "bytes": self.bytes, "enum": self.enum, "number": self.number,
            "generator": self.generator, "file": self.file, "cache": self.cache, "function": self.function,
            "method": self.method, "partial": self.partial, "class": self.kind, "module": self.module,
            "stateful": self.stateful, "object": self.instance, "opaque": self.opaque,
        }  # fmt: skip
        self.ids: dict[int, int] = {}
        self.alive: list[object] = []  # an id is valid only while its object lives
        self.storages: dict[int, tuple[str | int, Tensor]] | None = None  # by address: a path or a node
        self.saved = {id(value) for value in roots.saved.values() if not isinstance(value, nn.Module)}
        self.modules = {
            id(module) for value in roots.saved.values() if isinstance(value, nn.Module) for module in value.modules()
        }
        data = list(roots.data)
        self.data, self.data_storages = {id(value) for value in data}, set(map(_memory_of, data)) - {0}
        self.limit = MOST_NODES
        for path, value in roots.objects.items():
            self.limit = len(self.graph.nodes) + MOST_NODES
            number = self.ids.get(id(value))
            if number is not None:
                self.graph.roots[path] = {"ref": number}
            elif isinstance(value, nn.Module):
                self.graph.roots[path] = self.module(value, path, 0)
            else:
                self.graph.roots[path] = self.instance(value, path, 0)

    def give_up(self, value: object, path: str, why: str = "") -> Node:
        if why.endswith(" items") and path.startswith(LISTENERS):
            return {"skip": "a log"}
        self.graph.untracked[path] = type_name(value) + (f", {why}" if why else "")
        return {"skip": type_name(value)}

    def value(self, value: Any, path: str, depth: int) -> object:
        kind: type = type(value)
        name = family(kind)
        if name == "scalar":
            return value if is_scalar(value) else self.scalar(value, path)
        if name == "skip":
            return {"skip": type_name(value)}
        if type(value) is tuple and all(map(is_scalar, value)):
            return value
        if (number := self.ids.get(id(value))) is not None:
            return {"ref": number}
        if id(value) in self.data:
            return {"skip": "data"}
        if id(value) in self.saved:
            return {"skip": "saved"}
        if depth > DEEPEST or len(self.graph.nodes) > self.limit:
            return self.give_up(value, path, "too deep" if depth > DEEPEST else f"more than {MOST_NODES} objects")
        try:
            return self.encoders[name](value, path, depth)
        except Exception as error:  # noqa: BLE001  # the user's `__len__` or `state_dict` fails, a thread changes a dict
            self.ids.pop(id(value), None)
            return self.give_up(value, path, f"{type(error).__name__} while it was read")

    def add(
        self, value: object, path: str, kind: str, depth: int, items: Iterable[tuple[str, object]], leaf: object = None
    ) -> Node:
        number = self.ids[id(value)] = len(self.graph.nodes)
        self.alive.append(value)
        slots: dict[str, object] = {}
        self.graph.nodes.append({"kind": kind, "type": type_name(value), "leaf": leaf, "slots": slots})
        for key, item in items:
            slots[key] = self.value(item, path + key, depth + 1)
        return {"ref": number}

    def scalar(self, value: Any, path: str) -> Node:
        # a long scalar, or one that a checkpoint cannot hold directly
        if value is EMPTY or isinstance(value, int):
            return {"literal": hex(value) if isinstance(value, int) else repr(value)}
        if (number := self.ids.get(id(value))) is not None:
            return {"ref": number}
        return self.content(self.leaf(value, path, "text", None), path, value)

    def leaf(self, value: object, path: str, kind: str, leaf: object) -> Node:
        return self.add(value, path, kind, 0, (), leaf)

    def content(self, node: Node, path: str, content: Any) -> Node:
        number = node["ref"]
        self.graph.contents[number] = content
        self.graph.nodes[number]["digest"] = "" if path in self.changed_paths else digest_of(content)
        return node

    def scalars(self, value: Any, path: str, kind: str, content: Any, size: object = None) -> Node:
        attribute_slots = self.attribute_slots_of(value)
        if len(content) <= MOST_ITEMS:
            return self.add(value, path, kind, 0, attribute_slots, [content, size])
        bits = scalar_bits(content)
        if len(bits) > MOST_BYTES:
            return self.large(value, path, f"{len(value):,} items", bits)
        return self.content(self.add(value, path, kind, 0, attribute_slots, [None, size]), path, content)

    def attribute_slots_of(self, value: object) -> list[tuple[str, object]]:
        return [] if type(value).__dictoffset__ == 0 else [(f".{name}", item) for name, item in attributes(value)]

    def large(self, value: Any, path: str, size: str, content: Any) -> Node:
        # too large to be saved: only compared
        node = self.leaf(value, path, "large", size)
        self.graph.nodes[node["ref"]]["digest"] = digest_of(content)
        return node

    def mapping(self, value: Any, path: str, depth: int) -> object:
        pairs = ordered_items(value)
        keys, items = [key for key, _ in pairs], [item for _, item in pairs]
        if dict.keys(value) >= SNAPSHOT:  # a snapshot of this run
            return {"skip": "a snapshot"}
        if not all(is_key(key) for key in keys):
            if len(keys) > MOST_ITEMS:
                return self.give_up(value, path, f"{len(keys):,} items")
            parts = [
                part for n, (key, item) in enumerate(pairs) for part in ((f"[key {n}]", key), (f"[value {n}]", item))
            ]
            return self.add(value, path, "map", depth, [*parts, *self.attribute_slots_of(value)])
        if len(keys) > MOST_ITEMS and all(map(is_scalar, items)):
            return self.scalars(value, path, "dict of scalars", dict(zip(keys, items, strict=True)))
        slots = [(f"[{key!r}]", item) for key, item in zip(keys, items, strict=True)]
        return self.add(value, path, "dict", depth, [*slots, *self.attribute_slots_of(value)], keys)

    def sequence(self, value: Any, path: str, depth: int) -> object:
        kind = "tuple" if isinstance(value, tuple) else "list"
        items, size = list(value), getattr(value, "maxlen", None)
        if kind == "list" and all(map(is_scalar, items)):
            return self.scalars(value, path, "list of scalars", items, size)
        if len(items) > MOST_ITEMS:
            return self.give_up(value, path, f"{len(items):,} items")
        slots = [(f"[{number}]", item) for number, item in enumerate(items)]
        attribute_slots = [] if kind == "tuple" else self.attribute_slots_of(value)
        return self.add(value, path, kind, depth, [*slots, *attribute_slots], [size])

    def set(self, value: Any, path: str, depth: int) -> object:
        if not all(is_key(item) for item in value):
            return self.give_up(value, path, "of objects")
        return self.scalars(value, path, "set", sorted(value, key=repr))

    def bytes(self, value: Any, path: str, depth: int) -> object:
        return self.leaf(value, path, "bytes", bytes(value))

    def enum(self, value: Any, path: str, depth: int) -> object:
        return self.leaf(value, path, "enum", value.name)

    def number(self, value: Any, path: str, depth: int) -> object:
        base = next(base for base in type(value).__mro__ if base in SCALARS)
        plain = base.__new__(base, value) if base is not str else str.__str__(value)
        return self.add(value, path, "number", depth, [(f".{name}", item) for name, item in attributes(value)], plain)

    def generator(self, value: Any, path: str, depth: int) -> object:
        if isinstance(value, random.SystemRandom):
            return self.give_up(value, path)
        if is_global(value):
            return {"skip": "generator"}
        named_attributes = [] if type(value) in KINDS or type(value).__dictoffset__ == 0 else list(attributes(value))
        node = self.add(value, path, "generator", depth, [(f".{name}", item) for name, item in named_attributes])
        self.graph.nodes[node["ref"]]["leaf"] = generator_state(value)
        return node

    def file(self, value: Any, path: str, depth: int) -> object:
        is_output = value.closed or (value.writable() and not value.readable())
        return {"skip": "file"} if is_output else self.give_up(value, path)

    def cache(self, value: Any, path: str, depth: int) -> object:
        is_filled = is_by_user(value) and value.cache_info().currsize
        return self.give_up(value, path, "not empty") if is_filled else {"skip": "cache"}

    def function(self, value: Any, path: str, depth: int) -> object:
        if (wrapped := unwrapped(value)) is not value:  # for example by `torch.compile(function)`
            return self.value(wrapped, path, depth)
        if not is_by_user(value):
            return {"skip": "function"}
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        items = [(f".<{name}>", cell_content(cell)) for name, cell in cells if name != "__class__"]
        parts = {"__defaults__": value.__defaults__, "__kwdefaults__": value.__kwdefaults__, "__dict__": value.__dict__}
        items += [(f".{name}", part) for name, part in parts.items() if part]
        return self.add(value, path, "function", depth, items) if items else {"skip": "function"}

    def method(self, value: Any, path: str, depth: int) -> object:
        return self.add(value, path, "method", depth, [(".__self__", value.__self__)], value.__name__)

    def partial(self, value: Any, path: str, depth: int) -> object:
        items = [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
        return self.add(value, path, "partial", depth, items)

    def kind(self, value: Any, path: str, depth: int) -> object:
        if not is_by_user(value):
            return {"skip": "class"}
        items = [(f".{name}", item) for name, item in vars(value).items() if name[:2] != "__" and name != "_abc_impl"]
        items = [(name, item) for name, item in items if not isinstance(item, HARMLESS)]
        items += [(f".<base {number}>", base) for number, base in enumerate(value.__bases__) if is_by_user(base)]
        return self.add(value, path, "class", depth, items) if items else {"skip": "class"}

    def instance(self, value: Any, path: str, depth: int) -> object:
        items = [(f".{name}", item) for name, item in attributes(value)]
        if type(value) is Namespace:  # `torch.compile` adds such variables to modules
            items = [(key, item) for key, item in items if key[:3] != ".__"]
        return self.add(value, path, "object", depth, items + self.user_class(value))

    def user_class(self, value: object) -> list[tuple[str, object]]:
        # the attributes of a user's class and the closures of its methods are state
        return [(".__class__", type(value))] if is_by_user(type(value)) else []

    def opaque(self, value: Any, path: str, depth: int) -> object:
        # state in C cannot be restored, but a change shows in the pickle
        if isinstance(value, Iterator) and hasattr(value, "__reduce__") and type(value).__module__ == "builtins":
            return self.give_up(value, path)  # pickling an iterator such as `map` would copy what it reads
        try:
            pickled = pickle.dumps(value)
        except Exception:  # noqa: BLE001  # anything may happen in a library
            return self.give_up(value, path)
        if len(pickled) > MOST_PICKLED:
            return self.give_up(value, path, f"{len(pickled) >> 20} MiB")
        return self.large(value, path, "", pickled)

    def stateful(self, value: Any, path: str, depth: int) -> object:
        state = value.state_dict()
        self.alive.append(state)
        attribute_slots = [(f".{name}", item) for name, item in attributes(value)] if is_by_user(type(value)) else []
        items = [(".state_dict()", state), *attribute_slots, *self.user_class(value)]
        return self.add(value, path, "stateful", depth, items)

    def module(self, value: nn.Module, path: str, depth: int) -> object:
        module = inner(value)
        if module is not value and (number := self.ids.get(id(module))) is not None:
            return {"ref": number}
        variables, is_saved = vars(module), id(module) in self.modules
        skipped = MODULE_ATTRIBUTES if self.roots.with_modes else MODULE_ATTRIBUTES | {"training"}
        items = [(f".{name}", item) for name, item in variables.items() if name not in skipped]
        for name, parameter in module._parameters.items():
            if parameter is None or not is_saved:
                items.append((f".{name}", parameter))
                continue
            items.append((f".{name}.requires_grad", parameter.requires_grad))
            items += [(f".{name}.{key}", item) for key, item in vars(parameter).items() if key[0] != "_"]
            items += [(f".{name}.{key}", hooks) for key in PARAMETER_HOOKS if (hooks := user_hooks(parameter, key))]
        persistent = () if not is_saved else module._buffers.keys() - module._non_persistent_buffers_set
        items += [(f".{name}", buffer) for name, buffer in module._buffers.items() if name not in persistent]
        items += [(f".{name}", child) for name, child in module._modules.items()]
        items += [(f".{name}", hooks) for name in HOOKS if variables.get(name) and (hooks := user_hooks(module, name))]
        names = (
            None
            if is_saved
            else [[*module._parameters], [*module._buffers], sorted(module._non_persistent_buffers_set)]
        )
        return self.add(module, path, "module", depth, items + self.user_class(module), names)

    def array(self, value: Any, path: str, depth: int) -> object:
        if _memory_of(value) in self.data_storages or isinstance(value, np.memmap):
            return {"skip": "data"}
        if value.dtype.hasobject:
            return self.give_up(value, path, "of objects") if value.size else {"skip": "array"}
        root = value
        while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray):
            root = root.base
        if root is not value and root.flags.forc and root.nbytes <= max(1 << 20, 4 * value.nbytes):
            start = value.__array_interface__["data"][0] - root.__array_interface__["data"][0]
            leaf = [value.dtype.str, list(value.shape), list(value.strides), start]
            return self.add(value, path, "array view", depth, [(".base", root)], leaf)
        if value.nbytes > MOST_BYTES:
            return self.large(value, path, f"{value.nbytes >> 20} MiB", value)
        order = "F" if value.flags.fnc else "C"
        node = self.leaf(value, path, "array", [value.dtype.str, list(value.shape), order])
        return self.content(node, path, np.asarray(value.T if order == "F" else value))

    def tensor(self, value: Tensor, path: str, depth: int) -> object:
        if value.is_meta or storage_of(value) in self.data_storages:
            return {"skip": "meta" if value.is_meta else "data"}
        if value.layout != torch.strided or type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            return self.give_up(value, path, "" if value.layout == torch.strided else str(value.layout))
        storage = storage_of(value)
        owner, base = self.known_storages().get(storage, (None, None))
        is_leaf = value.is_leaf
        place = [str(value.dtype), list(value.shape), list(value.stride()), value.storage_offset()]
        place.append(is_leaf and value.requires_grad)
        grad = value.grad if is_leaf and id(value) not in self.roots.owned else None
        items = [] if grad is None else [(".grad", grad)]
        if isinstance(owner, str):
            return self.add(value, path, "tensor", depth, items, [*place, owner, base is value])
        if isinstance(owner, int):
            node = self.add(value, path, "tensor view", depth, items, place)
            self.graph.nodes[node["ref"]]["slots"][".base"] = {"ref": owner}
            return node
        if value.nbytes > MOST_BYTES and not isinstance(value, nn.Parameter):
            return self.large(value, path, f"{value.nbytes >> 20} MiB", value)
        covers_storage = value.untyped_storage().nbytes() <= max(1 << 20, 4 * value.nbytes)
        data = value.detach()
        if covers_storage:
            data = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
            if storage:
                self.known_storages()[storage] = (len(self.graph.nodes), value)
        else:  # a small part of a large storage is saved without the storage
            place[2], place[3] = list(torch.empty(value.shape, device="meta").stride()), 0
            data = data.contiguous().view(-1)
        return self.content(self.add(value, path, "tensor", depth, items, [*place, None, True]), path, data)

    def known_storages(self) -> dict[int, tuple[str | int, Tensor]]:
        if self.storages is None:  # most programs hold no tensors, and need no index
            self.storages = {}
            for name, holder in self.roots.saved.items():
                for path, tensor in named_tensors(name, holder):
                    self.storages.setdefault(storage_of(tensor), (path, tensor))
            self.storages.pop(0, None)
        return self.storages


def is_reference(value: Any) -> bool:
    return isinstance(value, dict) and "ref" in value


def ordered_items(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    # no method of a subclass runs; only an OrderedDict sees the order that its `move_to_end` sets
    base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
    return list(base.items(value))


def is_key(key: object) -> bool:
    return is_scalar(key) or (type(key) is tuple and all(map(is_scalar, key)))


def _memory_of(value: object) -> int:
    if isinstance(value, Tensor):
        return storage_of(value)
    return int(value.__array_interface__["data"][0]) if isinstance(value, np.ndarray) and value.size else 0


class Comparison:
    """The `paths` at which two graphs differ, and the nodes of the second graph that are `needed` to restore them."""

    def __init__(self, before: Graph, after: Graph, changed_paths: Iterable[str] = ()) -> None:
        self.before, self.after, self.changed_paths = before, after, frozenset(changed_paths)
        self.paths, self.needed = set[str](), set[int]()
        self.pairs, self.back, self.descended = dict[int, int](), dict[int, int](), set[int]()
        self.compared = set[tuple[int, int]]()
        for path in after.roots:  # in order: an alias gets the first path that reaches it
            if path in before.roots:
                self.visit(path, before.roots[path], after.roots[path])

    def visit(self, path: str, old: Any, new: Any) -> None:
        if not (is_reference(old) and is_reference(new)):
            if old is MISSING or new is MISSING or scalar_bits(old) != scalar_bits(new):
                self.add(path, new)
            elif path in self.changed_paths:
                self.need(new)
            return
        first, second = old["ref"], new["ref"]
        was, now = self.before.nodes[first], self.after.nodes[second]
        if (first, second) in self.compared or (path.startswith(LISTENERS) and size(was) != size(now)):
            return
        self.compared.add((first, second))
        if first in self.pairs or second in self.back:
            if was["kind"] != now["kind"] or now["kind"] not in IMMUTABLE:  # whose identity is not state
                self.add(path, new)
                return
        else:
            self.pairs[first], self.back[second] = second, first
        if was["kind"] != now["kind"] or was["type"] != now["type"]:
            self.add(path, new)
            return
        is_known = path in self.changed_paths
        if is_known or not self.has_same_leaf(first, second):
            self.paths.add(path)
            self.needed.add(second)
            if is_known or now["kind"] in ("stateful", "generator"):
                self.need(new)
        elif now["kind"] in ("list", "tuple") and len(was["slots"]) != len(now["slots"]):
            self.add(path, new)
        self.visit_slots(path, was["slots"], now["slots"])

    def visit_slots(self, path: str, slots: dict[str, Any], new_slots: dict[str, Any]) -> None:
        for key, new in new_slots.items():
            old = slots.get(key, MISSING)
            if old is not new or type(new) is dict:  # most are identical small numbers and texts
                self.visit(path + key, old, new)
        if slots.keys() != new_slots.keys():
            for key in slots.keys() - new_slots.keys():
                self.visit(path + key, slots[key], MISSING)

    def has_same_leaf(self, first: int, second: int) -> bool:
        was, now = self.before.nodes[first], self.after.nodes[second]
        if ("digest" in was) != ("digest" in now):
            return False
        same_digest = "digest" not in now or self.before.digest(first) == self.after.digest(second)
        return same_digest and scalar_bits(was["leaf"]) == scalar_bits(now["leaf"])

    def add(self, path: str, new: Any) -> None:
        self.paths.add(path)
        self.need(new)

    def need(self, value: Any) -> None:
        stack = [value]
        while stack:
            value = stack.pop()
            if isinstance(value, dict) and "ref" in value and value["ref"] not in self.descended:
                self.descended.add(value["ref"])
                self.needed.add(value["ref"])
                stack += self.after.nodes[value["ref"]]["slots"].values()


def size(node: Node) -> int:
    if node["kind"] in ("list of scalars", "dict of scalars", "set"):
        content = node["leaf"][0]
        return -1 if content is None else len(content)
    return len(node["slots"]) if node["kind"] in ("list", "dict", "map") else 0


def describe(graph: Graph, path: str) -> str:
    for slot_path, value in walk(graph):
        if slot_path == path:
            if not isinstance(value, dict):
                return f"{value!r:.60}"
            if "ref" not in value:
                return str(value.get("skip") or value["literal"])
            node = graph.nodes[value["ref"]]
            return str(node["leaf"]) if node["kind"] in ("number", "enum") else str(node["type"])
    return "missing"


def walk(graph: Graph) -> Iterator[tuple[str, Any]]:
    stack, seen = [*reversed(graph.roots.items())], set[int]()
    while stack:
        path, value = stack.pop()
        yield path, value
        if isinstance(value, dict) and "ref" in value and value["ref"] not in seen:
            seen.add(value["ref"])
            stack += [(path + key, child) for key, child in reversed(graph.nodes[value["ref"]]["slots"].items())]


def untracked(graph: Graph, changed: Iterable[str]) -> dict[str, str]:
    # types by path, of changed values that are only compared, too
    changed, types = set(changed), dict(graph.untracked)
    if any(node["kind"] == "large" for node in graph.nodes):
        for path, value in walk(graph):
            if path in changed and isinstance(value, dict) and "ref" in value:
                node = graph.nodes[value["ref"]]
                if node["kind"] == "large":
                    types[path] = node["type"] + (f", {node['leaf']}" if node["leaf"] else "")
    return types
