"""The moments of a batch and of an optimizer step in the loop of a host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from heliograph import BackwardEnd, BatchEnd, BatchStart, ForwardEnd, GradientsReady, StepEnd
from torch import Tensor

from .run import HostedRun

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="BatchMoments")


def closes_on_error(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Let the run be closed where a method raises, before the error passes to the host."""

    @wraps(method)
    def guarded(moments: T, /, *args: P.args, **options: P.kwargs) -> R:
        try:
            return method(moments, *args, **options)
        except BaseException as error:
            moments.fail(error)
            raise

    return guarded


class BatchMoments(ABC):
    """The moments of a batch; see `HostedTraining`.

    Attributes:
        run: the run that is under way, None outside of a training.
    """

    run: HostedRun | None = None
    _is_counted = False  # whether the samples of the batch are
    _is_dropped = False  # whether the window that ended last was not stepped with

    @property
    def active(self) -> HostedRun:
        """The run that is under way."""
        assert self.run is not None, "a training has begun"
        return self.run

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Close the run for an error that ends the loop, unless it is closed."""

    @abstractmethod
    def leave_validation(self) -> None:
        """End a validation that the host has left without its end, unless there is none."""

    @closes_on_error
    def begin_batch(self, batch: Any) -> None:
        """Begin a micro-batch: RuntimeError where a plugin replaces it, as the host would not train on the other."""
        run = self.active
        if run.phase != "train":
            self.leave_validation()
        run.work.batch, run.work.in_hand = batch, True
        self._is_counted = False
        if run.hot.batch_start.chain:
            run.hot.batch_start.emit(run, BatchStart())
            if run.work.batch is not batch:
                raise RuntimeError(
                    f"A plugin replaced run.batch, and {run.host.name} trains on its own. Instead, "
                    f"{run.host.mend('batches')}."
                )

    @closes_on_error
    def end_forward(self, loss: Tensor) -> None:
        """Take the loss of the micro-batch, a scalar tensor that stays on its device; its backward pass is next."""
        run = self.active
        self._take(run, loss)
        if run.hot.forward_end.chain:
            run.hot.forward_end.emit(run, ForwardEnd())

    @closes_on_error
    def end_backward(self, loss: Tensor | None) -> None:
        """Take the loss of the micro-batch, whose backward pass is done, and count its samples.

        Args:
            loss: None where the host shows it at the end of the batch only.
        """
        run = self.active
        self._take(run, loss)
        run.stepping.first.size += 1
        if run.hot.backward_end.chain:
            run.hot.backward_end.emit(run, BackwardEnd())

    def track_loss(self, loss: Tensor) -> None:
        """Add the loss of the micro-batch to `train/loss` of the next log, where the host logs none of its own.

        It is added when the batch has ended its window, unless the gradients of that were dropped.
        """
        run = self.active
        if run.report.tracks:
            run.stepping.first.kept.append((loss.detach().clone(), run.size_of(run.work.batch), False))

    @closes_on_error
    def begin_step(self) -> bool:
        """Show the gradients of a window; return whether they are to be dropped, on all ranks alike."""
        run = self.active
        if run.hot.gradients_ready.chain:
            run.hot.gradients_ready.emit(run, GradientsReady())
        run.control.agree_on_step()
        return run.control.drops_step

    @closes_on_error
    def end_step(self, *, stepped: bool = True) -> None:
        """Count an optimizer step, or a skipped one where the gradients were dropped.

        Args:
            stepped: False where the host has skipped it, as for infinite gradients in half precision.
        """
        run = self.active
        run.stepping.first.size = 0
        self._is_dropped = run.control.drops_step or not stepped
        if self._is_dropped:
            run.control.count_skip("skipped_steps", by_engine=not run.control.drops_step)
            return
        run.progress.steps += 1
        if run.hot.step_end.chain:
            run.hot.step_end.emit(run, StepEnd())

    @closes_on_error
    def end_batch(self, loss: Tensor | None = None) -> None:
        """End a micro-batch, perhaps one without a loss.

        Args:
            loss: its loss, where `end_backward` did not get it.
        """
        run = self.active
        if loss is not None:
            run.loss = run.stepping.first.loss = loss
        self._count(run)
        window = run.stepping.first
        if window.kept and not window.size:
            run.means.settle(window.label, window.kept, stepped=not self._is_dropped)
        run.progress.batch += 1
        run.work.in_hand = False
        if run.hot.batch_end.chain:
            run.hot.batch_end.emit(run, BatchEnd())
        run.outputs = run.work.batch = None
        if run.control.touched:
            run.control.close_batch()

    def _take(self, run: HostedRun, loss: Tensor | None) -> None:
        run.loss = run.stepping.first.loss = loss
        self._count(run)

    def _count(self, run: HostedRun) -> None:
        if not self._is_counted:
            self._is_counted, size = True, run.size_of(run.work.batch)
            run.progress.samples += run.data.sum_of_all_ranks(size) if run.control.is_shared else size


def drop_gradients(optimizer: Any) -> None:
    """Let an optimizer's next step change nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
