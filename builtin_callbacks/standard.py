"""The plugins that most runs want, in one call."""

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
from .progress_bar.plugin import ProgressBar
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
    """Return the plugins that most runs want: `Trainer(standard("runs/first"))`.

    They are, by name: `rng_capture` seeds, `log_schedule` logs, `validation_schedule` validates, `early_stopping` stops
    where `patience` is given, `checkpoint` saves the last and the best, `tensorboard` writes curves and `progress`
    draws bars. It is a list, to which you can add others; `print` shows what each of them does. A log, a validation and
    a save come at the end of the run, too. In a `fit` without validation data nothing is validated and no checkpoint is
    the best, as the result says; with `patience` that is an error.

    Args:
        folder: for the checkpoints and the curves; made where it is missing.
        *plugins: more of them. One that has the name of a standard one replaces it, in its place.
        every: when to validate and to save, such as `Every(steps=500)`.
        log_every: after how many optimizer steps to log.
        patience: after how many validations in a row without an improvement of `monitor` to stop; None never stops.
        monitor: the metric that makes the best checkpoint, and that `patience` is about. Of several validation sets by
            name, choose one, as in `validation/night/loss`; without that, a `fit` with such sets is refused.
        mode: whether a smaller (`min`) or a larger (`max`) one is better; may be left out for a loss or an error.
        keep_last: how many of the newest checkpoints to keep; None keeps all.
        keep_best: how many of the best to keep besides; 0 for none.
        seed: for everything random from the start of the run; by default the one that you gave `torch.manual_seed`. A
            model has its first weights before: call that before you make it.
        resume: None starts fresh, `auto` continues from the newest intact checkpoint in the folder, if there is one, a
            path continues from that file. A `Resume` object says more.
        without: names of standard plugins to leave out, such as `("tensorboard",)`.

    Raises:
        TypeError: one of `plugins` is not a plugin, or an argument is not of its kind.
        ValueError: `without` has an unknown name, two plugins have one name, an argument is out of its range, or is for
            a plugin that is replaced or left out.
    """
    options = Options(folder, every, log_every, patience, monitor, mode, keep_last, keep_best, seed, resume)
    options.check_kinds()
    own, left_out = _by_name(plugins), _names(without)
    for name in sorted(left_out & own.keys()):
        raise ValueError(f"Plugin {name!r} is given, and without= leaves it out: do one of the two.")
    options.check_use(left_out | own.keys())
    makers = {name: make for name, make in MAKERS.items() if name not in left_out}
    if patience is None:
        makers.pop("early_stopping", None)
    made = [(None, own.pop(name)) if name in own else make(options) for name, make in makers.items()]
    words = [(plugin, words) for words, plugin in made if words is not None]
    return PluginList([*(plugin for _, plugin in made), *own.values()], words)


@dataclass(frozen=True)
class Options:
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
        """Which values of the metric are better."""
        return "largest" if self.mode == "max" else "smallest"

    def check_kinds(self) -> None:
        """Raise TypeError or ValueError for what the plugins would call by other names than `standard` does."""
        check_path("standard(folder)", self.folder, "a folder")
        if not str(self.folder):
            raise ValueError("standard(folder) takes the path of a folder, got an empty text.")
        if not isinstance(self.every, Filter):
            raise TypeError(f"every takes a filter, as in every=Every(steps=500); got {self.every!r}.")
        check_whole_number("log_every", self.log_every, at_least=1)
        if not isinstance(self.resume, Resume | str | Path | None):
            raise TypeError(f"resume is None, 'auto', the path of a checkpoint, or a Resume; got {self.resume!r}.")

    def check_use(self, others: Collection[str]) -> None:
        """Raise ValueError where an argument would have no effect.

        Args:
            others: the names of the plugins that are replaced or left out.
        """
        for name, users in USED_BY.items():
            value, default = getattr(self, name), getattr(Options, name)
            used = set(users) - set(others)
            if name in ("monitor", "mode"):
                used -= {"checkpoint"} if not self.keep_best else set()
                used -= {"early_stopping"} if self.patience is None else set()
            if value != default and not used:
                raise ValueError(
                    f"{name}={value!r} would have no effect: it is for {' and '.join(users)}, not made here with the "
                    f"other arguments. Give it to your own plugin, or leave it out."
                )


