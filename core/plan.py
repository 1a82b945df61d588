"""The plan of a training, which is logged at its start."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import TextWrapper

from ..events.checks import count, printable
from ..plugins.states import Lines
from .checkpoint.schema import batch_factors, global_batch
from .context import RunContext
from .data.source import Sourced, loaders_of

WRAPPED = TextWrapper(80, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def plan_of(run: RunContext) -> str:
    """Return the model, the hardware, the length, the plugins' descriptions and the start of a run."""
    lines = [_model(run), _hardware(run), _length(run), *_streams(run), *_validation(run)]
    lines += [f"{name}: {text}" for name, text in run.plugins.descriptions(run).items()]
    if "rng" not in run.plugins.declared("exclusive"):
        lines += ["seed: none, so another run draws other random numbers; RNGCapture() sets one"]
    if run.report.started:
        lines += ["start: from the beginning"] * (run.checkpoints.resumed_at is None) + run.report.notes
        lines += [f"WARNING: {warning}" for warning in run.report.warnings]
    return Lines("\n".join([f"run {run.name!r}", *map(WRAPPED.fill, map(printable, lines))]))


def _model(run: RunContext) -> str:
    parameters = {id(value): value for module in run.modules.values() for value in module.parameters()}.values()
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    frozen = "" if trained == total else f", {trained:,} of them trained"
    return f"model: {type(run.task).__name__} with {total:,} parameters{frozen}"


def _hardware(run: RunContext) -> str:
    engine = run.engine
    processes = "1 process" if engine.world_size == 1 else f"{engine.world_size} processes"
    precision = getattr(getattr(engine, "precision", None), "name", "unknown precision")
    return f"hardware: {engine.device}, {precision}, {processes}, {type(engine).__name__}"


def _length(run: RunContext) -> str:
    factors = batch_factors(run)
    batches, window = run.data.length, factors["accumulation"]
    if batches is not None and window is not None:
        window = min(window, batches)  # a window ends with the epoch
    parts = [count(run.settings.epochs, "epoch", "epochs")] if run.settings.epochs is not None else []
    if run.settings.steps is not None:
        parts += ["at most " * bool(parts) + count(run.settings.steps, "step", "steps")]
    elif run.length.planned_steps is not None:
        parts += [count(run.length.planned_steps, "step", "steps")]
    parts = parts or ["until a plugin stops it"]
    parts += ["an epoch of unknown length" if batches is None else f"{count(batches, 'batch', 'batches')} an epoch"]
    parts += [f"{window} batches a step"] if window not in (None, 1) else []
    samples = global_batch({**factors, "accumulation": window, "batch_size": _batch_size(run)})
    parts += [] if samples is None else [f"global batch {samples:,}"]
    return f"length: {', '.join(parts)}"


def _batch_size(run: RunContext) -> int | None:
    """Return the samples in a batch of this process, or None if that is unknown before a batch is read."""
    loader = run.data.train_loader
    if isinstance(loader, list | tuple):
        return run.size_of(loader[0])
    is_known = all(getattr(part, "batch_size", None) for part in loaders_of(loader).values())
    return run.data.batch_size if is_known else None


def _streams(run: RunContext) -> Iterator[str]:
    loader = run.data.train_loader
    if isinstance(loader, Sourced) and loader.loaders:
        yield f"streams: {loader.describe()}"


def _validation(run: RunContext) -> Iterator[str]:
    if sets := run.data.validation_sets:
        every = run.settings.every
        named = [f"{name} (in every {every[name]})" if name in every else name for name in sets if name]
        yield f"validation: {count(len(sets), 'set', 'sets')} {', '.join(named)}".rstrip()
