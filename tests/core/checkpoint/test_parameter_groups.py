"""Parameter groups that are added in a run: resumed, they equal those of a run that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    CheckpointLoaded,
    DDPEngine,
    EpochStart,
    Every,
    FSDPEngine,
    LearningRate,
    LoadBest,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SaveSchedule,
    Supervised,
    Trainer,
    TrainStart,
    ValidationSchedule,
    on,
)
from heliograph.core.checkpoint.ranks import digest
from heliograph.tests.kit import class_batches, go_through, sgd
from heliograph.tests.messages import has_facts
from heliograph.tests.ranks_pool import Pool
from torch import nn

Make = Callable[..., Any]


class Unfreeze(Plugin):
    """Trains the first layer, too, from the second epoch on; slower, and without the decay of the others."""

    @on(TrainStart, CheckpointLoaded)
    def freeze(self, run: Run, event: TrainStart | CheckpointLoaded) -> None:
        trained = {id(each) for group in run.optimizer.param_groups for each in group["params"]}
        for each in run.modules["model"].parameters():
            each.requires_grad_(id(each) in trained)

    @on(EpochStart)
    def unfreeze(self, run: Run, event: EpochStart) -> None:
        if event.epoch == 1 and not event.resumed:
            first: Any = run.modules["model"][0]
            first.requires_grad_(True)
            self.add(run.optimizer, first)
            self.follow(run.scheduler)

    def add(self, optimizer: Any, first: Any) -> None:
        optimizer.add_param_group({"params": first.parameters(), "lr": 0.02, "weight_decay": 0.0})

    def follow(self, scheduler: Any) -> None:
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs.append(0.02)
            scheduler.optimizer.param_groups[-1]["initial_lr"] = 0.02
        if hasattr(scheduler, "lr_lambdas"):
            scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])


def decay(step: int) -> float:
    return 0.9**step


SCHEDULERS: dict[str, Any] = {
    "none": None,
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, decay),
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd(momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1, weight_decay=0.1),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


class Ended:
    """A run that ended, with all that it trained."""

    def __init__(
        self,
        *plugins: Any,
        optimizer: Any = "sgd",
        scheduler: str = "none",
        named: bool = False,
        epochs: int = 3,
    ) -> None:
        self.model = network()
        last: Any = self.model[2]
        given = last.named_parameters() if named else last.parameters()
        made = OPTIMIZERS[optimizer](given) if isinstance(optimizer, str) else optimizer(self.model)
        by = SCHEDULERS[scheduler]
        data = class_batches(3)
        stepping = [] if by is None else [LearningRate("step")]
        validating = ValidationSchedule(Every(epochs=1))
        run = Trainer([RNGCapture(), validating, *stepping, *plugins], device="cpu").run(
            Supervised(self.model, nn.functional.cross_entropy),
            data,
            validation=data,
            optimizer=made,
            scheduler=by,
            epochs=epochs,
        )
        self.result: RunResult = go_through(run).result
        self.state: Any = deepcopy((self.model.state_dict(), made.state_dict()))
        self.rates = [group["lr"] for group in made.param_groups]

    def check_equal(self, other: Ended) -> None:
        """Assert that another run has ended the same, to the last bit."""
        assert self.rates == other.rates
        assert digest(self.state) == digest(other.state)


def saving(folder: Path, **options: Any) -> list[Any]:
    return [SaveSchedule(Every(steps=1), at_end=False), Checkpoint(folder, keep_last=None, **options)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_resumed_from_anywhere_and_equal(optimizer: str, scheduler: str, tmp_path: Path) -> None:
    whole = Ended(Unfreeze(), *saving(tmp_path / "whole"), optimizer=optimizer, scheduler=scheduler)
    paths = sorted((tmp_path / "whole").glob("*.pth"))
    assert len(paths) == 9
    assert [len(each["params"]) for each in whole.state[1]["param_groups"]] == [2, 2]
    for path in paths[1::2]:
        plugins = [Unfreeze(), *saving(tmp_path / path.stem, resume=path)]
        resumed = Ended(*plugins, optimizer=optimizer, scheduler=scheduler)
        resumed.check_equal(whole)
        assert resumed.result.resume is not None
        assert resumed.result.resume.reasons == ()
        facts = ("'optimizer'", "2 parameter groups", "1 parameter group ")
        noted = any(has_facts(note, *facts) for note in resumed.result.notes)
        assert noted == (int(path.stem.rpartition("_")[2]) > 3)


def test_a_group_of_named_parameters_is_resumed(tmp_path: Path) -> None:
    class Named(Unfreeze):
        def add(self, optimizer: Any, first: Any) -> None:
            optimizer.add_param_group({"params": list(first.named_parameters("first")), "lr": 0.02})

    whole = Ended(Named(), *saving(tmp_path), named=True)
    resumed = Ended(Named(), *saving(tmp_path, resume=tmp_path / "run_epoch_1_iter_5.pth"), named=True)
    resumed.check_equal(whole)
    assert resumed.state[1]["param_groups"][1]["param_names"] == ["first.weight", "first.bias"]


def test_parameters_that_a_group_gained_come_back(tmp_path: Path) -> None:
    class Extend(Unfreeze):
        def add(self, optimizer: Any, first: Any) -> None:
            optimizer.param_groups[0]["params"].extend(first.parameters())

    whole = Ended(Extend(), *saving(tmp_path))
    Ended(Extend(), *saving(tmp_path, resume=tmp_path / "run_epoch_1_iter_5.pth")).check_equal(whole)


def test_groups_in_another_order_get_their_own_state(tmp_path: Path) -> None:
    """Torch would give the state of one layer's momentum to the other: they have as many parameters."""

    def made(places: tuple[int, int]) -> Any:
        return lambda model: torch.optim.SGD(
            [{"params": model[place].parameters(), "lr": 0.1 + place} for place in places], momentum=0.9
        )

    whole = Ended(*saving(tmp_path), optimizer=made((0, 2)))
    path = tmp_path / "run_epoch_1_iter_5.pth"
    Ended(*saving(tmp_path, resume=path), optimizer=made((2, 0))).check_equal(whole)


