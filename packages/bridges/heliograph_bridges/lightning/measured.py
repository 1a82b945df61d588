"""What Lightning logs, by our names. Each of its loops collects the values that are logged while it runs."""

from __future__ import annotations

from typing import Any

from ..hosted.boundary import LOSS
from .names import our_name


class Measured:
    """Files each logged value under the phase and the step in which it was logged."""

    def __init__(self) -> None:
        self._updates: dict[str, int] = {}  # of each value at the last log
        self._of_epoch: dict[str, float] = {}  # means of epochs, until they are logged

    def of_validation(self, trainer: Any) -> dict[str, float]:
        """Return what was logged in the validation that ends."""
        return _values(trainer.fit_loop.epoch_loop.val_loop._results, "validation", on_step=False)

    def end_epoch(self, trainer: Any) -> None:
        """Take the values of an epoch, which Lightning has once the epoch has ended."""
        results = trainer.fit_loop.epoch_loop._results
        self._of_epoch = self.of_step(trainer) | _values(results, "train", on_step=False)
        self._updates.clear()  # Lightning resets its values

    def of_training(self, trainer: Any, *, in_epoch: bool) -> dict[str, float]:
        """Return what was logged in the training since the last log.

        Args:
            trainer: the Trainer.
            in_epoch: whether an epoch is under way: its losses are newer than the mean of the epoch before.
        """
        metrics, self._of_epoch = self._of_epoch, {}
        if in_epoch:
            metrics.pop(LOSS, None)
            metrics |= self.of_step(trainer)
        return metrics

    def of_step(self, trainer: Any) -> dict[str, float]:
        """Return what was logged at steps of this epoch since the last log."""
        results = trainer.fit_loop.epoch_loop._results
        before, self._updates = self._updates, {key: result.update_count for key, result in results.items()}
        new = {key for key, count in self._updates.items() if count != before.get(key)}
        return _values(results, "train", on_step=True, keys=new)


def _values(results: Any, phase: str, *, on_step: bool, keys: Any = None) -> dict[str, float]:
    values = dict[str, float]()
    for key, result in results.items():
        if result.has_reset or (keys is not None and key not in keys):
            continue
        value = results._get_cache(result, on_step)
        if value is not None:
            values |= dict.fromkeys((our_name(n, phase) for n in results._forked_name(result, on_step)), float(value))
    return values
