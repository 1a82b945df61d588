"""The program of a recorded run, called again for a rerun in another folder, and the change of a fork."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from heliograph import BatchStart, Bus, Checkpoint, CheckpointLoaded, Lane, Preemption, Run
from heliograph.events import FunctionName, OrderedSignal, Subscription
from heliograph.spi import TrainerFactory, UsageError, describe, describe_error, find_function

from ..divergence.compare import FirstDifference
from ..plugin import Digests, Recorder

Program = str | Callable[..., Any]
Change = Callable[[Run], object]


class NotExact(RuntimeError):  # noqa: N818  # says what is missing
    """A recorded run cannot be repeated bit for bit.

    Attributes:
        reasons: why a resume may differ; may be empty.
        difference: the first difference between the rerun and the recording, None if there is none.
        has_option: `exact=False` is possible.
    """

    def __init__(
        self, reasons: tuple[str, ...], difference: FirstDifference | None = None, *, has_option: bool = True
    ) -> None:
        super().__init__(reasons, difference)
        self.reasons, self.difference, self.has_option = reasons, difference, has_option

    def __str__(self) -> str:
        reasons = [reason.rstrip(".") for reason in self.reasons]
        if self.difference is None:
            text = f"The run cannot be repeated bit for bit: {'; '.join(reasons)}."
        else:
            text = f"The rerun differs from the recording. The first difference: {self.difference}".rstrip(".") + "."
            text += "".join(f" Likely cause: {reason}." for reason in reasons)
        return text + " To repeat it anyway, give exact=False (--inexact on the command line)." * self.has_option


def change_of(caller: str, change: Change | str | None) -> Change | None:
    """Return the function of a `change=` argument."""
    if isinstance(change, str):
        return find_function(change)
    if change is not None and not callable(change):
        raise TypeError(
            f"{caller}(change=) takes a function of the run, or its name as module:function; got {change!r}."
        )
    return change


def make_change(run: Run, change: Change) -> None:
    """Change a run, and request a save, because a kill before the first scheduled save would lose the change."""
    change(run)
    if "save" in run.plugins.declared("asks"):
        run.control.request_save("the fork has been changed", by="fork")


def connect_before_batches(bus: Bus, receiver: Callable[[Run, BatchStart], None], owner: str) -> None:
    """Call a function at the start of each batch, before all other handlers."""
    signal: OrderedSignal[BatchStart] = bus.signal(BatchStart)
    signal.connect(receiver, weak=False, subscription=Subscription((Lane.TRANSFORM, -2), FunctionName(owner)))


def function_of(program: Program) -> Callable[..., Any]:
    return find_function(program) if isinstance(program, str) else program


def name_of(program: Program) -> str:
    if isinstance(program, str):
        return program
    return describe(program) if callable(program) else repr(program)


@contextmanager
def naming(program: Program) -> Iterator[None]:
    """Add the name of a program to the error if it is not a valid program."""
    name = name_of(program)
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{name} is not a program: {error}") from None
    except Exception as error:
        raise UsageError(f"{name} failed, so it is not a program: {describe_error(error)}") from error


class Rerun:
    """A trainer made by its program again, for another folder.

    Args:
        program: a function that returns a trainer and the keywords of its `fit`, or its name as module:function.
        folder: for all files.
        checkpoint: to resume, or None.

    Attributes:
        trainer: the trainer.
        options: of its `fit`.
        recorder: of the rerun.
        left_out: the names of the disabled plugins.
        notes: differences from the recorded run.
    """

    def __init__(self, program: Program, folder: Path, checkpoint: Path | None) -> None:
        function = function_of(program)
        with naming(program):
            self.trainer, self.options = TrainerFactory(function)(folder / "program")
        plugins = self.trainer.plugins
        reporting = [plugin.name for plugin in plugins if not getattr(plugin, "rehearses", True)]
        self.notes = [f"{name} is left out: its effects cannot be undone" for name in reporting]
        preemptions = [plugin.name for plugin in plugins if isinstance(plugin, Preemption)]
        self.notes += [f"{name} is left out: signals need the main thread" for name in preemptions]
        self.left_out = [*reporting, *preemptions]
        plugins.disable(*self.left_out)
        before_all = Subscription((Lane.TRANSFORM, -3), FunctionName("the rerun"))
        self.trainer.bus.signal(CheckpointLoaded).connect(self.leave_out, weak=False, subscription=before_all)
        for name in [name for name in plugins.names() if isinstance(plugins[name], Recorder)]:
            plugins.unregister(name)
        plugins.redirect(folder)
        unredirected = plugins.unredirected()
        self.notes += [f"{name} has no rehearse(folder): it may write to its usual place" for name in unredirected]
        self.recorder = Recorder(folder / "recording", losses=True, digests=Digests(gradients=1, weights=1))
        plugins.register(self.recorder)
        checkpoints = [plugin for plugin in plugins if isinstance(plugin, Checkpoint)]
        for plugin in checkpoints:
            plugin.resume = replace(plugin.resume, path=None)
        if checkpoint is not None:
            if not checkpoints:
                raise ValueError(
                    f"The program has no Checkpoint, so it cannot resume {checkpoint}: give the program that ran."
                )
            checkpoints[0].resume = replace(checkpoints[0].resume, path=checkpoint.absolute())

    def leave_out(self, run: Run, event: CheckpointLoaded) -> None:
        """Disable plugins again that the checkpoint has enabled."""
        for name in self.left_out:
            if run.plugins.is_enabled(name):
                run.plugins.disable(name)
