"""The precision of a run: full, TensorFloat-32, or 16-bit autocast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from ...events.checks import known_names
from .options import PrecisionName

if TYPE_CHECKING:
    from .numerics import LossScaling

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The precision of an engine, which calls these methods in its own steps.

    - `fp32`: torch's own settings; most methods do nothing.
    - `tf32`: matrix products and convolutions of 32-bit numbers use the TensorFloat-32 units of an Nvidia GPU while
      `running()` is entered.
    - `bf16`: forward passes under `torch.autocast`; the parameters keep 32 bits.
    - `fp16`: the same, with scaled losses; gradients are unscaled, and a step with infinite or NaN gradients is
      skipped.

    An engine calls `check(device)` when the device is known, `running()` around the run, `begin` in its `set_up`, and
    the other methods in its methods of the same names.

    Raises:
        ValueError: there is no such precision.
    """

    def __init__(self, name: PrecisionName = "fp32") -> None:
        if name not in get_args(PrecisionName):
            raise ValueError(f"Unknown precision {name!r}.{known_names(str(name), get_args(PrecisionName))}")
        self.name = name
        self.scaling: LossScaling | None = None
        self._seeds: dict[tuple[torch.dtype, torch.device, float], Tensor] = {}
        self.backward: Callable[[Tensor], None] = Tensor.backward  # without a frame of ours in between, for speed
        if name == "fp16":
            self.backward = self._backward_with_scale

    def check(self, device: torch.device) -> None:
        """Raise ValueError unless the device supports the precision; the error names the supported ones."""
        if self.name != "fp32":
            from .numerics import check_supported

            check_supported(device, self.name)

    def running(self) -> AbstractContextManager[None]:
        """Return the context of a run, with torch's settings for the precision; it may be nested."""
        if self.name != "tf32":
            return nullcontext()
        from .numerics import tensor_float

        return tensor_float()

    def begin(self, device: torch.device, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Begin a run with a new loss scale."""
        if self.name == "fp16":
            from .numerics import LossScaling

            self.scaling = LossScaling(device.type, optimizers.values())

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        dtype = DTYPES.get(self.name)
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype)

    def bind(self, forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Return the function as it runs in this precision; itself if nothing changes."""
        dtype = DTYPES.get(self.name)
        if dtype is None:
            return forward

        @wraps(forward)
        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device.type, dtype):
                return forward(*args, **kwargs)

        return under_autocast

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        """Add the gradients of `scale * loss`, without a multiplication in the graph."""
        if scale == 1.0:
            self.backward(loss)
        else:
            torch.autograd.backward(loss, self._seed(loss, scale))

    def backward_for(self, loss: Tensor, scale: float, parameters: Sequence[Tensor]) -> None:
        """Add the gradients of `scale * loss` to these parameters only."""
        torch.autograd.backward(loss, self._seed(loss, scale), inputs=parameters)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the loss scale from the gradients, without waiting for the device."""
        if self.scaling is not None:
            self.scaling.unscale(optimizer)

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that steps, and returns False if it skips the step; often the optimizer's own."""
        scaling = self.scaling
        return optimizer.step if scaling is None else lambda: scaling.step(optimizer)

    def bind_zero_grad(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that drops gradients and updates the loss scale; often the optimizer's own."""
        scaling = self.scaling
        return optimizer.zero_grad if scaling is None else lambda: scaling.zero_grad(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale for a resumed run."""
        return {} if self.scaling is None else {"scaler": self.scaling.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved loss scale; only fp16 has one."""
        if self.scaling is not None and "scaler" in state:
            self.scaling.scaler.load_state_dict(dict(state["scaler"]))

    def _backward_with_scale(self, loss: Tensor) -> None:
        torch.autograd.backward(loss, self._seed(loss, 1.0))

    def _seed(self, loss: Tensor, scale: float) -> Tensor:
        # Cached, because creating the tensor may wait for the device.
        key = (loss.dtype, loss.device, scale)
        if key not in self._seeds:
            self._seeds[key] = torch.tensor(scale, dtype=loss.dtype, device=loss.device)
        seed = self._seeds[key]
        return seed if self.scaling is None else self.scaling.scaler.scale(seed)
