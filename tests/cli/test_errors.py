"""Mistakes in a configuration: one sentence with the key and the nearest name, exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from heliograph.__main__ import main
from heliograph.tests.cli.conftest import Command

MISTAKES = [
    ("--epoch=3", "There is no key 'epoch'. Did you mean 'epochs'?"),
    ("--trainer.devic=cpu", "There is no key 'trainer.devic'. Did you mean 'trainer.device'?"),
    ("--task.model.hiden=3", "task.model: lesson.Net has no option 'hiden'. Did you mean 'hidden'? Known: dropout, h"),
    ("--task.model.hidden=x", "task.model.hidden: takes int, got x."),
    ("--epochs=x", "epochs: takes int or float or null, got x."),
    ("--trainer.precision=bf17", "Literal['fp32', 'tf32', 'bf16', 'fp16'], got bf17. Did you mean 'bf16'?"),
    ("--trainer.engine=dpp", "got dpp. Did you mean 'ddp'?"),
    ("--trainer.engine={ddp: {devic: cpu}}", "trainer.engine: heliograph.DDPEngine has no option 'devic'."),
    ("--trainer.plugins+=early_stoping", "plugin is named 'early_stoping'. Did you mean 'early_stopping'?"),
    ("--trainer.plugins+={early_stopping: {patienc: 3}}", "heliograph.EarlyStopping has no option 'patienc'. Did you"),
    ("--trainer.plugins+={early_stopping: {patience: x}}", "trainer.plugins.patience: takes int, got x."),
    ("--trainer.plugins+={early_stopping: {patience: 0}}", "patience must be a whole number, at least 1; got 0."),
    ("--trainer.plugins+={log_schedule: {step: 3}}", "LogSchedule has no option 'step'. Did you mean 'steps'?"),
    ("--trainer.plugins+={log_schedule: {when: {step: 3}}}", "plugins.when: Unknown counter 'step'. Did you mean"),
    ("--trainer.plugins+={file_log: }", "trainer.plugins: heliograph.FileLog needs folder."),
    ("--trainer.plugins+=heliograph.EarlyStoping", "heliograph has no 'EarlyStoping'. Did you mean 'EarlyStopping'?"),
    ("--trainer.plugins={progress: , progress: }", "--trainer.plugins: the key 'progress' is given twice, in line 1"),
    ("--loader_params={shuffle: true, shuffle: false}", "--loader_params: the key 'shuffle' is given twice"),
    ("--trainer.plugins.monitor=x", "--trainer.plugins.monitor does not name one of the plugins of this configuration"),
    ("--trainer.plugins.early_stopping.patience=2", "or add a plugin before with --trainer.plugins+=NAME."),
    ("--trainer.plugins.learning_rate.pr=step", "LearningRate has no option 'pr'. Did you mean 'per'?"),
    ("--trainer.plugins=3", "trainer.plugins: takes list, got 3."),
    ("--optimizer=torch.optim.Adm", "optimizer: module 'torch.optim' has no 'Adm'. Did you mean 'Adam'?"),
    ("--optimizer.lrr=1", "optimizer: torch.optim.AdamW has no option 'lrr'. Did you mean 'lr'?"),
    ("--optimizer.lr=x", "optimizer.lr: takes float or Tensor, got x."),
    ("--optimizer=lesson.unsaid", "the function lesson.unsaid must say in its annotation that it returns Optimizer."),
    ("--task=lesso.Own", "task: there is no module 'lesso'. Did you mean 'lesson'?"),
    ("--task=lesson.Ownn", "task: module 'lesson' has no 'Ownn'. Did you mean 'Own'?"),
    ("--task.model=torch.nn.Linear", "task.model: torch.nn.Linear needs in_features, out_features."),
    ("--task.model=lesson.sgd", "task.model: lesson.sgd is not a Module, nor a function that says in its annotation"),
    ("--train=3", "train: takes a class path or dict[str, a class path] or null, got 3."),
    ("--train.cont=3", "train: lesson.data has no option 'cont'. Did you mean 'count'?"),
    ("--loader_params.batch_siz=3", "loader_params= has no 'batch_siz'. Did you mean 'batch_size'?"),
    ("--train=null", "fit needs train:, or a DataModule as data:, one of the two."),
    ("--task.metrics=3", "task.metrics: takes"),
    ("--task.loss_fn=lesson.data", "the function lesson.data must say in its annotation that it returns Tensor."),
    ("--epochs=null", "As fit was called, the run has no end: pass epochs= or steps="),
    ("--task=lesson.Data", "lesson.Data needs count."),
]  # fmt: skip


@pytest.mark.sample(12)
@pytest.mark.parametrize(("option", "expected"), MISTAKES)
def test_a_mistake_is_one_sentence(
    fit: Command, option: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(option) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.startswith("heliograph fit: ")
    assert said.count("\n") == 1
    assert "jsonargparse" not in said


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("epochs: 2", "epohs: 2", "There is no key 'epohs'. Did you mean 'epochs'?"),
        ("hidden: 3", "hidde: 3", "task.model: lesson.Net has no option 'hidde'. Did you mean 'hidden'?"),
        ("rng_capture", "rng_captur", "No installed plugin is named 'rng_captur'. Did you mean 'rng_capture'?"),
        ("every: {steps: 2}", "evry: {steps: 2}", "heliograph.Checkpoint has no option 'evry'. Did you mean 'every'?"),
        ("device: cpu", "devic: cpu", "There is no key 'trainer.devic'. Did you mean 'trainer.device'?"),
        ("lesson.Net", "lesson.Nett", "task.model: module 'lesson' has no 'Nett'. Did you mean 'Net'?"),
        ("epochs: 2", "epochs: [2", "lesson.yaml is not YAML: "),
        (
            "epochs: 2",
            "epochs: 2\nepochs: 3",
            "lesson.yaml: the key 'epochs' is given twice, in line 12 and in line 13: k",
        ),
        (
            "    rng_capture:",
            "    checkpoint:\n    rng_capture:",
            "'trainer.plugins.checkpoint' is given twice, in line 16",
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_too(
    fit: Command, folder: Path, old: str, new: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "lesson.yaml").read_text()
    assert old in text
    (folder / "lesson.yaml").write_text(text.replace(old, new))
    assert fit() == 2
    assert expected in capsys.readouterr().err


def test_a_file_that_there_is_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "leson.yaml"]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_no_file_at_all_is_said_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit"]) == 2
    assert "The configuration has no task" in capsys.readouterr().err
