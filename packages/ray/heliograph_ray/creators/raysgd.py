"""RaySGD arguments and methods, and their replacements here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypedDict

RANKS: Final = "launcher=LocalLauncher({0!r}) for processes on this machine, launcher=RayLauncher({0!r}) on a cluster"
AUTOCAST: Final = "precision='fp16' or 'bf16', which use torch's autocast instead of Apex"
EACH_SHARE: Final = "omit it: each rank reads its share of the data"
MEANS: Final = "omit it: the returned metrics are means over the samples of all ranks"
PROFILE: Final = "plugin_creator=lambda config: [HandlerTimes()], or Profile(folder)"
INFO: Final = "config=, which the creators and functions get"
ARGUMENTS: Final[Mapping[str, str]] = {
    "num_replicas": RANKS,
    "num_workers": RANKS,
    "use_gpu": "use_cpu=False to compute on a GPU, use_cpu=True on the CPU; without it, on a GPU if there is one. On a "
    "cluster: launcher=RayLauncher(num_workers, use_gpu={0!r})",
    "backend": "omit it for nccl with GPUs and gloo without, or engine=functools.partial(DDPEngine, 'gloo')",
    "use_fp16": AUTOCAST,
    "apex_args": AUTOCAST,
    "use_tqdm": "plugin_creator=lambda config: [ProgressBar()]",
    "training_operator_cls": "train_function= and validation_function=, or a Task for Trainer.fit",
    "data_loader_args": "dataloader_config={0!r}",
    "add_dist_sampler": EACH_SHARE,
    "wrap_ddp": "omit it: the gradients are always averaged over the ranks",
    "serialize_data_creation": "initialization_hook=, which runs before data_creator",
    "num_cpus_per_worker": "launcher=RayLauncher(num_workers, resources_per_worker={{'CPU': {0!r}}})",
    "num_gpus_per_worker": "launcher=RayLauncher(num_workers, resources_per_worker={{'GPU': {0!r}}})",
    "timeout_s": "engine=functools.partial(DDPEngine, timeout={0!r})",
    "use_local": "omit it and launcher= to train in this process",
}
CALLS: Final[Mapping[str, Mapping[str, str]]] = {
    "train": {
        "checkpoint": "omit it: the state before each pass is kept in memory, and with max_retries= a pass in which a "
        "rank is lost is repeated from it. save(path) writes it to a file",
        "num_steps": "train on a smaller set in data_creator, or break out of the iterator of a train_function",
        "profile": PROFILE,
        "reduce_results": MEANS,
        "info": INFO,
        "dataset": "data_creator=, which returns the data",
    },
    "validate": {
        "num_steps": "return a smaller validation set from data_creator",
        "profile": PROFILE,
        "reduce_results": MEANS,
        "info": INFO,
    },
    "shutdown": {"force": "omit it: no call is running, so there is nothing to kill"},
}
METHODS: Final[Mapping[str, str]] = {
    "load": "restore(path)",
    "load_state_dict": "restore(path)",
    "state_dict": "save(path)",
    "apply_all_workers": "launcher.run(function), or initialization_hook=, which each new process calls first",
    "apply_all_operators": "a plugin, from plugin_creator=: its handlers get the run, with model and optimizers",
    "get_local_operator": "get_model(), or a plugin from plugin_creator=, whose handlers get the run",
    "max_replicas": "launcher=RayLauncher((2, 8)), with the least and the largest number of workers",
}


class NoArguments(TypedDict):
    """Extra keyword arguments of a method, for type checkers: none."""


def explain_argument(name: str, value: Any) -> str | None:
    return f" Instead: {ARGUMENTS[name].format(value)}." if name in ARGUMENTS else None


def refuse_arguments(method: str, arguments: Mapping[str, Any]) -> None:
    for name in arguments:
        instead = CALLS[method].get(name)
        table = "docs/howto/migrate_from_raysgd.md has a table of RaySGD's methods"
        remedy = f" Instead: {instead}." if instead else f" {table}."
        raise TypeError(f"CreatorTrainer.{method} has no argument {name!r}.{remedy}")


def explain_method(name: str, suggest: Callable[[str], str]) -> str:
    return f"CreatorTrainer has no {name!r}." + (f" Instead: {METHODS[name]}." if name in METHODS else suggest(name))


def check_file(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix != ".pth":
        raise ValueError(
            f"The name of a checkpoint ends in .pth, got {str(path)!r}: call save({str(path) + '.pth'!r})."
        )
    return path
