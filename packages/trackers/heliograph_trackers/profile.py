"""Trace some steps with torch's profiler."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from heliograph import BatchEnd, EpochStart, Event, Lane, Plugin, Run, RunClosed, on
from heliograph.spi import Receiver, check_flag, check_whole_number, current_owner, require


class Trace:
    """A trace under way.

    Args:
        run: the run that is traced.
        settings: of `torch.profiler.profile`.
        is_kept: whether it is one to write.

    Attributes:
        steps: which ones have begun in it.

    Raises:
        RuntimeError: another profiler of torch runs.
    """

    def __init__(self, run: Run, settings: dict[str, Any], *, is_kept: bool) -> None:
        if _is_profiling():  # a second one would end the first silently
            raise RuntimeError(
                "Profile cannot trace this run: another profiler of torch runs already, and there is one at a time. "
                "Stop it before, or leave Profile out."
            )
        self.run, self.is_kept = run, is_kept
        self.steps: list[int] = []
        self._range: Any = None
        self._profiler = torch_profiler().profile(**settings)
        self._profiler.prepare_trace()
        self._profiler.start_trace()

    def mark(self, step: int) -> None:
        """Begin the range of a step, unless that has begun."""
        if step in self.steps[-1:]:
            return
        self._end_range()
        self.steps.append(step)
        self._range = torch_profiler().record_function(f"ProfilerStep#{step}")
        self._range.__enter__()

    def stop(self) -> None:
        """End the trace.

        Raises:
            RuntimeError: another profiler has ended it.
        """
        self._end_range()
        if not _is_profiling():
            raise RuntimeError(
                "Profile has lost its trace: another profiler of torch was started during it, and only one can run."
            )
        self._profiler.stop_trace()

    def write(self, folder: Path) -> None:
        """Write a trace that was stopped; under its name it is whole.

        Raises:
            OSError: it could not be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{socket.gethostname()}_{os.getpid()}.{time.time_ns()}.pt.trace.json"
        aside = path.with_name(f"{path.name}.tmp")
        try:
            self._profiler.export_chrome_trace(str(aside))
            if not _is_whole(aside):  # torch says nothing
                raise OSError(f"torch.profiler could not write {path}: is the folder writable, and the disk not full?")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def _end_range(self) -> None:
        last, self._range = self._range, None
        if last is not None:
            last.__exit__(None, None, None)


def torch_profiler() -> Any:
    """Return torch's module, imported where it is used first."""
    return require("torch.profiler", "Profile")


def _is_profiling() -> bool:
    """Return whether a profiler of torch runs, in whatever thread."""
    return bool(require("torch.autograd.profiler", "Profile")._is_profiler_enabled)


def kinds(activities: tuple[str, ...] | None) -> list[Any]:
    """Return torch's names of what is to be traced."""
    supported = {kind.name.lower(): kind for kind in torch_profiler().supported_activities()}
    if missing := [name for name in activities or () if name not in supported]:
        raise ValueError(f"torch cannot trace {', '.join(missing)} here, only {', '.join(sorted(supported))}.")
    return [supported[name] for name in activities or supported]


