"""`CheckpointLabel` and `TrainedOnly`: the names of checkpoints, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

from ...core.checkpoint.compatibility import FROZEN, Key, named_parameters
from ...core.checkpoint.ranks import digest
from ...core.engines.options import is_sharding
from ...core.objects.equality import sums
from ...core.system.extras import kind_of
from ...events import Event, Lane, Log, Run, RunClosed, TrainStart, ValidationEnd
from ...events.checks import known_names
from ...plugins import Plugin, on
from .folder import warn_without_saver

SEPARATORS = "_- .,"


class CheckpointLabel(Plugin):
    """Add metrics, or your own text, to the names of checkpoints.

    The name is `<run_name>_epoch_<epoch>_iter_<step>_<label>.pth`. A part of the template is omitted if its metric was
    not measured yet. Without this plugin the label is the result of the task's `checkpoint_metadata(run)`,
    if it has this method. Any plugin with such a method can name checkpoints; the main rank calls it.

    Args:
        label: a template of metric names, for example `"loss_{validation/loss:.3f}"`, or a function of the run that
            returns a string.

    Raises:
        TypeError: `label` is neither.
        ValueError: the template is malformed; when metrics are measured, one in the template does not exist.
    """

    affects_training = False
    exclusive = ("the names of checkpoints",)

    def __init__(self, label: str | Callable[[Run], str]) -> None:
        if not isinstance(label, str) and not callable(label):
            raise TypeError(
                f"CheckpointLabel takes a template of metric names such as 'loss_{{validation/loss:.3f}}', or a "
                f"function of the run that returns a string; got {label!r}."
            )
        self._label = _Template(label) if isinstance(label, str) else label
        self._metrics = self._label.metrics if isinstance(self._label, _Template) else []
        after: dict[bool, type[Event]] = {True: Log, False: ValidationEnd}
        events = {after[name.startswith("train/")] for name in self._metrics}
        self.ignores = tuple(event for event in after.values() if event not in events)
        self._lacking: dict[str, int] = {}  # metrics, and the step of the first checkpoint that was named without them

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Forget the previous run; warn if no plugin writes checkpoints."""
        self._lacking = {}
        warn_without_saver(run, "CheckpointLabel")

    def checkpoint_metadata(self, run: Run) -> str:
        """Return the label of a checkpoint that is written now."""
        if not isinstance(self._label, _Template):
            return self._label(run)
        text, lacking = self._label.fill(run.metrics)
        self._lacking = dict.fromkeys(lacking, run.progress.steps) | self._lacking
        return text

    @on(ValidationEnd, Log, lane=Lane.REPORT, optional=True)
    def check(self, run: Run, event: ValidationEnd | Log) -> None:
        """Raise ValueError if the template names a metric that was not measured.

        A metric of another split may come later.
        """
        split = "train/" if isinstance(event, Log) else "validation/"
        measured = {**run.metrics, **event.metrics}
        if not run.engine.is_main or not any(name.startswith(split) for name in event.metrics):
            return
        for name in self._metrics:
            if name not in measured and name.startswith(split):
                raise ValueError(
                    f"The checkpoint's name needs {name!r}, which is not a metric.{known_names(name, measured)}"
                )

    @on(RunClosed)
    def finish(self, run: Run, event: RunClosed) -> None:
        """Warn of metrics that were never measured."""
        for metric, step in self._lacking.items():
            if metric not in run.metrics:
                run.warn(
                    f"CheckpointLabel needs {metric!r}, which was never measured: the names of checkpoints lack it, "
                    f"from step {step} on.{known_names(metric, run.metrics)}"
                )


class _Template:
    # metric names contain slashes, so `str.format` cannot be used
    def __init__(self, text: str) -> None:
        try:
            self._parts = list(Formatter().parse(text))
            self.metrics = [name for _, name, _, _ in self._parts if name is not None]
            if any(not name or name.isdecimal() for name in self.metrics):
                raise ValueError("the name of a metric is missing between { and }")
            self.fill(dict.fromkeys(self.metrics, 0.5))
        except ValueError as error:
            raise ValueError(
                f"{text!r} is not a template of metric names such as 'loss_{{validation/loss:.3f}}': {error}."
            ) from error

    def fill(self, metrics: Mapping[str, float]) -> tuple[str, list[str]]:
        formatter, text, missing = Formatter(), "", []
        for literal, name, form, conversion in self._parts:
            if name is None:
                text += literal
            elif name in metrics:
                value = formatter.convert_field(metrics[name], conversion)
                text += literal + formatter.format_field(value, form or "")
            else:
                missing.append(name)
        return text.strip(SEPARATORS) if missing else text, missing


class TrainedOnly(Plugin):
    """Omit parameters from checkpoints that require no gradient and have not changed since the run began.

    Use it if most weights are frozen, for example with LoRA. The program that resumes such a checkpoint, or loads its
    weights, must have the same frozen weights, which is verified by digests. Not for an engine that shards weights,
    such as `FSDPEngine`.

    Raises:
        ValueError: at the run's start, the engine shards the weights.
    """

    affects_training = False
    exclusive = ("the state without frozen weights",)

    def __init__(self) -> None:
        self._sums: dict[Key, int] = {}  # of the weights that required no gradient when the run began
        self._digests: dict[Key, str] = {}

    @on(TrainStart, lane=Lane.MEASURE)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Record which weights are frozen."""
        warn_without_saver(run, "TrainedOnly")
        if is_sharding(run.engine):
            raise ValueError(
                f"TrainedOnly needs an engine with full weights, but {kind_of(run.engine)} shards them: remove the "
                f"plugin, or train with DDPEngine."
            )
        if all(parameter.requires_grad for module in run.modules.values() for parameter in module.parameters()):
            run.warn(
                "TrainedOnly has no effect, because all weights of this task are trained: freeze weights with "
                "requires_grad_(False), or remove the plugin."
            )
        frozen = {key: tensor for key, tensor in named_parameters(run.modules) if not tensor.requires_grad}
        self._sums, self._digests = sums(frozen), {}  # waits for the device once

    def reduce_state(self, run: Run, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without the frozen weights, and with their digests."""
        saved: Mapping[str, Mapping[str, Any]] = state["modules"]
        here = {
            (root, name): tensor
            for (root, name), tensor in named_parameters(run.modules)
            if (root, name) in self._sums and not tensor.requires_grad and name in saved.get(root, {})
        }
        # one that has changed since the run began, such as an average that a task maintains, is saved
        unchanged = {key: here[key] for key, value in sums(here).items() if value == self._sums[key]}
        frozen: dict[str, dict[str, str]] = {}
        for (root, name), tensor in unchanged.items():
            if (root, name) not in self._digests:
                self._digests[root, name] = digest(tensor).hex()
            frozen.setdefault(root, {})[name] = self._digests[root, name]
        trained = {
            root: {name: tensor for name, tensor in weights.items() if (root, name) not in unchanged}
            for root, weights in saved.items()
        }
        return {**state, "modules": trained, FROZEN: frozen}

    def describe(self, run: Run) -> str:
        """Return what the checkpoints omit."""
        return "leaves frozen weights out of the checkpoints"
