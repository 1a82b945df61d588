"""Frozen weights that a checkpoint leaves out: the resuming program has them, verified by digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..engines.options import parameters_of
from .ranks import digest

FROZEN = "frozen"  # in a state: the digests of the weights that it lacks, by module and name
Key = tuple[str, str]  # a module, a name in it


def with_frozen(saved: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> Mapping[str, Any]:
    """Return a saved state with the frozen weights that it lacks, taken from the program.

    Raises:
        ValueError: the program has other weights, or lacks one.
    """
    if not saved.get(FROZEN):
        return saved
    weights = {
        root: {**saved_weights, **verified_weights(root, modules.get(root), saved[FROZEN].get(root, {}))}
        for root, saved_weights in saved["modules"].items()
    }
    return {**saved, "modules": weights}


def verified_weights(root: str, module: nn.Module | None, digests: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the parameters of a module that have these digests, by name.

    Raises:
        ValueError: one has another digest, or is missing.
    """
    parameters = {} if module is None else dict(parameters_of(module, remove_duplicate=False))
    if any(hasattr(parameters.get(name), "full_tensor") for name in digests):
        raise ValueError(
            "The checkpoint holds only trained weights (TrainedOnly), and this program shards its weights: read it "
            "with an engine that has full weights on each rank, such as DDPEngine."
        )
    mismatched = [
        name for name, value in digests.items() if name not in parameters or digest(parameters[name]).hex() != value
    ]
    if mismatched:
        raise ValueError(
            f"The checkpoint holds only trained weights (TrainedOnly), and the frozen weights of this program differ: "
            f"{len(mismatched)} of {len(digests)}, such as {root}.{mismatched[0]}. Load the same base weights before "
            f"fit, in the same dtype."
        )
    return {name: parameters[name].detach() for name in digests}


def named_parameters(modules: Mapping[str, nn.Module]) -> Iterator[tuple[Key, Tensor]]:
    for root, module in modules.items():
        for name, parameter in parameters_of(module, remove_duplicate=False):
            yield (root, name), parameter
