"""The command line on checkpoints: `python -m heliograph checkpoint inspect | verify | migrate | ...`."""

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
from ...core.checkpoint.storage.folder import read_pointer
from ...core.checkpoint.storage.manifest import (
    PINNED,
    SUFFIX,
    Entry,
    Label,
    MissingManifestError,
    SchemaError,
    pointer_path,
)
from ...core.checkpoint.storage.store import Store
from ...core.checkpoint.weights_files import WHICH, Of, export_weights, find_weights
from ...core.metrics.monitor import Monitor
from ...core.system.errors import MACHINE_ERRORS
from ...core.system.extras import printable_lines
from ...events.checks import known_names, printable
from .retention import by_training, ranked, reasons_to_keep

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
        prog="heliograph checkpoint", description="Look into checkpoints, verify, migrate, remove them."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser(
        "inspect", help="show what a checkpoint holds and whether it is intact, or list a folder"
    )
    verify = commands.add_parser("verify", help="check every byte against its digest, and load it")
    migrate = commands.add_parser("migrate", help="convert checkpoints of Helios")
    for each, act in ((inspect, _inspect), (verify, _verify), (migrate, _migrate)):
        each.add_argument("paths", metavar="PATH", nargs="+", type=_path, help="a checkpoint or a folder of them")
        each.set_defaults(run=act)
    migrate.add_argument("--dry-run", action="store_true", help="change nothing, only say what would be done")
    migrate.add_argument("--no-backup", action="store_true", help="do not keep the former files in the end")
    migrate.add_argument(
        "--as-data", metavar="CLASS", action="append", default=[], help="read objects of this class as plain records"
    )
    consolidate = commands.add_parser("consolidate", help="make an ordinary checkpoint of one with shards")
    consolidate.add_argument("path", metavar="FILE", type=_path)
    consolidate.add_argument("--out", metavar="FILE", type=_path, help="write there, and leave the former as it is")
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
    export.add_argument("--module", metavar="NAME", help="which module, where there are several")
    weights = export.add_mutually_exclusive_group()
    weights.add_argument("--average", metavar="PLUGIN", help="the weights that this plugin averaged, such as ema")
    weights.add_argument("--trained", action="store_true", help="the trained weights, whatever was validated")
    export.add_argument("--force", action="store_true", help="replace OUT, if it exists")
    export.set_defaults(run=_export)


def _add_prune(prune: ArgumentParser) -> None:
    prune.add_argument("folder", metavar="FOLDER", type=_path)
    prune.add_argument("--keep-last", metavar="K", type=_positive, required=True, help="keep the newest K")
    prune.add_argument("--keep-best", metavar="M", type=_positive, help="besides, keep the best M by --monitor")
    prune.add_argument("--monitor", metavar="METRIC", help="such as validation/loss")
    prune.add_argument("--mode", choices=("min", "max"), help="which is better; min for a loss or an error")
    prune.add_argument("--run", dest="run_name", metavar="NAME", help="only runs of this name; else all in the folder")
    prune.add_argument("--dry-run", action="store_true", help="remove nothing, only say what would be done")
    prune.set_defaults(run=_prune, parser=prune)


def _path(text: str) -> Path:
    if not text:  # an unset variable of a shell: it would be the current folder
        raise ArgumentTypeError("a path is needed, got an empty text")
    return Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"a whole number of at least 1 is needed, got {text!r}")
    return int(text)


def _inspect(options: Namespace) -> int:
    return _each(options.paths, _inspected)


def _verify(options: Namespace) -> int:
    return _each_file(options.paths, _verified)


def _migrate(options: Namespace) -> int:
    def act(path: Path) -> list[str]:
        keep = not options.no_backup
        return migrate_file(path, keep_backup=keep, dry_run=options.dry_run, as_data=options.as_data)

    return _each_file(options.paths, act)


