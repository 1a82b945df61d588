"""Peers in turns with the hand-written loop: alone, with the usual set, and over several sources of batches.

Alone and with the usual set, Ignite runs in `lean` and `usual`, beside ours.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from heliograph.packages.tests.benchmarks import harness, lean, usual
from heliograph.packages.tests.benchmarks.harness import Batch, Seconds, Train, Turns, batches_of, race, shuffled
from heliograph.packages.tests.benchmarks.lean import CONTROL, HAND
from heliograph.packages.tests.benchmarks.peers.loss import loss_in_turns
from torch.nn.functional import mse_loss

EPOCHS = 1
IGNITE, TORCHTNT, FABRIC = "Ignite", "TorchTNT", "Lightning Fabric"
LIGHTNING, HUGGINGFACE = "Lightning Trainer", "Hugging Face Trainer"
OURS = "heliograph, Supervised"
FILES = {TORCHTNT: "torchtnt", FABRIC: "fabric", LIGHTNING: "lightning", HUGGINGFACE: "huggingface"}
KINDS = {"lean": tuple(FILES), "usual": (TORCHTNT, LIGHTNING, HUGGINGFACE)}
ASIDE = Path(sys.prefix) / "peers"  # where `make bench` puts TorchTNT

Loops = dict[str, Callable[..., None]]


def installed(kind: str) -> list[str]:
    """Return the peers that have such a loop, without TorchTNT where it is not installed."""
    return [name for name in KINDS[kind] if name != TORCHTNT or _torchtnt_is_installed()]


def loops(kind: str) -> Loops:
    """Return the loops of these peers."""
    warnings.filterwarnings("ignore", "pkg_resources is deprecated")  # TorchTNT imports it
    names = installed(kind)
    return {
        name: getattr(import_module(f"heliograph.packages.tests.benchmarks.peers.{FILES[name]}"), kind)
        for name in names
    }


def _torchtnt_is_installed() -> bool:
    """Return whether it can be imported; where `make bench` puts it, no other library sees what it brings."""
    if str(ASIDE) not in sys.path:
        sys.path.append(str(ASIDE))
    return find_spec("torchtnt") is not None


def race_lean(seed: int) -> Seconds:
    """Time the loops without callbacks, over prebuilt batches."""
    variants: dict[str, Train] = {HAND: lean.by_hand, CONTROL: lean.by_hand}
    for name, loop in loops("lean").items():
        variants[name] = partial(_prebuilt, loop)
    return race(variants, EPOCHS, seed)


def _prebuilt(loop: Callable[..., None], turns: Turns, epochs: int) -> None:
    loop(turns, epochs, mse_loss)


def race_usual(seed: int) -> Seconds:
    """Time the loops with the usual set; each with what it has of its own."""
    trains: Loops = {HAND: usual.by_hand, CONTROL: usual.by_hand, **loops("usual")}
    with TemporaryDirectory() as place, Path(os.devnull).open("w") as quiet:
        variants: dict[str, Train] = {}
        for number, (name, train) in enumerate(trains.items()):
            (folder := Path(place) / str(number)).mkdir()
            variants[name] = partial(train, folder, quiet)
        with redirect_stdout(quiet), redirect_stderr(quiet):
            return race(variants, EPOCHS, seed)


def race_list(seed: int) -> Seconds:
    """Time ours and Ignite's over a list of batches, which Lightning takes for a list of loaders."""
    return _race_over(seed, lambda: batches_of(harness.EPOCH), {})


def race_loader(seed: int) -> Seconds:
    """Time the loops over a shuffled `DataLoader` of a user's dataset, without workers."""
    return _race_over(seed, shuffled, loops("lean"))


def race_workers(seed: int) -> Seconds:
    """Time the loops over the same with two workers."""
    return _race_over(seed, partial(shuffled, num_workers=2), loops("lean"))


def _race_over(seed: int, make: Callable[[], Iterable[Batch]], peers: Loops) -> Seconds:
    ours = {HAND: lean.by_hand, CONTROL: lean.by_hand, OURS: lean.fit_supervised, IGNITE: lean.ignite}
    variants = {name: partial(_read, loop, make) for name, loop in {**ours, **peers}.items()}
    return race(variants, EPOCHS, seed)


def _read(loop: Callable[..., None], make: Callable[[], Iterable[Batch]], turns: Turns, epochs: int) -> None:
    loop(make(), epochs, loss_in_turns(turns, epochs))
