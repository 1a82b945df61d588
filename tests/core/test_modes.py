"""Train and eval mode, and frozen modules: what the user has set is kept, and what cannot be meant is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heliograph import (
    DDPEngine,
    EpochStart,
    Plugin,
    Run,
    StrictError,
    Supervised,
    Task,
    Trainer,
    TrainRun,
    TrainStart,
    on,
)
from heliograph.tests.kit import class_batches, fit, go_through, sgd
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn

WAY = Callable[..., Any]


class Net(nn.Module):
    """A backbone and a head, with what acts in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.norm(self.backbone(inputs)))
        return outputs


class Distillation(Task):
    """A student, and a teacher that is frozen."""

    def __init__(self) -> None:
        self.student, self.teacher = nn.Linear(4, 2), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        self.teacher.requires_grad_(False)

    def training_step(self, run: Run, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.student(batch[0]), self.teacher(batch[0]))


class Modes(Plugin):
    """Notes which modules are in eval mode when an epoch begins."""

    def __init__(self) -> None:
        self.evaluating: list[str] = []

    @on(EpochStart)
    def look(self, run: Run, event: EpochStart) -> None:
        self.evaluating = evaluating(run.modules)


def evaluating(modules: Any) -> list[str]:
    return [
        f"{root}.{name}".rstrip(".")
        for root, module in modules.items()
        for name, part in module.named_modules()
        if not part.training
    ]


def supervised(model: nn.Module) -> Supervised:
    return Supervised(model, nn.functional.cross_entropy)


def by_fit(task: Any, *plugins: Any) -> Any:
    return fit(*plugins, task=task).warnings


def by_own_loop(task: Any, *plugins: Any) -> Any:
    run: TrainRun = Trainer(plugins, device="cpu").run(task, class_batches(2), optimizer=sgd(), epochs=1)
    return go_through(run).result.warnings


WAYS = [by_fit, by_own_loop]


@pytest.mark.parametrize("train", WAYS)
def test_modules_that_are_in_eval_mode_stay_so(train: WAY) -> None:
    model, modes = Net(), Modes()
    model.norm.eval()
    model.backbone[1].eval()
    before = model.norm.get_buffer("running_mean").clone()
    assert train(supervised(model), modes) == ()
    assert modes.evaluating == evaluating({"model": model}) == ["model.backbone.1", "model.norm"]
    assert torch.equal(model.norm.get_buffer("running_mean"), before)


@pytest.mark.parametrize("train", WAYS)
def test_a_frozen_teacher_in_eval_mode_stays_as_it_is(train: WAY) -> None:
    task, modes = Distillation(), Modes()
    task.teacher.eval()
    before = {name: value.clone() for name, value in task.teacher.state_dict().items()}
    assert train(task, modes) == ()
    assert modes.evaluating == ["teacher", "teacher.0", "teacher.1", "teacher.2"]
    assert all(torch.equal(value, before[name]) for name, value in task.teacher.state_dict().items())


def test_a_module_of_the_task_that_is_trained_in_eval_mode_stays_so() -> None:
    class Parts(Task):
        def __init__(self) -> None:
            self.body, self.head = Net().backbone.eval(), nn.Linear(4, 2)

        def training_step(self, run: Run, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])

    task, modes = Parts(), Modes()
    assert by_fit(task, modes) == ()
    assert modes.evaluating == ["body", "body.0", "body.1", "body.2"]


def test_a_validation_leaves_the_modes_as_they_were() -> None:
    model = Net()
    model.norm.eval()
    Trainer(device="cpu").validate(supervised(model), class_batches(2))
    assert evaluating({"model": model}) == ["model.norm"]


def test_what_a_models_own_train_method_leaves_in_eval_mode_stays_so() -> None:
    class Own(Net):
        def train(self, mode: bool = True) -> Own:
            super().train(mode)
            self.norm.eval()
            return self

    modes = Modes()
    assert by_fit(supervised(Own()), modes) == ()
    assert modes.evaluating == ["model.norm"]
    model = Own()
    model.backbone[2].eval()
    by_fit(supervised(model), modes)
    assert modes.evaluating == ["model.backbone.2", "model.norm"]


@pytest.mark.parametrize("train", WAYS)
def test_a_model_that_an_evaluation_has_left_in_eval_mode_is_put_into_train_mode_and_that_is_said(train: WAY) -> None:
    model, modes = Net(), Modes()
    model.backbone.requires_grad_(False)
    task = Supervised(model.eval(), nn.CrossEntropyLoss())
    (warning,) = train(task, modes)
    assert_facts(warning, "trained module", "eval mode")
    assert modes.evaluating == ["model.backbone", "model.backbone.0", "model.backbone.1", "model.backbone.2"]


