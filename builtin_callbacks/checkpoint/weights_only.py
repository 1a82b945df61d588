"""What of a run's state is saved; where it is only the weights, nothing is resumed from it, and that is said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.checkpoint.state.frozen import FrozenWeights
from ...core.engines.sharded.states import ShardingEngine
from ...core.engines.weights import state_of
from ...core.system.extras import kind_of
from ...events import Run

OF_A_RESUME: dict[str, Any] = {
    "resume": None,
    "batch_change": "refuse",
    "restore_attributes": True,
}


class Capture:
    """Takes the state of a run, or a part of it.

    Args:
        weights_only: only the weights.
        trained_only: of the weights, only what is trained, and the digests of the others.
    """

    def __init__(self, *, weights_only: bool, trained_only: bool) -> None:
        self.weights_only = weights_only
        self._frozen = FrozenWeights() if trained_only else None

    def begin(self, run: Run) -> None:
        """Look at what is frozen when a run begins.

        Raises:
            ValueError: the weights are divided among ranks.
        """
        if self._frozen is None:
            return
        if isinstance(run.engine, ShardingEngine):
            raise ValueError(
                f"trained_only=True is for an engine that has whole weights, and {kind_of(run.engine)} divides "
                f"them: leave it out, or train with DDPEngine."
            )
        if all(each.requires_grad for module in run.modules.values() for each in module.parameters()):
            run.warn(
                "Checkpoint(trained_only=True) leaves out frozen weights, and all of this task are trained: freeze the "
                "others with requires_grad_(False), or leave the option out."
            )
        self._frozen.begin(run.modules)

    def __call__(self, run: Run, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the live state, without what is left out; on several ranks a collective."""
        state = run.state_dict(shards, weights_only=self.weights_only)
        return state if self._frozen is None else self._frozen.without(run.modules, state)

    def weights(self, run: Run) -> Mapping[str, Any]:
        """Return the weights alone."""
        weights = {name: state_of(module) for name, module in run.modules.items()}
        return weights if self._frozen is None else self._frozen.without(run.modules, {"modules": weights})["modules"]


def check_options(
    load_best: str | None, sharded: bool | None, of_a_resume: dict[str, Any], *, weights_only: bool
) -> None:
    """Raise ValueError for options that are about a resume, or about more than weights, where only these are saved.

    Args:
        load_best: what is loaded back at the end.
        sharded: whether every rank writes its shards.
        of_a_resume: the other options that matter at a resume only, by name.
        weights_only: whether only weights are saved.
    """
    given = [f"{name}={value!r}" for name, value in of_a_resume.items() if value != OF_A_RESUME[name]]
    given += ["load_best='everything'"] * (load_best == "everything") + ["sharded=True"] * bool(sharded)
    if given and weights_only:
        raise ValueError(
            f"weights_only=True saves no optimizer, no shards, and nothing to resume, so {', '.join(given)} has no "
            f"meaning there: give that to another Checkpoint, in another folder."
        )


def full_ones(run: Run, kind: type[Any]) -> list[Any]:
    """Return the plugins of a kind that save what a run can resume, and are switched on."""
    found = (each for each in run.plugins if isinstance(each, kind) and run.plugins.is_enabled(each))
    return [each for each in found if not each.weights_only]


def warn_at_start(run: Run, name: str, *, is_alone: bool) -> None:
    """Say, where nothing else saves this run, that it cannot be resumed."""
    if not is_alone:
        return
    run.data.doubt("not exact", "only weights are saved, which cannot be resumed: Checkpoint(weights_only=True)")
    if "preemption" in run.plugins.declared("exclusive"):
        run.warn(
            f"When this process is taken away, its training is lost: plugin {name!r} saves only weights. Add another "
            f"Checkpoint, in another folder, for what can be resumed."
        )


def lost(path: Path | None, step: int | None) -> str:
    """Return what a run that ended early leaves: weights, and nothing to resume."""
    if path is None or step is None:
        return "no weights were saved yet, and nothing that could be resumed"
    return f"the newest weights are {path}, of step {step}; only weights are saved, so the run cannot be resumed"
