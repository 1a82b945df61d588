"""The losses of a block of batches, which stay on their device until the block is written."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def copy_loss(loss: Tensor | None) -> Tensor | None:
    return None if loss is None else loss.detach().clone().reshape(())


def read_losses(losses: Sequence[Tensor | None], skips: Sequence[bool]) -> tuple[float, ...]:
    tensors = [each for each in losses if each is not None]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    values = [math.nan if each is None else next(numbers) for each in losses]
    return tuple(math.nan if skip else value for value, skip in zip(values, skips, strict=True))