def _consolidate(options: Namespace) -> int:
    def act(path: Path) -> list[str]:
        entry = consolidate(path, options.out)
        return [f"{path}: written as one file, {entry.path} ({entry.size / 1e6:,.3f} MB)"]

    return _each([options.path], act)


def _export(options: Namespace) -> int:
    def act(path: Path) -> list[str]:
        file = find_weights(path, options.which, Of(options.run_name))
        average: str | Literal[False] | None = False if options.trained else options.average
        written = export_weights(file, options.out, module=options.module, average=average, overwrite=options.force)
        return [f"{file.path}: exported to {written}"]

    return _each([options.path], act)


def _each_file(paths: Iterable[Path], act: Callable[[Path], Iterable[str]]) -> int:
    """Do something to each file, and to each in the folders; return 1 where a file or a folder failed."""
    status = 0
    for path in paths:
        try:
            files = _files(path)
        except (OSError, ValueError) as error:
            status = _print_error(error)
        else:
            status = max(status, _each(files, act))
    return status


def _each(things: Iterable[T], act: Callable[[T], Iterable[str]]) -> int:
    """Do something to each; one that fails gets a sentence, does not keep the others, and makes the status 1."""
    status = 0
    for thing in things:
        try:
            for line in act(thing):
                print(printable_lines(line))
        except (ValueError, *MACHINE_ERRORS) as error:
            status = _print_error(" ".join([str(error) or repr(error), *getattr(error, "__notes__", ())]))
    return status


def _print_error(error: object) -> int:
    print(f"heliograph checkpoint: {printable(error)}", file=sys.stderr)
    return 1


def _prune(options: Namespace) -> int:
    if (options.keep_best is None) != (options.monitor is None):
        options.parser.error("--keep-best M and --monitor METRIC go together: how many, and the best of what")
    if options.monitor is not None:
        try:
            options.monitor = Monitor(options.monitor, options.mode)
        except ValueError as error:
            options.parser.error(str(error))
    try:
        check_folder(options.folder)
    except ValueError as error:
        return _print_error(error)
    names = _asked_names(options.folder, options.run_name) or ([options.run_name] if options.run_name else [])
    if not names:
        return _print_error(f"There is no checkpoint with a manifest in {options.folder}.")
    return _each(names, lambda name: _pruned(Store(options.folder, name), options))


def _pruned(store: Store, options: Namespace) -> list[str]:
    """Remove what the trainings of one name need not keep; return a line for each checkpoint."""
    _check_monitor(*store.entries("folder"), options)
    notes = [] if options.dry_run else store.open()  # refused where a process trains into the folder
    try:
        entries, passed_over = store.entries("folder")
        entries = [each for each in entries if options.run_name in (None, each.family, each.run_name)]
        trainings = by_training(entries)
        reasons: dict[Path, str] = {}  # all of them, before a checkpoint is removed
        for training in trainings:
            reasons |= _reasons_to_keep(store, training, options)
        lines = [_dealt_with(store, each, reasons, options.dry_run) for training in trainings for each in training]
    finally:
        store.close()
    return [*notes, *lines, *(f"left     {line}" for line in passed_over)]


def _reasons_to_keep(store: Store, entries: list[Entry], options: Namespace) -> dict[Path, str]:
    """Return why each checkpoint of a training is kept; the one that its run marked as the best always is."""
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
    """Judge checkpoints by the metrics in their manifests, unless their run judged some of them by this metric."""
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


def _check_monitor(entries: list[Entry], passed_over: list[str], options: Namespace) -> None:
    """Raise ValueError where a run has no checkpoints, or none with the metric."""
    if not entries:
        raise ValueError(" ".join(passed_over) or f"There is no checkpoint in {options.folder}.")
    if options.monitor is not None and not ranked(_judged(entries, options.monitor), options.monitor):
        name, known = options.monitor.name, {name for each in entries for name in each.metrics}
        raise ValueError(
            f"No checkpoint of run {entries[0].run_name!r} has a metric {name!r}.{known_names(name, known)}"
        )


