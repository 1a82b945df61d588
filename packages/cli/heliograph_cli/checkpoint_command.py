"""The command `heliograph checkpoint inspect | verify | migrate | consolidate | export | prune`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar

from heliograph.builtin_callbacks.checkpoint.folder import reasons_to_keep
from heliograph.core.checkpoint.ranks import join_shards
from heliograph.core.checkpoint.weights import find_weights
from heliograph.spi import (
    Entry,
    MissingManifestError,
    Monitor,
    Store,
    as_json,
    describe_error,
    find,
    known_names,
    printable,
    printable_lines,
    read_manifest,
)
from torch import Tensor

from .helios import SUFFIX, migrate_file
from .tables import format_table
from .weights_export import export_weights

T = TypeVar("T")
ERRORS = (ValueError, OSError, MemoryError, RuntimeError, SystemError, ImportError)  # of a file, or of the machine
DROPPED = ("BATCH", "RUN", "SIZE", "SAVED", "EPOCH")  # in a narrow terminal, in this order
HEAD = ("FILE", "RUN", "EPOCH", "BATCH", "STEP", "SAVED", "SIZE", "MARKS", "METRICS")


def checkpoint(arguments: Sequence[str]) -> int:
    """Inspect, verify, migrate, export or prune checkpoints.

    The exit status is 1 if a checkpoint is damaged or could not be processed.
    """
    options = _parser().parse_args(arguments)
    return int(options.run(options))


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
    for command, act in (
        (inspect, lambda options: _print_json(options) if options.json else _process(options.paths, _inspected)),
        (verify, lambda options: _print_json(options) if options.json else _process_files(options.paths, _verified)),
        (migrate, _migrate),
    ):
        kind = _path_or_url if command is inspect else _path
        command.add_argument("paths", metavar="PATH", nargs="+", type=kind, help="a checkpoint or a folder of them")
        command.set_defaults(run=act)
    for command in inspect, verify:
        command.add_argument("--json", action="store_true", help="print one JSON object")
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
    export.add_argument("--which", choices=("last", "best"), help="in a folder: the newest intact one by default")
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
    if "://" in text:
        raise ArgumentTypeError(f"expected a path on this machine, got {text}: only `checkpoint inspect` reads URLs")
    return Path(text)


def _path_or_url(text: str) -> Path | str:
    return text if "://" in text else _path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _migrate(options: Namespace) -> int:
    def act(path: Path) -> list[str]:
        keep = not options.no_backup
        return migrate_file(path, keep_backup=keep, dry_run=options.dry_run, as_data=options.as_data)

    return _process_files(options.paths, act)


def _consolidate(options: Namespace) -> int:
    def act(path: Path) -> list[str]:
        _check_exists(path)
        entry = consolidate(path, options.out or path)
        return [f"{path}: written as one file, {entry.path} ({entry.size / 1e6:,.3f} MB)"]

    return _process([options.path], act)


def consolidate(path: Path, out: Path) -> Entry:
    """Convert a checkpoint with shards to one file, as other engines write it.

    Args:
        path: the checkpoint.
        out: where to write; if it is `path`, the checkpoint and its shards are replaced, unless it is pinned.

    Raises:
        ValueError: the checkpoint is damaged or has no shards; or another process writes this run's checkpoints there.
        OSError: the checkpoint could not be read, or `out` could not be written; the original is unchanged.
    """
    state, entry = _store(path).load(path), read_manifest(path)
    if "shards" not in state:
        raise ValueError(f"{path} has no shards: it is an ordinary checkpoint already.")
    with closing(Store(out.parent, entry.family)) as store:
        store.open()
        store.write_as(entry.training, entry.run_name)
        return store.save(
            out.name,
            join_shards(state, path),
            judged_by=entry.judged_by,
            sequence=entry.sequence,
            replace_unknown=out == path,
        )


def _export(options: Namespace) -> int:
    def act(path: Path) -> list[str]:
        _check_exists(path)
        file = find_weights(path, options.which, options.run_name)
        average: str | Literal[False] | None = False if options.trained else options.average
        written = export_weights(file, options.out, module=options.module, average=average, overwrite=options.force)
        return [f"{file.path}: exported to {written}"]

    return _process([options.path], act)


def _store(path: Path) -> Store:
    return Store(path.parent, path.stem)


def files_in(path: Path) -> list[Path]:
    """Return the files with the name of a checkpoint in a folder, or a path that is not a folder.

    Raises:
        FileNotFoundError: there is none in the folder, or no such folder.
        OSError: the folder cannot be read.
    """
    if not path.is_dir():
        _check_exists(path)
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix == SUFFIX and not file.is_dir())
    if not files:
        raise FileNotFoundError(f"There is no checkpoint in {path}.")
    return files


def _check_exists(path: Path) -> None:
    needed = path.parent if path.suffix == SUFFIX else path  # the reader of a missing file names the others
    if not needed.exists():
        raise FileNotFoundError(f"{needed} does not exist.")


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
        except ERRORS as error:
            status = _print_error(_text_of(error))
    return status


def _text_of(error: Exception) -> str:
    return " ".join([str(error) or repr(error), *getattr(error, "__notes__", ())])


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
        trainings: dict[str, list[Entry]] = {}
        for entry in entries:
            if _is_requested(entry, options):
                trainings.setdefault(entry.training, []).append(entry)
        if options.monitor is not None:
            _check_monitor(entries, options.monitor)
        reasons: dict[Path, str] = {}  # of all checkpoints, before one is removed
        for training in trainings.values():
            reasons |= _reasons_to_keep(store, training, options)
        requested = [entry for training in trainings.values() for entry in training]
        lines = [_prune_entry(store, entry, reasons, options.dry_run) for entry in requested]
    finally:
        store.close()
    return [*notes, *lines, *(f"left     {line}" for line in skipped)]


def _check_monitor(entries: list[Entry], monitor: Monitor) -> None:
    if not any(entry.judged_by and entry.judged_by[2] is not None for entry in _judged(entries, monitor)):
        known = known_names(monitor.name, {name for entry in entries for name in entry.metrics})
        raise ValueError(f"No checkpoint of run {entries[0].run_name!r} has a metric {monitor.name!r}.{known}")


def _reasons_to_keep(store: Store, entries: list[Entry], options: Namespace) -> dict[Path, str]:
    """Return why each checkpoint of a training is kept; the one marked as the best by its run always is."""

    @cache  # it reads the whole file
    def damage_to(path: Path) -> str:
        try:
            store.verify(path)
        except ValueError as error:
            return str(error)
        return ""

    reasons = reasons_to_keep(
        entries if options.monitor is None else _judged(entries, options.monitor),
        keep_last=options.keep_last,
        keep_best=options.keep_best or 0,
        monitor=options.monitor,
        is_pinned=store.is_pinned,
        damage_to=damage_to,
    )
    best = {entry.path for entry in entries if "best" in store.marks(entry)}
    return {path: reason or "called the best by its run" * (path in best) for path, reason in reasons.items()}


def _judged(entries: list[Entry], monitor: Monitor) -> list[Entry]:
    """Rank by the metrics in the manifests, unless the run itself ranked some checkpoints by this metric."""
    name, mode = monitor.name, monitor.mode
    judged = [entry for entry in entries if entry.judged_by and entry.judged_by[:2] == (name, mode)]
    if any(entry.judged_by[2] is not None for entry in judged if entry.judged_by):
        return entries
    return [replace(entry, judged_by=(name, mode, entry.metrics.get(name))) for entry in entries]


def _prune_entry(store: Store, entry: Entry, reasons: Mapping[Path, str], dry_run: bool) -> str:
    path = entry.path
    if reasons[path]:
        return f"kept     {path}: {reasons[path]}"
    if dry_run:
        return f"would be removed {path}"
    return f"removed  {path}" if store.remove(path, entry.training) else f"kept     {path}: pinned or moved meanwhile"


def _verified(path: Path) -> list[str]:
    _store(path).load(path)
    entry = read_manifest(path)
    return [f"intact   {path}: run {entry.family!r}, step {entry.progress.get('steps')}"]


def _inspected(path: Path | str) -> list[str]:
    if isinstance(path, str):
        return _remote_table(path)
    _check_exists(path)
    if path.is_dir():
        return _table(path)
    print(printable_lines(describe(path)))  # also if it is damaged
    _store(path).verify(path)
    return []


def _print_json(options: Namespace) -> int:
    rows = []
    for path in options.paths:
        try:
            if isinstance(path, str):
                rows += _remote_rows(path)
                continue
            verifies = options.command == "verify" or not path.is_dir()
            facts = [_row_facts(file, verifies=verifies, loads=options.command == "verify") for file in files_in(path)]
            facts.sort(key=lambda row: (row.get("sequence", 0), row.get("saved_at", "")), reverse=True)  # newest first
            rows += sorted(facts, key=lambda row: str(row.get("run_name", "")))
        except (OSError, ValueError) as error:
            rows.append({"path": str(path), "error": str(error)})
    print(as_json({"schema": "heliograph.checkpoints/1", "checkpoints": rows}))
    return int(any(row["error"] is not None and not row.get("foreign") for row in rows))


def _row_facts(path: Path, *, verifies: bool, loads: bool) -> dict[str, Any]:
    """Return the manifest of a checkpoint; its contents and the result of its verification, if `verifies`."""
    row: dict[str, Any] = {"path": str(path), "error": None, "foreign": False, "verified": False}
    try:
        entry, store = read_manifest(path), _store(path)
        row |= _manifest_facts(entry) | {"bytes": sum(file.stat().st_size for file in store.files_of(path))}
        row["marks"] = store.marks(entry)
        if verifies:
            state = store.load(path) if loads else store.peek(store.verify(path).path)
            row |= {"verified": True, "contents": {label: texts for label, *texts in _contents(state)}}
    except ERRORS as error:
        row |= {"error": _text_of(error), "foreign": not verifies and isinstance(error, MissingManifestError)}
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:  # of a file, as in `describe`
        row["error"] = describe_error(error)
    return row


def _manifest_facts(entry: Entry) -> dict[str, Any]:
    saved_at = datetime.fromtimestamp(entry.saved_at, UTC)
    return asdict(entry) | {"saved_at": saved_at.strftime("%Y-%m-%dT%H:%M:%SZ")}  # as `fromdate` of jq reads it


def _read_manifests(folder: Path) -> tuple[list[Entry], dict[Path, OSError | ValueError]]:
    entries, problems = list[Entry](), dict[Path, OSError | ValueError]()
    for path in files_in(folder):
        try:
            entries.append(read_manifest(path))
        except (OSError, ValueError) as error:
            problems[path] = error
    return entries, problems


def _remote_entries(url: str) -> tuple[list[tuple[Entry, int, list[str]]], list[ValueError]]:
    """Return the checkpoints in a folder, each with its bytes and marks; and the problems of other files."""
    if url.endswith(SUFFIX):
        raise ValueError(f"{url} is a file: give its folder, {url.rpartition('/')[0]}.")
    try:
        kind = find("fsspec", "heliograph.storage").load()
    except LookupError as error:
        raise ValueError(f"{url} cannot be read: {error}") from error
    copy = kind(url, keep_last=None, keep_best=0, monitor=None)
    entries, problems = copy.entries()
    if not entries and not problems:
        raise FileNotFoundError(f"There is no checkpoint in {url}.")
    return [(entry, copy.size_of(entry), ["pinned"] * copy.is_pinned(entry)) for entry in entries], problems


def _remote_rows(url: str) -> list[dict[str, Any]]:
    entries, problems = _remote_entries(url)
    common = {"error": None, "foreign": False, "verified": False}
    rows = [
        {**_manifest_facts(entry), **common, "path": f"{url.rstrip('/')}/{entry.path.name}"}
        | {"bytes": size, "marks": marks}
        for entry, size, marks in entries
    ]
    return [*rows, *({**common, "path": url, "error": str(problem)} for problem in problems)]


def _remote_table(url: str) -> list[str]:
    entries, problems = _remote_entries(url)
    rows = [_cells(entry, f"{size / 1e6:,.3f} MB", ",".join(marks) or "-") for entry, size, marks in entries]
    return [format_table([HEAD, *rows], optional=DROPPED), *map(str, problems)]


def _table(folder: Path) -> list[str]:
    # Only truncated files and missing shards count as damaged here: the digests are not verified.
    entries, problems = _read_manifests(folder)
    entries.sort(key=lambda entry: (entry.run_name, -entry.sequence, -entry.saved_at, entry.path.name))
    if entries:
        print(format_table([HEAD, *map(_row, entries)], optional=DROPPED))
    for problem in problems.values():
        print(printable(problem))
    bad = [path.name for path, problem in problems.items() if not isinstance(problem, MissingManifestError)]
    bad += [entry.path.name for entry in entries if not _files_of(entry)]
    if bad:
        raise ValueError(f"{folder}: damaged, or cannot be read: {', '.join(sorted(bad))}.")
    return []


def _row(entry: Entry) -> tuple[str, ...]:
    damaged = [] if _files_of(entry) else ["damaged"]
    kind = ["weights only"] * entry.weights_only
    marks = ",".join([*damaged, *kind, *_store(entry.path).marks(entry)]) or "-"
    return _cells(entry, _size(entry), marks)


def _cells(entry: Entry, size: str, marks: str) -> tuple[str, ...]:
    counters = (str(entry.progress.get(name, "?")) for name in ("epoch", "batch", "steps"))
    metrics = " ".join(f"{name}={value:.4g}" for name, value in sorted(entry.metrics.items()))
    return entry.path.name, entry.run_name, *counters, _time(entry.saved_at), size, marks, metrics


def describe(path: Path) -> str:
    """Return the lines about one checkpoint, without verifying it."""
    entry, state = read_manifest(path), _store(path).peek(path)
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
    yield "layout", f"schema {state['schema']}"
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
    yield "marks", ", ".join(_store(entry.path).marks(entry)) or "none"
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


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _size(entry: Entry) -> str:
    return f"{sum(file.stat().st_size for file in _files_of(entry) or [entry.path]) / 1e6:,.3f} MB"


def _files_of(entry: Entry) -> list[Path]:
    # empty if shards are missing or truncated; digests are not verified
    try:
        return _store(entry.path).files_of(entry.path)
    except ValueError:
        return []
