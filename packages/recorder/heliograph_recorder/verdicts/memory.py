"""The memory that a process has in use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the bytes of this process in memory, 0 where the system does not say; Linux does."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def device_bytes(device: Any) -> int:
    """Return the bytes of tensors on a CUDA device, without waiting for it; 0 for another one."""
    if getattr(device, "type", "") != "cuda":
        return 0
    import torch

    return int(torch.cuda.memory_allocated(device))
