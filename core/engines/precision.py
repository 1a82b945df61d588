"""How precisely a run computes: full, TensorFloat-32, or autocast to sixteen bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from ...events.checks import known_names

if TYPE_CHECKING:
    from .loss_scale import LossScaling

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """What an engine does about precision; every engine has one, and hands its steps on to it.

    - `fp32`: nothing; torch's own settings hold.
    - `tf32`: matrix products and convolutions of 32-bit numbers on an Nvidia GPU's TensorFloat-32 units, while
      `running()` is entered.
    - `bf16`: forward passes under `torch.autocast`; the parameters stay 32 bits wide.
    - `fp16`: so too, with losses scaled up and gradients scaled down again; a step with gradients that are infinite or
      NaN is skipped.

    For an engine: `check(device)` where the device is known, `running()` around the run, `begin` in its `set_up`, and
    the rest for the methods of the same names.

    Raises:
        ValueError: there is no such precision.
    """

    def __init__(self, name: PrecisionName = "fp32") -> None:
        if name not in get_args(PrecisionName):
            raise ValueError(f"Unknown precision {name!r}.{known_names(str(name), get_args(PrecisionName))}")
        self.name = name
        self.scaling: LossScaling | None = None
        self.backward: Callable[[Tensor], None] = Tensor.backward  # once a step: no frame of ours in between
        if name == "fp16":
            self.backward = self._backward_with_scale
        self._seeds: dict[tuple[torch.dtype, torch.device, float], Tensor] = {}

    def check(self, device: torch.device) -> None:
        """Raise ValueError unless a device computes so; says what it allows."""
        if not _supports(device, self.name):
            allowed = ", ".join(name for name in get_args(PrecisionName) if _supports(device, name))
            raise ValueError(
                f"precision={self.name!r} is not to be had on the device {str(device)!r}, which allows {allowed}. tf32 "
                f"is for Nvidia GPUs; of these, those before compute capability 8.0 have neither tf32 nor bf16."
            )

    def running(self) -> AbstractContextManager[None]:
        """Return the context of a run: torch's settings within, and given back behind; may be entered within itself."""
        return _tensor_float() if self.name == "tf32" else nullcontext()

    def begin(self, device: torch.device, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Begin a run, with a scale of its own."""
        if self.name == "fp16":
            from .loss_scale import LossScaling

            self.scaling = LossScaling(device.type, optimizers.values())

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        dtype = DTYPES.get(self.name)
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype)

    def bind(self, forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Return the function as it is run in this precision; the very function where there is nothing to do.

        A step that yields its losses is at work only later: the loop enters `autocast` for each.
        """
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
        """Make the gradients true ones; without a wait for the device."""
        if self.scaling is not None:
            self.scaling.unscale(optimizer)

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that steps, and returns False where it skips that; often the optimizer's own."""
        scaling = self.scaling
        return optimizer.step if scaling is None else lambda: scaling.step(optimizer)

    def bind_zero_grad(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that drops gradients, with which the scale moves; often the optimizer's own."""
        scaling = self.scaling
        return optimizer.zero_grad if scaling is None else lambda: scaling.zero_grad(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return `{"scaler": ...}` in fp16, else nothing."""
        return {} if self.scaling is None else {"scaler": self.scaling.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved scale; one of a run in fp16 means nothing to another precision."""
        if self.scaling is not None and "scaler" in state:
            self.scaling.load_state_dict(state["scaler"])

    def _backward_with_scale(self, loss: Tensor) -> None:
        torch.autograd.backward(loss, self._seed(loss, 1.0))

    def _seed(self, loss: Tensor, scale: float) -> Tensor:
        """Return what the gradients of `scale * loss` begin with; made once: making it may wait for the device."""
        key = (loss.dtype, loss.device, scale)
        if key not in self._seeds:
            self._seeds[key] = torch.tensor(scale, dtype=loss.dtype, device=loss.device)
        return self._seeds[key] if self.scaling is None else self.scaling.scale(self._seeds[key])


def _supports(device: torch.device, name: PrecisionName) -> bool:
    if name == "fp32":
        return True
    if device.type != "cuda":
        return name != "tf32" and torch.amp.is_autocast_available(device.type)
    with torch.cuda.device(device):
        if name == "tf32":
            return torch.cuda.is_tf32_supported()
        return name == "fp16" or torch.cuda.is_bf16_supported(including_emulation=False)


@contextmanager
def _tensor_float() -> Iterator[None]:
    """Allow TensorFloat-32 within.

    torch has an older and a newer set of names for this. The older one is used, as its compiler does; it refuses to
    read what a user set by the newer one, which is used then.
    """
    places = _newer_settings()
    values = [each.fp32_precision for each in places]
    try:
        older = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        older = None
    try:
        if older is None:
            for each in places[1:]:
                each.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            torch.backends.cudnn.allow_tf32 = older[1]
        for each, value in zip(places, values, strict=True):
            each.fp32_precision = value


def _newer_settings() -> list[Any]:
    """Return what has an attribute `fp32_precision`, the CPU's first; nothing before torch 2.9."""
    backends: Any = torch.backends
    if not hasattr(backends.cudnn, "conv"):
        return []
    return [backends.mkldnn.matmul, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