def test_a_strict_trainer_refuses_a_model_in_eval_mode() -> None:
    with pytest.raises(StrictError, match="Every trained module"):
        fit(Trainer(device="cpu", strict=True), task=supervised(Net().eval()))


def test_all_of_a_model_is_trained_in_eval_mode_where_a_handler_says_so() -> None:
    trainer, modes = Trainer(device="cpu"), Modes()
    trainer.plugins.register(modes)
    trainer.bus.on(TrainStart, lambda run, event: run.modules["model"].eval())
    assert fit(trainer, task=supervised(Net())).warnings == ()
    assert len(modes.evaluating) == 7


@pytest.mark.parametrize("train", WAYS)
def test_a_frozen_module_in_train_mode_is_warned_of(train: WAY) -> None:
    (warning,) = train(Distillation())
    assert_facts(warning, "Frozen", "train mode", "teacher", "eval()")
    model = Net()
    model.backbone.requires_grad_(False)
    model.norm.requires_grad_(False)
    (warning,) = train(supervised(model))
    assert "train mode: model.backbone, model.norm." in warning


def test_the_names_of_frozen_modules_are_few() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(4).requires_grad_(False) for _ in range(5)), nn.Linear(4, 2))
    (warning,) = by_fit(supervised(model))
    assert "mode: model.0, model.1, model.2" in warning


@pytest.mark.parametrize(
    "part",
    [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), nn.BatchNorm1d(4, track_running_stats=False)],
    ids=["linear", "dropout of nothing", "without statistics"],
)
def test_a_frozen_module_that_is_the_same_in_both_modes_is_not_warned_of(part: nn.Module) -> None:
    assert by_fit(supervised(nn.Sequential(part.requires_grad_(False), nn.Linear(4, 2)))) == ()


class Change(Plugin):
    """Changes the task at `TrainStart`."""

    def __init__(self, change: Callable[[Run], object]) -> None:
        self._change = change

    @on(TrainStart)
    def change(self, run: Run, event: TrainStart) -> None:
        self._change(run)


def put(run: Run) -> nn.Linear:
    added = nn.Linear(4, 2)
    run.modules["model"].add_module("1", added)
    return added


def two_layers() -> Supervised:
    return supervised(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


@pytest.mark.parametrize("train", WAYS)
def test_a_module_that_is_put_in_at_the_start_and_that_no_optimizer_holds_is_an_error(train: WAY) -> None:
    with pytest.raises(ValueError, match=r"optimizer: model\.1\.weight, model\.1\.bias\. They"):
        train(two_layers(), Change(put))


def test_one_that_the_optimizer_is_given_is_trained() -> None:
    added: list[nn.Linear] = []

    def change(run: Run) -> None:
        added.append(put(run))
        run.optimizer.add_param_group({"params": list(added[0].parameters())})
        added.append(nn.Linear(4, 2))
        added[1].load_state_dict(added[0].state_dict())

    by_fit(two_layers(), Change(change))
    assert not torch.equal(added[0].weight, added[1].weight)


def on_ranks() -> tuple[Any, list[str], str]:
    task, modes = Distillation(), Modes()
    task.teacher.eval()
    warnings = fit(Trainer([modes], engine=DDPEngine(device="cpu")), task=task).warnings
    give = Change(lambda run: run.optimizer.add_param_group({"params": list(put(run).parameters())}))
    with pytest.raises(ValueError, match="A handler of TrainStart") as caught:
        fit(Trainer([give], engine=DDPEngine(device="cpu")), task=two_layers())
    return warnings, modes.evaluating, str(caught.value)


def test_several_ranks_keep_modes_and_take_no_new_modules(ranks: Any) -> None:
    for warnings, modes, error in ranks(2).run(on_ranks):
        assert warnings == ()
        assert modes == ["teacher", "teacher.0", "teacher.1", "teacher.2"]
        assert "ranks: model.1.weight, model.1.bias" in error


def test_frozen_ones_may_be_put_in() -> None:
    assert by_fit(two_layers(), Change(lambda run: put(run).requires_grad_(False))) == ()


@pytest.mark.parametrize("name", ["model", "other"])
def test_another_module_of_the_task_is_an_error(name: str) -> None:
    change = Change(lambda run: setattr(run.task, name, nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=f"optimizer: {name}.weight"):
        by_fit(two_layers(), change)


def test_an_optimizer_of_a_part_of_the_parameters_is_no_error() -> None:
    task = two_layers()
    fit(
        Change(lambda run: None),
        task=task,
        optimizer=torch.optim.SGD(task.model.get_submodule("1").parameters(), lr=0.1),
    )