def _dealt_with(store: Store, entry: Entry, reasons: Mapping[Path, str], dry_run: bool) -> str:
    """Remove a checkpoint unless there is a reason to keep it; return the line to print."""
    path = entry.path
    if reasons[path]:
        return f"kept     {path}: {reasons[path]}"
    if dry_run:
        return f"would be removed {path}"
    return f"removed  {path}" if store.remove(path, entry.training) else f"kept     {path}: pinned or moved by now"


def _asked_names(folder: Path, run_name: str | None) -> list[str]:
    """Return by which names the runs in a folder were asked for; of one name only, where that is given."""
    names = set()
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            entry = reader.read_manifest(path)
        except (OSError, ValueError):
            continue  # listed with each run as skipped
        if run_name in (None, entry.family, entry.run_name):
            names.add(entry.family)
    return sorted(names)


def _inspected(path: Path) -> Iterator[str]:
    """Yield the lines about a checkpoint or a folder; then raise ValueError where a checkpoint is not intact."""
    if path.is_dir():
        listed, bad = table(path)
        yield listed
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
    """Return a file, or those in a folder that are checkpoints."""
    if not path.is_dir():
        return [path]
    check_folder(path)
    if not (files := files_in(path)):
        raise FileNotFoundError(f"There is no checkpoint in {path}.")
    return files


def _entry_of(path: Path) -> Entry | None:
    """Return the entry in the manifest of a file; None if it has none, as a checkpoint of Helios."""
    try:
        return reader.read_manifest(path)
    except MissingManifestError:
        return None


def describe(path: Path) -> str:
    """Return what is known of one checkpoint; it is not verified.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read.
    """
    entry = _entry_of(path)
    if entry is None:
        found = read_any(path)
        state, layout = found.state, f"{found.origin}, without a manifest: run `checkpoint migrate` on it"
    else:
        state, layout = reader.read(path, map_tensors=True), f"schema {SCHEMA}"
    with content_of(path):
        lines = [("layout", layout), *_facts(path, state, entry), *_judgement(entry), *_contents(state)]
    return "\n".join([printable(path), *(f"    {label:<12}{printable(text)}".rstrip() for label, text in lines)])


def check_folder(folder: Path) -> None:
    """Raise ValueError unless this user can read a folder: globbing one that cannot be read would find nothing."""
    try:
        next(folder.iterdir(), None)
    except OSError as error:
        raise ValueError(f"The folder {folder} cannot be read: {error.strerror}.") from error


def table(folder: Path) -> tuple[str, list[str]]:
    """Return the checkpoints in a folder, one line each, by run and the newest first; then those that cannot be read.

    A file that is cut short and one whose shards have other sizes than they had are marked as damaged; no more is
    verified. The run of a file that is cut short is read from its beginning.

    Returns:
        The text, and the names of the files that are damaged or cannot be read.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the folder cannot be read.
    """
    check_folder(folder)
    found, damaged, unreadable, bad = list[Entry](), list[tuple[str, ...]](), list[str](), list[str]()
    files = files_in(folder)
    if not files:
        raise FileNotFoundError(f"There is no checkpoint in {folder}.")
    for path in files:
        try:
            found.append(reader.read_manifest(path))
        except (OSError, ValueError) as error:
            unreadable.append(str(error))
            bad += [path.name] * (not isinstance(error, MissingManifestError))
            if not isinstance(error, OSError | MissingManifestError | SchemaError):
                damaged.append(_damaged_row(path))
    found.sort(key=lambda each: (each.run_name, -each.sequence, -each.saved_at, each.path.name))
    rows = [HEAD, *(tuple(map(printable, row)) for row in [*map(_row, found), *damaged])] if found or damaged else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    bad += [each.path.name for each in found if not reader.is_complete(each)]
    return "\n".join([*lines, *map(printable, unreadable)]), sorted(bad)


