"""A few training steps with the plugins that shape the training, without those that log, validate, save or stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from ...events import BatchEnd, Event, Lane, LastBoundary, Log, Run
from ...plugins import Plugins
from ...plugins.plugin import Plugin, on
from .. import loop
from ..trainer import Trainer
from .objects import restored
from .rehearsal import ours, placed, refuse_iterators

LEFT_OUT: Set[str] = {"stop", "validation", "validation data", "save", "log"}


class Requests(Plugin):
    name = "probe"
    asks = ("log", "validation")

    @on(BatchEnd)
    def log(self, run: Run, event: BatchEnd) -> None:
        if not run.stepping.window:
            run.control.request_log("the loss of each step is read")

    @on(LastBoundary)
    def validate(self, run: Run, event: LastBoundary) -> None:
        if run.data.validation_sets:
            run.control.request_validation("at the end")


def refuse(options: Mapping[str, Any], method: str, instead: str) -> None:
    if names := [name for name in ("epochs", "validation", "limit_validation") if options.get(name) is not None]:
        raise TypeError(f"{method} trains for {instead}: leave {', '.join(f'{name}=' for name in names)} out.")


Handlers = list[tuple[type[Event], Callable[[Any, Any], None]]]


class Probe:
    """Trains for a few steps and restores everything.

    Plugins that request or need a log, a validation, a save or a stop, that write files, or that only observe are
    disabled.

    Args:
        trainer: the trainer with its plugins.
        arguments: the task, the data, and the other arguments of `fit`.
        purpose: the words for a note on errors.
    """

    def __init__(self, trainer: Trainer, arguments: tuple[Any, Any, Mapping[str, Any]], purpose: str) -> None:
        self._trainer, self._purpose = trainer, purpose
        self._task, self._train, self._options = arguments
        self.losses: dict[str, list[float]] = {}
        refuse_iterators([self._train])

    @contextmanager
    def begun(self, handlers: Handlers) -> Iterator[Any]:
        """Yield a run, not entered yet, with some handlers that are disconnected at the end."""
        trainer, words = self._trainer, LEFT_OUT
        if self._options.get("scheduler") is None:
            words = words | {"scheduler"}
        out = _left_out(trainer.plugins, words)
        users, leave = [self._task, self._options, *trainer.plugins], [trainer.plugins[name] for name in out]
        with (
            trainer.engine.process(),
            trainer.plugins.disabled(*out),
            restored(users, [self._train], ours(trainer), [trainer.engine, *leave]),
            placed(self._purpose),
        ):
            trainer.plugins.register(Requests())  # `restored` removes it and the handlers
            for event, handler in [(Log, self._read), *handlers]:
                trainer.bus.on(event, handler, lane=Lane.REPORT)
            yield trainer.run(self._task, self._train, **self._options)

    def train(self, run: Any) -> Any:
        with run:
            loop.fit(run)
        return run.result_or_raise(exits=False)

    def _read(self, run: Any, event: Any) -> None:
        for name in run.optimizers:
            label = run.stepping.label("loss", name)
            if f"train/{label}" in event.metrics:
                self.losses.setdefault(label, []).append(event.metrics[f"train/{label}"])


def _left_out(plugins: Plugins, words: Set[str]) -> list[str]:
    enabled = [name for name in plugins.names() if plugins.is_enabled(name)]
    return [name for name in enabled if not _shapes_training(plugins[name], words)]


def _shapes_training(plugin: Any, left_out: Set[str]) -> bool:
    words = {*getattr(plugin, "asks", ()), *getattr(plugin, "needs", ())}
    writes = isinstance(plugin, Plugin) and type(plugin).rehearse is not Plugin.rehearse
    changes = getattr(plugin, "policy", "") != "observer" and getattr(plugin, "affects_training", True)
    return changes and not writes and not words & left_out and getattr(plugin, "rehearses", True)
