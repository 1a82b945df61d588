"""Capture objects as a graph of plain nodes, and compare two graphs.

A slot holds a scalar, a tuple of scalars, `{"ref": 3}` for node 3, or `{"skip": "module.Type"}` for a value that is
not captured. A node has a `kind`, the `type` of its object, a `leaf` (plain facts), a `digest` of content that is saved
apart, and `slots` by key, for example `.weight`, `[0]`, `['loss']`. Two slots with the same reference are aliases.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..data.rng import KINDS, generator_state, is_global
from ..data.users_code import attributes, cell_content, is_by_user, is_ours, slots_of, unwrapped
from ..engines.options import COMPILED
from ..system.plain_pickle import pack
from .equality import SCALARS, digest_of, is_scalar, scalar_bits

Node = dict[str, Any]
MISSING: Final[Any] = object()
LISTENERS: Final = "run.listeners."  # functions connected to the bus; their growing containers are logs
MOST_BYTES: Final = 16 << 20  # of a saved tensor or array; a larger one is only compared
MOST_ITEMS: Final = 1000  # of a dict whose items are compared one by one, and of a list of objects
MOST_NODES: Final = 20_000  # of one root
DEEPEST: Final = 60
BUILT_IN: Final = (list, dict, set)  # containers without attributes
SMALL: Final = 1 << 20  # bytes of memory that is saved whole, although a tensor or array is a small part of it
# Immutable, or without influence on the training.
HARMLESS: Final = (
    types.BuiltinFunctionType, types.ModuleType, types.GenericAlias, types.MethodWrapperType, types.CodeType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.MappingProxyType, types.TracebackType,
    types.FrameType, property, staticmethod, classmethod, functools.cached_property, range, slice, type(Ellipsis),
    type(NotImplemented), type(vars(collections.namedtuple("Named", "field"))["field"]), torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo, np.dtype, np.ufunc, weakref.ref,
    weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, types.UnionType,
)  # fmt: skip
HARMLESS_MODULES: Final = frozenset({
    "__future__", "_abc", "_ctypes", "_frozen_importlib", "_frozen_importlib_external", "_pytest", "_queue", "_struct",
    "_thread", "abc", "argparse", "blinker", "concurrent", "contextlib", "ctypes", "datetime", "decimal", "enum",
    "fractions", "importlib", "inspect", "logging", "matplotlib", "pathlib", "pytest", "re", "rich", "socket",
    "subprocess", "tempfile", "threading", "torch._dynamo", "torch._ops", "torch.cuda", "torch.distributed",
    "torch.futures", "torch.jit", "torch.profiler", "torch.utils.hooks", "torch.utils.tensorboard", "tqdm", "typing",
    "typing_extensions", "unittest", "uuid", "wandb", "warnings", "zipimport", "zoneinfo",
})  # fmt: skip
MODULE_ATTRIBUTES: Final = frozenset({*vars(nn.Module()), "_compiled_call_impl"}) - {"training"}
HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PARAMETER_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
SNAPSHOT: Final = frozenset({"schema", "training_id", "objects"})  # keys of what `run.state_dict()` returns
STATE: Final = ".state_dict()"  # key of the slot of a stateful object
FUNCTION_PARTS: Final = ("__defaults__", "__kwdefaults__", "__dict__")
IMMUTABLE: Final = ("constant", "tuple", "enum")
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
        large: types by path, of objects that are only compared.
        contents: live tensors, arrays or bytes by the number of the node with their digest.
    """

    nodes: list[Node] = field(default_factory=list)
    roots: dict[str, Any] = field(default_factory=dict)
    untracked: dict[str, str] = field(default_factory=dict)
    large: dict[str, str] = field(default_factory=dict)
    contents: dict[int, Any] = field(default_factory=dict)

    def digest(self, number: int) -> str:
        # computed here if the path had changed before the walk; a checkpoint has no content of logs
        return str(self.nodes[number]["digest"]) or digest_of(self.contents.get(number))

    def pack(self) -> bytes:
        # all but the contents
        return pack({"nodes": self.nodes, "roots": self.roots, "untracked": self.untracked, "large": self.large})

    def plain_contents(self, needed: Iterable[int]) -> dict[int, Any]:
        return {number: plain_content(self.contents[number]) for number in needed if number in self.contents}


