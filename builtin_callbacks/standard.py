"""The plugins that most trainings use, in one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from ..events.checks import check_path, check_whole_number, known_names
from ..events.signatures import show_value
from ..plugins.entry import make_entry
from ..plugins.filters import Every, Filter
from ..plugins.hints import explains_arguments
from .checkpoint.plugin import Checkpoint, Resume
from .progress_bar import ProgressBar
from .rng_capture import RNGCapture
from .schedules import LogSchedule, ValidationSchedule
from .trackers import TensorBoard

EACH_EPOCH = Every(epochs=1)


@explains_arguments
def standard(
    folder: str | Path,
    *plugins: Any,
    every: Filter = EACH_EPOCH,
    log_every: int = 50,
    patience: int | None = None,
    monitor: str = "validation/loss",
    mode: Literal["min", "max"] | None = None,
    keep_last: int | None = 1,
    keep_best: int = 1,
    seed: int | None = None,
    resume: Resume | str | Path | None = None,
    without: Collection[str] = (),
) -> PluginList:
    """Return the plugins that most trainings use: `Trainer(standard("runs/first"))`.

    By name: `rng_capture` seeds, `log_schedule` logs, `validation_schedule` validates, `early_stopping` stops if
    `patience` is set, `checkpoint` saves the last and the best state, `tensorboard` writes curves, and `progress` draws
    bars. The result is a list to which you can add plugins; `print` shows each with its arguments. There is also a log,
    a validation and a save at the end of the run. Without validation data, `fit` does not validate and no checkpoint is
    the best, as the result shows; with `patience` this is an error.

    Args:
        folder: the folder of checkpoints and curves; created if it does not exist. The curves of a URL stay local.
        *plugins: more plugins. One with the name of a standard plugin replaces it, in the same position.
        every: when to validate and save, such as `Every(steps=500)`.
        log_every: the number of optimizer steps between two logs.
        patience: stop after this number of consecutive validations without an improvement of `monitor`; None never
            stops.
        monitor: the metric for the best checkpoint and for `patience`. With several named validation sets, choose one,
            such as `validation/night/loss`; otherwise `fit` raises an error.
        mode: whether smaller (`min`) or larger (`max`) values are better; optional for a loss or an error.
        keep_last: the number of newest checkpoints to keep; None keeps all.
        keep_best: the number of best checkpoints to keep in addition; 0 for none.
        seed: the seed of everything random in the run; by default the one passed to `torch.manual_seed`. A model has
            its initial weights before the run: call `torch.manual_seed` before you create it.
        resume: None starts fresh; `auto` continues from the newest intact checkpoint in the folder, if any; a path
            continues from that file. A `Resume` object has more options.
        without: names of standard plugins to omit, such as `("tensorboard",)`.

    Raises:
        TypeError: one of `plugins` is not a plugin, or an argument has the wrong type.
        ValueError: `without` has an unknown name, two plugins have the same name, an argument is out of range, or it is
            for a plugin that is replaced or omitted.
    """
    check_path("standard(folder)", folder, "a folder")
    if not str(folder):
        raise ValueError("standard(folder) takes the path of a folder, got an empty text.")
    if not isinstance(every, Filter):
        raise TypeError(f"every takes a filter, as in every=Every(steps=500); got {every!r}.")
    check_whole_number("log_every", log_every, at_least=1)
    if not isinstance(resume, Resume | str | Path | None):
        raise TypeError(f"resume is None, 'auto', the path of a checkpoint, or a Resume; got {resume!r}.")
    options = {"every": every, "log_every": log_every, "patience": patience, "monitor": monitor, "mode": mode}
    options |= {"keep_last": keep_last, "keep_best": keep_best, "seed": seed, "resume": resume}

    def make_checkpoint() -> Checkpoint:
        best: dict[str, Any] = {"monitor": monitor, "mode": mode} if keep_best else {}
        kept: dict[str, Any] = {"keep_last": keep_last, "keep_best": keep_best}
        checkpoint = Checkpoint(folder, every=every, **kept, **best, resume=resume)
        checkpoint.expects_best = False
        return checkpoint

    def make_early_stopping() -> Any:
        from .early_stopping import EarlyStopping  # imported if a run may stop early

        return EarlyStopping(monitor, patience=patience or 0, mode=mode)

    makers: dict[str, Callable[[], Any]] = {
        "rng_capture": lambda: RNGCapture(seed=seed),
        "log_schedule": lambda: LogSchedule(steps=log_every, at_end=True),
        "validation_schedule": lambda: ValidationSchedule(every, required=False),
        "early_stopping": make_early_stopping,
        "checkpoint": make_checkpoint,
        "tensorboard": lambda: TensorBoard(Checkpoint(folder).folder if "://" in str(folder) else folder),
        "progress": ProgressBar,
    }
    users_plugins = _by_name(plugins)
    _check_names(without, users_plugins, makers)
    _check_use(options, {*without, *users_plugins})
    if patience is None:
        del makers["early_stopping"]
    made = [
        users_plugins.pop(name) if name in users_plugins else make()
        for name, make in makers.items()
        if name not in without
    ]
    return PluginList([*made, *users_plugins.values()])


USED_BY = {
    "every": ("validation_schedule", "checkpoint"),
    "log_every": ("log_schedule",),
    "patience": ("early_stopping",),
    "monitor": ("early_stopping", "checkpoint"),
    "mode": ("early_stopping", "checkpoint"),
    "keep_last": ("checkpoint",),
    "keep_best": ("checkpoint",),
    "seed": ("rng_capture",),
    "resume": ("checkpoint",),
}


def _check_names(without: Collection[str], passed: Collection[str], names: Collection[str]) -> None:
    if isinstance(without, str):
        raise TypeError(f"without takes a tuple of names, ({without!r},), got {without!r}.")
    for name in without:
        if name not in names:
            raise ValueError(f"without= has no standard plugin {name!r}.{known_names(str(name), names)}")
        if name in passed:
            raise ValueError(f"Plugin {name!r} is both passed and in without=: remove one of the two.")


def _check_use(options: Mapping[str, Any], omitted: Collection[str]) -> None:
    """Raise ValueError if an argument would have no effect, because its plugins are replaced or omitted."""
    defaults = inspect.signature(standard).parameters
    for name, users in USED_BY.items():
        used = set(users) - set(omitted)
        if name in ("monitor", "mode"):
            used -= {"checkpoint"} if not options["keep_best"] else set()
            used -= {"early_stopping"} if options["patience"] is None else set()
        if options[name] != defaults[name].default and not used:
            raise ValueError(
                f"{name}={options[name]!r} would have no effect, because the other arguments omit or replace "
                f"{' and '.join(users)}. Remove it, or pass it to your own plugin."
            )


def _by_name(plugins: Iterable[Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for plugin in plugins:
        name = make_entry(plugin).name
        if name in named:
            example = f"{type(plugin).__name__}(...).named('{name}_2')"
            raise ValueError(f"Two plugins are named {name!r}: rename one of them, as in {example}.")
        named[name] = plugin
    return named


class PluginList(list[Any]):
    """A list of plugins whose `repr` has one line for each, with its name and its arguments."""

    def __repr__(self) -> str:
        lines = {make_entry(plugin, None).name: show_value(plugin) for plugin in self}
        width = max(map(len, lines), default=0)
        return "\n".join(f"{name:{width}}  {text}" for name, text in lines.items())
