"""Batch norm over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

GROUP = "process_group"  # where torch's SyncBatchNorm looks for it
Converted = list[tuple[nn.Module, type[nn.Module]]]


def synchronize_batch_norm(modules: Iterable[nn.Module], group: ProcessGroup) -> Converted:
    """Let the batch norms within modules share their statistics; return what `separate_batch_norm` needs.

    torch's own conversion puts new modules in the place of the old ones, and cannot do that for a module that is a
    batch norm itself. Here each stays the object that it was, with its parameters, buffers, hooks and whoever holds it,
    and changes its class, as torch's lazy modules do.

    Args:
        modules: whatever may hold batch norms.
        group: with whom they share.
    """
    converted: Converted = []
    for root in modules:
        for module in root.modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                converted.append((module, type(module)))
                module.__class__ = nn.SyncBatchNorm
                setattr(module, GROUP, group)
    return converted


def separate_batch_norm(converted: Converted) -> None:
    """Make batch norms what they were; what they have learned stays."""
    for module, kind in converted:
        module.__class__ = kind
        delattr(module, GROUP)
