"""Whether all ranks built the same model; batch norm over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from itertools import zip_longest

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ...distributed.ranks.exchange import Exchange


def check_same(group: Exchange, modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError on every rank unless all ranks have equal modules, except for their values."""
    for name, module in modules.items():
        for part, value in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(value):
                raise ValueError(
                    f"{name}.{part} gets its shape in the first forward pass only. On several ranks it must have one "
                    f"before: call the model once on a batch, and make its optimizer after that."
                )
    own = [
        f"the {kind} {name}.{part} of {value.dtype} {list(value.shape)}"
        for name, module in modules.items()
        for kind, parts in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for part, value in parts
    ]
    digests = group.gather_objects(sha256("\n".join(own).encode()).digest())
    if len(set(digests)) == 1:
        return
    everyone = group.gather_objects(own)
    rank = next(rank for rank, each in enumerate(everyone) if each != everyone[0])
    pairs = zip_longest(everyone[0], everyone[rank], fillvalue="nothing more")
    first, other = next(pair for pair in pairs if pair[0] != pair[1])
    raise ValueError(
        f"The task's modules are not the same on all ranks: rank 0 has {first}, and rank {rank} has {other}. Build "
        f"the same model everywhere."
    )


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
