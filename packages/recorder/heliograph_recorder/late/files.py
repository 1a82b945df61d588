"""The files beside checkpoints: the result of an evaluation, and the journal of what a training has read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from heliograph.spi import UsageError, clean, read_manifest

RESULT, JOURNAL = ".late.json", ".late.journal"  # suffixes
TEMPORARY = ".late.tmp"
RESULT_SCHEMA, JOURNAL_SCHEMA = "heliograph.late/1", "heliograph.late-journal/1"
Position = tuple[int, int, bool]  # finished epochs, batches, and whether the training is over


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a checkpoint.

    Attributes:
        checkpoint: the name of the file.
        training: the id of its training.
        steps: the optimizer steps of the checkpoint.
        sha256: the digest of its data, from its manifest.
        function: what evaluated it, `module:function`.
        seconds: how long the function took.
        metrics: what the function returned; empty after an error.
        error: the error of the function, or an empty text.
    """

    checkpoint: str
    training: str
    steps: int
    sha256: str
    function: str
    seconds: float
    metrics: Mapping[str, float]
    error: str = ""

    def as_plain(self) -> dict[str, Any]:
        """Return the fields for JSON; NaN and infinity are texts."""
        metrics = {name: value if isfinite(value) else str(value) for name, value in self.metrics.items()}
        return {**asdict(self), "metrics": metrics}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Evaluation:
        metrics = {str(name): float(value) for name, value in plain["metrics"].items()}
        return cls(**{**plain, "steps": int(plain["steps"]), "metrics": metrics})

    def write(self, folder: Path) -> None:
        """Write the result beside its checkpoint."""
        path = (folder / self.checkpoint).with_suffix(RESULT)
        write_json(path, {"schema": RESULT_SCHEMA, **self.as_plain()})


@dataclass(frozen=True)
class Reading:
    """Results that a training read together, and where."""

    position: Position
    evaluations: Sequence[Evaluation]


def read_evaluation(path: Path) -> Evaluation | None:
    """Return the result in a file; None if there is none.

    Raises:
        ValueError: it is not a result.
    """
    plain = _read_json(path, RESULT_SCHEMA, "Remove it: the checkpoint is then evaluated again.")
    try:
        return None if plain is None else Evaluation.of(plain)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a late result: {error}. Remove it.") from None


def is_current(evaluation: Evaluation, checkpoint: Path) -> bool:
    """Return whether an evaluation is of this file, not of a file that it replaced; also if it was removed."""
    try:
        return read_manifest(checkpoint).sha256 == evaluation.sha256
    except FileNotFoundError:
        return True


def local(what: str, folder: str | Path) -> Path:
    """Return the path of a folder on this machine.

    Raises:
        UsageError: it is a URL.
    """
    if url := re.match(r"([\w+.-]{2,}):/+(.*)", str(folder)):  # also a Path of a URL
        path = Path("runs", url[1], *(clean(part) for part in url[2].split("/") if part))
        raise UsageError(
            f"{what} is a folder on this machine, got the URL {str(folder)!r}: pass the folder that Checkpoint copies "
            f"from, {path}."
        )
    return Path(folder)


class Journal:
    """What the trainings of a run's name have read, and until where. Only their main rank writes it.

    A decision is in this file before it takes effect, so that a resumed run repeats it.

    Args:
        folder: of the checkpoints.
        run_name: the name that the program gave the run.

    Raises:
        ValueError: the file is not a journal.
    """

    def __init__(self, folder: Path, run_name: str) -> None:
        self._path = folder / f"{clean(run_name)}{JOURNAL}"
        advice = "Remove it; a resumed run may then read results at other steps."
        self._facts = _read_json(self._path, JOURNAL_SCHEMA, advice) or {"trainings": {}}

    def mark(self, *, is_over: bool) -> None:
        """Write whether the run is over, so that no more checkpoints follow."""
        self._facts["is_over"] = is_over
        self._write()

    def of(self, training: str) -> tuple[list[Reading], Position | None]:
        """Return what a training has read, and the last position at which it looked for results."""
        facts = self._facts["trainings"].get(training, {"readings": [], "until": None})
        readings = [
            Reading(_position(reading["position"]), [Evaluation.of(plain) for plain in reading["evaluations"]])
            for reading in facts["readings"]
        ]
        return readings, None if facts["until"] is None else _position(facts["until"])

    def write(self, training: str, readings: Sequence[Reading], until: Position) -> None:
        """Replace what is written about a training; return when that is durable."""
        plain = [
            {"position": reading.position, "evaluations": [item.as_plain() for item in reading.evaluations]}
            for reading in readings
        ]
        self._facts["trainings"][training] = {"until": until, "readings": plain}
        self._write()

    def _write(self) -> None:
        write_json(self._path, {"schema": JOURNAL_SCHEMA, **self._facts})


def is_over(folder: Path) -> bool:
    """Return whether every run in a folder that reads late results is over, and there is one."""
    journals = [_read_json(path, JOURNAL_SCHEMA, "Remove it.") or {} for path in folder.glob(f"*{JOURNAL}")]
    return bool(journals) and all(facts.get("is_over") for facts in journals)


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a file with one atomic rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _read_json(path: Path, schema: str, advice: str) -> dict[str, Any] | None:
    try:
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. {advice}") from None
    if not isinstance(facts, dict) or facts.pop("schema", None) != schema:
        raise ValueError(f"{path} has another schema than {schema!r}. {advice}")
    return facts


def _position(plain: Sequence[Any]) -> Position:
    epoch, batches, is_end = plain
    return int(epoch), int(batches), bool(is_end)
