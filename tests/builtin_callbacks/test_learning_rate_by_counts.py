"""LearningRate with schedulers that are given counts, as those of timm: a class of the same surface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import Every, LearningRate, Trainer, ValidationSchedule
from heliograph.tests import kit

BATCHES = kit.class_batches(3)


class Counted:
    """Sets the rate to 1 / (1 + count), of the unit that it counts."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, t_in_epochs: bool) -> None:
        self.optimizer, self.t_in_epochs = optimizer, t_in_epochs
        self.calls: list[tuple[str, int]] = []

    def step(self, epoch: int, metric: float | None = None) -> None:
        self._set("epoch", epoch, is_due=self.t_in_epochs)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self._set("step", num_updates, is_due=not self.t_in_epochs)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("optimizer", "calls")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def _set(self, unit: str, count: int, *, is_due: bool) -> None:
        self.calls.append((unit, count))
        if is_due:
            self.optimizer.param_groups[0]["lr"] = 1 / (1 + count)


class OfAPlateau(Counted):
    """Holds torch's scheduler, as timm's of a plateau."""

    lr_scheduler = None


def by_steps(optimizer: torch.optim.Optimizer) -> Counted:
    return Counted(optimizer, t_in_epochs=False)


def by_epochs(optimizer: torch.optim.Optimizer) -> Counted:
    return Counted(optimizer, t_in_epochs=True)


def test_it_is_given_the_steps_or_the_epochs_that_are_finished() -> None:
    model = kit.linear_classifier()
    optimizer = torch.optim.SGD(model.model.parameters(), lr=0.5)
    scheduler = by_steps(optimizer)
    kit.fit(LearningRate("step"), task=model, train=BATCHES, optimizer=optimizer, scheduler=scheduler, epochs=2)
    assert scheduler.calls == [("step", count) for count in range(1, 7)]
    assert optimizer.param_groups[0]["lr"] == 1 / 7
    scheduler = by_epochs(optimizer)
    kit.fit(LearningRate("epoch"), task=model, train=BATCHES, optimizer=optimizer, scheduler=scheduler, epochs=2)
    assert scheduler.calls == [("epoch", 1), ("epoch", 2)]
    assert optimizer.param_groups[0]["lr"] == 1 / 3


@pytest.mark.parametrize(("per", "make"), [("step", by_steps), ("epoch", by_epochs)])
@pytest.mark.parametrize("step", [2, 3, 5])
def test_a_resumed_run_continues_with_the_counts(per: Any, make: Any, step: int, tmp_path: Path) -> None:
    def fit(folder: Path, **options: Any) -> Any:
        task = kit.linear_classifier()
        plugins = [LearningRate(per), *kit.saving(folder, Every(steps=1), keep_last=None, **options)]
        result = kit.fit(*plugins, task=task, train=BATCHES, scheduler=make, epochs=2)
        assert result.warnings == ()
        return task.model.weight

    whole = fit(tmp_path)
    assert torch.equal(fit(tmp_path / "again", resume=next(tmp_path.glob(f"*_iter_{step}.pth"))), whole)


def test_each_of_several_optimizers_has_its_own_count() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

        def training_step(self, run: Any, batch: Any) -> Any:
            for name in ("one", "other") if run.progress.batch != 1 else ("one",):
                yield name, torch.nn.functional.cross_entropy(getattr(self, name)(batch[0]), batch[1])

    made: dict[str, Counted] = {}

    def make(name: str) -> Any:
        return lambda optimizer: made.setdefault(name, by_steps(optimizer))

    task = Two()
    optimizers = {name: torch.optim.SGD(getattr(task, name).parameters(), lr=0.1) for name in ("one", "other")}
    schedulers = {name: make(name) for name in optimizers}
    kit.fit(LearningRate("step"), task=task, train=BATCHES, optimizer=optimizers, scheduler=schedulers)
    assert [count for _, count in made["one"].calls] == [1, 2, 3]
    assert [count for _, count in made["other"].calls] == [1, 2]


@pytest.mark.parametrize(
    ("per", "make", "error"),
    [
        ("step", by_epochs, r"Counted.*counts epochs.*LearningRate\('epoch'\).*=False"),
        (
            "epoch",
            by_steps,
            r"Counted.*counts optimizer steps.*LearningRate\('step'\).*=True",
        ),
        (
            "plateau",
            by_epochs,
            r"Counted.*save its patience.*ReduceLROnPlateau",
        ),
        (
            "epoch",
            lambda each: OfAPlateau(each, t_in_epochs=True),
            r"OfAPlateau.*save its patience",
        ),
    ],
)
def test_what_would_never_act_is_refused(per: Any, make: Any, error: str) -> None:
    monitor = {"monitor": "validation/loss"} if per == "plateau" else {}
    trainer = Trainer([LearningRate(per, **monitor), ValidationSchedule(Every(epochs=1))], device="cpu")
    with pytest.raises(ValueError, match=error):
        kit.fit(trainer, train=BATCHES, validation=BATCHES, scheduler=make)