@pytest.mark.parametrize("scheduler", ["none", "lambda"])
def test_a_run_that_goes_back_drops_the_group_and_adds_it_again(scheduler: str) -> None:
    class Back(Plugin):
        kept: Any = None
        groups: Any = None

        @on(BatchEnd)
        def back(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches == 2 and self.kept is None:
                self.kept = deepcopy(run.state_dict())
            if run.progress.batches == 5 and self.groups is None:
                run.roll_back(self.kept)

        @on(CheckpointLoaded)
        def look(self, run: Run, event: CheckpointLoaded) -> None:
            self.groups = len(run.optimizer.param_groups)

    back = Back()
    whole, again = Ended(Unfreeze(), scheduler=scheduler), Ended(Unfreeze(), back, scheduler=scheduler)
    assert back.groups == 1
    again.check_equal(whole)


def test_the_best_comes_back_with_the_groups_that_it_had(tmp_path: Path) -> None:
    class Worse(Plugin):
        @on(EpochStart)
        def ruin(self, run: Run, event: EpochStart) -> None:
            if event.epoch == 2:
                run.optimizer.param_groups[0]["lr"] = 1e6

    best = Checkpoint(tmp_path, keep_best=1, monitor="validation/loss")
    plugins = [SaveSchedule(Every(epochs=1)), best, LoadBest("everything")]
    ended = Ended(Unfreeze(), Worse(), *plugins, scheduler="lambda")
    assert ended.result.best_checkpoint is not None
    state = torch.load(ended.result.best_checkpoint, weights_only=True)
    assert len(ended.rates) == len(state["optimizers"]["optimizer"]["param_groups"])
    assert digest(ended.state[1]) == digest(state["optimizers"]["optimizer"])


def train_on_ranks(kind: str, folder: Path, resume: Path | None) -> tuple[bytes, tuple[int, ...]]:
    """Train on each rank; return a digest of the final state, and the sizes of the groups."""
    engine = DDPEngine(device="cpu") if kind == "ddp" else FSDPEngine(device="cpu", state=kind)  # type: ignore[arg-type]

    class Add(Plugin):
        @on(EpochStart)
        def add(self, run: Run, event: EpochStart) -> None:
            if event.epoch == 1 and not event.resumed:
                first: Any = run.modules["model"][0]
                first.zero_grad()
                run.optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.02, "weight_decay": 0.0})

    model = network()
    last: Any = model[2]
    optimizer = OPTIMIZERS["sgd"](last.parameters())
    plugins = [RNGCapture(), Add(), *saving(folder, resume=resume)]
    data = [(torch.full((3, 4), float(number)), torch.tensor([0, 1, 0])) for number in range(6)]
    task = Supervised(model, nn.functional.cross_entropy)
    Trainer(plugins, engine=engine).fit(task, data, optimizer=optimizer, epochs=2)
    ended = digest([model.state_dict(), optimizer.state_dict()])
    return ended, tuple(len(group["params"]) for group in optimizer.param_groups)


