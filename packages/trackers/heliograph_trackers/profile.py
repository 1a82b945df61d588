"""The plugin that traces steps with torch's profiler."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from heliograph import BatchEnd, EpochStart, Event, Lane, Plugin, Run, RunClosed, on
from heliograph.events import Receiver, current_owner
from heliograph.spi import check_flag, check_whole_number, require


class ProfilerTrace:
    """A trace in progress; `steps` lists its steps, and `is_kept` tells whether it will be written."""

    def __init__(self, run: Run, settings: dict[str, Any], *, is_kept: bool) -> None:
        if _is_profiling():  # a second profiler would end the first one
            raise RuntimeError(
                "Profile cannot trace this run: another profiler of torch is running, and only one can run. Stop it "
                "first, or remove Profile."
            )
        self.run, self.is_kept = run, is_kept
        self.steps: list[int] = []
        self._range: Any = None
        self._profiler = torch_profiler().profile(**settings)
        self._profiler.prepare_trace()
        self._profiler.start_trace()

    def mark(self, step: int) -> None:
        if step in self.steps[-1:]:
            return
        self._end_range()
        self.steps.append(step)
        self._range = torch_profiler().record_function(f"ProfilerStep#{step}")
        self._range.__enter__()

    def stop(self) -> None:
        self._end_range()
        if not _is_profiling():
            raise RuntimeError("Profile lost its trace: another profiler of torch was started, and only one can run.")
        self._profiler.stop_trace()

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{socket.gethostname()}_{os.getpid()}.{time.time_ns()}.pt.trace.json"
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            self._profiler.export_chrome_trace(str(temporary))
            if not _is_complete(temporary):  # torch raises no error
                raise OSError(f"torch.profiler could not write {path}: is the folder writable, and the disk not full?")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _end_range(self) -> None:
        last, self._range = self._range, None
        if last is not None:
            last.__exit__(None, None, None)


def torch_profiler() -> Any:
    return require("torch.profiler", "Profile")


def _is_profiling() -> bool:
    return bool(require("torch.autograd.profiler", "Profile")._is_profiler_enabled)


def kinds(activities: tuple[str, ...] | None) -> list[Any]:
    supported = {kind.name.lower(): kind for kind in torch_profiler().supported_activities()}
    if missing := [name for name in activities or () if name not in supported]:
        raise ValueError(f"torch cannot trace {', '.join(missing)} here, only {', '.join(sorted(supported))}.")
    return [supported[name] for name in activities or supported]


def _is_complete(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 64))
        return file.read().rstrip().endswith(b"}")


Phase = Literal["wait", "warmup", "active", "over"]
ACTIVITIES = ("cpu", "cuda")


class Profile(Plugin):
    """Trace some steps with `torch.profiler`.

    View the files with TensorBoard or https://ui.perfetto.dev. A step is a micro-batch, counted from 0 at the start of
    this fit, also of a resumed one. It lasts from the end of the previous step to its own `BatchEnd`, so a validation
    or a save belongs to the next batch. The trace names it `ProfilerStep#<step>`. After `skip_first` steps come cycles
    of `wait` steps without a trace, `warmup` steps whose trace is discarded, and `active` steps that are traced into
    one file `<host>_<process>.<time>.pt.trace.json`, like `torch.profiler.tensorboard_trace_handler`.

    If a run ends or fails during active steps, or the plugin is disabled there, the partial trace is written. On
    several ranks only the main rank is traced. Torch has one profiler at a time: if another one is running, this plugin
    reports an error and stays off.

    Args:
        folder: the folder of the traces, for example that of `TensorBoard`; created if it does not exist.
        wait: the untraced steps per cycle.
        warmup: the steps per cycle whose trace is discarded, because the profiler slows the first steps.
        active: the traced steps per cycle, at least one.
        repeat: the number of cycles; 0 repeats until the run ends.
        skip_first: the untraced steps before the first cycle.
        activities: what to trace, of `cpu` and `cuda`; by default everything that torch can trace here.
        record_shapes: whether to record the shapes of operator inputs.
        profile_memory: whether to record allocations.
        with_stack: whether to record the source lines of operators.
        handlers: whether each handler of a plugin is a range `<plugin>.<event>` in the trace. It has no cost outside
            the active steps.

    Raises:
        ValueError: an option is out of range; at the first trace, torch cannot trace an activity.
        RuntimeError: another profiler of torch is running, or was started during a trace.
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
            raise TypeError(f"folder must be a path, got {folder!r}.")
        numbers = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat, "skip_first": skip_first}
        self.wait, self.warmup, self.active, self.repeat, self.skip_first = (
            check_whole_number(name, value, at_least=int(name == "active")) for name, value in numbers.items()
        )
        extent = {"record_shapes": record_shapes, "profile_memory": profile_memory, "with_stack": with_stack}
        for name, flag in {**extent, "handlers": handlers}.items():
            check_flag(name, flag)
        if isinstance(activities, str):
            raise TypeError(f"activities must be a tuple, for example ({activities!r},), got {activities!r}.")
        self.activities = None if activities is None else tuple(activities)
        if self.activities is not None and not (self.activities and set(self.activities) <= set(ACTIVITIES)):
            raise ValueError(f"activities must be some of {', '.join(ACTIVITIES)}, got {self.activities!r}.")
        self.folder = Path(folder)
        self.handlers = handlers
        self._extent = extent
        self._trace: ProfilerTrace | None = None
        self._remove_ranges: Callable[[], None] | None = None
        self._step = self._written = 0
        self._is_over = False

    def reset(self) -> None:
        self._step = self._written = 0
        self._is_over = False
        self.close()  # a second interrupt may have left a trace running

    def rehearse(self, folder: Path) -> list[Path]:
        intended, self.folder = self.folder, folder
        return [intended]

    @on(EpochStart, lane=Lane.REPORT)
    def open(self, run: Run, event: EpochStart) -> None:
        self._guarded(partial(self._next_step, run))

    @on(BatchEnd, lane=Lane.REPORT)
    def step(self, run: Run, event: BatchEnd) -> None:
        self._guarded(partial(self._next_step, run, ended=True))

    @on(RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: RunClosed) -> None:
        if self._trace is not None and len(self._trace.steps) == 1 and event.status in ("completed", "stopped"):
            self._trace.is_kept = False  # the next step did not occur
        self._guarded(self._finish)
        if run.optimizer is not None and not (self._written or self._is_over):
            first = self.skip_first + self.wait + self.warmup
            run.note(f"no trace was written: the run ended at step {self._step}, and step {first} is the first active")

    def close(self) -> None:
        self._guarded(self._finish)

    def _next_step(self, run: Run, *, ended: bool = False) -> None:
        if self._is_over:
            return
        self._step += ended
        if ended and self._place_in_cycle() == 0:  # end of a cycle
            self._finish()
        phase = self._phase()
        self._is_over = phase == "over"
        if phase == "active":
            if self._trace is None or not self._trace.is_kept:
                self._finish()
                self._trace = self._start_trace(run, is_kept=True)
                self._remove_ranges = self._add_ranges(run) if self.handlers else None
            self._trace.mark(self._step)
        elif phase == "warmup" and self._trace is None:
            self._trace = self._start_trace(run, is_kept=False)

    def _place_in_cycle(self) -> int:
        place = self._step - self.skip_first
        return place if place < 0 else place % (self.wait + self.warmup + self.active)

    def _phase(self) -> Phase:
        place = self._place_in_cycle()
        if self.repeat and self._step - self.skip_first >= self.repeat * (self.wait + self.warmup + self.active):
            return "over"
        if place < self.wait:
            return "wait"
        return "warmup" if place < self.wait + self.warmup else "active"

    def _start_trace(self, run: Run, *, is_kept: bool) -> ProfilerTrace:
        return ProfilerTrace(run, {**self._extent, "activities": kinds(self.activities)}, is_kept=is_kept)

    def _add_ranges(self, run: Run) -> Callable[[], None]:
        this_plugin, record = current_owner(), torch_profiler().record_function

        def named(handler: Receiver, owner: str) -> Receiver:
            def traced(run: Run, *, event: Event) -> None:
                with record(f"{owner}.{event.name}"):
                    handler(run, event=event)

            return handler if owner == this_plugin else traced

        return run.bus.intercept(named)

    def _finish(self) -> None:
        trace = self._stop()
        if trace is not None and trace.is_kept:
            trace.write(self.folder)
            self._written += 1
            if self._written == 1:
                trace.run.note(f"traces of torch.profiler are in {self.folder}, for TensorBoard or ui.perfetto.dev")

    def _guarded(self, act: Callable[[], None]) -> None:
        # After an error, nothing more is traced in this run.
        try:
            act()
        except BaseException:
            self._is_over = True
            self._stop()
            raise

    def _stop(self) -> ProfilerTrace | None:
        trace, self._trace = self._trace, None
        if self._remove_ranges is not None:
            self._remove_ranges()
            self._remove_ranges = None
        if trace is not None:
            trace.stop()
        return trace
