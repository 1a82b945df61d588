"""A run in words: its metrics in a fixed order and fitted to a width, where it is, its pace, how it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap

from ...core.host import is_preempted
from ...events import Run
from ...events.catalogue import Status
from ...events.checks import printable

WIDTH = 80  # columns, where there is no terminal
MAX_METRICS = 20  # at the end of a run, below its bars
SPLITS = ("train", "validation", "test", "predict")
LOOKS = 6  # the speed is that since the fifth look before


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics in an order that does not depend on when each was logged: by split, losses first, by name."""
    return dict(sorted(metrics.items(), key=lambda item: _rank(item[0])))


def fitted(metrics: Mapping[str, float], room: int) -> str:
    """Return the first metrics that fit into so many columns, none of them cut: `train loss=0.31 accuracy=0.88`."""
    text = last = ""
    for name, value in metrics.items():
        split, _, short = printable(name).rpartition("/")
        joint = " " if split == last else ", "
        item = (joint if text else "") + (f"{split} " if split and (split != last or not text) else "")
        item += f"{short}={value:.4g}"
        if len(text) + len(item) > room:
            break
        text, last = text + item, split
    return text


def values(metrics: Mapping[str, float]) -> list[str]:
    """Return each metric with its value: `train/loss 0.31`."""
    return [f"{name} {value:.4g}" for name, value in metrics.items()]


def position(run: Run) -> list[str]:
    """Return what is done: `epochs 3/10`, `steps 480`. The epoch that is running is not done."""
    progress = run.progress
    if run.optimizer is None:
        return [run.phase, f"batches {progress.evaluated}"]
    return [
        f"epochs {progress.epoch}" + (f"/{run.length.max_epochs}" if run.length.max_epochs is not None else ""),
        f"steps {progress.steps}" + (f"/{run.length.max_steps}" if run.length.max_steps is not None else ""),
    ]


def verdict(run: Run, status: Status) -> str:
    """Return how a run ended; of one that broke off, what it can be resumed from."""
    if run.optimizer is None:
        return status
    text = f"{status} at step {run.progress.steps}"
    stop = run.control.stop_request
    newest = "" if run.checkpoints.last is None else f"; the newest checkpoint is {run.checkpoints.last}"
    if status == "stopped" and stop is not None:
        return f"{text} by {stop.by}: {stop.reason}" + (newest if is_preempted(run) else "")
    if status in ("interrupted", "failed"):
        return text + (newest or "; there is no checkpoint" * (run.progress.steps > run.origin.steps))
    return text if run.report.is_replay else f"{status}: {run.report.reason(None)}"


def warnings(run: Run, width: int = WIDTH) -> list[str]:
    """Return the lines of what was asked for and did not happen."""
    return [line for each in run.report.warnings for line in broken(f"WARNING: {each}", width)]


def broken(text: str, width: int) -> list[str]:
    """Return a sentence as lines; a path in it is never broken."""
    return wrap(printable(text), width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def joined(parts: Iterable[str], width: int) -> list[str]:
    """Return parts as lines, with two blanks between them; none of them is broken."""
    lines = [""]
    for part in map(printable, parts):
        if lines[-1] and len(lines[-1]) + 2 + len(part) > width:
            lines.append("  " + part)
        else:
            lines[-1] += ("  " if lines[-1] else "") + part
    return lines


def limited(metrics: Sequence[str]) -> list[str]:
    """Return the first of many."""
    more = len(metrics) - MAX_METRICS
    return [*metrics[:MAX_METRICS], *([f"and {more} more"] if more > 0 else [])]


def _rank(name: str) -> tuple[int, bool, str]:
    split = name.partition("/")[0]
    return SPLITS.index(split) if split in SPLITS else len(SPLITS), not name.endswith("loss"), name


class Pace:
    """Measures from one look at a run to the next.

    Args:
        run: at its beginning, or where it continues.
    """

    def __init__(self, run: Run) -> None:
        self._begin = _counts(run)
        self._looks = deque([self._begin], LOOKS)

    def look(self, run: Run) -> list[str]:
        """Return the recent speed, and the time that is left where that is known: `45.2 steps/s`, `ETA 01:20`."""
        self._looks.append(_counts(run))
        batches, steps = self._speeds(self._looks[0])
        left = [
            (run.length.max_steps - run.progress.steps) / steps if run.length.max_steps is not None and steps else None,
            _batches_left(run) / batches
            if run.length.max_epochs is not None and run.length.batches_per_epoch and batches
            else None,
        ]
        known = [each for each in left if each is not None]
        return [*_speed(steps), *([f"ETA {duration(min(known))}"] if known and min(known) > 0 else [])]

    def whole(self, run: Run) -> list[str]:
        """Return the speed since the beginning."""
        self._looks.append(_counts(run))
        return _speed(self._speeds(self._begin)[1])

    def _speeds(self, since: tuple[float, int, int]) -> tuple[float, float]:
        """Return batches and steps in a second."""
        seconds, batches, steps = (now - then for now, then in zip(self._looks[-1], since, strict=True))
        return (batches / seconds, steps / seconds) if seconds > 0 else (0.0, 0.0)


def duration(seconds: float) -> str:
    """Return a time such as 01:20 or 1:01:20, as bars show it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _counts(run: Run) -> tuple[float, int, int]:
    return run.progress.seconds, run.progress.batches, run.progress.steps


def _batches_left(run: Run) -> float:
    progress = run.progress
    return max(
        0, ((run.length.max_epochs or 0) - progress.epoch) * (run.length.batches_per_epoch or 0) - progress.batch
    )


def _speed(steps: float) -> list[str]:
    if not steps:
        return []
    return [
        f"{steps:.3g} steps/s"
        if 1 <= steps < 999.5
        else f"{steps:.0f} steps/s"
        if steps > 1
        else f"{1 / steps:.3g} s/step"
    ]
