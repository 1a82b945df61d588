"""The program of a recorded run, called again: what it makes writes elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from heliograph.builtin_callbacks.checkpoint.plugin import Checkpoint
from heliograph.builtin_callbacks.preemption import Preemption
from heliograph.builtin_callbacks.recorder.digests.options import Digests
from heliograph.builtin_callbacks.recorder.plugin import Recorder
from heliograph.core.rehearsal.stage import cannot_be_redirected, left_out, redirect
from heliograph.core.trainer import Trainer
from heliograph.testing.command import find_function
from heliograph.testing.resume.factory import TrainerFactory

Program = str | Callable[..., Any]


def function_of(program: Program) -> Callable[..., Any]:
    """Return the function that a program is, or that it names.

    Raises:
        UsageError: there is no such function.
    """
    return find_function(program) if isinstance(program, str) else program


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
        notes: what is not as it was.

    Raises:
        UsageError: the program is not such a function.
        ValueError: nothing of it can resume the checkpoint.
    """

    def __init__(self, program: Program, folder: Path, checkpoint: Path | None) -> None:
        self.trainer, self.options = TrainerFactory(function_of(program))(folder / "program")
        plugins = self.trainer.plugins
        leave = left_out(plugins)
        self.notes = [f"{each.name} is left out: what it does cannot be taken back" for each in leave]
        signals = [each for each in plugins if isinstance(each, Preemption)]
        self.notes += [f"{each.name} is left out: signals are for the main thread" for each in signals]
        for each in [*leave, *signals]:
            plugins.disable(each.name)
        for name in [name for name in plugins.names() if isinstance(plugins[name], Recorder)]:
            plugins.unregister(name)
        redirect(plugins, folder)
        foreign = [name for name in plugins.names() if cannot_be_redirected(plugins[name])]
        self.notes += [f"{name} has no rehearse(folder): it may write where it always does" for name in foreign]
        self.recorder = Recorder(folder / "recording", losses=True, digests=Digests(gradients=1, weights=1))
        plugins.register(self.recorder)
        _resume(self.trainer, checkpoint)


def _resume(trainer: Trainer, checkpoint: Path | None) -> None:
    found = [each for each in trainer.plugins if isinstance(each, Checkpoint) and not each.weights_only]
    for each in found:
        each.resume = None
    if checkpoint is not None and not found:
        raise ValueError(f"The program has no Checkpoint, so it cannot resume {checkpoint}: give the program that ran.")
    if checkpoint is not None:
        found[0].resume = checkpoint.absolute()
