"""Restore the objects of a resumed run from the saved graph, in place, and compare the rest."""

from __future__ import annotations

import ast
import collections
import functools
import logging
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from ...events import BatchEnd, EpochEnd, EpochStart, Handle, Run
from ..data.rng import KINDS, set_generator_state
from ..data.users_code import is_ours
from ..system.plain_pickle import unpack
from .equality import same, sums
from .graph import (
    MISSING,
    STATE,
    Comparison,
    Graph,
    Node,
    Parts,
    Roots,
    Walk,
    capture_graph,
    is_reference,
    labeled_items,
    named_tensors,
    storage_of,
    type_name,
    untracked,
    unwrap,
)
from .program import NOT_THERE, Program, describe_program, differing, encode_data, encode_options, show_both
from .run_state import MODULE, OPTIMIZER, SCHEDULER, ObjectState, capture_baseline, find_roots, learning_rates

logger = logging.getLogger("heliograph")
REBUILT: Final = ("constant", "tuple", "array", "array view", "tensor", "tensor view", "enum")
NEW: Final = ("list", "dict", "scalars", "object", "module")
CONSTANTS: Final[dict[str, Any]] = {  # a checkpoint calls no other class
    "builtins.str": str, "builtins.frozenset": frozenset, "builtins.int": ast.literal_eval,
    "builtins.bytes": ast.literal_eval,
}  # fmt: skip
GENERATORS: Final = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in KINDS}


@dataclass(slots=True)
class ResumedObjects:
    """The run state outside of any `state_dict` in a resumed run, or after a rollback.

    Attributes:
        state: that state.
        saved: the facts in the checkpoint, until the first `EpochStart` is over.
        must_share: whether the ranks must exchange the differences that a resume has reported.
        waiting: reports the differences of the data that are compared again after the next batch.
    """

    state: ObjectState
    saved: Mapping[str, Any] | None = None
    must_share: bool = False
    waiting: Callable[[], None] | None = None

    def restore(self, run: Run, saved: Mapping[str, Any], *, is_roll_back: bool) -> tuple[list[str], list[str]]:
        """Restore the paths that the training had changed, and report remaining differences from the checkpoint.

        Args:
            run: the run, with its state loaded.
            saved: the result of `ObjectState.state_dict`.
            is_roll_back: whether the same process wrote the state. Plugins and module variables then stay unchanged, so
                that a plugin can count the rollbacks.

        Returns:
            The restored paths, and the paths that the program now sets differently.
        """
        state, facts = self.state, unpack(saved["facts"])
        state.changed |= set(facts["changed"])
        state.report_variables(run, facts["variables"])
        roots, graph = find_roots(run), Graph(**unpack(saved["graph"]), contents=saved["contents"])
        paths = {path for path in facts["changed"] if not (is_roll_back and path.startswith((MODULE, "plugins.")))}
        restored, failed = restore(roots, graph, paths)
        _write_back(run, roots)
        if is_roll_back:
            return restored, []
        present = capture_graph(find_roots(run))
        untracked_now = untracked(present, state.changed)
        for path, kind in untracked_now.items():
            run.data.report_untracked(path, kind)
        for path, kind in failed.items():
            if path not in untracked_now:  # a later resume finds no trace of it: differences are saved, too
                run.data.report_difference(f"{path} ({kind}) was not restored")
        edited = list[str]()
        for path in sorted(Comparison(graph, present).paths - failed.keys()):
            if path not in state.changed:
                edited.append(path)
            elif path not in graph.untracked and path not in present.untracked:
                was, now = describe(graph, path), describe(present, path)
                run.data.report_difference(f"{path} was {was} and is {now}")
        return restored, edited

    # runs once every plugin has its state: attributes that change later count as changes
    def compare(self, run: Run, saved: Mapping[str, Any], *, is_roll_back: bool) -> None:
        state = self.state
        if not is_roll_back:
            facts = unpack(saved["facts"])
            for change in compare_programs(facts, describe_program(run)):
                run.data.report_difference(change)
            restored = encode_options(run)
            for option, was, now in differing(facts["options"], state.options):
                if NOT_THERE not in (was, now) and restored.get(option) != now:
                    before, present = show_both(was, now)
                    note = f"{option} was {before} in the program and is {present}: the value in the checkpoint is used"
                    run.note(note)
                    logger.warning(note)
            self.saved = facts
        state.baseline, state.data = capture_baseline(run), encode_data(run)
        state.packed = state.baseline.pack()

    @contextmanager
    def comparing_start(self, run: Any) -> Iterator[None]:
        saved, self.saved = self.saved, None
        if saved is None:
            yield
        else:
            with run.evaluating_weights():  # as during the save
                before = (capture_baseline(run), _sums(run) if _handlers(run) else {}) if run.progress.batch else None
            yield
            if before is not None:
                with run.evaluating_weights():
                    _compare_start(run, saved, *before)
            run.hooks.when_positioned(partial(self._compare_data, run, saved))
        self._share(run)

    def compare_end(self, run: Any) -> None:
        # of a training that read no batch after it was resumed
        saved, self.saved = self.saved, None
        if saved is not None:
            self._compare_data(run, saved)
        if self.waiting is not None:
            self.waiting()
        self._share(run)

    def _share(self, run: Any) -> None:
        if self.must_share:
            self.must_share = False
            run.hooks.when_positioned(partial(share_facts, run))  # after the data are compared

    def _compare_data(self, run: Run, saved: Mapping[str, Any]) -> None:
        """Compare the data objects once the order has reached its position.

        Within an epoch they are compared again after a batch or at its end, because a sampler that counts epochs counts
        when its first index is drawn.
        """
        differences = differing(saved["data"], encode_data(run))
        changes = {path: (was, now) for path, was, now in differences if run.progress.batch or "by_epoch" not in now}
        handles: list[Handle] = []

        def report() -> None:
            self.waiting = None
            for handle in handles:
                handle.remove()
            remaining = {path for path, *_ in differing(saved["data"], encode_data(run))}
            for path in (path for path in changes if path in remaining):
                cause = "the training changed it" if path in saved["data_changed"] else "the program sets it"
                before, present = show_both(*changes[path])
                run.data.report_difference(f"{path} was {before} and is {present}: {cause}")

        if changes and run.progress.batch:
            self.waiting = report
            handles += [run.bus.on(event, lambda run, event: report()) for event in (BatchEnd, EpochEnd)]  # noqa: ARG005
        elif changes:
            report()