@pytest.mark.parametrize("kind", ["ddp", "full", "sharded"])
def test_it_is_resumed_on_ranks_and_equal(kind: str, ranks: Pool, tmp_path: Path) -> None:
    whole = ranks(2).run(train_on_ranks, kind, tmp_path / "whole", None)
    path = tmp_path / "whole" / "run_epoch_1_iter_5.pth"
    resumed = ranks(2).run(train_on_ranks, kind, tmp_path / "resumed", path)
    assert resumed == whole
    assert [sizes for _, sizes in whole] == [(2, 2), (2, 2)]


# What is refused.


def edited(tmp_path: Path, **changes: Any) -> list[Any]:
    """Return plugins that resume from a cut with two groups, with some of its parts changed."""
    cut: dict[str, Any] = {}

    class Keep(Plugin):
        @on(BatchEnd)
        def keep(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches == 5:
                cut.update(deepcopy(run.state_dict()))

    class Resume(Plugin):
        @on(TrainStart)
        def begin(self, run: Run, event: TrainStart) -> None:
            run.resume({**cut, **changes})

    Ended(Unfreeze(), Keep())
    return [Resume(), Unfreeze()]


WAYS = (
    r"Give fit an optimizer with the checkpoint's groups, and add further groups .* or load only the weights, with load"
)


def test_a_checkpoint_without_the_names_says_how_many_and_how_to_continue(tmp_path: Path) -> None:
    what = r"'optimizer'.*2 parameter groups.*1 parameter.*unknown.*"
    with pytest.raises(ValueError, match=what + WAYS):
        Ended(*edited(tmp_path, groups={}))


def test_parameters_of_no_module_cannot_be_found_again(tmp_path: Path) -> None:
    groups = {"parameters": {"optimizer": [["model.2.weight", "model.2.bias"], [None, None]]}, "functions": {}}
    with pytest.raises(ValueError, match=rf"task\. {WAYS}"):
        Ended(*edited(tmp_path, groups=groups))


def test_a_program_that_trains_more_than_the_checkpoint_s_is_refused(tmp_path: Path) -> None:
    Ended(*saving(tmp_path), epochs=1)
    plugins = saving(tmp_path, resume="auto")
    with pytest.raises(ValueError, match=rf"lack model\.0\.bias, model\.0\.weight\. {WAYS}"):
        Ended(*plugins, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


def test_a_function_of_a_group_s_own_is_not_saved(tmp_path: Path) -> None:
    class Own(Unfreeze):
        def follow(self, scheduler: Any) -> None:
            super().follow(scheduler)
            scheduler.lr_lambdas[-1] = lambda step: 0.5**step

    Ended(Own(), *saving(tmp_path), scheduler="lambda", epochs=2)
    with pytest.raises(ValueError, match="functions for 2 parameter"):
        Ended(Own(), *saving(tmp_path, resume="auto"), scheduler="lambda")
