"""The command `evaluate`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heliograph.spi import Entry, Lock

    from .files import Evaluation

POLL = 1.0  # seconds between two looks into the folder
LOCK = ".late-.lock"  # no run's name ends in a hyphen there, so no run has this lock


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate each checkpoint of a training with your function, in another process."""
    parser = argparse.ArgumentParser(
        prog="heliograph evaluate",
        description="Calls the function with the path of each checkpoint, oldest first, and writes the metrics that it "
        "returns beside the checkpoint. Exit status 0: all were evaluated; 1: the function failed for a checkpoint; "
        "2: there are no checkpoints or no function, another process evaluates them, or a result cannot be written.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="the folder of the checkpoints")
    parser.add_argument("function", metavar="module:function", help="returns metrics by name, as a dict of numbers")
    parser.add_argument("--follow", action="store_true", help="wait for new checkpoints until the run is over")
    parser.add_argument("--json", action="store_true", help="print the evaluations as one JSON object, at the end")
    options = parser.parse_args(arguments)
    from heliograph.spi import UsageError, describe_error, find_function  # after the parser: torch is slow to import

    from .files import local

    try:
        folder = local("FOLDER", options.folder)
        function = find_function(options.function)
    except Exception as error:  # noqa: BLE001  # the user's module may raise anything
        if not isinstance(error, UsageError):
            print_trace(error)
        text = error if isinstance(error, UsageError) else f"{options.function}: {describe_error(error)}"
        print(f"heliograph evaluate: {text}", file=sys.stderr)
        return 2
    lock = lock_of(folder)
    try:
        if not options.follow and not any(folder.glob("*.pth")):
            raise UsageError(f"There is no checkpoint in {folder}. To wait for the first, add --follow.")
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        evaluations = _evaluate_all(Evaluator(folder, options.function, function), follow=options.follow, show=options)
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        print(f"heliograph evaluate: {error}", file=sys.stderr)
        return 2
    finally:
        lock.release()
    return int(any(evaluation.error for evaluation in evaluations))


def lock_of(folder: Path) -> Lock:
    """Return the lock of the process that evaluates the checkpoints of a folder."""
    from heliograph.spi import Lock

    return Lock(folder / LOCK, f"The checkpoints in {folder} are evaluated", "wait for it")


def _evaluate_all(evaluator: Evaluator, *, follow: bool, show: argparse.Namespace) -> list[Evaluation]:
    from heliograph.spi import as_json, count

    from .files import RESULT, Evaluation, is_over

    evaluations = list[Evaluation]()
    while True:
        is_last = not follow or is_over(evaluator.folder)  # before the look, which then finds the last checkpoint
        for evaluation in evaluator.look():
            evaluations.append(evaluation)
            if not show.json:
                print(describe_evaluation(evaluation), flush=True)
        if is_last:
            break
        sleep(POLL)
    names = {evaluation.checkpoint for evaluation in evaluations}
    earlier = [evaluation for name, evaluation in evaluator.earlier.items() if name not in names]
    if show.json:
        plain = [
            {**evaluation.as_plain(), "is_new": is_new}
            for is_new, part in ((False, earlier), (True, evaluations))
            for evaluation in part
        ]
        print(as_json({"schema": "heliograph.evaluate/1", "evaluations": plain}))
    elif earlier:
        path = (evaluator.folder / earlier[-1].checkpoint).with_suffix(RESULT)
        were = count(len(earlier), "checkpoint was", "checkpoints were")
        print(f"{were} evaluated before; to evaluate one again, remove its result, such as {path}")
    return evaluations


def describe_evaluation(evaluation: Evaluation) -> str:
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in evaluation.metrics.items())
    return f"{evaluation.checkpoint}: {evaluation.error or metrics} ({evaluation.seconds:.1f} s)"


