"""The command `python -m heliograph checkpoint inspect | verify | migrate | consolidate | export | prune`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor

from ...core.checkpoint.conversion import consolidate, files_in, migrate_file, read_any
from ...core.checkpoint.state.schema import SCHEMA, WEIGHTS_ONLY
from ...core.checkpoint.storage import reader
from ...core.checkpoint.storage.archive import read_head
from ...core.checkpoint.storage.manifest import (
    PINNED,
    SUFFIX,
    Entry,
    Label,
    MissingManifestError,
    SchemaError,
    pointer_path,
)
from ...core.checkpoint.storage.reader import read_pointer
from ...core.checkpoint.storage.store import Store
from ...core.checkpoint.weights import WHICH, RunFilter, export_weights, find_weights
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
        file = find_weights(path, options.which, RunFilter(options.run_name))
        average: str | Literal[False] | None = False if options.trained else options.average
        written = export_weights(file, options.out, module=options.module, average=average, overwrite=options.force)
        return [f"{file.path}: exported to {written}"]

    return _process([options.path], act)


def _process_files(paths: Iterable[Path], act: Callable[[Path], Iterable[str]]) -> int:
    """Process each file and each file of the folders; return 1 if any of them failed."""
    status = 0
    for path in paths:
        try:
            files = _files(path)
        except (OSError, ValueError) as error:
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
        check_folder(options.folder)
    except ValueError as error:
        return _print_error(error)
    names = _requested_names(options.folder, options.run_name) or ([options.run_name] if options.run_name else [])
    if not names:
        return _print_error(f"There is no checkpoint with a manifest in {options.folder}.")
    return _process(names, lambda name: _pruned(Store(options.folder, name), options))


def _pruned(store: Store, options: Namespace) -> list[str]:
    _check_monitor(*store.entries("folder"), options)
    notes = [] if options.dry_run else store.open()  # raises if a process trains into the folder
    try:
        entries, skipped = store.entries("folder")
        entries = [entry for entry in entries if options.run_name in (None, entry.family, entry.run_name)]
        trainings = by_training(entries)
        reasons: dict[Path, str] = {}  # of all checkpoints, before one is removed
        for training in trainings:
            reasons |= _reasons_to_keep(store, training, options)
        lines = [_prune_entry(store, entry, reasons, options.dry_run) for entries in trainings for entry in entries]
    finally:
        store.close()
    return [*notes, *lines, *(f"left     {line}" for line in skipped)]


def _reasons_to_keep(store: Store, entries: list[Entry], options: Namespace) -> dict[Path, str]:
    """Return why each checkpoint of a training is kept; the one marked as the best by its run always is."""
    reasons = reasons_to_keep(
        _judged(entries, options.monitor),
        keep_last=options.keep_last,
        keep_best=options.keep_best or 0,
        monitor=options.monitor,
        is_pinned=store.is_pinned,
        damage_to=cache(_damage_to),  # it reads the whole file
    )
    best = read_pointer(pointer_path(store.folder, entries[0].run_name, "best"))
    return {path: reason or "called the best by its run" * (path.name == best) for path, reason in reasons.items()}


def _judged(entries: list[Entry], monitor: Monitor | None) -> list[Entry]:
    """Rank by the metrics in the manifests, unless the run itself ranked some checkpoints by this metric."""
    if monitor is None or ranked(entries, monitor):
        return entries
    name, mode = monitor.name, monitor.mode
    return [replace(entry, judged_by=(name, mode, entry.metrics.get(name))) for entry in entries]


def _damage_to(path: Path) -> str:
    try:
        reader.check(path)
    except ValueError as error:
        return str(error)
    return ""


def _check_monitor(entries: list[Entry], skipped: list[str], options: Namespace) -> None:
    if not entries:
        raise ValueError(" ".join(skipped) or f"There is no checkpoint in {options.folder}.")
    if options.monitor is not None and not ranked(_judged(entries, options.monitor), options.monitor):
        name, metrics = options.monitor.name, {name for entry in entries for name in entry.metrics}
        raise ValueError(
            f"No checkpoint of run {entries[0].run_name!r} has a metric {name!r}.{known_names(name, metrics)}"
        )


def _prune_entry(store: Store, entry: Entry, reasons: Mapping[Path, str], dry_run: bool) -> str:
    path = entry.path
    if reasons[path]:
        return f"kept     {path}: {reasons[path]}"
    if dry_run:
        return f"would be removed {path}"
    return f"removed  {path}" if store.remove(path, entry.training) else f"kept     {path}: pinned or moved meanwhile"


def _requested_names(folder: Path, run_name: str | None) -> list[str]:
    """Return the requested names of the runs in a folder: of a run that was saved as `run-2`, it is `run`."""
    names = set()
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            entry = reader.read_manifest(path)
        except (OSError, ValueError):
            continue  # reported as skipped with each run
        if run_name in (None, entry.family, entry.run_name):
            names.add(entry.family)
    return sorted(names)


def _inspected(path: Path) -> Iterator[str]:
    """Yield the lines about a checkpoint or a folder; at the end raise ValueError if a checkpoint is damaged."""
    if path.is_dir():
        lines, bad = table(path)
        yield lines
        if bad:
            raise ValueError(f"{path}: damaged, or cannot be read: {', '.join(bad)}.")
    else:
        yield describe(path)
        if _entry_of(path) is not None:
            reader.check(path)


def _verified(path: Path) -> list[str]:
    state = reader.load(path)
    with content_of(path):
        return [f"intact   {path}: run {state['run_name']!r}, step {state['progress']['steps']}"]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    check_folder(path)
    if not (files := files_in(path)):
        raise FileNotFoundError(f"There is no checkpoint in {path}.")
    return files


def _entry_of(path: Path) -> Entry | None:
    """Return the entry in the manifest of a file; None for a checkpoint of Helios, which has no manifest."""
    try:
        return reader.read_manifest(path)
    except MissingManifestError:
        return None


def describe(path: Path) -> str:
    """Return the lines about one checkpoint, without verifying it."""
    entry = _entry_of(path)
    if entry is None:
        foreign = read_any(path)
        state, layout = foreign.state, f"{foreign.origin}, without a manifest: run `checkpoint migrate` on it"
    else:
        state, layout = reader.read(path, map_tensors=True), f"schema {SCHEMA}"
    with content_of(path):
        lines = [("layout", layout), *_facts(path, state, entry), *_judgement(entry), *_contents(state)]
    return "\n".join([printable(path), *(f"    {label:<12}{printable(text)}".rstrip() for label, text in lines)])


def check_folder(folder: Path) -> None:
    # Globbing an unreadable folder finds nothing, without an error.
    try:
        next(folder.iterdir(), None)
    except OSError as error:
        raise ValueError(f"The folder {folder} cannot be read: {error.strerror}.") from error


def table(folder: Path) -> tuple[str, list[str]]:
    """Return the table of the checkpoints in a folder, and the names of damaged or unreadable files.

    Only truncated files and missing shards count as damaged here: the digests are not verified.
    """
    check_folder(folder)
    entries, damaged, unreadable, bad = list[Entry](), list[tuple[str, ...]](), list[str](), list[str]()
    files = files_in(folder)
    if not files:
        raise FileNotFoundError(f"There is no checkpoint in {folder}.")
    for path in files:
        try:
            entries.append(reader.read_manifest(path))
        except (OSError, ValueError) as error:
            unreadable.append(str(error))
            bad += [path.name] * (not isinstance(error, MissingManifestError))
            if not isinstance(error, OSError | MissingManifestError | SchemaError):
                damaged.append(_damaged_row(path))
    entries.sort(key=lambda entry: (entry.run_name, -entry.sequence, -entry.saved_at, entry.path.name))
    rows = (
        [HEAD, *(tuple(map(printable, row)) for row in [*map(_row, entries), *damaged])] if entries or damaged else []
    )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    bad += [entry.path.name for entry in entries if not reader.is_complete(entry)]
    return "\n".join([*lines, *map(printable, unreadable)]), sorted(bad)


@contextmanager
def content_of(path: Path) -> Iterator[None]:
    """Turn errors of an unexpected content into a ValueError that names the file."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"{path} is not a checkpoint: {type(error).__name__}: {error}") from error