def _is_whole(path: Path) -> bool:
    """Return whether a file holds a JSON object to its end."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 64))
        return file.read().rstrip().endswith(b"}")


Phase = Literal["wait", "warmup", "active", "over"]
ACTIVITIES = ("cpu", "cuda")


class Profile(Plugin):
    """Trace some steps with `torch.profiler`.

    TensorBoard and https://ui.perfetto.dev show the files. A step is a micro-batch, counted from 0 at the beginning of
    this fit, a resumed one too; it lasts from the end of the one before to its own `BatchEnd`, so that a validation or
    a save belongs to the batch after it. The trace names it `ProfilerStep#<step>`. The first `skip_first` are left
    alone; then come cycles of `wait` steps that are left alone, `warmup` steps whose trace is thrown away, and `active`
    steps that are traced into one file `<host>_<process>.<time>.pt.trace.json`, where
    `torch.profiler.tensorboard_trace_handler` would put it.

    A run that ends or fails during the active steps, or a plugin that is switched off there, writes what there is. On
    several ranks the main one is traced. Torch has one profiler at a time: where another one is running already, this
    one leaves it alone, reports that as its error and stays off.

    Args:
        folder: where the traces go, such as the folder of `TensorBoard`; made where it is missing.
        wait: how many steps of each cycle are left alone.
        warmup: how many are traced and thrown away, because starting the profiler slows the first ones.
        active: how many are traced, at least one.
        repeat: how many cycles there are; 0 repeats until the run ends.
        skip_first: how many steps to leave alone before the first cycle.
        activities: what is traced, of `cpu` and `cuda`; by default all that torch can trace here.
        record_shapes: whether the shapes of operators' inputs are kept.
        profile_memory: whether the memory that tensors take and give back is.
        with_stack: whether the source lines that call operators are.
        handlers: whether each handler of a plugin is a range `<plugin>.<event>` in the trace. Costs nothing outside of
            the active steps.

    Raises:
        ValueError: an option is out of its range; at its first trace, torch cannot trace an activity here.
        RuntimeError: at a trace, another profiler of torch runs already, or was started during it.
        OSError: a trace could not be written.
    """

    policy = "observer"
    draws = False
    ranks = "main"
    exclusive = ("profiler",)

    def __init__(
        self,
        folder: str | Path,
        *,
        wait: int = 5,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        skip_first: int = 0,
        activities: Iterable[str] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        handlers: bool = True,
    ) -> None:
        if not isinstance(folder, str | Path):
            raise TypeError(f"Profile takes its folder as a path, got {folder!r}.")
        numbers = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat, "skip_first": skip_first}
        self.wait, self.warmup, self.active, self.repeat, self.skip_first = (
            check_whole_number(name, value, at_least=int(name == "active")) for name, value in numbers.items()
        )
        extent = {"record_shapes": record_shapes, "profile_memory": profile_memory, "with_stack": with_stack}
        for name, flag in {**extent, "handlers": handlers}.items():
            check_flag(name, flag)
        if isinstance(activities, str):
            raise TypeError(f"activities is a tuple, ({activities!r},), not {activities!r}.")
        self.activities = None if activities is None else tuple(activities)
        if self.activities is not None and not (self.activities and set(self.activities) <= set(ACTIVITIES)):
            raise ValueError(f"activities are some of {', '.join(ACTIVITIES)}; got {self.activities!r}.")
        self.folder = Path(folder)
        self.handlers = handlers
        self._extent = extent
        self._trace: Trace | None = None
        self._take_off: Callable[[], None] | None = None
        self._step = self._written = 0
        self._is_over = False

    def reset(self) -> None:
        """Start counting again."""
        self._step = self._written = 0
        self._is_over = False
        self.close()  # a second interrupt may have left the former run's trace as it was

    def rehearse(self, folder: Path) -> list[Path]:
        """Write traces elsewhere."""
        former, self.folder = self.folder, folder
        return [former]

    @on(EpochStart, lane=Lane.REPORT)
    def open(self, run: Run, event: EpochStart) -> None:
        """Begin the first step."""
        self._guarded(partial(self._go_on, run))

    @on(BatchEnd, lane=Lane.REPORT)
    def step(self, run: Run, event: BatchEnd) -> None:
        """End a step and begin the next."""
        self._guarded(partial(self._go_on, run, ended=True))

    @on(RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: RunClosed) -> None:
        """Write what there is."""
        if self._trace is not None and len(self._trace.steps) == 1 and event.status in ("completed", "stopped"):
            self._trace.is_kept = False  # of a step that never came
        self._guarded(self._finish)
        if run.optimizer is not None and not (self._written or self._is_over):
            first = self.skip_first + self.wait + self.warmup
            run.note(f"no trace was written: the run ended at step {self._step}, and step {first} is the first active")

    def close(self) -> None:
        """Write what there is, and leave no profiler running."""
        self._guarded(self._finish)

    def _go_on(self, run: Run, *, ended: bool = False) -> None:
        """Do what the step that now begins is for; `ended`: whether another has just ended."""
        if self._is_over:
            return
        self._step += ended
        if ended and self._place() == 0:  # a cycle is over
            self._finish()
        phase = self._phase()
        self._is_over = phase == "over"
        if phase == "active":
            if self._trace is None or not self._trace.is_kept:
                self._finish()
                self._trace = self._begun(run, is_kept=True)
                self._take_off = self._named_ranges(run) if self.handlers else None
            self._trace.mark(self._step)
        elif phase == "warmup" and self._trace is None:
            self._trace = self._begun(run, is_kept=False)

    def _place(self) -> int:
        """Return which step of its cycle the present one is; negative before the first."""
        place = self._step - self.skip_first
        return place if place < 0 else place % (self.wait + self.warmup + self.active)

    def _phase(self) -> Phase:
        place = self._place()
        if self.repeat and self._step - self.skip_first >= self.repeat * (self.wait + self.warmup + self.active):
            return "over"
        if place < self.wait:
            return "wait"
        return "warmup" if place < self.wait + self.warmup else "active"

    def _begun(self, run: Run, *, is_kept: bool) -> Trace:
        return Trace(run, {**self._extent, "activities": kinds(self.activities)}, is_kept=is_kept)

    def _named_ranges(self, run: Run) -> Callable[[], None]:
        """Put a named range around every handler but this plugin's own; return what takes them off."""
        own, ranged = current_owner(), torch_profiler().record_function

        def named(handler: Receiver, owner: str) -> Receiver:
            def traced(run: Run, *, event: Event) -> None:
                with ranged(f"{owner}.{event.name}"):
                    handler(run, event=event)

            return handler if owner == own else traced

        return run.bus.intercept(named)

    def _finish(self) -> None:
        """Stop the trace, and write it if it is one to keep."""
        trace = self._stop()
        if trace is not None and trace.is_kept:
            trace.write(self.folder)
            self._written += 1
            if self._written == 1:
                trace.run.note(f"traces of torch.profiler are in {self.folder}, for TensorBoard or ui.perfetto.dev")

    def _guarded(self, act: Callable[[], None]) -> None:
        """Do something; where it fails, nothing is traced any more in this run."""
        try:
            act()
        except BaseException:
            self._is_over = True
            self._stop()
            raise

    def _stop(self) -> Trace | None:
        """Stop the trace, if one is under way, and return it."""
        trace, self._trace = self._trace, None
        if self._take_off is not None:
            self._take_off()
            self._take_off = None
        if trace is not None:
            trace.stop()
        return trace
