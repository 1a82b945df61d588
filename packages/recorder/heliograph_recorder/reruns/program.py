"""The program of a recorded run, called again: what it makes writes elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from heliograph import Checkpoint, CheckpointLoaded, Lane, Preemption, Run, Trainer
from heliograph.events import FunctionName, Subscription
from heliograph.spi import TrainerFactory, UsageError, describe, describe_error, find_function

from ..digests.options import Digests
from ..plugin import Recorder

Program = str | Callable[..., Any]


def function_of(program: Program) -> Callable[..., Any]:
    """Return the function that a program is, or that it names.

    Raises:
        UsageError: there is no such function.
    """
    return find_function(program) if isinstance(program, str) else program


def name_of(program: Program) -> str:
    """Return a program's name, as it was given."""
    if isinstance(program, str):
        return program
    return describe(program) if callable(program) else repr(program)


@contextmanager
def naming(program: Program) -> Iterator[None]:
    """Let the error of a function that is no program name it, as it was given.

    Raises:
        UsageError: it failed, or is no program.
    """
    name = name_of(program)
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{name} is not a program: {str(error).replace('make_trainer', 'a program')}") from None
    except Exception as error:
        raise UsageError(f"{name} failed, so it is not a program: {describe_error(error)}") from error


class Rerun:
    """A trainer that its program has made once more, in a folder of its own.

    Args:
        program: a function that returns a trainer and the keywords of its `fit`, as `verify-resume` takes it; or its
            name, `module:function`.
        folder: where everything is written; it exists.
        checkpoint: what is continued, None to begin at the start.

    Attributes:
        trainer: the trainer.
        options: of its `fit`.
        recorder: records the run in the folder.
        left_out: the names of the plugins that do nothing here.
        notes: what is not as it was.

    Raises:
        UsageError: the program is not such a function.
        ValueError: nothing of it can resume the checkpoint.
    """

    def __init__(self, program: Program, folder: Path, checkpoint: Path | None) -> None:
        function = function_of(program)
        with naming(program):
            self.trainer, self.options = TrainerFactory(function)(folder / "program")
        plugins = self.trainer.plugins
        leave = [plugin for plugin in plugins if not getattr(plugin, "rehearses", True)]
        self.notes = [f"{each.name} is left out: what it does cannot be taken back" for each in leave]
        signals = [each for each in plugins if isinstance(each, Preemption)]
        self.notes += [f"{each.name} is left out: signals are for the main thread" for each in signals]
        self.left_out = [each.name for each in (*leave, *signals)]
        plugins.disable(*self.left_out)
        before_all = Subscription((Lane.TRANSFORM, -3), FunctionName("the rerun"))
        self.trainer.bus.signal(CheckpointLoaded).connect(self.leave_out, weak=False, subscription=before_all)
        for name in [name for name in plugins.names() if isinstance(plugins[name], Recorder)]:
            plugins.unregister(name)
        plugins.redirect(folder)
        foreign = plugins.unredirected()
        self.notes += [f"{name} has no rehearse(folder): it may write where it always does" for name in foreign]
        self.recorder = Recorder(folder / "recording", losses=True, digests=Digests(gradients=1, weights=1))
        plugins.register(self.recorder)
        _resume(self.trainer, checkpoint)

    def leave_out(self, run: Run, event: CheckpointLoaded) -> None:
        """Disable again what the loaded state has enabled, since somebody had asked for it."""
        for name in [name for name in self.left_out if run.plugins.is_enabled(name)]:
            run.plugins.disable(name)


def _resume(trainer: Trainer, checkpoint: Path | None) -> None:
    found = [each for each in trainer.plugins if isinstance(each, Checkpoint)]
    for each in found:
        each.resume = replace(each.resume, path=None)
    if checkpoint is not None and not found:
        raise ValueError(f"The program has no Checkpoint, so it cannot resume {checkpoint}: give the program that ran.")
    if checkpoint is not None:
        found[0].resume = replace(found[0].resume, path=checkpoint.absolute())