def _row(entry: Entry) -> tuple[str, ...]:
    counters = (str(entry.progress.get(name, "?")) for name in ("epoch", "batch", "steps"))
    damaged = [] if reader.is_complete(entry) else ["damaged"]
    kind = ["weights only"] * entry.weights_only
    marks = ",".join([*damaged, *kind, *_marks(entry.path, entry.run_name)]) or "-"
    metrics = " ".join(f"{name}={value:.4g}" for name, value in sorted(entry.metrics.items()))
    return entry.path.name, entry.run_name, *counters, _time(entry.saved_at), _size(entry.path, entry), marks, metrics


def _damaged_row(path: Path) -> tuple[str, ...]:
    # The manifest is lost: the head of the file has the run and the time.
    head = read_head(path)
    run, saved = ("?", "?") if head is None else (head.run_name, _time(head.saved_at))
    marks = ",".join(["damaged", *_marks(path, run)])
    return path.name, run, "?", "?", "?", saved, _size(path, None), marks, ""


def _facts(path: Path, state: Mapping[str, Any], entry: Entry | None) -> Iterator[tuple[str, str]]:
    requested = state["run_name"]
    name = requested if entry is None else entry.run_name
    place, versions = state["progress"], sorted(state["versions"].items())
    yield "run", name if name == requested else f"{name}, requested as {requested}"
    yield "training", state["training_id"]
    if origin := state.get("forked_from"):
        yield "fork of", f"training {origin['training']} at step {origin['step']}, {origin['recording']}"
    if state.get(WEIGHTS_ONLY):
        yield "holds", "only weights: for load_weights and `checkpoint export`, not for a resume"
    yield "position", f"epoch {place['epoch']}, batch {place['batch']}, step {place['steps']}"
    tokens = f"{place['tokens']} tokens, " if place.get("tokens") else ""
    trained = f"{place['samples']} samples, {tokens}{place['validations']} validations"
    yield "so far", f"{trained}, {place['earlier_seconds']:.1f} s"
    yield from _several("streams", (f"{name} {count} batches" for name, count in place.get("streams", {}).items()))
    yield "saved", _time(state["saved_at"])
    yield "size", _size(path, entry)
    yield "marks", ", ".join(_marks(path, name)) or "none"
    yield "versions", ", ".join(f"{name} {number}" for name, number in versions) or "unknown"
    yield "processes", str(state["world"]["size"])
    yield from _several("metrics", (f"{name} {value:.6g}" for name, value in sorted(state["metrics"].items())))