class Evaluator:
    """Evaluates the checkpoints of a folder, each once.

    Args:
        folder: of the checkpoints.
        name: of the function, for the results.
        function: called with the path of a checkpoint; returns metrics.
    """

    def __init__(self, folder: Path, name: str, function: Callable[[Path], Mapping[str, float]]) -> None:
        from .files import TEMPORARY

        self.folder, self._name, self._function = folder, name, function
        self.earlier: dict[str, Evaluation] = {}  # by checkpoint, oldest first
        self._seen: dict[Path, tuple[int, int]] = {}  # the identity of files that need no other look
        for path in folder.glob(f".*{TEMPORARY}"):  # left by a killed evaluation
            path.unlink(missing_ok=True)

    def look(self) -> Iterator[Evaluation]:
        """Evaluate the checkpoints without a result, oldest first, and write each result."""
        for entry, result in sorted(self._unseen(), key=lambda pair: pair[0].order):
            if result and (result.sha256, result.function, result.error) == (entry.sha256, self._name, ""):
                self.earlier[result.checkpoint] = result
            elif (evaluation := self._evaluate(entry)) is not None:
                evaluation.write(self.folder)
                yield evaluation

    def _unseen(self) -> Iterator[tuple[Entry, Evaluation | None]]:
        from heliograph.spi import read_manifest

        from .files import RESULT, read_evaluation

        for path in self.folder.glob("*.pth"):
            try:
                status = path.stat()
                if self._seen.get(path) == (stamp := (status.st_ino, status.st_mtime_ns)):
                    continue
                entry = read_manifest(path)
                result = read_evaluation(path.with_suffix(RESULT))
            except FileNotFoundError:  # removed by the training
                continue
            except ValueError as error:
                print(f"heliograph evaluate: skipped {path.name}: {error}", file=sys.stderr, flush=True)
                self._seen[path] = stamp
                continue
            self._seen[path] = stamp
            yield entry, result

    def _evaluate(self, entry: Entry) -> Evaluation | None:
        from heliograph.spi import describe_error

        from .files import Evaluation

        start, metrics, error = perf_counter(), dict[str, float](), ""
        if not entry.path.exists():
            return None
        try:
            metrics = check_metrics(self._function(entry.path))
        except (Exception, SystemExit) as failure:  # noqa: BLE001  # the user's function
            if not entry.path.exists():  # removed during the evaluation
                print(f"heliograph evaluate: {entry.path.name} was removed meanwhile", file=sys.stderr, flush=True)
                return None
            print_trace(failure)
            error = describe_error(failure)
        seconds, steps = perf_counter() - start, int(entry.progress["steps"])
        facts = (entry.path.name, entry.training, steps, entry.sha256, self._name, seconds)
        return Evaluation(*facts, metrics=metrics, error=error)


def print_trace(error: BaseException) -> None:
    """Print the traceback of an error in the user's code, from the first frame of that code; nothing without one."""
    from heliograph.spi import find_function

    trace, ours = error.__traceback__, {__name__, find_function.__module__}
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if module not in ours and module.partition(".")[0] != "importlib":
            break
        trace = trace.tb_next
    if trace is not None or isinstance(error, SyntaxError):  # which has its place in its text
        traceback.print_exception(error.with_traceback(trace))


def check_metrics(returned: Any) -> dict[str, float]:
    """Return the metrics of a function as floats.

    Raises:
        TypeError: they are not a dict of names and numbers.
        ValueError: one is called `steps`.
    """
    form = "the function must return metrics as a dict of names and numbers, such as {'accuracy': 0.9}"
    if not isinstance(returned, Mapping) or not returned:
        raise TypeError(f"{form}; it returned {returned!r}.")
    metrics = {}
    for name, value in returned.items():
        number = value
        if hasattr(value, "item"):
            with suppress(RuntimeError, ValueError):  # a tensor or an array with several elements
                number = value.item()
        if not isinstance(name, str) or not isinstance(number, int | float):
            raise TypeError(f"{form}; {name!r} is {value!r}.")
        metrics[name] = float(number)
    if "steps" in metrics:
        raise ValueError("The metric name 'steps' is reserved for the steps of the checkpoint: choose another name.")
    return metrics
