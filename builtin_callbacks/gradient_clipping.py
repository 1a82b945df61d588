"""Keep gradients within bounds."""

from __future__ import annotations

from torch.nn.utils import clip_grad_value_

from ..events import GradientsReady, Lane, Run
from ..events.checks import check_number
from ..plugins import Plugin, on


class GradientClipping(Plugin):
    """Clip the gradients, and log their norm.

    It clips those of a complete window, before the optimizer step; the norm is that from before the clipping. Sees true
    gradients: accumulated, rescaled, unscaled and averaged over ranks. Their norm is that of the whole gradients, also
    where the engine shards them; it is tracked as `train/gradient_norm`, without a wait for the device.

    Args:
        norm: the largest total norm; None does not clip by norm.
        value: the largest absolute value of an element, clipped after the norm; None does not clip by value.
        norm_type: the p of the p-norm, such as 2.0 or `inf`.

    Raises:
        ValueError: neither bound is given, or one is not positive.
    """

    exclusive = ("clipping", "gradient_norm")

    def __init__(self, norm: float | None = None, *, value: float | None = None, norm_type: float = 2.0) -> None:
        if norm is None and value is None:
            raise ValueError("GradientClipping needs a bound: norm=1.0, value=0.5, or both.")
        self.norm, self.value = (
            None if bound is None else check_number(name, bound, more_than=0, finite=False, or_else="None")
            for name, bound in (("norm", norm), ("value", value))
        )
        self.norm_type = check_number("norm_type", norm_type, more_than=0, finite=False)

    def describe(self, run: Run) -> str:
        """Say where gradients are clipped."""
        bounds = [] if self.norm is None else [f"at norm {self.norm:g}"]
        return f"clips gradients {' and '.join(bounds + ([] if self.value is None else [f'at value {self.value:g}']))}"

    @on(GradientsReady, lane=Lane.DECIDE)
    def clip(self, run: Run, event: GradientsReady) -> None:
        """Clip, and track the norm."""
        parameters = [each for group in run.optimizer.param_groups for each in group["params"]]
        total = run.engine.clip_gradients(parameters, self.norm, self.norm_type)
        if self.value is not None:
            clip_grad_value_(parameters, self.value)
        run.track(run.label("gradient_norm"), total)