def plain_content(content: Any) -> Any:
    if not isinstance(content, np.ndarray):
        return content.detach().view(-1) if isinstance(content, Tensor) else content
    flat = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())


class Namespace:
    """Holds the variables of a module, or the attributes of an object that its `state_dict` lacks."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self.__dict__ = variables


def type_name(value: object) -> str:
    kind: type = type(value)
    return _name_of(kind)


@functools.cache
def _name_of(kind: type) -> str:
    # of a sharded module, the class that the user wrote
    if issubclass(kind, nn.Module) and kind.__name__.startswith("FSDP"):
        kind = next((base for base in kind.__mro__[1:] if not base.__module__.startswith("torch.distributed")), kind)
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__  # the script in a spawned process
    return f"{module}.{kind.__qualname__}"


@functools.cache
def family(kind: type) -> str:
    slots = slots_of(kind)
    if kind in SCALARS:
        return "scalar"
    if issubclass(kind, HARMLESS):
        return "skip"
    for name, kinds in FAMILIES.items():
        if issubclass(kind, kinds):
            return name
    name, is_framework = f"{kind.__module__}.{kind.__qualname__}", is_ours(kind.__module__)
    # not by `getattr`: a metaclass may raise anything
    if not is_framework and {"state_dict", "load_state_dict"} <= set[str]().union(*map(vars, kind.__mro__)):
        return "stateful"
    if is_framework or name == "_csv.writer" or any(name.startswith(f"{module}.") for module in HARMLESS_MODULES):
        return "skip"
    if kind.__basicsize__ > _PLAIN_SIZE + 8 * len(slots):
        return "opaque"  # a base class in C has unreadable state
    return "object" if kind.__dictoffset__ or slots else "opaque"


FAMILIES: Final[dict[str, tuple[type, ...]]] = {
    "tensor": (Tensor,),
    "array": (np.ndarray, np.generic),
    "dict": (dict,),
    "sequence": (list, tuple, collections.deque, bytearray),
    "set": (set, frozenset),
    "enum": (enum.Enum,),
    "generator": KINDS,
    "file": (io.IOBase,),
    "cache": (functools._lru_cache_wrapper,),
    "function": (types.FunctionType,),
    "method": (types.MethodType,),
    "partial": (functools.partial,),
    "class": (type,),
    "module": (nn.Module,),
}


def unwrap(value: Any) -> Any:
    # the module or function inside the wrapper of `torch.compile`
    return vars(value).get("_modules", {}).get(COMPILED, value) if isinstance(value, nn.Module) else unwrapped(value)


def user_hooks(holder: Any, names: Iterable[str]) -> list[tuple[str, Any]]:
    named_hooks: list[tuple[str, Any]] = []
    for name in names:
        if hooks := getattr(holder, name, None):
            functions = [hook for hook in hooks.values() if isinstance(hook, types.FunctionType | types.MethodType)]
            named_hooks += [(f"{name}[{number}]", hook) for number, hook in enumerate(filter(is_by_user, functions))]
    return named_hooks


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


class Parts(NamedTuple):
    """An object taken apart: `leaf` is plain, `content` is a tensor, an array, or plain and long."""

    kind: str
    slots: list[tuple[str, Any]]
    leaf: object = None
    content: Any = MISSING


class Walk:
    def __init__(self, roots: Roots, changed_paths: frozenset[str] = frozenset(), *, skips_code: bool = True) -> None:
        # `skips_code`: whether imports, and functions without state, are left out
        self.graph, self.roots, self.changed_paths, self.skips_code = Graph(), roots, changed_paths, skips_code
        self.readers: dict[str, Callable[[Any, str], Parts | Node]] = {
            "scalar": self.scalar, "tensor": self.tensor, "array": self.array, "dict": self.mapping,
            "sequence": self.sequence, "set": self.set, "enum": self.enum, "generator": self.generator,
            "file": self.file, "cache": self.cache, "function": self.function, "method": self.method,
            "partial": self.partial, "class": self.kind, "module": self.module, "stateful": self.stateful,
            "object": self.instance, "opaque": self.opaque,
        }  # fmt: skip
        self.ids: dict[int, int] = {}
        self.alive: list[object] = []  # an id is valid only while its object lives
        self.saved = {id(value) for value in roots.saved.values() if not isinstance(value, nn.Module)}
        self.modules = {
            id(module) for value in roots.saved.values() if isinstance(value, nn.Module) for module in value.modules()
        }
        data = list(roots.data)
        self.data, self.data_storages = {id(value) for value in data}, set(map(_memory_of, data)) - {0}
        self.limit = MOST_NODES
        for path, value in roots.objects.items():
            self.limit = len(self.graph.nodes) + MOST_NODES
            root = unwrap(value)
            if id(root) in self.ids:
                self.graph.roots[path] = {"ref": self.ids[id(root)]}
            else:
                read = self.module if isinstance(root, nn.Module) else self.instance
                self.graph.roots[path] = self.add(root, read(root, path), path, 0)

    def give_up(self, value: object, path: str, why: str = "") -> Node:
        if why.endswith(" items") and path.startswith(LISTENERS):
            return {"skip": "a log"}
        self.graph.untracked[path] = type_name(value) + (f", {why}" if why else "")
        return {"skip": type_name(value)}

    def value(self, value: Any, path: str, depth: int) -> object:
        kind: type = type(value)
        name = family(kind)
        if (name == "scalar" and is_scalar(value)) or (kind is tuple and all(map(is_scalar, value))):
            return value
        if name == "skip":
            return {"skip": type_name(value)}
        if name in ("module", "function") and (inner := unwrap(value)) is not value:
            return self.value(inner, path, depth)
        if (number := self.ids.get(id(value))) is not None:
            return {"ref": number}
        if id(value) in self.data:
            return {"skip": "data"}
        if id(value) in self.saved:
            return {"skip": "saved"}
        if depth > DEEPEST or len(self.graph.nodes) > self.limit:
            return self.give_up(value, path, "too deep" if depth > DEEPEST else f"more than {MOST_NODES} objects")
        return self.add(value, self.take_apart(value, path), path, depth)

    def take_apart(self, value: Any, path: str) -> Parts | Node:
        kind: type = type(value)
        try:
            return self.readers[family(kind)](value, path)
        except Exception as error:  # noqa: BLE001  # the user's `__len__` or `state_dict` fails, a thread changes a dict
            return self.give_up(value, path, f"{type(error).__name__} while it was read")

    def add(self, value: object, parts: Parts | Node, path: str, depth: int) -> Node:
        if not isinstance(parts, Parts):
            return parts
        number = self.ids[id(value)] = len(self.graph.nodes)
        self.alive.append(value)
        slots: dict[str, object] = {}
        node: Node = {"kind": parts.kind, "type": type_name(value), "leaf": parts.leaf, "slots": slots}
        self.graph.nodes.append(node)
        if parts.content is not MISSING:
            is_large = parts.kind == "large"
            node["digest"] = "" if path in self.changed_paths and not is_large else digest_of(parts.content)
            if is_large:
                self.graph.large[path] = f"{node['type']}, {parts.leaf}" if parts.leaf else node["type"]
            else:
                self.graph.contents[number] = parts.content
        for key, item in parts.slots:
            slots[key] = item if is_scalar(item) else self.value(item, path + key, depth + 1)
        return {"ref": number}

    # Each reader returns the parts of a value, or a slot without a node.

    def scalar(self, value: Any, path: str) -> Parts:
        # a long text, or bytes or an integer that `torch.load(weights_only=True)` cannot read
        text = value if isinstance(value, str) else hex(value) if isinstance(value, int) else repr(value)
        return limited(Parts("constant", [], None, text), len(text))

    def scalars(self, value: Any, content: Any) -> Parts:
        size = len(scalar_bits(content)) if len(content) > MOST_ITEMS else 0
        kind = "constant" if isinstance(value, frozenset) else "scalars"
        leaf = [len(content), getattr(value, "maxlen", None)]
        return limited(Parts(kind, attribute_slots(value), leaf, content), size)

    def mapping(self, value: Any, path: str) -> Parts | Node:
        if dict.keys(value) >= SNAPSHOT:  # a snapshot of this run
            return {"skip": "a snapshot"}
        items = labeled_items(value)
        if len(items) > MOST_ITEMS and all(is_key(key) and is_key(item) for _, key, item in items):
            return self.scalars(value, {key: item for _, key, item in items})
        keys, slots = [], []
        for number, (label, key, item) in enumerate(items):
            keys.append(key if is_key(key) else {})
            slots += [(label, item)] if is_key(key) else [(f"[key {number}]", key), (label, item)]
        return Parts("dict", slots + attribute_slots(value), keys)

    def sequence(self, value: Any, path: str) -> Parts | Node:
        items = list(value)
        if not isinstance(value, tuple) and (all(map(is_scalar, items)) or all(map(is_key, items))):
            return self.scalars(value, items)
        if len(items) > MOST_ITEMS:
            return self.give_up(value, path, f"{len(items):,} items")
        slots = [(f"[{number}]", item) for number, item in enumerate(items)]
        if isinstance(value, tuple):
            return Parts("tuple", slots, len(items))
        return Parts("list", slots + attribute_slots(value), [len(items), getattr(value, "maxlen", None)])

    def set(self, value: Any, path: str) -> Parts | Node:
        if not all(map(is_key, value)):
            return self.give_up(value, path, "of objects")
        return self.scalars(value, sorted(value, key=repr))

    def enum(self, value: Any, path: str) -> Parts:
        return Parts("enum", [], value.name)

    def generator(self, value: Any, path: str) -> Parts | Node:
        if is_by_user(type(value)) or isinstance(value, random.SystemRandom):
            return self.opaque(value, path)
        return {"skip": "generator"} if is_global(value) else Parts("generator", [], generator_state(value))

    def file(self, value: Any, path: str) -> Node:
        is_output = value.closed or (value.writable() and not value.readable())
        return {"skip": "file"} if is_output else self.give_up(value, path)

    def cache(self, value: Any, path: str) -> Node:
        is_filled = is_by_user(value) and value.cache_info().currsize
        return self.give_up(value, path, "not empty") if is_filled else {"skip": "cache"}

    def function(self, value: Any, path: str) -> Parts | Node:
        if not is_by_user(value) or not self.is_state(value):
            return {"skip": "function"}
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        slots = [(f".<{name}>", cell_content(cell)) for name, cell in cells if name != "__class__"]
        slots += [(f".{name}", part) for name in FUNCTION_PARTS if (part := getattr(value, name))]
        return Parts("function", slots) if slots else {"skip": "function"}

    def method(self, value: Any, path: str) -> Parts:
        return Parts("method", [(".__self__", value.__self__)], value.__name__)

    def partial(self, value: Any, path: str) -> Parts:
        slots = [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
        return Parts("partial", slots + attribute_slots(value))

    def kind(self, value: Any, path: str) -> Parts | Node:
        if not is_by_user(value):
            return {"skip": "class"}
        variables = {
            name: item.__func__ if isinstance(item, staticmethod | classmethod) else item
            for name, item in vars(value).items()
            if name[:2] != "__" and name != "_abc_impl"
        }
        slots = [(f".{name}", item) for name, item in variables.items() if self.is_state(item)]
        slots += [(f".<base {number}>", base) for number, base in enumerate(value.__bases__) if is_by_user(base)]
        return Parts("class", slots) if slots else {"skip": "class"}

    def instance(self, value: Any, path: str) -> Parts:
        slots = attribute_slots(value)
        if type(value) is Namespace and "__name__" in vars(value):  # `torch.compile` adds `__` variables to modules
            slots = [(key, item) for key, item in slots if key[:3] != ".__" and self.is_state(item)]
        return Parts("object", slots + class_slots(value))

    def is_state(self, variable: Any) -> bool:
        return not self.skips_code or has_state(variable)

    def opaque(self, value: Any, path: str) -> Parts | Node:
        # state in C cannot be restored, but a change shows in the pickle
        if isinstance(value, Iterator) and type(value).__module__ == "builtins":
            return self.give_up(value, path)  # pickling an iterator such as `map` would copy what it reads
        try:
            return Parts("large", [], "", pickle.dumps(value))
        except Exception:  # noqa: BLE001  # anything may happen in a library
            return self.give_up(value, path)

    def stateful(self, value: Any, path: str) -> Parts:
        slots = attribute_slots(value) if is_by_user(type(value)) else []
        return Parts("stateful", [(STATE, value.state_dict()), *slots, *class_slots(value)])

    def module(self, value: nn.Module, path: str) -> Parts:
        variables, is_saved = vars(value), id(value) in self.modules
        skipped = MODULE_ATTRIBUTES if self.roots.with_modes else MODULE_ATTRIBUTES | {"training"}
        slots = [(f".{name}", item) for name, item in variables.items() if name not in skipped]
        for name, parameter in value._parameters.items():
            if parameter is None or not is_saved:
                slots.append((f".{name}", parameter))
                continue
            slots.append((f".{name}.requires_grad", parameter.requires_grad))
            slots += [(f".{name}.{key}", item) for key, item in vars(parameter).items() if key[0] != "_"]
            slots += [(f".{name}.{key}", hook) for key, hook in user_hooks(parameter, PARAMETER_HOOKS)]
            if id(parameter) not in self.roots.owned and parameter.grad is not None:
                slots.append((f".{name}.grad", parameter.grad))
        not_persistent = value._non_persistent_buffers_set
        buffers = value._buffers.items()
        slots += [(f".{name}", buffer) for name, buffer in buffers if not is_saved or name in not_persistent]
        slots += [(f".{name}", child) for name, child in value._modules.items()]
        slots += [(f".{name}", hook) for name, hook in user_hooks(value, HOOKS)]
        names = None if is_saved else [[*value._parameters], [*value._buffers], sorted(not_persistent)]
        return Parts("module", slots + class_slots(value), names)

    def array(self, value: Any, path: str) -> Parts | Node:
        if _memory_of(value) in self.data_storages or isinstance(value, np.memmap):
            return {"skip": "data"}
        if value.dtype.hasobject:
            return self.give_up(value, path, "of objects") if value.size else {"skip": "array"}
        base = value
        while isinstance(base, np.ndarray) and isinstance(base.base, np.ndarray):
            base = base.base
        if base is not value and base.flags.forc and base.nbytes <= max(SMALL, 4 * value.nbytes):
            start = value.__array_interface__["data"][0] - base.__array_interface__["data"][0]
            leaf = [value.dtype.str, list(value.shape), list(value.strides), start]
            return Parts("array view", [(".base", base)], leaf)
        leaf = [value.dtype.str, list(value.shape), "F" if value.flags.fnc else "C"]
        return limited(Parts("array", [], leaf, np.asarray(value)), value.nbytes)

    def tensor(self, value: Tensor, path: str) -> Parts | Node:
        address = storage_of(value)
        if value.is_meta or address in self.data_storages:
            return {"skip": "meta" if value.is_meta else "data"}
        if value.layout != torch.strided or value.is_quantized or type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            why = "quantized" if value.is_quantized else "" if value.layout == torch.strided else str(value.layout)
            return self.give_up(value, path, why)
        place = [str(value.dtype), list(value.shape), list(value.stride()), value.storage_offset()]
        place.append(value.is_leaf and value.requires_grad)
        grad = value.grad if value.is_leaf and id(value) not in self.roots.owned else None
        slots = [] if grad is None else [(".grad", grad)]
        saved_path, base = self.storages.get(address, ("", None))
        if saved_path:
            return Parts("tensor", slots, [*place, saved_path, base is value])
        if base is not None and base is not value:
            return Parts("tensor view", [(".base", base), *slots], place)
        data, size = value, value.untyped_storage().nbytes()
        if size <= max(SMALL, 4 * value.nbytes):
            if size != value.nbytes or not value.is_contiguous() or value.is_conj() or value.is_neg():
                data = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
            self.storages[address] = "", value
        else:  # a small part of a large storage is saved without the storage
            place[2], place[3] = list(torch.empty(value.shape, device="meta").stride()), 0
            data = value.detach().contiguous()
        parts = Parts("tensor", slots, [*place, "", True], data)
        return parts if type(value) is nn.Parameter else limited(parts, value.nbytes)

    @functools.cached_property  # most programs hold no tensors, and need no index
    def storages(self) -> dict[int, tuple[str, Tensor]]:
        # by address: a path in `saved`, and the tensor
        by_address: dict[int, tuple[str, Tensor]] = {}
        for name, holder in self.roots.saved.items():
            for path, tensor in named_tensors(name, holder):
                by_address.setdefault(storage_of(tensor), (path, tensor))
        by_address.pop(0, None)
        return by_address


def limited(parts: Parts, nbytes: int) -> Parts:
    # too large to be saved: only compared
    return Parts("large", [], f"{nbytes >> 20} MiB", parts.content) if nbytes > MOST_BYTES else parts


def attribute_slots(value: object) -> list[tuple[str, Any]]:
    return [(f".{name}", item) for name, item in attributes(value)] if type(value) not in BUILT_IN else []


def has_state(variable: Any) -> bool:
    # of a module or class; a function may be only code, or have only attributes such as the mark of a handler
    kind: type = type(variable)
    if kind is types.FunctionType:
        parts = variable.__closure__ or variable.__defaults__ or variable.__kwdefaults__
        return bool(parts and is_by_user(variable)) or not all(map(_is_skipped, variable.__dict__.values()))
    return not _is_skipped(variable) and (family(kind) != "class" or is_by_user(variable))


def _is_skipped(value: object) -> bool:
    kind: type = type(value)
    return family(kind) == "skip"


def class_slots(value: object) -> list[tuple[str, Any]]:
    # the attributes of a user's class and the closures of its methods are state
    return [(".__class__", type(value))] if is_by_user(type(value)) else []


def labeled_items(value: dict[Any, Any]) -> list[tuple[str, Any, Any]]:
    # no method of a subclass runs; only an OrderedDict sees the order that its `move_to_end` sets
    base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
    items = enumerate(base.items(value))
    return [(f"[{key!r}]" if is_key(key) else f"[value {number}]", key, item) for number, (key, item) in items]


def is_reference(value: Any) -> bool:
    return isinstance(value, dict) and "ref" in value


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
        self.compared = set[tuple[int, int]]()
        self.compared_before, self.compared_after = set[int](), set[int]()
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
        is_other_alias = first in self.compared_before or second in self.compared_after
        self.compared.add((first, second))
        self.compared_before.add(first)
        self.compared_after.add(second)
        if (was["kind"], was["type"]) != (now["kind"], now["type"]) or (
            is_other_alias and now["kind"] not in IMMUTABLE  # whose identity is not state
        ):
            self.add(path, new)
            return
        if path in self.changed_paths or not self.has_same_content(first, second):
            self.add(path, new)
        slots, new_slots, differences = was["slots"], now["slots"], len(self.paths)
        for key, new_value in new_slots.items():
            old_value = slots.get(key, MISSING)
            if old_value is not new_value or type(new_value) is dict:  # most are identical small numbers and texts
                self.visit(path + key, old_value, new_value)
        self.paths |= {path + key for key in slots if key not in new_slots}
        if now["kind"] == "stateful" and len(self.paths) > differences:  # its state is restored as a whole
            self.need(new)

    def has_same_content(self, first: int, second: int) -> bool:
        was, now = self.before.nodes[first], self.after.nodes[second]
        if scalar_bits(was["leaf"]) != scalar_bits(now["leaf"]):
            return False
        return "digest" not in now or self.before.digest(first) == self.after.digest(second)

    def add(self, path: str, new: Any) -> None:
        self.paths.add(path)
        self.need(new)

    def need(self, value: Any) -> None:
        stack = [value]
        while stack:
            value = stack.pop()
            if is_reference(value) and value["ref"] not in self.needed:
                self.needed.add(value["ref"])
                stack += self.after.nodes[value["ref"]]["slots"].values()


def size(node: Node) -> int | None:
    # of a container
    kind, leaf = node["kind"], node["leaf"]
    return len(leaf) if kind == "dict" else leaf[0] if kind in ("list", "scalars") else None


def untracked(graph: Graph, changed: Collection[str]) -> dict[str, str]:
    # types by path, of changed values that are only compared, too
    return graph.untracked | {path: kind for path, kind in graph.large.items() if path in changed}