def _seeds(given: Options) -> tuple[str, Any]:
    seed = "what torch.manual_seed was given" if given.seed is None else given.seed
    return f"seeds everything random with {seed}, and lets a resumed run continue exactly", RNGCapture(given.seed)


def _logs(given: Options) -> tuple[str, Any]:
    plugin = LogSchedule(steps=given.log_every, at_end=True)
    return f"logs {plugin.filter} and at the end", plugin


def _validates(given: Options) -> tuple[str, Any]:
    plugin = ValidationSchedule(given.every, required=False)
    return f"validates {plugin.filter} and at the end, if fit has validation data", plugin


def _stops(given: Options) -> tuple[str, Any]:
    assert given.patience is not None
    plugin = EarlyStopping(given.monitor, patience=given.patience, mode=given.mode)
    times = "1 validation" if given.patience == 1 else f"{given.patience} validations in a row"
    return f"stops when {given.monitor} has not improved in {times}", plugin


def _saves(given: Options) -> tuple[str, Any]:
    best: dict[str, Any] = {"monitor": given.monitor, "mode": given.mode}
    plugin = Checkpoint(
        given.folder,
        every=given.every,
        keep_last=given.keep_last,
        keep_best=given.keep_best,
        resume=given.resume,
        **(best if given.keep_best else {}),
    )
    plugin.expects_best = False
    kept = "all" if given.keep_last is None else f"the last {given.keep_last}"
    kept += f" and the best {given.keep_best} by the {given.way} {given.monitor}" if given.keep_best else ""
    path = plugin.resume.path
    begins = {None: "starts fresh", "auto": "continues from the newest, if there is one"}
    begin = begins.get(None if path is None else str(path), f"continues from {path}")
    return f"saves to {given.folder} {given.every} and at the end, keeps {kept}, {begin}", plugin


def _draws(given: Options) -> tuple[str, Any]:
    return f"writes curves of what is logged; see them with: tensorboard --logdir {given.folder}", TensorBoard(
        given.folder
    )


MAKERS: Mapping[str, Callable[[Options], tuple[str, Any]]] = {
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
            raise ValueError(f"There is no standard plugin {name!r} to leave out.{known_names(str(name), MAKERS)}")
    return set(without)


def _by_name(plugins: Iterable[Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for plugin in plugins:
        name = make_entry(plugin).name
        if name in named:
            mend = f"{type(plugin).__name__}(...).named('{name}_2')"
            raise ValueError(f"Two plugins are named {name!r}: give one of them another name, as in {mend}.")
        named[name] = plugin
    return named


class PluginList(list[Any]):
    """A list of plugins whose text has a line for each: its name, and what it does.

    Args:
        plugins: the plugins.
        words: plugins, each with what it does; of others, the docstring of the class says it.
    """

    def __init__(self, plugins: Iterable[Any], words: Iterable[tuple[Any, str]]) -> None:
        super().__init__(plugins)
        self._words = list(words)

    def __repr__(self) -> str:
        names = [name_of(each) for each in self]
        width = max(map(len, names), default=0)
        return "\n".join(f"{name:<{width}}  {self._what(each)}" for name, each in zip(names, self, strict=True))

    def _what(self, plugin: Any) -> str:
        own = inspect.cleandoc(type(plugin).__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        return next((words for each, words in self._words if each is plugin), own or type(plugin).__name__)


def name_of(plugin: Any) -> str:
    """Return the name under which an object would be registered."""
    own = getattr(plugin, "name", None)
    return own if isinstance(own, str) else snake_case(type(plugin).__name__)
