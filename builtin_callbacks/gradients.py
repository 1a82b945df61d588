"""The norm of the gradients, and clipping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad_value_

from ..events import GradientsReady, Lane, Run
from ..events.checks import check_flag, check_number, check_whole_number
from ..plugins import Plugin, on


class GradientNorm(Plugin):
    """Log the norm of the gradients before clipping, as `train/gradient_norm`.

    The norm is measured for complete windows, of gradients that are accumulated, averaged over ranks and unscaled,
    without waiting for the device. It is not measured unless a plugin logs. `GradientClipping` tracks the same norm, so
    only one of the two can be registered.

    Args:
        every: steps of an optimizer between two measurements.
        per_module: also track the norm of each module of the task, as `train/gradient_norm/<module>`.
        norm_type: the p of the p-norm, such as 2.0 or `inf`.

    Raises:
        ValueError: an argument is out of range.
    """

    affects_training = False
    exclusive = ("gradient_norm",)
    latest_norm: Tensor | None = None

    def __init__(self, *, every: int = 1, per_module: bool = False, norm_type: float = 2.0) -> None:
        self.every = check_whole_number("every", every, of="optimizer steps", at_least=1)
        check_flag("per_module", per_module)
        self.per_module = per_module
        self.norm_type = check_number("norm_type", norm_type, more_than=0, finite=False)
        self._counts: dict[str, int] = {}

    def reset(self) -> None:
        self._counts = {}

    @on(GradientsReady, lane=Lane.MEASURE)
    def measure(self, run: Run, event: GradientsReady) -> None:
        """Track the norm if a measurement is due."""
        count = self._counts[run.stepping.optimizer_name] = self._counts.get(run.stepping.optimizer_name, 0) + 1
        if count % self.every or not run.report.tracks:
            return
        parameters = _parameters(run.optimizer)
        ids = set(map(id, parameters))
        self.latest_norm = run.engine.clip_gradients(parameters, None, self.norm_type)
        run.track(run.stepping.label("gradient_norm"), self.latest_norm)
        for name, module in run.modules.items() if self.per_module else ():
            stepped = [parameter for parameter in module.parameters() if id(parameter) in ids]
            if any(parameter.grad is not None for parameter in stepped):
                norm = run.engine.clip_gradients(stepped, None, self.norm_type)
                run.track(run.stepping.label(f"gradient_norm/{name}"), norm)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._counts) if self.every > 1 else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts = dict(state)


class GradientClipping(Plugin):
    """Clip the gradients before the optimizer step, and log their norm.

    Gradients of complete windows are clipped, after they were accumulated, rescaled, unscaled and averaged over ranks.
    The norm is measured before clipping, over all shards, and tracked as `train/gradient_norm`, without waiting for the
    device.

    Args:
        norm: the maximum total norm; None does not clip by norm.
        value: the maximum absolute value of an element, clipped after the norm; None does not clip by value.
        norm_type: the p of the p-norm, such as 2.0 or `inf`.

    Raises:
        ValueError: neither bound is passed, or one is not positive.
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
        self._latest_norm: Tensor | None = None  # a public attribute would be an option, which resumes compare

    @property
    def latest_norm(self) -> Tensor | None:
        """The norm of the latest step, before clipping."""
        return self._latest_norm

    def describe(self, run: Run) -> str:
        bounds = [] if self.norm is None else [f"at norm {self.norm:g}"]
        return f"clips gradients {' and '.join(bounds + ([] if self.value is None else [f'at value {self.value:g}']))}"

    @on(GradientsReady, lane=Lane.DECIDE)
    def clip(self, run: Run, event: GradientsReady) -> None:
        """Clip, and track the norm."""
        parameters = _parameters(run.optimizer)
        self._latest_norm = run.engine.clip_gradients(parameters, self.norm, self.norm_type)
        if self.value is not None:
            try:
                clip_grad_value_(parameters, self.value)
            except NotImplementedError:  # torch does not clip sparse gradients
                from ..core.engines.weights import with_dense_gradients

                clip_grad_value_(with_dense_gradients(parameters), self.value)
        run.track(run.stepping.label("gradient_norm"), self._latest_norm)


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
