"""Write golden files: `python packages/tests/golden/make.py FOLDER`, in a new folder, with the code to be kept.

`schema_3` holds those of commit a326ba4, with the first schema of checkpoints that was given to others: a
checkpoint from the border of an epoch, one from the middle of the next, the recording of that run, its rules file, and
in `ranks` the same of two ranks. The tests resume, explain and replay them, so they stay as they are, except that
`ranks` was removed from the layout of the data when nothing used it any more.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from heliograph import (
    Checkpoint,
    DDPEngine,
    EarlyStopping,
    Every,
    FileLog,
    JsonlLog,
    LearningRate,
    LogSchedule,
    Plugin,
    RNGCapture,
    RunResult,
    SaveSchedule,
    Supervised,
    Trainer,
    ValidationSchedule,
    launch,
)
from heliograph_recorder import Recorder
from heliograph_rules import RuleController
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

NAME = "golden"
EPOCHS = 3
BATCHES = 4  # in an epoch
RULES = """\
controller_metrics:
  - name: loss
    class: Loss
  - name: window
    class: HistoryBasedMetric
    arguments:
      window_size: 2

controllers:
  - name: log_at_a_low_loss
    triggers:
      - on_log
    rule: loss["loss"] < 10
    patience:
      patience_threshold: 1
    operations:
      - hfcontrols.should_log
  - name: stop_when_it_gets_worse
    triggers:
      - on_epoch_end
    rule: len(window.metrics.eval_loss) == 2 and window.metrics.eval_loss[0] < window.metrics.eval_loss[1]
    operations:
      - hfcontrols.should_training_stop
"""


def make_data() -> TensorDataset:
    """Return the same 16 samples each time, whatever the generators do."""
    inputs = torch.arange(32.0).reshape(16, 2) / 32
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def make_task() -> Supervised:
    """Return the small network, the same each time."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.25), nn.Linear(3, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).reshape(parameter.shape))
    return Supervised(model, nn.functional.mse_loss)


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return one that keeps a state of its own."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_plugins(logs: Path, *more: Plugin) -> list[Plugin]:
    """Return a plugin of every kind that keeps a state."""
    return [
        RNGCapture(6691),
        EarlyStopping(patience=50),
        JsonlLog(logs / "log.jsonl"),
        FileLog(logs),
        LearningRate("step"),
        LogSchedule(Every(steps=3)),
        ValidationSchedule(Every(epochs=1)),
        SaveSchedule(Every(epochs=1), at_end=True),
        *more,
    ]


def fit(
    checkpoint: Checkpoint, logs: Path, *more: Plugin, epochs: int, steps: int | None = None, ranks: int = 1
) -> RunResult:
    """Train; several ranks train on the same global batches as one."""
    plugins = make_plugins(logs, checkpoint, *more)
    engine = DDPEngine(device="cpu") if ranks > 1 else None
    trainer = Trainer(plugins, device="cpu") if engine is None else Trainer(plugins, engine=engine)
    return trainer.fit(
        make_task(),
        DataLoader(make_data(), batch_size=4 // ranks, shuffle=True),
        validation=DataLoader(make_data(), batch_size=8 // ranks),
        optimizer=make_optimizer,
        scheduler=lambda optimizer: StepLR(optimizer, step_size=5, gamma=0.5),
        name=NAME,
        epochs=epochs,
        steps=steps,
    )


def write(folder: Path, ranks: int = 1) -> None:
    """Leave a checkpoint from the border of an epoch, one from the middle of the next, and the recording of both."""
    checkpoint = Checkpoint(folder, keep_last=None, keep_best=1, monitor="validation/loss")
    more = [RuleController("rules.yaml"), Recorder(folder, losses=True)]
    fit(checkpoint, Path("logs"), *more, epochs=EPOCHS, steps=BATCHES + 2, ranks=ranks)


def main(folder: Path) -> None:
    """Write the files of one process and of two."""
    folder = folder.resolve()
    with TemporaryDirectory() as scratch:
        os.chdir(scratch)
        Path("rules.yaml").write_text(RULES)
        write(Path("golden"))
        launch(write, Path("golden/ranks"), 2, nprocs=2)
        shutil.copy("rules.yaml", "golden")
        shutil.copytree("golden", folder, ignore=shutil.ignore_patterns("*.lock", ".*"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
