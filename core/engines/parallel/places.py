"""Which device and which backend one of several processes gets."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from ...distributed.ranks.membership import Membership

Backend = Literal["gloo", "nccl"]


def own_device(device: str | torch.device | None, member: Membership) -> torch.device:
    """Return this process's device among those of its machine.

    Args:
        device: what was asked for; None for a GPU where there is one.
        member: this process's place.

    Raises:
        ValueError: several processes cannot compute there, or there are too few GPUs.
    """
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"Unknown device {device!r}: {error}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"Several processes compute on 'cpu' or 'cuda', got device={device!r}.")
    if chosen.type == "cpu" or chosen.index is not None:
        return chosen
    count = torch.cuda.device_count()
    if member.local_rank >= count:
        raise ValueError(
            f"Local rank {member.local_rank} has no GPU: torch sees {count} on this machine. Start no more processes "
            f"per machine than it has GPUs; or pass device='cuda:0' where each process sees its own only, or 'cpu'."
        )
    return torch.device("cuda", member.local_rank)


def checked_backend(backend: Backend | None, device: torch.device) -> Backend:
    """Return what carries gradients between devices; raise ValueError where it cannot.

    Args:
        backend: what was asked for; None for what suits the device.
        device: where they are.
    """
    fitting: Backend = "nccl" if device.type == "cuda" else "gloo"
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"backend= is 'gloo' or 'nccl', got {backend!r}.")
    if backend == "nccl" and fitting != "nccl":
        raise ValueError("backend='nccl' is for device='cuda': on the CPU, take 'gloo'.")
    chosen = backend or fitting
    if chosen == "nccl" and not dist.is_nccl_available():
        raise ValueError("This build of torch has no nccl: pass backend='gloo'.")
    return chosen
