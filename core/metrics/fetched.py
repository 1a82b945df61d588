"""Tensors on their way to the host: copied during the backward pass, read before the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Fetched:
    """A tensor on its way to the host: from a GPU without a wait, from other devices when it is read."""

    __slots__ = ("_arrival", "_copy")

    def __init__(self, tensor: Tensor) -> None:
        self._copy, self._arrival = tensor.detach(), None
        if tensor.is_cuda:
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy = on_host.copy_(self._copy, non_blocking=True)
            self._arrival = torch.cuda.current_stream(tensor.device).record_event()

    @property
    def is_there(self) -> bool:
        # As far as that is known.
        return self._arrival is None or self._arrival.query()

    def read(self) -> Any:
        return self.wait().tolist()

    def wait(self) -> Tensor:
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy
