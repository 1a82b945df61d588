"""The program of a run: its plugins, the options of plugins and optimizers, the settings of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, Final

import torch
from torch import nn

from ...events import Run, SavePoint
from ...plugins.plugin import ARGUMENTS
from ..data.users_code import is_ours, is_users
from ..engines.options import COMPILED
from ..system.extras import with_article
from .equality import SCALARS
from .values import Value, differing, encode, show_both

Program = Mapping[str, Mapping[str, Any]]
WORDS: Final = {
    "precision": "the precision",
    "dtype": "torch's default dtype",
    "device": "the device",
    "compiled": "the list of compiled modules",
    "engine": "the engine",
    "threads": "the number of torch's threads",
    "deterministic": "torch.use_deterministic_algorithms",
    "cudnn": "cuDNN's (deterministic, benchmark, allow_tf32)",
    "matmul": "torch's float32_matmul_precision",
}
DERIVED: Final = {"name", "needs", ARGUMENTS}  # attributes that follow from others
ACCUMULATES: Final = "accumulation"  # claimed by a plugin that sets the number of micro-batches in a step


def describe_program(run: Run) -> dict[str, dict[str, Any]]:
    engine = run.engine
    device = torch.device(str(engine.device))
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    cudnn = torch.backends.cudnn
    settings = {
        "precision": str(getattr(getattr(engine, "precision", None), "name", "unknown")),
        "dtype": str(torch.get_default_dtype()),
        "device": f"{device.type} {model}".strip(),
        "compiled": _compiled(run.task),
        "engine": type(engine).__name__,
        "ranks": engine.world_size,
        "batch": None if run.data.batch_size is None else run.data.batch_size * engine.world_size,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": [cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32],
        "matmul": torch.get_float32_matmul_precision(),
    }
    named = zip(run.plugins.names(), run.plugins, strict=True)
    return {"settings": settings, "plugins": {name: _plugin(run, name, plugin) for name, plugin in named}}


def _compiled(task: Any) -> list[str]:
    roots = {"task": task} if isinstance(task, nn.Module) else getattr(task, "__dict__", {})
    return [
        f"{name}.{path}".rstrip(".").replace(f".{COMPILED}", "")
        for name, root in roots.items()
        if isinstance(root, nn.Module)
        for path, module in root.named_modules()
        if COMPILED in module._modules
    ]


def compare_programs(before: Program, now: Program) -> Iterator[str]:
    same_ranks = before["settings"]["ranks"] == now["settings"]["ranks"]  # with other ranks, another engine is expected
    for name, value in now["settings"].items():
        was = before["settings"][name]
        if was != value and name in WORDS and (name != "engine" or same_ranks):
            yield f"{WORDS[name]} was {was} and is {value}"
    plugins, saved, same_steps = now["plugins"], before["plugins"], _steps(before) == _steps(now) != {}
    for name in [name for name in saved if saved[name]["affects_training"] and name not in plugins]:
        if not (same_steps and ACCUMULATES in saved[name]):
            yield f"plugin {name!r} is no longer registered"
    for name in [name for name in plugins if plugins[name]["affects_training"]]:
        if name in saved:
            yield from _plugin_changes(f"plugin {name!r}", saved[name], plugins[name], same_steps=same_steps)
        elif not (same_steps and ACCUMULATES in plugins[name]):
            yield f"plugin {name!r} is new"


def _steps(program: Program) -> dict[int, int]:
    # samples in a step, by the epoch from which on it has so many; empty if unknown
    batch = program["settings"]["batch"]
    numbers = [facts[ACCUMULATES] for facts in program["plugins"].values() if ACCUMULATES in facts and facts["enabled"]]
    if batch is None or len(numbers) > 1:
        return {}
    steps: dict[int, int] = {}
    for epoch, number in sorted((numbers or [{0: 1}])[0].items()):
        if not steps or number * batch != next(reversed(steps.values())):
            steps[epoch] = number * batch
    return steps


def _plugin_changes(
    label: str, before: Mapping[str, Any], now: Mapping[str, Any], *, same_steps: bool
) -> Iterator[str]:
    if before["class"] != now["class"]:
        yield f"{label} was {with_article(before['class'])} and is {with_article(now['class'])}"
        return
    if before["enabled"] != now["enabled"]:
        yield f"{label} was switched {'on' if before['enabled'] else 'off'} and is not"
    for name, before_value, now_value in sorted(differing(before["options"], now["options"]), key=itemgetter(0)):
        if same_steps and name == "schedule" and ACCUMULATES in before and ACCUMULATES in now:
            continue
        was, text = show_both(before_value, now_value)
        yield f"{label} had {name} = {was} and has {text}"


def _plugin(run: Run, name: str, plugin: Any) -> dict[str, Any]:
    affects = affects_training(plugin)
    kind = f"{type(plugin).__module__}.{type(plugin).__qualname__}"
    compares = affects and is_ours(type(plugin).__module__)  # other plugins are in the object graph
    options = plugin_options(plugin) if compares else {}
    facts: dict[str, Any] = {
        "class": kind,
        "affects_training": affects,
        "enabled": run.plugins.is_enabled(name),
        "options": options,
    }
    if ACCUMULATES in getattr(plugin, "exclusive", ()) and isinstance(getattr(plugin, "schedule", None), Mapping):
        facts[ACCUMULATES] = {epoch: plugin.number(epoch) for epoch in plugin.schedule}
    return facts


def affects_training(plugin: Any) -> bool:
    return getattr(plugin, "policy", "critical") != "observer" and bool(getattr(plugin, "affects_training", True))


def report_late_listeners(run: Run, saver: str) -> None:
    """Report plugins that listen to `SavePoint` after the saving plugin: their changes there are not saved.

    Args:
        run: the run.
        saver: the name of the plugin that saves.
    """
    owners = [subscription.owner for _, subscription in run.bus.signal(SavePoint).listeners()]
    names = set(run.plugins.names())
    for name in dict.fromkeys(owners[owners.index(saver) + 1 :] if saver in owners else ()):
        plugin = run.plugins[name] if name in names else None
        if is_users(type(plugin).__module__) and affects_training(plugin) and has_state(plugin):
            reason = "after the state is saved, so a resume loses its changes"
            run.data.report_untracked(
                f"plugins.{name}",
                f"plugin {name!r} listens to SavePoint {reason}: use a lane before PERSIST, or set affects_training = "
                f"False if it only observes",
            )


def has_state(plugin: Any) -> bool:
    return hasattr(plugin, "state_dict") and bool(plugin.state_dict())


def plugin_options(plugin: Any) -> dict[str, Value]:
    is_builtin = is_ours(type(plugin).__module__)
    names = [name for name in vars(plugin) if name not in DERIVED and not (is_builtin and name.startswith("_"))]
    return {name: encode(_plain(getattr(plugin, name))) for name in names}


def _plain(option: Any) -> Any:
    # of a class of heliograph its `str` if it has one, else its attributes
    if type(option) in SCALARS or not is_ours(type(option).__module__):
        return option
    if any("__str__" in vars(kind) for kind in type(option).__mro__[:-1]):
        return str(option)
    return {name: value for name, value in getattr(option, "__dict__", {}).items() if not name.startswith("_")}


PARAMETERS: Final = ("params", "param_names")


def encode_options(run: Run) -> dict[str, Value]:
    # not the learning rate that a scheduler has set: the program's is in `initial_lr`
    options: dict[str, Any] = {}
    for name, optimizer in run.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            group_name = name if len(optimizer.param_groups) == 1 else f"group {number} of {name}"
            skip = {*PARAMETERS, *(["lr"] if "initial_lr" in group else [])}
            options.update({f"{key} of {group_name}": value for key, value in group.items() if key not in skip})
    return {group_name: encode(value) for group_name, value in options.items()} | encode_scheduler_options(run)


def encode_scheduler_options(run: Run) -> dict[str, Value]:
    return {
        f"{key} of the scheduler of {name}": encode(value)
        for name, scheduler in run.schedulers.items()
        for key, value in scheduler.state_dict().items()
        if key != "_last_lr"  # made of base_lrs
    }


def list_overridden(
    before: Mapping[str, Value], now: Mapping[str, Value], restored: Mapping[str, Value]
) -> Iterator[str]:
    """Yield a sentence for each option that the program sets and the checkpoint overrides.

    Args:
        before: the options in the program that wrote the checkpoint.
        now: those in this program.
        restored: those after the checkpoint is loaded.
    """
    for option, before_value, now_value in differing(before, now):
        if option in before and option in now and restored.get(option) != now_value:
            was, value = show_both(before_value, now_value)
            yield f"{option} was {was} in the program and is {value}: the value in the checkpoint is used"
