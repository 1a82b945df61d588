"""The plugins that most trainings use, in one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..events.checks import check_path, check_whole_number, known_names
from ..plugins.entry import make_entry
from ..plugins.filters import Every, Filter
from ..plugins.hints import explains_arguments
from ..plugins.plugin import snake_case
from .checkpoint.plugin import Checkpoint
from .checkpoint.resume import Resume
from .early_stopping import EarlyStopping
from .progress_bar import ProgressBar
from .rng_capture import RNGCapture
from .schedules import LogSchedule, ValidationSchedule
from .trackers.tensorboard import TensorBoard

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
    bars. The result is a list to which you can add plugins; `print` shows what each does. There is also a log, a
    validation and a save at the end of the run. Without validation data, `fit` does not validate and no checkpoint is
    the best, as the result shows; with `patience` this is an error.

    Args:
        folder: the folder of checkpoints and curves; created if it does not exist.
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
    options = StandardOptions(folder, every, log_every, patience, monitor, mode, keep_last, keep_best, seed, resume)
    options.check_kinds()
    users_plugins, left_out = _by_name(plugins), _names(without)
    for name in sorted(left_out & users_plugins.keys()):
        raise ValueError(f"Plugin {name!r} is both passed and in without=: remove one of the two.")
    options.check_use(left_out | users_plugins.keys())
    makers = {name: make for name, make in MAKERS.items() if name not in left_out}
    if patience is None:
        makers.pop("early_stopping", None)
    made = [
        (None, users_plugins.pop(name)) if name in users_plugins else make(options) for name, make in makers.items()
    ]
    words = [(plugin, words) for words, plugin in made if words is not None]
    return PluginList([*(plugin for _, plugin in made), *users_plugins.values()], words)


@dataclass(frozen=True)
class StandardOptions:
    """The arguments of `standard` that are about single plugins."""

    folder: str | Path
    every: Filter = EACH_EPOCH
    log_every: int = 50
    patience: int | None = None
    monitor: str = "validation/loss"
    mode: Literal["min", "max"] | None = None
    keep_last: int | None = 1
    keep_best: int = 1
    seed: int | None = None
    resume: Resume | str | Path | None = None

    @property
    def way(self) -> str:
        return "largest" if self.mode == "max" else "smallest"

    def check_kinds(self) -> None:
        """Raise for invalid arguments that plugins would report by another name."""
        check_path("standard(folder)", self.folder, "a folder")
        if not str(self.folder):
            raise ValueError("standard(folder) takes the path of a folder, got an empty text.")
        if not isinstance(self.every, Filter):
            raise TypeError(f"every takes a filter, as in every=Every(steps=500); got {self.every!r}.")
        check_whole_number("log_every", self.log_every, at_least=1)
        if not isinstance(self.resume, Resume | str | Path | None):
            raise TypeError(f"resume is None, 'auto', the path of a checkpoint, or a Resume; got {self.resume!r}.")

    def check_use(self, omitted: Collection[str]) -> None:
        """Raise ValueError if an argument would have no effect.

        Args:
            omitted: the names of the plugins that are replaced or omitted.
        """
        for name, users in USED_BY.items():
            value, default = getattr(self, name), getattr(StandardOptions, name)
            used = set(users) - set(omitted)
            if name in ("monitor", "mode"):
                used -= {"checkpoint"} if not self.keep_best else set()
                used -= {"early_stopping"} if self.patience is None else set()
            if value != default and not used:
                raise ValueError(
                    f"{name}={value!r} would have no effect, because the other arguments omit or replace "
                    f"{' and '.join(users)}. Remove it, or pass it to your own plugin."
                )


def _seeds(options: StandardOptions) -> tuple[str, Any]:
    seed = "the seed of torch.manual_seed" if options.seed is None else options.seed
    return f"seeds everything random with {seed}, so that a resumed run continues exactly", RNGCapture(options.seed)


def _logs(options: StandardOptions) -> tuple[str, Any]:
    plugin = LogSchedule(steps=options.log_every, at_end=True)
    return f"logs {plugin.filter} and at the end", plugin


def _validates(options: StandardOptions) -> tuple[str, Any]:
    plugin = ValidationSchedule(options.every, required=False)
    return f"validates {plugin.filter} and at the end, if fit has validation data", plugin


def _stops(options: StandardOptions) -> tuple[str, Any]:
    assert options.patience is not None
    plugin = EarlyStopping(options.monitor, patience=options.patience, mode=options.mode)
    times = "1 validation" if options.patience == 1 else f"{options.patience} validations in a row"
    return f"stops when {options.monitor} has not improved in {times}", plugin


def _saves(options: StandardOptions) -> tuple[str, Any]:
    best: dict[str, Any] = {"monitor": options.monitor, "mode": options.mode}
    plugin = Checkpoint(
        options.folder,
        every=options.every,
        keep_last=options.keep_last,
        keep_best=options.keep_best,
        resume=options.resume,
        **(best if options.keep_best else {}),
    )
    plugin.expects_best = False
    keeps = "all" if options.keep_last is None else f"the last {options.keep_last}"
    keeps += f" and the best {options.keep_best} by the {options.way} {options.monitor}" if options.keep_best else ""
    path = plugin.resume.path
    begins = {None: "starts fresh", "auto": "continues from the newest, if there is one"}
    begin = begins.get(None if path is None else str(path), f"continues from {path}")
    return f"saves to {options.folder} {options.every} and at the end, keeps {keeps}, {begin}", plugin


def _draws(options: StandardOptions) -> tuple[str, Any]:
    plugin = TensorBoard(options.folder)
    return f"writes curves of logged values; see them with: tensorboard --logdir {options.folder}", plugin


MAKERS: Mapping[str, Callable[[StandardOptions], tuple[str, Any]]] = {
    "rng_capture": _seeds,
    "log_schedule": _logs,
    "validation_schedule": _validates,
    "early_stopping": _stops,
    "checkpoint": _saves,
    "tensorboard": _draws,
    "progress": lambda _: ("shows how far the run is, with its losses and metrics", ProgressBar()),
}
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


def _names(without: Collection[str]) -> set[str]:
    if isinstance(without, str):
        raise TypeError(f"without takes a tuple of names, ({without!r},), got {without!r}.")
    for name in without:
        if name not in MAKERS:
            raise ValueError(f"without= has no standard plugin {name!r}.{known_names(str(name), MAKERS)}")
    return set(without)


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
    """A list of plugins whose `repr` has one line for each: its name and what it does.

    Args:
        plugins: the plugins.
        words: plugins with their descriptions; the default is the first paragraph of the class's docstring.
    """

    def __init__(self, plugins: Iterable[Any], words: Iterable[tuple[Any, str]]) -> None:
        super().__init__(plugins)
        self._words = list(words)

    def __repr__(self) -> str:
        names = [name_of(plugin) for plugin in self]
        width = max(map(len, names), default=0)
        return "\n".join(f"{name:<{width}}  {self._describe(plugin)}" for name, plugin in zip(names, self, strict=True))

    def _describe(self, plugin: Any) -> str:
        default = inspect.cleandoc(type(plugin).__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        return next((words for item, words in self._words if item is plugin), default or type(plugin).__name__)


def name_of(plugin: Any) -> str:
    """Return the name under which an object will be registered."""
    name = getattr(plugin, "name", None)
    return name if isinstance(name, str) else snake_case(type(plugin).__name__)
