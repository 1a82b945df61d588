"""The program of a recorded run, called again for a rerun in another folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from heliograph import Checkpoint, CheckpointLoaded, Lane, Preemption, Run
from heliograph.events import FunctionName, Subscription
from heliograph.spi import TrainerFactory, UsageError, describe, describe_error, find_function

from ..digests.options import Digests
from ..plugin import Recorder

Program = str | Callable[..., Any]


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
        raise UsageError(f"{name} is not a program: {str(error).replace('make_trainer', 'a program')}") from None
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
