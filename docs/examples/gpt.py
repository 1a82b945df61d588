"""Train a small GPT, byte by byte, on lines of Python's own standard library, and let it write some.

    python docs/examples/gpt.py

The loss is a sum over bytes, with their count, so lines of any length weigh as their bytes do, also over the two
micro-batches of a step. Killed at any time, the same command resumes where it was, and ends with the same weights.
It prints the loss on a module that it has not seen, about 2.0 (counts of which byte follows which three others give
2.2), and eight lines of its own.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import typing
from functools import partial
from pathlib import Path
from types import ModuleType

import heliograph as h
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

BYTES, LONGEST, WIDTH = 128, 80, 64


class GPT(nn.Module):
    """A decoder: two layers of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of each next byte, (batch, length, 128), for bytes of (batch, length)."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, text.device)
        embedded = self.bytes(text) + self.positions(torch.arange(length, device=text.device))
        return self.head(self.layers(embedded, mask, is_causal=True))

    @torch.no_grad()
    def write(self, lines: int, temperature: float = 0.5) -> list[str]:
        """Return lines that it makes up."""
        self.eval()
        text = torch.full((lines, 1), ord("\n"), device=self.head.weight.device)
        while text.shape[1] < LONGEST:
            odds = (self(text)[:, -1] / temperature).softmax(dim=-1)
            text = torch.cat([text, odds.multinomial(1)], dim=1)
        return [bytes(line).decode("ascii").split("\n")[1] for line in text.tolist()]


class NextByte(h.Task):
    """Predict each byte of a line from those before it; the padding is 0."""

    def __init__(self) -> None:
        self.model = GPT()

    def training_step(self, run: h.Run, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss over the bytes, and their number."""
        target = text[:, 1:]
        loss = cross_entropy(self.model(text[:, :-1]).mT, target, ignore_index=0, reduction="sum")
        return loss, (target != 0).sum()

    def validation_step(self, run: h.Run, text: Tensor) -> tuple[Tensor, Tensor]:
        """Do as in training."""
        return self.training_step(run, text)


class Lines(Dataset[Tensor]):
    """Different lines of a module's source as bytes of (length,), each from line break to line break."""

    def __init__(self, *modules: ModuleType) -> None:
        sources = "".join(Path(inspect.getfile(module)).read_text() for module in modules)
        lines = [f"\n{line}\n" for line in dict.fromkeys(map(str.strip, sources.splitlines()))]
        self.lines = [torch.tensor(list(line.encode())) for line in lines if line.isascii() and len(line) <= LONGEST]
        self.lengths = [len(line) for line in self.lines]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Tensor:
        return self.lines[index]


def main() -> NextByte:
    """Train, and say how well."""
    train, held_out = Lines(ast, inspect, typing), Lines(argparse)
    torch.manual_seed(0)
    task = NextByte()
    schedules = [h.LogSchedule(fraction=0.1), h.ValidationSchedule(epochs=1), h.LearningRate("step")]
    steps = [h.GradientAccumulation(2), h.GradientClipping(norm=1.0)]
    checkpoint = h.Checkpoint("runs/gpt", every=h.Every(fraction=0.1), resume="auto")
    trainer = h.Trainer([h.RNGCapture(), *schedules, *steps, checkpoint, h.ProgressBar()])
    pad = partial(pad_sequence, batch_first=True)
    sampler = h.TokenBudgetBatchSampler(train.lengths, tokens=400, multiple_of=8)
    result = trainer.fit(
        task,
        train,
        loader_params={"batch_sampler": sampler, "collate_fn": pad},
        validation=DataLoader(held_out, batch_size=100, collate_fn=pad),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        scheduler=h.warmup_cosine(0.1),
        epochs=3,
    )
    print(f"{result.progress.tokens:,} bytes seen, validation loss {result.metrics['validation/loss']:.2f}")
    return task


if __name__ == "__main__":
    for line in main().model.write(8):
        print(line)
