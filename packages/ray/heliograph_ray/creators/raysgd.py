"""RaySGD's own arguments and methods, and what to write instead of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypedDict


class NoArguments(TypedDict):
    """What a method takes beside its own arguments, for type checkers: nothing."""


RANKS: Final = "launcher=LocalLauncher({0!r}) for processes on this machine, launcher=RayLauncher({0!r}) on a cluster"
AUTOCAST: Final = "precision='fp16' or 'bf16', which use torch's autocast instead of Apex"
EACH_SHARE: Final = "leave it out: each rank reads its share of the data"
ARGUMENTS: Final[Mapping[str, str]] = {
    "num_replicas": RANKS,
    "num_workers": RANKS,
    "use_gpu": "use_cpu=False to compute on a GPU, use_cpu=True on the CPU; without it, on a GPU if there is one. On a "
    "cluster: launcher=RayLauncher(num_workers, use_gpu={0!r})",
    "backend": "leave it out for nccl with GPUs and gloo without, or engine=functools.partial(DDPEngine, 'gloo')",
    "use_fp16": AUTOCAST,
    "apex_args": AUTOCAST,
    "use_tqdm": "plugin_creator=lambda config: [ProgressBar()]",
    "training_operator_cls": "train_function= and validation_function=, or a Task for Trainer.fit",
    "data_loader_args": "dataloader_config={0!r}",
    "add_dist_sampler": EACH_SHARE,
    "wrap_ddp": "leave it out: the gradients are averaged over the ranks in any case",
    "serialize_data_creation": "initialization_hook= for what is to be done before the data are created",
    "num_cpus_per_worker": "launcher=RayLauncher(num_workers, resources_per_worker={{'CPU': {0!r}}})",
    "num_gpus_per_worker": "launcher=RayLauncher(num_workers, resources_per_worker={{'GPU': {0!r}}})",
    "timeout_s": "engine=functools.partial(DDPEngine, timeout={0!r})",
    "use_local": "leave it out, and launcher= too, to train in this process",
}
CALLS: Final[Mapping[str, Mapping[str, str]]] = {
    "train": {
        "checkpoint": "leave it out: the state before each pass is kept in memory, and a pass in which a rank is lost "
        "is repeated from it, with max_retries=. save(path) writes it to a file",
        "num_steps": "train on a smaller set in data_creator, or break out of the iterator of a train_function",
        "profile": "plugin_creator=lambda config: [HandlerTimes()], or Profile(folder)",
        "reduce_results": "leave it out: what is returned are means over the samples of all ranks",
        "info": "config=, which the creators and functions get",
        "dataset": "data_creator=, which returns the data",
    },
    "validate": {
        "num_steps": "return a smaller validation set from data_creator",
        "profile": "plugin_creator=lambda config: [HandlerTimes()], or Profile(folder)",
        "reduce_results": "leave it out: what is returned are means over the samples of all ranks",
        "info": "config=, which the creators and functions get",
    },
    "shutdown": {"force": "leave it out: no process runs between calls, so there is nothing to kill"},
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


def explain_argument(name: str, value: Any) -> str | None:
    """Return what to write instead of an argument of RaySGD's trainer, as a sentence; None if it has no such one."""
    return f" In its place: {ARGUMENTS[name].format(value)}." if name in ARGUMENTS else None


def refuse_arguments(method: str, given: Mapping[str, Any]) -> None:
    """Raise TypeError where a method was given an argument that it does not take; say what to write instead."""
    for name in given:
        instead = CALLS[method].get(name)
        mend = f" In its place: {instead}." if instead else " docs/raysgd.md has a table of RaySGD's methods."
        raise TypeError(f"CreatorTrainer.{method} has no argument {name!r}.{mend}")


def explain_method(name: str, known: Callable[[str], str]) -> str:
    """Return the error of an attribute that the trainer does not have; says what to write instead.

    Args:
        name: of the attribute.
        known: returns the end of the sentence where it is not one of RaySGD's.
    """
    return f"CreatorTrainer has no {name!r}." + (f" In its place: {METHODS[name]}." if name in METHODS else known(name))


def check_file(path: str | Path) -> Path:
    """Return the path of a file that is to be written.

    Raises:
        ValueError: its name does not end in `.pth`; says how to write it.
    """
    path = Path(path)
    if path.suffix != ".pth":
        raise ValueError(
            f"The name of a checkpoint ends in .pth, got {str(path)!r}: call save({str(path) + '.pth'!r}). A file "
            f"{path.stem}.json beside it describes it."
        )
    return path