@contextmanager
def content_of(path: Path) -> Iterator[None]:
    """Read a file's content in this context: whatever is not as in a checkpoint becomes a ValueError."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"{path} holds something else than a checkpoint: {type(error).__name__}: {error}") from error


def _row(entry: Entry) -> tuple[str, ...]:
    counters = (str(entry.progress.get(name, "?")) for name in ("epoch", "batch", "steps"))
    damaged = [] if reader.is_complete(entry) else ["damaged"]
    kind = ["weights only"] * entry.weights_only
    marks = ",".join([*damaged, *kind, *_marks(entry.path, entry.run_name)]) or "-"
    metrics = " ".join(f"{name}={value:.4g}" for name, value in sorted(entry.metrics.items()))
    return entry.path.name, entry.run_name, *counters, _time(entry.saved_at), _size(entry.path, entry), marks, metrics


def _damaged_row(path: Path) -> tuple[str, ...]:
    """Return the row of a checkpoint that has lost its manifest."""
    head = read_head(path)
    run, saved = ("?", "?") if head is None else (head.run_name, _time(head.saved_at))
    marks = ",".join(["damaged", *_marks(path, run)])
    return path.name, run, "?", "?", "?", saved, _size(path, None), marks, ""


def _facts(path: Path, state: Mapping[str, Any], entry: Entry | None) -> Iterator[tuple[str, str]]:
    asked = state["run_name"]
    name = asked if entry is None else entry.run_name
    place, versions = state["progress"], sorted(state["versions"].items())
    yield "run", name if name == asked else f"{name}, asked for as {asked}"
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
    groups = {name: len(each["param_groups"]) for name, each in (state["optimizers"] or shards["optimizers"]).items()}
    optimizers = [f"{name}: {kinds.get(name, 'unknown')}, {groups[name]} groups" for name in groups]
    schedulers = [f"{name}: {scheduler_kinds.get(name, 'unknown')}" for name in state["schedulers"]]
    yield from _several("modules", (f"{name}: {_weights(each)}" for name, each in state["modules"].items()))
    yield from _several("modules", sharded)
    yield from _several("optimizers", optimizers or ["none"])
    yield from _several("schedulers", schedulers or ["none"])
    yield from _several("plugins", (f"{name}: {_keys(each)}" for name, each in sorted(state["plugins"].items())))


def _several(label: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a line for each text, the first with the label."""
    for text in texts:
        yield label, text
        label = ""


def _weights(module: Mapping[str, Any]) -> str:
    tensors = [each for each in module.values() if isinstance(each, Tensor)]
    return f"{sum(each.numel() for each in tensors):,} values in {len(tensors)} tensors"


def _sharded(name: str, tensors: Mapping[str, Any]) -> str:
    sizes = [prod(shape) for key, (shape, _) in tensors.items() if key.startswith(f"modules/{name}/")]
    return f"{sum(sizes):,} values in {len(sizes)} tensors"


def _keys(state: Any) -> str:
    return (", ".join(map(str, state)) or "no state") if isinstance(state, Mapping) else type(state).__name__


def _marks(path: Path, run_name: str) -> list[str]:
    """Return whether people and tools are pointed to a file, and whether it is pinned."""
    pointers = {label: pointer_path(path.parent, run_name, label) for label in get_args(Label)}
    marks = [label for label, each in pointers.items() if read_pointer(each) == path.name]
    return [*marks, "pinned"] if path.with_suffix(PINNED).exists() else marks


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _size(path: Path, entry: Entry | None) -> str:
    shards = None if entry is None or entry.shards is None else reader.shards_path(entry)
    files = [path, *(shards.iterdir() if shards is not None and shards.exists() else ())]
    return f"{sum(each.stat().st_size for each in files) / 1e6:,.3f} MB"
