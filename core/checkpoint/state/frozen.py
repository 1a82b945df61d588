"""Frozen weights that a file does not hold: a program that reads it has them, which is verified by digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from ...engines.weights import parameters_of
from ...objects.equality import sums

FROZEN = "frozen"  # in a state: the digests of what its modules lack, by module and name
CHUNK = 1 << 26  # bytes that are hashed at a time
Key = tuple[str, str]  # a module, a name in it
Digests = dict[str, dict[str, str]]


class FrozenWeights:
    """The parameters of a run that have required no gradient, and have not changed, since it began."""

    def __init__(self) -> None:
        self._sums: dict[Key, int] = {}
        self._digests: dict[Key, str] = {}

    def begin(self, modules: Mapping[str, nn.Module]) -> None:
        """Look at what is frozen now; waits for the device once."""
        self._digests = {}
        self._sums = sums({key: each for key, each in _parameters(modules) if not each.requires_grad})

    def without(self, modules: Mapping[str, nn.Module], state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a run without its frozen weights, and with their digests.

        One that has changed since the run began, such as an average that a task keeps, is not left out.
        """
        saved: Mapping[str, Mapping[str, Any]] = state["modules"]
        here = {
            (root, name): each
            for (root, name), each in _parameters(modules)
            if (root, name) in self._sums and not each.requires_grad and name in saved.get(root, {})
        }
        unchanged = {key: here[key] for key, value in sums(here).items() if value == self._sums[key]}
        frozen: Digests = {}
        for (root, name), each in unchanged.items():
            if (root, name) not in self._digests:
                self._digests[root, name] = digest(each)
            frozen.setdefault(root, {})[name] = self._digests[root, name]
        kept = {
            root: {name: each for name, each in weights.items() if (root, name) not in unchanged}
            for root, weights in saved.items()
        }
        return {**state, "modules": kept, FROZEN: frozen}


def with_frozen(saved: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> Mapping[str, Any]:
    """Return a saved state with the frozen weights that it lacks: those of the program, if they are the same.

    Raises:
        ValueError: one of them is another, or is not there.
    """
    if not saved.get(FROZEN):
        return saved
    weights = {
        root: {**of_file, **verified_weights(root, modules.get(root), saved[FROZEN].get(root, {}))}
        for root, of_file in saved["modules"].items()
    }
    return {**saved, "modules": weights}


def verified_weights(root: str, module: nn.Module | None, digests: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the parameters of a module that have these digests, by name.

    Raises:
        ValueError: one has another digest, or is not there.
    """
    own = {} if module is None else dict(parameters_of(module, remove_duplicate=False))
    if any(hasattr(own.get(name), "full_tensor") for name in digests):
        raise ValueError(
            "The checkpoint holds only what was trained (TrainedOnly), and the weights of this program are "
            "divided among its ranks: read it with an engine that has whole weights, such as DDPEngine."
        )
    other = [name for name, value in digests.items() if name not in own or digest(own[name]) != value]
    if other:
        raise ValueError(
            f"The checkpoint holds only what was trained (TrainedOnly), on top of other frozen weights than this "
            f"program has: {len(other)} of {len(digests)} differ, such as {root}.{other[0]}. Load the same base "
            f"weights before fit, in the same dtype."
        )
    return {name: own[name].detach() for name in digests}


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor: its dtype, its shape, all of its bits."""
    found = blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
    flat = tensor.detach().reshape(-1)
    step = max(1, CHUNK // max(1, flat.element_size()))
    for begin in range(0, flat.numel(), step):
        found.update(flat[begin : begin + step].cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _parameters(modules: Mapping[str, nn.Module]) -> Iterator[tuple[Key, Tensor]]:
    for root, module in modules.items():
        for name, each in parameters_of(module, remove_duplicate=False):
            yield (root, name), each
