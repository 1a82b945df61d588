"""Train a transformers model, DistilBERT, to tell lines of one module of Python's library from those of another.

    pip install transformers
    python docs/examples/distilbert.py

The weights are random here, so that it runs without a network; `from_pretrained` takes their place. Batches are dicts,
as tokenizers and data collators make them, of lines of about one length.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, random_split
from transformers import DistilBertConfig, DistilBertForSequenceClassification

Batch = dict[str, Tensor]
MODULES = (argparse, inspect)


class Lines(Dataset[dict[str, Any]]):
    """Lines of each module as bytes, with the number of the module."""

    def __init__(self) -> None:
        self.items = [
            {"input_ids": torch.tensor(list(line.encode()[:64])), "labels": label}
            for label, module in enumerate(MODULES)
            for line in dict.fromkeys(map(str.strip, Path(inspect.getfile(module)).read_text().splitlines()))
            if len(line) > 10
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def pad(items: list[dict[str, Any]]) -> Batch:
    """Return a batch of lines: bytes and mask of (batch, length), labels of (batch,)."""
    ids = pad_sequence([item["input_ids"] for item in items], batch_first=True)
    labels = torch.tensor([item["labels"] for item in items])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


class Classifier(h.Task):
    """A model of transformers that computes its own loss."""

    def __init__(self) -> None:
        # DistilBertForSequenceClassification.from_pretrained("distilbert-base-uncased") where there is a network
        config = DistilBertConfig(
            vocab_size=256, max_position_embeddings=64, dim=64, n_layers=2, n_heads=4, hidden_dim=128
        )
        self.model = DistilBertForSequenceClassification(config)

    def training_step(self, run: h.Run, batch: Batch) -> Tensor:
        """Return the model's loss."""
        return self.model(**batch).loss

    def validation_step(self, run: h.Run, batch: Batch) -> Mapping[str, Tensor]:
        """Return the loss and the accuracy."""
        outputs = self.model(**batch)
        return {"loss": outputs.loss, "accuracy": h.accuracy(outputs.logits, batch["labels"])}

    def predict_step(self, run: h.Run, batch: Batch) -> Tensor:
        """Return the number of the likeliest module for each line."""
        return self.model(**batch).logits.argmax(dim=1)


def main() -> None:
    """Train, test the best epoch, and show what it says of some lines."""
    torch.manual_seed(0)
    train, validation, test = random_split(Lines(), [0.7, 0.15, 0.15])
    task = Classifier()
    checkpoint = h.Checkpoint(
        "runs/distilbert",
        every=h.Every(epochs=1),
        keep_best=1,
        monitor="validation/accuracy",
        mode="max",
        resume="auto",
    )
    schedules = [h.ValidationSchedule(epochs=1), h.LearningRate("step"), h.GradientClipping(norm=1.0)]
    trainer = h.Trainer([h.RNGCapture(), *schedules, checkpoint, h.LoadBest()])
    lengths = [len(item["input_ids"]) for item in train]
    trainer.fit(
        task,
        train,
        loader_params={"batch_size": 32, "sampler": h.LengthGroupedSampler(lengths, 32), "collate_fn": pad},
        validation=torch.utils.data.DataLoader(validation, 64, collate_fn=pad),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        scheduler=h.warmup_linear(0.1),
        epochs=6,
    )
    loader: h.LoaderParams = {"batch_size": 64, "collate_fn": pad}
    print(f"accuracy {trainer.test(task, test, loader_params=loader).metrics['test/accuracy']:.3f}")
    labels = trainer.predict(task, test, loader_params=loader).predictions
    for item, label in zip(test, labels[:5], strict=False):
        print(f"{MODULES[label].__name__:>10}: {bytes(item['input_ids'].tolist()).decode()}")


if __name__ == "__main__":
    main()
