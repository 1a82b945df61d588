"""Keep gradients within bounds."""

from __future__ import annotations

from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from ..events import GradientsReady, Lane, Run
from ..plugins import Plugin, on


class GradientClipping(Plugin):
    """Clip the gradients of a complete window before the optimizer step, and log their norm from before the clipping.

    Sees true gradients: accumulated, rescaled and unscaled. The norm is tracked as `train/gradient_norm` without a wait
    for the device.

    Args:
        norm: the largest total norm; None does not clip by norm.
        value: the largest absolute value of an element, clipped after the norm; None does not clip by value.
        norm_type: the p of the p-norm, such as 2.0 or `inf`.

    Raises:
        ValueError: neither bound is given, or one is not positive.
    """

    exclusive = ("clipping",)

    def __init__(self, norm: float | None = None, *, value: float | None = None, norm_type: float = 2.0) -> None:
        if norm is None and value is None:
            raise ValueError("GradientClipping needs a bound: norm=1.0, value=0.5, or both.")
        for name, bound in (("norm", norm), ("value", value), ("norm_type", norm_type)):
            if bound is not None and not bound > 0:
                raise ValueError(f"{name} must be positive, got {bound!r}.")
        self.norm, self.value, self.norm_type = norm, value, norm_type

    @on(GradientsReady, lane=Lane.DECIDE)
    def clip(self, run: Run, event: GradientsReady) -> None:
        """Clip, and track the norm."""
        parameters = [each for group in run.optimizer.param_groups for each in group["params"]]
        if self.norm is not None:
            total = clip_grad_norm_(parameters, self.norm, self.norm_type)
        else:
            gradients: list[Tensor] = [each.grad for each in parameters if each.grad is not None]
            total = get_total_norm(gradients, self.norm_type)
        if self.value is not None:
            clip_grad_value_(parameters, self.value)
        run.track("gradient_norm", total)