# Reports changes by handlers of `EpochStart`, which run a second time.
def _compare_start(run: Run, saved: Mapping[str, Any], before: Graph, weights: Mapping[str, int]) -> None:
    handlers = f"after EpochStart was handled again by {', '.join(_handlers(run)) or 'a plugin'}"
    now = learning_rates(run)
    if now != saved["rates"]:
        run.data.report_difference(f"{handlers}: the learning rates are {now} and were {saved['rates']}")
    changed = Comparison(before, capture_graph(find_roots(run))).paths
    if weights:
        changed |= {path for path, value in _sums(run).items() if value != weights.get(path)}
    for path in sorted(changed):
        run.data.report_difference(f"{handlers}: {path} changed when the epoch was resumed")


def share_facts(run: Any) -> None:
    # a collective: other ranks may read other data
    if run.control.is_shared:
        for facts in run.engine.gather_objects(run.data.resume_facts()):
            for path, kind in facts.untracked.items():
                run.data.report_untracked(path, kind)
            for text in facts.differences:
                run.data.report_difference(text)


def _handlers(run: Run) -> list[str]:
    listeners = run.bus.signal(EpochStart).listeners()
    owners = [entry.owner for receiver, entry in listeners if not is_ours(str(getattr(receiver, "__module__", "")))]
    return list(dict.fromkeys(owners))


def _sums(run: Run) -> dict[str, int]:
    tensors = {
        f"{name}.{key}": tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for name, module in run.modules.items()
        for key, tensor in (*module.named_parameters(), *module.named_buffers())
        if not tensor.is_meta and tensor.layout is torch.strided
    }
    return sums(tensors)


def _write_back(run: Run, roots: Roots) -> None:
    for kind, parts in ((OPTIMIZER, run.optimizers), (SCHEDULER, run.schedulers)):
        for name, part in parts.items():
            attributes = vars(roots.objects[kind + name]).items()
            vars(part).update({key: item for key, item in attributes if "[" not in key})  # no hooks


def compare_programs(before: Program, now: Program) -> Iterator[str]:
    same_ranks = before["ranks"] == now["ranks"]  # with other ranks, another engine is expected
    for name, value in now["settings"].items():
        was = before["settings"][name]
        if was != value and (name != "the engine" or same_ranks):
            yield f"{name} was {was} and is {value}"
    saved, plugins = before["plugins"], now["plugins"]
    yield from (f"plugin {name!r} is no longer registered" for name in saved if name not in plugins)
    yield from (f"plugin {name!r} is new" for name in plugins if name not in saved)
    was, value = ([name for name in names if name in saved and name in plugins] for names in (saved, plugins))
    for name in value:
        for option, *values in differing(saved[name], plugins[name]):
            yield "plugin {!r} had {} = {} and has {}".format(name, option, *show_both(*values))
    if was != value:
        yield f"the order of the plugins was {', '.join(was)} and is {', '.join(value)}"


def describe(graph: Graph, path: str) -> str:
    value = dict(walk(graph)).get(path, MISSING)
    if is_reference(value):
        node = graph.nodes[value["ref"]]
        return str(node["leaf"] if node["kind"] == "enum" else node["type"])
    return "not saved" if value is MISSING else str(value["skip"]) if isinstance(value, dict) else f"{value!r:.60}"


def walk(graph: Graph) -> Iterator[tuple[str, Any]]:
    stack, seen = [*reversed(graph.roots.items())], set[int]()
    while stack:
        path, value = stack.pop()
        yield path, value
        if is_reference(value) and value["ref"] not in seen:
            seen.add(value["ref"])
            stack += [(path + key, child) for key, child in reversed(graph.nodes[value["ref"]]["slots"].items())]


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
        self.live = Walk(replace(roots, objects={}), skips_code=False)

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
        # without its lock or logger, for example, the object would be broken
        skipped = {key for key, child in node["slots"].items() if isinstance(child, dict) and "skip" in child}
        if kind in ("object", "module") and skipped - {".__class__"}:
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
