"""Time the loop on a GPU beside a hand-written one and those of Ignite, Lightning and Hugging Face.

    python packages/tests/benchmarks/gpu_peers.py [--device cpu] [--tiny] [--rounds 5]

Every loop trains the same models on the same batches in pinned memory, without logs, saves or progress bars, with the
settings that make it fastest. In a round each trains once, in shuffled order; a figure is the median over the rounds.
A step is timed from batch to batch, as the loop asks for them, with the device idle at the first and at the last.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import platform
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle, islice
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import heliograph as h
import torch
from heliograph.packages.tests.benchmarks.gpu_models import Work, works
from torch import Tensor, nn

HAND, CONTROL, OURS = "hand-written", "hand-written again", "Heliograph"
BAR = 0.99  # of the steps per second of the hand-written loop
KEPT = 8  # batches, used again and again
AHEAD = 2  # some loops ask for a batch before they train on the one before
PAGE = "docs/explanation/performance.md"

Train = Callable[[Work, "Clocked", torch.device], object]


class Clocked:
    """A loader that looks at the clock when the first and the last of the timed batches are asked for.

    Args:
        work: what is trained.
        device: is waited for before each look.
    """

    def __init__(self, work: Work, device: torch.device) -> None:
        generator, pins = torch.Generator().manual_seed(0), device.type == "cuda"
        drawn = [work.batch(generator) for _ in range(KEPT)]
        self.batches = [tuple(each.pin_memory() if pins else each for each in batch) for batch in drawn]
        self.work, self.device = work, device
        self.looks: list[float] = []

    def __len__(self) -> int:
        return self.work.warm_up + self.work.steps + AHEAD

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(islice(cycle(self.batches), len(self))):
            if number in (self.work.warm_up, self.work.warm_up + self.work.steps):
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                self.looks.append(perf_counter())
            yield batch

    @property
    def steps_per_second(self) -> float:
        """The steps between the two looks, by the seconds."""
        begin, end = self.looks
        return self.work.steps / (end - begin)


def by_hand(work: Work, loader: Iterable[Any], device: torch.device) -> None:
    """Train as one does without a framework."""
    model = work.model().to(device)
    optimizer = work.optimizer(model.parameters())
    for inputs, targets in loader:
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with autocast(work, device):
            loss = work.loss_fn(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
        optimizer.step()
        optimizer.zero_grad()


def autocast(work: Work, device: torch.device) -> Any:
    """Return the context of a forward pass."""
    return torch.autocast(device.type, torch.bfloat16) if work.precision == "bf16" else nullcontext()


def ours(work: Work, loader: Iterable[Any], device: torch.device) -> None:
    """Train with Heliograph, without plugins."""
    trainer = h.Trainer(device=device, precision=work.precision)
    trainer.fit(h.Supervised(work.model(), work.loss_fn), loader, optimizer=work.optimizer, epochs=1)


def with_ignite(work: Work, loader: Iterable[Any], device: torch.device) -> None:
    """Train with Ignite; its step is written by hand, as its users do."""
    from ignite.engine import Engine
    from ignite.utils import convert_tensor

    model = work.model().to(device)
    optimizer = work.optimizer(model.parameters())

    def step(engine: Engine, batch: Any) -> Tensor:
        inputs, targets = (convert_tensor(each, device, non_blocking=True) for each in batch)
        with autocast(work, device):
            loss = work.loss_fn(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
        optimizer.step()
        optimizer.zero_grad()
        return loss

    Engine(step).run(loader, max_epochs=1)


def with_lightning(work: Work, loader: Iterable[Any], device: torch.device) -> None:
    """Train with Lightning."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # set by its import

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return work.loss_fn(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return work.optimizer(self.parameters())

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options: dict[str, Any] = dict.fromkeys(quiet, False)
    options |= {"accelerator": "gpu" if device.type == "cuda" else "cpu", "devices": 1, "max_epochs": 1}
    precision: Any = "bf16-mixed" if work.precision == "bf16" else "32-true"
    pl.Trainer(precision=precision, **options).fit(Module(), loader)


def with_huggingface(work: Work, loader: Iterable[Any], device: torch.device) -> None:
    """Train with the Trainer of Hugging Face; it would look for NaN in every loss, and clip, unless that is set off."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": work.loss_fn(self.model(inputs), labels)}

    class Script(Trainer):
        def get_train_dataloader(self) -> Any:
            return Named(loader)

        def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
            return {name: each.to(device, non_blocking=True) for name, each in inputs.items()}

    with TemporaryDirectory() as folder:
        model = WithLoss()
        arguments = TrainingArguments(
            folder,
            num_train_epochs=1,
            use_cpu=device.type == "cpu",
            bf16=work.precision == "bf16",
            max_grad_norm=0.0,
            logging_nan_inf_filter=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            lr_scheduler_type="constant",
        )
        optimizer = work.optimizer(model.parameters())
        script = Script(model, arguments, optimizers=(optimizer, None), train_dataset=[0])
        script.remove_callback(PrinterCallback)
        script.train()


class Named:
    """Batches as the dicts that a model of transformers is called with."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"inputs": inputs, "labels": targets} for inputs, targets in self.loader)


PEERS: Mapping[str, tuple[str, Train]] = {  # with their packages
    "Ignite": ("ignite", with_ignite),
    "Lightning": ("lightning", with_lightning),
    "Hugging Face": ("transformers", with_huggingface),
}
INSTALLED = {name: train for name, (package, train) in PEERS.items() if find_spec(package) is not None}
LOOPS: Mapping[str, Train] = {HAND: by_hand, CONTROL: by_hand, OURS: ours, **INSTALLED}


def compare(work: Work, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Return the steps per second of each loop in each round."""
    shuffle, found = random.Random(0).shuffle, {name: list[float]() for name in LOOPS}
    for _ in range(rounds):
        order = list(LOOPS)
        shuffle(order)
        for name in order:
            torch.manual_seed(0)
            loader = Clocked(work, device)
            LOOPS[name](work, loader, device)
            found[name].append(loader.steps_per_second)
            gc.collect()  # the models of one loop are gone before the next begins
    return found


def line(work: Work, found: Mapping[str, list[float]]) -> str:
    """Return a row of the table: steps per second by hand, and the share of them that each of the others does."""
    hand = [sum(pair) / 2 for pair in zip(found[HAND], found[CONTROL], strict=True)]
    shares = {
        name: median(
            one / other for one, other in zip(found[name], found[HAND] if name == CONTROL else hand, strict=True)
        )
        for name in LOOPS
        if name != HAND
    }
    cells = [f"{median(hand):,.1f}", *(f"{shares[name]:.3f}" for name in LOOPS if name != HAND)]
    return f"| {work.name} | {' | '.join(cells)} | {'held' if shares[OURS] >= BAR else 'NOT HELD'} |"


def conditions(device: torch.device, rounds: int) -> str:
    """Return what was measured on, and how often."""
    names = {"Ignite": "pytorch-ignite", "Lightning": "lightning", "Hugging Face": "transformers"}
    packages = ", ".join(f"{names[each]} {version(names[each])}" if each in LOOPS else f"no {each}" for each in PEERS)
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else f"the CPU, {platform.machine()}"
    return f"{what}; Python {platform.python_version()}, torch {torch.__version__}, {packages}; {rounds} rounds"


def main() -> None:
    """Print the table, and where it belongs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script out")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps, to try the script out")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    # The Trainer of Hugging Face would take all that there are.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --tiny tries the script out.")
    warnings.simplefilter("ignore")
    print(conditions(device, arguments.rounds), flush=True)
    print(f"steps per second by hand; of the others their share of it; bar for {OURS}: {BAR}\n")
    print(f"| model | {' | '.join(LOOPS)} | bar |\n| --- {'| ---: ' * len(LOOPS)}| --- |", flush=True)
    for work in works(tiny=arguments.tiny):
        print(line(work, compare(work, device, arguments.rounds)), flush=True)
    print(f"\nThe table and the line above it belong into {PAGE}, under the heading for GPUs.")


if __name__ == "__main__":
    main()