def _judgement(entry: Entry | None) -> Iterator[tuple[str, str]]:
    if entry is not None and entry.judged_by is not None:
        metric, mode, value = entry.judged_by
        yield "judged by", f"{metric} ({mode}) {value}"


def _contents(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    shards = state.get("shards", {"modules": {}, "tensors": {}, "optimizers": {}})
    sharded = (f"{name}: {_sharded(name, shards['tensors'])}, in shards" for name in shards["modules"])
    kinds, scheduler_kinds = state.get("optimizer_kinds", {}), state.get("scheduler_kinds", {})
    saved = state["optimizers"] or shards["optimizers"]
    groups = {name: len(optimizer["param_groups"]) for name, optimizer in saved.items()}
    optimizers = [f"{name}: {kinds.get(name, 'unknown')}, {groups[name]} groups" for name in groups]
    schedulers = [f"{name}: {scheduler_kinds.get(name, 'unknown')}" for name in state["schedulers"]]
    yield from _several("modules", (f"{name}: {_weights(module)}" for name, module in state["modules"].items()))
    yield from _several("modules", sharded)
    yield from _several("optimizers", optimizers or ["none"])
    yield from _several("schedulers", schedulers or ["none"])
    yield from _several("plugins", (f"{name}: {_keys(plugin)}" for name, plugin in sorted(state["plugins"].items())))


def _several(label: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a line per text; the first line has the label."""
    for text in texts:
        yield label, text
        label = ""


def _weights(module: Mapping[str, Any]) -> str:
    tensors = [value for value in module.values() if isinstance(value, Tensor)]
    return f"{sum(tensor.numel() for tensor in tensors):,} values in {len(tensors)} tensors"


def _sharded(name: str, tensors: Mapping[str, Any]) -> str:
    sizes = [prod(shape) for key, (shape, _) in tensors.items() if key.startswith(f"modules/{name}/")]
    return f"{sum(sizes):,} values in {len(sizes)} tensors"


def _keys(state: Any) -> str:
    return (", ".join(map(str, state)) or "no state") if isinstance(state, Mapping) else type(state).__name__


def _marks(path: Path, run_name: str) -> list[str]:
    pointers = {label: pointer_path(path.parent, run_name, label) for label in get_args(Label)}
    marks = [label for label, pointer in pointers.items() if read_pointer(pointer) == path.name]
    return [*marks, "pinned"] if path.with_suffix(PINNED).exists() else marks


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _size(path: Path, entry: Entry | None) -> str:
    shards = None if entry is None or entry.shards is None else reader.shards_path(entry)
    files = [path, *(shards.iterdir() if shards is not None and shards.exists() else ())]
    return f"{sum(file.stat().st_size for file in files) / 1e6:,.3f} MB"
