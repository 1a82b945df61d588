"""Mistakes in a configuration: one sentence with the key and the nearest name, exit status 2."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from heliograph.__main__ import main
from heliograph.packages.cli.tests.conftest import Command
from heliograph.packages.tests.facts import assert_facts

MISTAKES = [
    ("--epoch=3", "Unknown key 'epoch'. Did you mean 'epochs'?"),
    ("--trainer.devic=cpu", "Unknown key 'trainer.devic'. Did you mean 'trainer.device'?"),
    ("--task.model.hiden=3", "task.model: lesson.Net has no option 'hiden'. Did you mean 'hidden'? Known: dropout, h"),
    ("--task.model.hidden=x", "task.model.hidden: must be int, got x."),
    ("--epochs=x", "epochs: must be int or float or null, got x."),
    ("--trainer.precision=bf17", "Literal['fp32', 'tf32', 'bf16', 'fp16'], got bf17. Did you mean 'bf16'?"),
    ("--trainer.engine=dpp", "got dpp. Did you mean 'ddp'?"),
    ("--trainer.engine={ddp: {devic: cpu}}", "trainer.engine: heliograph.DDPEngine has no option 'devic'."),
    ("--trainer.plugins+=early_stoping", "plugin is named 'early_stoping'. Did you mean 'early_stopping'?"),
    ("--trainer.plugins+={early_stopping: {patienc: 3}}", "heliograph.EarlyStopping has no option 'patienc'. Did you"),
    ("--trainer.plugins+={early_stopping: {patience: x}}", "trainer.plugins.patience: must be int, got x."),
    ("--trainer.plugins+={early_stopping: {patience: 0}}", "patience must be a whole number, at least 1; got 0."),
    ("--trainer.plugins+={log_schedule: {step: 3}}", "LogSchedule has no option 'step'. Did you mean 'steps'?"),
    ("--trainer.plugins+={log_schedule: {when: {step: 3}}}", "plugins.when: Unknown counter 'step'. Did you mean"),
    ("--trainer.plugins+={file_log: }", "trainer.plugins: heliograph.FileLog needs folder."),
    ("--trainer.plugins+=heliograph.EarlyStoping", "heliograph has no 'EarlyStoping'. Did you mean 'EarlyStopping'?"),
    ("--trainer.plugins+=heliograph.Recorder", "heliograph-recorder: from heliograph_recorder import Recorder"),
    ("--trainer.plugins={progress: , progress: }", "{progress: , progress: }: the key 'progress' is repeated"),
    ("--loader_params={shuffle: true, shuffle: false}", "shuffle: false}: the key 'shuffle' is repeated"),
    ("--trainer.plugins.monitor=x", "--trainer.plugins.monitor names no plugin of this configuration"),
    ("--trainer.plugins.early_stopping.patience=2", "or add a plugin first by --trainer.plugins+=NAME."),
    ("--trainer.plugins.learning_rate.pr=step", "LearningRate has no option 'pr'. Did you mean 'per'?"),
    ("--trainer.plugins=3", "trainer.plugins: must be list, got 3."),
    ("--optimizer=torch.optim.Adm", "optimizer: module 'torch.optim' has no 'Adm'. Did you mean 'Adam'?"),
    ("--optimizer.lrr=1", "optimizer: torch.optim.AdamW has no option 'lrr'. Did you mean 'lr'?"),
    ("--optimizer.lr=x", "optimizer.lr: must be float or Tensor, got x."),
    ("--optimizer=lesson.unsaid", "the function lesson.unsaid needs the return annotation Optimizer."),
    ("--task=lesso.Own", "task: no module named 'lesso'. Did you mean 'lesson'?"),
    ("--task=lesson.Ownn", "task: module 'lesson' has no 'Ownn'. Did you mean 'Own'?"),
    ("--task.model=torch.nn.Linear", "task.model: torch.nn.Linear needs in_features, out_features."),
    ("--task.model=lesson.sgd", "task.model: lesson.sgd is neither a Module nor a function whose return annotation"),
    ("--train=3", "train: must be a class path or dict[str, a class path] or null, got 3."),
    ("--train.cont=3", "train: lesson.data has no option 'cont'. Did you mean 'count'?"),
    ("--loader_params.batch_siz=3", "loader_params= has no 'batch_siz'. Did you mean 'batch_size'?"),
    ("--train=null", "fit needs either train: or a DataModule as data:."),
    ("--task.metrics=3", "task.metrics: must be"),
    ("--task.loss_fn=lesson.data", "the function lesson.data needs the return annotation Tensor."),
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


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("epochs: 2", "epohs: 2", ("'epohs'", "Did you mean 'epochs'")),
        ("hidden: 3", "hidde: 3", ("task.model", "lesson.Net", "'hidde'", "'hidden'")),
        ("rng_capture", "rng_captur", ("'rng_captur'", "Did you mean 'rng_capture'")),
        ("every: {steps: 2}", "evry: {steps: 2}", ("heliograph.Checkpoint", "'evry'", "'every'")),
        ("device: cpu", "devic: cpu", ("'trainer.devic'", "'trainer.device'")),
        ("lesson.Net", "lesson.Nett", ("task.model", "'lesson'", "'Nett'", "'Net'")),
        ("epochs: 2", "epochs: [2", ("lesson.yaml is not YAML",)),
        (
            "epochs: 2",
            "epochs: 2\nepochs: 3",
            ("lesson.yaml", "'epochs' is repeated", "line 12", "line 13"),
        ),
        (
            "    rng_capture:",
            "    checkpoint:\n    rng_capture:",
            ("'trainer.plugins.checkpoint' is repeated", "line 16"),
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_too(
    fit: Command, folder: Path, old: str, new: str, expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "lesson.yaml").read_text()
    assert old in text
    (folder / "lesson.yaml").write_text(text.replace(old, new))
    assert fit() == 2
    assert_facts(capsys.readouterr().err, *expected)


KINDS = "must be a class path or dict[str, a class path] or null"
FORM = (
    "A filter is written as {epochs: 1} for Every(epochs=1), {steps: [10, 100]} for At(steps=[10, 100]), "
    "{Between: {epochs: [2, 5]}} for Between(epochs=(2, 5)), {Once: {}} for Once()"
)
ADD = "write --trainer.plugins.NAME.OPTION=VALUE, or add a plugin first by --trainer.plugins+=NAME."
PLUGIN = "plugins belong under trainer.plugins, as trainer.plugins.checkpoint."
ADAM = "Did you mean 'torch.optim.AdamW'?"
GIVEN = "--trainer={plugins: {early_stopping: , learning_rate: {per: step}}}"
REASONS = [
    # The innermost reason, where a value could have several types.
    (["--train=lesson.Data"], "train: lesson.Data needs count."),
    (["--scheduler=torch.optim.lr_scheduler.StepLR"], "scheduler: torch.optim.lr_scheduler.StepLR needs step_size."),
    (["--train.count=many"], "train.count: must be int, got many."),
    (["--optimizer.betas=[0.9]"], "optimizer.betas: must be tuple with 2 elements, got [0.9]."),
    (["--optimizer={a: {torch.optim.SGD: {lr: x}}}"], "optimizer.lr: must be float or Tensor, got x."),
    (["--optimizer=null", "--optimizer.lr=1"], f"optimizer: {KINDS}, got only its option lr=1."),
    (["--train=./data"], f"train: {KINDS}, got ./data."),
    (["--task=[lesson.Own]"], "task: must be a class path, got ['lesson.Own']."),
    (["--optimizer=torch.optim"], "optimizer: must be a class path, got module 'torch.optim'."),
    (
        ["--optimizer={torch.optim.lr_scheduler.StepLR: {step_size: 3}}"],
        "optimizer: torch.optim.lr_scheduler.StepLR is neither an Optimizer "
        "nor a function whose return annotation is one.",
    ),
    (
        ["--optimizer={class_path: torch.optim.SGD, lr: 0.01}"],
        "optimizer: arguments of a class must be under init_args, next to class_path.",
    ),
    (
        ["--task={heliograph.Supervised: 3}"],
        "task: arguments of heliograph.Supervised must be a mapping: {heliograph.Supervised: {option: value}}.",
    ),
    (["--trainer.plugins={progress: 3}"], "progress: options must be a mapping, {progress: {option: value}}, got 3."),
    (["--trainer.plugins=[3]"], "trainer.plugins: must be a class path, got 3."),
    (
        ["--trainer.plugins=[{init_args: {a: 1}}]"],
        "trainer.plugins: must be a class path, got {'init_args': {'a': 1}}.",
    ),
    (["--trainer=3"], "trainer: must be a mapping of keys, got 3."),
    (
        ["--scheduler={torch.optim.lr_scheduler.ExponentialLR: {Gamma: 0.9}}"],
        "scheduler: torch.optim.lr_scheduler.ExponentialLR has no option 'Gamma'. Did you mean 'gamma'? "
        "Known: gamma, last_epoch, optimizer.",
    ),
    (
        ["--scheduler={torch.optim.lr_scheduler.CosineAnnealingLR: {T_maxx: 9}}"],
        "scheduler: torch.optim.lr_scheduler.CosineAnnealingLR has no option 'T_maxx'. Did you mean 'T_max'? "
        "Known: T_max, eta_min, last_epoch, optimizer.",
    ),
    # Names without their modules.
    (
        ["--optimizer={AdamW: {lr: 0.01}}"],
        "optimizer: AdamW is not a class path. Did you mean 'torch.optim.AdamW'?",
    ),
    (["--task=supervised"], "task: must be a class path, got supervised. Did you mean 'heliograph.Supervised'?"),
    (
        ["--task.model={Linear: {bias: true}}"],
        "task.model: Linear is not a class path. Did you mean 'torch.nn.Linear'?",
    ),
    (
        ["--train=data"],
        f"train: {KINDS}, got data. A class path starts with a module, for example my_module.data.",
    ),
    # Null, where a type does not have it.
    (["--optimizer.lr=null"], "optimizer.lr: must be float or Tensor, got null."),
    (["--task.model.dropout=null"], "task.model.dropout: must be float, got null."),
    (["--trainer.strict=null"], "trainer.strict: must be bool, got null."),
    # Plugins by their names.
    (["--checkpoint.every.steps=5"], f"Unknown key 'checkpoint': {PLUGIN}"),
    (["--trainer.checkpoint.folder=x"], f"Unknown key 'trainer.checkpoint': {PLUGIN}"),
    (
        ["--trainer.plugins.checkpoint.every.steps=5"],
        f"trainer.plugins.every: {FORM}, got only its option steps=5.",
    ),
    (
        [GIVEN, "--trainer.plugins.early_stopping.patience=0"],
        "trainer.plugins: patience must be a whole number, at least 1; got 0.",
    ),
    (
        [GIVEN, "--trainer.plugins.early_stoping.patience=2"],
        f"--trainer.plugins.early_stoping.patience names no plugin of this configuration: {ADD} "
        "Did you mean 'early_stopping'? Known: early_stopping, learning_rate.",
    ),
    # The command line itself.
    (["--ranks=0"], "ranks must be a whole number, at least 1, or null for this process alone; got 0."),
    (
        ["--folder=lesson.py"],
        "Nothing can be saved in lesson.py: lesson.py is not a folder. Choose another path.",
    ),
    (["--train={a: 1"], "{a: 1 is not YAML: expected ',' or '}', but got '<stream end>' in line 1, column 6."),
    (["--task="], "--task needs a value: --task=VALUE."),
    (["--epochs"], "--epochs needs a value: --epochs=VALUE."),
    (
        ["--epochs=3", "lesson.yaml"],
        "unrecognized arguments: lesson.yaml: options have the form --KEY=VALUE, files precede them.",
    ),
    (["--config", "none.yaml"], "Cannot read none.yaml: No such file or directory."),
    (["--config=none.yaml"], "Cannot read none.yaml: No such file or directory."),
    (
        ["epochs=3"],
        "Cannot read epochs=3: No such file or directory. Options start with two dashes: --KEY=VALUE.",
    ),
]


@pytest.mark.sample(12)
@pytest.mark.parametrize(("words", "expected"), REASONS, ids=[" ".join(words) for words, _ in REASONS])
def test_the_sentence_gives_the_innermost_reason(
    fit: Command, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(*words) == 2
    assert capsys.readouterr().err == f"heliograph fit: {expected}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("mapping of keys", "task: my_module.MyTask.")),
        ("- a\n", ("mapping of keys",)),
        (
            "hello\n",
            ("mapping of keys",),
        ),
        (
            "task:\n\tlesson.Own:\n",
            ("is not YAML", "'\\t'", "indent by spaces", "line 2, column 1"),
        ),
        ("{[a]: b}\n", ("is not YAML", "unhashable key", "line 1, column 2")),
    ],
)
def test_a_file_that_is_not_a_mapping(
    folder: Path, text: str, expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "other.yaml").write_text(text)
    assert main(["fit", "other.yaml"]) == 2
    assert_facts(capsys.readouterr().err, "heliograph fit: other.yaml ", *expected)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "plugins:",
            "plugin:",
            ("'trainer.plugin'", "'trainer.plugins'", "Known: trainer.cudnn_benchmark, ", ", trainer.use_cpu."),
        ),
        ("{warmup: 0.1}", "{}", ("scheduler: heliograph.warmup_cosine", "warmup.")),
        ("torch.optim.AdamW: {", "AdamW: {", (f"optimizer: {KINDS}", "{'AdamW': {'lr': 0.01}}", ADAM)),
        (
            "{torch.optim.AdamW: {lr: 0.01}}",
            "{class_path: torch.optim.AdamW, lr: 0.01}",
            (f"optimizer: {KINDS}", "{'class_path': 'torch.optim.AdamW', 'lr': 0.01}", "under init_args"),
        ),
        ("{lr: 0.01}", "{lr: 0,01}", ("optimizer: keys must", "got 1.")),
        ("{lr: 0.01}", "{lr: null}", ("optimizer.lr: must", "float or Tensor", "got null.")),
        ("plugins:\n", "checkpoint:\n  plugins:\n", ("'trainer.checkpoint'", PLUGIN)),
    ],
)
def test_a_mistake_in_the_file_gives_the_innermost_reason(
    fit: Command, folder: Path, old: str, new: str, expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "lesson.yaml").read_text()
    assert old in text
    (folder / "lesson.yaml").write_text(text.replace(old, new))
    assert fit() == 2
    assert_facts(capsys.readouterr().err, "heliograph fit: ", *expected)


def test_an_empty_key_is_left_out(folder: Path) -> None:
    rest = "train: lesson.data\nloader_params: {batch_size: 4}\noptimizer: lesson.sgd\nepochs: 1\n"
    (folder / "lesson.yaml").write_text(f"task: lesson.Own\n{rest}scheduler:\ntrainer:\n")
    assert main(["fit", "lesson.yaml"]) == 0


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (
            "--weights=bst",
            ("weights='bst'", "Did you mean 'best'", "best, last."),
        ),
        ("--weights=gone.pth", ("no checkpoint", "gone.pth", "Known: none.")),
    ],
)
def test_weights_that_there_are_not(
    fit: Command, option: str, expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit("--validation=lesson.data", option, verb="validate") == 2
    assert_facts(capsys.readouterr().err, "heliograph validate: ", *expected)


def test_a_file_that_there_is_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "leson.yaml"]) == 2
    said = capsys.readouterr().err
    assert_facts(said, "heliograph fit: ", "leson.yaml", "No such file")


@pytest.mark.parametrize(
    "later",
    ["--trainer.plugins=[checkpoint: {folder: other}]", "--trainer={plugins: [progress: ]}", "--config=again.yaml"],
)
def test_an_option_of_a_plugin_that_is_replaced_is_a_mistake(
    fit: Command, folder: Path, later: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(folder / "lesson.yaml", folder / "again.yaml")
    assert fit("--trainer.plugins.checkpoint.keep_best=2", later) == 2
    expected = ("heliograph fit: ", "--trainer.plugins.keep_best=2", "no effect", "replaced later")
    assert_facts(capsys.readouterr().err, *expected)


def test_no_file_at_all_is_said_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit"]) == 2
    assert_facts(capsys.readouterr().err, "configuration has no task")
