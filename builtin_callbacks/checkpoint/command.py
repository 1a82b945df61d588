"""The command `python -m heliograph checkpoint inspect | verify | migrate | consolidate | export | prune`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor

from ...core.checkpoint.conversion import consolidate, files_in, migrate_file
from ...core.checkpoint.state.schema import SCHEMA
from ...core.checkpoint.storage import reader
from ...core.checkpoint.storage.manifest import PINNED, Entry, Label, MissingManifestError, pointer_path
from ...core.checkpoint.storage.reader import read_pointer
from ...core.checkpoint.storage.store import Store
from ...core.checkpoint.weights import WHICH, export_weights, find_weights
from ...core.metrics.monitor import Monitor
from ...core.system.errors import MACHINE_ERRORS
from ...core.system.extras import printable_lines
from ...events.checks import known_names, printable
from .folder import by_training, ranked, reasons_to_keep

T = TypeVar("T")
HEAD = ("FILE", "RUN", "EPOCH", "BATCH", "STEP", "SAVED", "SIZE", "MARKS", "METRICS")


def main(arguments: Sequence[str]) -> int:
    """Inspect, verify, migrate, export or prune checkpoints.

    The exit status is 1 if a checkpoint is damaged or could not be processed.
    """
    options = _parser().parse_args(arguments)
    command: Callable[[Namespace], int] = options.run
    return command(options)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="heliograph checkpoint", description="Inspect, verify, convert and remove checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser(
        "inspect", help="show the content of a checkpoint and whether it is intact, or list a folder"
    )
    verify = commands.add_parser("verify", help="check every byte against its digest, and load it")
    migrate = commands.add_parser("migrate", help="convert checkpoints of Helios")
    for command, act in ((inspect, _inspect), (verify, _verify), (migrate, _migrate)):
        command.add_argument("paths", metavar="PATH", nargs="+", type=_path, help="a checkpoint or a folder of them")
        command.set_defaults(run=act)
    migrate.add_argument("--dry-run", action="store_true", help="print what would be done, and change nothing")
    migrate.add_argument("--no-backup", action="store_true", help="remove the original files after the conversion")
    migrate.add_argument(
        "--as-data", metavar="CLASS", action="append", default=[], help="read objects of this class as plain records"
    )
    consolidate = commands.add_parser("consolidate", help="write a sharded checkpoint as one file")
    consolidate.add_argument("path", metavar="FILE", type=_path)
    consolidate.add_argument("--out", metavar="FILE", type=_path, help="write to this file, and keep the original")
    consolidate.set_defaults(run=_consolidate)
    _add_export(
        commands.add_parser("export", help="write the weights of a module as safetensors, or as a plain .pth file")
    )
    _add_prune(commands.add_parser("prune", help="remove checkpoints of a run; never the newest or a pinned one"))
    return parser


def _add_export(export: ArgumentParser) -> None:
    export.add_argument("path", metavar="PATH", type=_path, help="a checkpoint, or a folder of them")
    export.add_argument("out", metavar="OUT", type=_path, help="a .safetensors, .pth or .pt file")
    export.add_argument("--which", choices=WHICH, help="in a folder: the newest intact one (last, the default)")
    export.add_argument("--run", dest="run_name", metavar="NAME", help="in a folder: only of this run")
    export.add_argument("--module", metavar="NAME", help="the module, if there are several")
    weights = export.add_mutually_exclusive_group()
    weights.add_argument("--average", metavar="PLUGIN", help="the averaged weights of this plugin, for example ema")
    weights.add_argument("--trained", action="store_true", help="the trained weights, even if others were validated")
    export.add_argument("--force", action="store_true", help="replace OUT, if it exists")
    export.set_defaults(run=_export)


def _add_prune(prune: ArgumentParser) -> None:
    prune.add_argument("folder", metavar="FOLDER", type=_path)
    prune.add_argument("--keep-last", metavar="K", type=_positive, required=True, help="keep the newest K")
    prune.add_argument("--keep-best", metavar="M", type=_positive, help="also keep the best M by --monitor")
    prune.add_argument("--monitor", metavar="METRIC", help="a metric, for example validation/loss")
    prune.add_argument("--mode", choices=("min", "max"), help="the better direction; min for a loss or an error")
    prune.add_argument("--run", dest="run_name", metavar="NAME", help="only runs of this name; by default all")
    prune.add_argument("--dry-run", action="store_true", help="print what would be done, and remove nothing")
    prune.set_defaults(run=_prune, parser=prune)


def _path(text: str) -> Path:
    if not text:  # an unset shell variable would mean the current folder
        raise ArgumentTypeError("expected a path, got an empty text")
    return Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _inspect(options: Namespace) -> int:
    return _process(options.paths, _inspected)


def _verify(options: Namespace) -> int:
    return _process_files(options.paths, _verified)


def _migrate(options: Namespace) -> int:
    def act(path: Path) -> list[str]:
        keep = not options.no_backup
        return migrate_file(path, keep_backup=keep, dry_run=options.dry_run, as_data=options.as_data)

    return _process_files(options.paths, act)


def _consolidate(options: Namespace) -> int:
    def act(path: Path) -> list[str]:
        entry = consolidate(path, options.out)
        return [f"{path}: written as one file, {entry.path} ({entry.size / 1e6:,.3f} MB)"]

    return _process([options.path], act)


def _export(options: Namespace) -> int:
    def act(path: Path) -> list[str]:
        file = find_weights(path, options.which, options.run_name)
        average: str | Literal[False] | None = False if options.trained else options.average
        written = export_weights(file, options.out, module=options.module, average=average, overwrite=options.force)
        return [f"{file.path}: exported to {written}"]

    return _process([options.path], act)


def _process_files(paths: Iterable[Path], act: Callable[[Path], Iterable[str]]) -> int:
    """Process each file and each file of the folders; return 1 if any of them failed."""
    status = 0
    for path in paths:
        try:
            files = files_in(path)
        except OSError as error:
            status = _print_error(error)
        else:
            status = max(status, _process(files, act))
    return status


def _process(items: Iterable[T], act: Callable[[T], Iterable[str]]) -> int:
    # An error of one does not stop the others.
    status = 0
    for item in items:
        try:
            for line in act(item):
                print(printable_lines(line))
        except (ValueError, *MACHINE_ERRORS) as error:
            status = _print_error(" ".join([str(error) or repr(error), *getattr(error, "__notes__", ())]))
    return status


def _print_error(error: object) -> int:
    print(f"heliograph checkpoint: {printable(error)}", file=sys.stderr)
    return 1


def _prune(options: Namespace) -> int:
    if (options.keep_best is None) != (options.monitor is None):
        options.parser.error("--keep-best M and --monitor METRIC need each other: a number, and the metric to rank by")
    if options.monitor is not None:
        try:
            options.monitor = Monitor(options.monitor, options.mode)
        except ValueError as error:
            options.parser.error(str(error))
    try:
        entries, _ = _read_manifests(options.folder)
    except OSError as error:
        return _print_error(error)
    # The name of the runs: of a run that was saved as `run-2`, it is `run`.
    names = sorted({entry.family for entry in entries if _is_requested(entry, options)})
    if not names:
        of_run = f" of run {options.run_name!r}" if options.run_name else ""
        return _print_error(f"There is no checkpoint{of_run} with a manifest in {options.folder}.")
    return _process(names, lambda name: _pruned(Store(options.folder, name), options))


def _is_requested(entry: Entry, options: Namespace) -> bool:
    return options.run_name in (None, entry.family, entry.run_name)


def _pruned(store: Store, options: Namespace) -> list[str]:
    notes = [] if options.dry_run else store.open()  # raises if a process trains into the folder
    try:
        entries, skipped = store.entries()
        trainings = by_training(entry for entry in entries if _is_requested(entry, options))
        if options.monitor is not None:
            _check_monitor(entries, options.monitor)
        reasons: dict[Path, str] = {}  # of all checkpoints, before one is removed
        for training in trainings:
            reasons |= _reasons_to_keep(store, training, options)
        lines = [_prune_entry(store, entry, reasons, options.dry_run) for entries in trainings for entry in entries]
    finally:
        store.close()
    return [*notes, *lines, *(f"left     {line}" for line in skipped)]


def _check_monitor(entries: list[Entry], monitor: Monitor) -> None:
    if not ranked(_judged(entries, monitor), monitor):
        known = known_names(monitor.name, {name for entry in entries for name in entry.metrics})
        raise ValueError(f"No checkpoint of run {entries[0].run_name!r} has a metric {monitor.name!r}.{known}")


def _reasons_to_keep(store: Store, entries: list[Entry], options: Namespace) -> dict[Path, str]:
    """Return why each checkpoint of a training is kept; the one marked as the best by its run always is."""
    reasons = reasons_to_keep(
        entries if options.monitor is None else _judged(entries, options.monitor),
        keep_last=options.keep_last,
        keep_best=options.keep_best or 0,
        monitor=options.monitor,
        is_pinned=store.is_pinned,
        damage_to=cache(_damage_to),  # it reads the whole file
    )
    best = read_pointer(pointer_path(store.folder, entries[0].run_name, "best"))
    return {path: reason or "called the best by its run" * (path.name == best) for path, reason in reasons.items()}


def _judged(entries: list[Entry], monitor: Monitor) -> list[Entry]:
    """Rank by the metrics in the manifests, unless the run itself ranked some checkpoints by this metric."""
    if ranked(entries, monitor):
        return entries
    name, mode = monitor.name, monitor.mode
    return [replace(entry, judged_by=(name, mode, entry.metrics.get(name))) for entry in entries]


def _damage_to(path: Path) -> str:
    try:
        reader.check(path)
    except ValueError as error:
        return str(error)
    return ""


def _prune_entry(store: Store, entry: Entry, reasons: Mapping[Path, str], dry_run: bool) -> str:
    path = entry.path
    if reasons[path]:
        return f"kept     {path}: {reasons[path]}"
    if dry_run:
        return f"would be removed {path}"
    return f"removed  {path}" if store.remove(path, entry.training) else f"kept     {path}: pinned or moved meanwhile"


def _verified(path: Path) -> list[str]:
    reader.load(path)
    entry = reader.read_manifest(path)
    return [f"intact   {path}: run {entry.family!r}, step {entry.progress.get('steps')}"]


def _inspected(path: Path) -> list[str]:
    if path.is_dir():
        return _table(path)
    print(printable_lines(describe(path)))  # also if it is damaged
    reader.check(path)
    return []


def _read_manifests(folder: Path) -> tuple[list[Entry], dict[Path, OSError | ValueError]]:
    entries, problems = list[Entry](), dict[Path, OSError | ValueError]()
    for path in files_in(folder):
        try:
            entries.append(reader.read_manifest(path))
        except (OSError, ValueError) as error:
            problems[path] = error
    return entries, problems


def _table(folder: Path) -> list[str]:
    # Only truncated files and missing shards count as damaged here: the digests are not verified.
    entries, problems = _read_manifests(folder)
    entries.sort(key=lambda entry: (entry.run_name, -entry.sequence, -entry.saved_at, entry.path.name))
    rows = [HEAD, *(tuple(map(printable, _row(entry))) for entry in entries)] if entries else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    for problem in problems.values():
        print(printable(problem))
    bad = [path.name for path, problem in problems.items() if not isinstance(problem, MissingManifestError)]
    bad += [entry.path.name for entry in entries if not reader.is_complete(entry)]
    if bad:
        raise ValueError(f"{folder}: damaged, or cannot be read: {', '.join(sorted(bad))}.")
    return []


def _row(entry: Entry) -> tuple[str, ...]:
    counters = (str(entry.progress.get(name, "?")) for name in ("epoch", "batch", "steps"))
    damaged = [] if reader.is_complete(entry) else ["damaged"]
    kind = ["weights only"] * entry.weights_only
    marks = ",".join([*damaged, *kind, *_marks(entry)]) or "-"
    metrics = " ".join(f"{name}={value:.4g}" for name, value in sorted(entry.metrics.items()))
    return entry.path.name, entry.run_name, *counters, _time(entry.saved_at), _size(entry), marks, metrics


def describe(path: Path) -> str:
    """Return the lines about one checkpoint, without verifying it."""
    entry, state = reader.read_manifest(path), reader.read(path, map_tensors=True)
    lines = [printable(path)]
    try:
        for label, *texts in (*_facts(state, entry), *_contents(state)):
            for text in texts:
                lines.append(f"    {label:<12}{printable(text)}".rstrip())
                label = ""  # only the first line has it
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"{path} is not a checkpoint: {type(error).__name__}: {error}") from error
    return "\n".join(lines)


def _facts(state: Mapping[str, Any], entry: Entry) -> Iterator[tuple[str, ...]]:
    name, place, versions = entry.run_name, state["progress"], sorted(state["versions"].items())
    yield "layout", f"schema {SCHEMA}"
    yield "run", name if name == entry.family else f"{name}, requested as {entry.family}"
    yield "training", state["training_id"]
    if origin := state.get("forked_from"):
        yield "fork of", f"training {origin['training']} at step {origin['step']}, {origin['recording']}"
    if entry.weights_only:
        yield "holds", "only weights: for load_weights and `checkpoint export`, not for a resume"
    yield "position", f"epoch {place['epoch']}, batch {place['batch']}, step {place['steps']}"
    tokens = f"{place['tokens']} tokens, " if place.get("tokens") else ""
    trained = f"{place['samples']} samples, {tokens}{place['validations']} validations"
    yield "so far", f"{trained}, {place['earlier_seconds']:.1f} s"
    yield "streams", *(f"{name} {count} batches" for name, count in place.get("streams", {}).items())
    yield "saved", _time(entry.saved_at)
    yield "size", _size(entry)
    yield "marks", ", ".join(_marks(entry)) or "none"
    yield "versions", ", ".join(f"{name} {number}" for name, number in versions) or "unknown"
    yield "processes", str(state["world"]["size"])
    yield "metrics", *(f"{name} {value:.6g}" for name, value in sorted(state["metrics"].items()))
    if entry.judged_by is not None:
        metric, mode, best = entry.judged_by
        yield "judged by", f"{metric} ({mode}) {best}"


def _contents(state: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    shards = state.get("shards", {"modules": {}, "tensors": {}, "optimizers": {}})
    sharded = (f"{name}: {_sharded(name, shards['tensors'])}, in shards" for name in shards["modules"])
    kinds, scheduler_kinds = state.get("optimizer_kinds", {}), state.get("scheduler_kinds", {})
    saved = state["optimizers"] or shards["optimizers"]
    groups = {name: len(optimizer["param_groups"]) for name, optimizer in saved.items()}
    optimizers = [f"{name}: {kinds.get(name, 'unknown')}, {groups[name]} groups" for name in groups]
    schedulers = [f"{name}: {scheduler_kinds.get(name, 'unknown')}" for name in state["schedulers"]]
    yield "modules", *(f"{name}: {_weights(module)}" for name, module in state["modules"].items()), *sharded
    yield "optimizers", *(optimizers or ["none"])
    yield "schedulers", *(schedulers or ["none"])
    yield "plugins", *(f"{name}: {_keys(plugin)}" for name, plugin in sorted(state["plugins"].items()))


def _weights(module: Mapping[str, Any]) -> str:
    tensors = [value for value in module.values() if isinstance(value, Tensor)]
    return f"{sum(tensor.numel() for tensor in tensors):,} values in {len(tensors)} tensors"


def _sharded(name: str, tensors: Mapping[str, Any]) -> str:
    sizes = [prod(shape) for key, (shape, _) in tensors.items() if key.startswith(f"modules/{name}/")]
    return f"{sum(sizes):,} values in {len(sizes)} tensors"


def _keys(state: Any) -> str:
    return (", ".join(map(str, state)) or "no state") if isinstance(state, Mapping) else type(state).__name__


def _marks(entry: Entry) -> list[str]:
    path, labels = entry.path, get_args(Label)
    marks = [label for label in labels if read_pointer(pointer_path(path.parent, entry.run_name, label)) == path.name]
    return [*marks, "pinned"] if path.with_suffix(PINNED).exists() else marks


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _size(entry: Entry) -> str:
    shards = None if entry.shards is None else reader.shards_path(entry)
    files = [entry.path, *(shards.iterdir() if shards is not None and shards.exists() else ())]
    return f"{sum(file.stat().st_size for file in files) / 1e6:,.3f} MB"
