"""What a trial reports, and what its pruner answers: asked once, even if the process was killed after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .trials import AnyTrial, live

if TYPE_CHECKING:
    from optuna.trial import Trial

KEY = "heliograph:pruned_at"


class Judge:
    """Reports values and asks the pruner.

    Some pruners write down how far a trial has come, and say something else when they are asked again. So a trial that
    continues after a kill does not ask again about what it continued from, and an answer to stop is in the storage
    before it counts.

    Args:
        trial: of one that is over, nothing is reported.
    """

    def __init__(self, trial: AnyTrial) -> None:
        self._trial: Trial | None = live(trial)
        self._reported: set[int] = set()
        self._pruned_at: int | None = None
        if self._trial is not None:  # read again what it knows of itself: that of a rank may be older
            known = self._trial.storage.get_trial(self._trial._trial_id)
            self._trial._cached_frozen_trial = known
            self._reported, self._pruned_at = set(known.intermediate_values), known.system_attrs.get(KEY)

    def report(self, step: int, value: float) -> bool:
        """Report a value, unless that was done; return whether the pruner is to be asked of it."""
        if self._trial is None:
            return False
        is_newest = step >= max(self._reported, default=step)
        if step not in self._reported:
            self._trial.report(value, step)
            self._reported.add(step)
        return is_newest

    def prunes(self, step: int) -> bool:
        """Return whether the pruner stops the trial at a step that was reported."""
        assert self._trial is not None
        if self._pruned_at is None and self._trial.should_prune():
            self._pruned_at = step
            self._trial.storage.set_trial_system_attr(self._trial._trial_id, KEY, step)
        return self._pruned_at == step
