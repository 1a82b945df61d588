"""State that no `state_dict` holds: restored, or reported."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.tests.messages import assert_each, assert_facts
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

SAVED, STEPS = 6, 12


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((3, 4), number / 10), torch.tensor([0, 1, 0])) for number in range(5)]


class Net(nn.Module):
    """A layer, and whatever a test puts beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 2), nn.Dropout(0.0)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.drop(self.layer(inputs)) * self.factor()  # type: ignore[no-any-return]  # a module returns Any

    def factor(self) -> float:
        return 1.0


class Counting(Net):
    """Its attribute changes what it computes."""

    def factor(self) -> float:
        self.calls += self.training
        return 1 + self.calls / 100


class Buffering(Net):
    """So does its buffer, which is not saved."""

    seen: Tensor

    def factor(self) -> float:
        self.seen += self.training
        return 1 + float(self.seen) / 100


class LazyCache(Net):
    """Makes the attribute when it is first needed."""

    def factor(self) -> float:
        self.history: list[float] = getattr(self, "history", [])
        self.history.append(1.0)
        return 1 + len(self.history) / 100


def supervised(net: type[Net] = Net) -> h.Supervised:
    torch.manual_seed(0)
    return h.Supervised(net(), nn.functional.cross_entropy)


class Job:
    """One program: created for each attempt."""

    def __init__(
        self,
        task: Callable[[], Any] = supervised,
        plugins: Callable[[], Iterable[Any]] = tuple,
        *,
        data: Callable[[], Any] = batches,
        optimizer: Callable[[Any], Any] = lambda each: torch.optim.SGD(each, 0.1),
        scheduler: Callable[[Any], Any] | None = None,
        **engine: Any,
    ) -> None:
        self.task, self.plugins, self.data, self.optimizer, self.engine = task, plugins, data, optimizer, engine
        self.scheduler = scheduler

    def fit(self, folder: Path, steps: int, **checkpoint: Any) -> tuple[h.RunResult, Any]:
        task, scheduling = self.task(), [h.LearningRate("step")] if self.scheduler else []
        saving = [h.SaveSchedule(h.At(steps=SAVED)), h.Checkpoint(folder, **checkpoint)]
        trainer = h.Trainer([h.RNGCapture(), *scheduling, *self.plugins(), *saving], device="cpu", **self.engine)
        result = trainer.fit(
            task, self.data(), optimizer=self.optimizer, scheduler=self.scheduler, steps=steps, name="unseen"
        )
        return result, task

    def attempts(self, folder: Path, later: Job | None = None) -> tuple[h.RunResult, bool]:
        """Train in one go, and in two attempts; return the second one's result and whether it ended equal."""
        _, whole = self.fit(folder / "whole", STEPS)
        first, _ = self.fit(folder / "first", SAVED)
        result, resumed = (later or self).fit(folder / "second", STEPS, resume=first.last_checkpoint)
        mine, theirs = (task.model.state_dict() for task in (resumed, whole))
        return result, all(torch.equal(mine[name], theirs[name]) for name in theirs)


def reasons(result: h.RunResult) -> str:
    assert result.resume is not None
    return "; ".join(result.resume.reasons)


class AtStep(h.Plugin):
    """Changes something once, in a way that no state_dict sees."""

    def __init__(self, action: Callable[[h.Run], object]) -> None:
        self.action = action

    @h.on(h.StepEnd)
    def act(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == 3:
            self.action(run)


class CountingTask(h.Supervised):
    """A task with a counter that weighs its loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Net(), nn.functional.cross_entropy)
        self.calls, self.kept = 0, torch.zeros(2)

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        self.calls += 1
        self.kept += 1
        return super().training_step(run, batch) * (1 + self.calls / 100 + float(self.kept[0]) / 50)


def anneal(run: h.Run) -> None:
    run.modules["model"].get_submodule("drop").p = 0.3


def freeze(run: h.Run) -> None:
    run.modules["model"].get_parameter("layer.bias").requires_grad_(False)


def evaluate_dropout(run: h.Run) -> None:
    run.modules["model"].get_submodule("drop").eval()


class NormNet(Net):
    """With a batch norm that a plugin freezes in mid-run."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.BatchNorm1d(2)  # type: ignore[assignment]  # in the place of the dropout


RESTORED = {
    "a module's counter": (Job(lambda: supervised(Counting)), "model.calls"),
    "a buffer that is not persistent": (Job(lambda: supervised(Buffering)), "model.seen"),
    "an attribute that the training made": (Job(lambda: supervised(LazyCache)), "model.history"),
    "a task's counter and tensor": (Job(CountingTask), "task.calls"),
    "a dropout's rate": (Job(supervised, lambda: [AtStep(anneal)]), "model.drop.p"),
    "requires_grad": (Job(supervised, lambda: [AtStep(freeze)]), "model.layer.bias.requires_grad"),
    "eval mode": (Job(lambda: supervised(NormNet), lambda: [AtStep(evaluate_dropout)]), "model.drop.training"),
}


class Decay(torch.optim.SGD):
    """An optimizer with a counter of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.calls
        return super().step(closure)


def remembering() -> Callable[[int], float]:
    seen: list[int] = []

    def factor(step: int) -> float:
        seen.append(step)
        return 1 / len(seen)

    return factor


class Remembering:
    """A loss function with a state."""

    def __init__(self) -> None:
        self.worst = 0.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, targets)
        self.worst = max(self.worst, loss.item())
        return loss * self.worst


class Caching(Dataset[Any]):
    """Keeps what it drew when it was first asked."""

    def __init__(self) -> None:
        self.cache: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return 15

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index not in self.cache:
            self.cache[index] = torch.rand(4)
        return self.cache[index], index % 2


class Growing:
    """A sampler that changes itself."""

    def __init__(self) -> None:
        self.order = list(range(15))

    def __iter__(self) -> Any:
        self.order.append(self.order.pop(0))
        return iter(self.order)

    def __len__(self) -> int:
        return 15


class Rate(h.Plugin):
    """A plugin with a count that is in no state."""

    def __init__(self) -> None:
        self.seen = 0

    @h.on(h.GradientsReady)
    def scale(self, run: h.Run, event: h.GradientsReady) -> None:
        self.seen += 1
        for parameter in run.modules["model"].parameters():
            assert parameter.grad is not None
            parameter.grad /= self.seen


def hooked() -> h.Supervised:
    task, calls = supervised(), [0]

    def hook(module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        calls[0] += 1
        return outputs * (1 + calls[0] / 10)

    task.model.register_forward_hook(hook)
    return task


def iterating() -> h.Supervised:
    task = supervised()
    task.stream = (number for number in range(1000))  # type: ignore[attr-defined]  # the user's own
    return task


RESTORED |= {
    "an optimizer's counter": (Job(optimizer=Decay), "run.optimizers.optimizer.calls"),
    "a closure of a scheduler": (
        Job(scheduler=lambda each: torch.optim.lr_scheduler.LambdaLR(each, remembering())),
        "run.schedulers.optimizer.lr_lambdas[0].<seen>",
    ),
    "a loss function's state": (
        Job(lambda: (torch.manual_seed(0), h.Supervised(Net(), Remembering()))[1]),
        "task.loss_fn.worst",
    ),
    "a plugin's count": (Job(supervised, lambda: [Rate()]), "plugins.rate.seen"),
    "a hook's closure": (Job(hooked), "model._forward_hooks[0].<calls>"),
}


@pytest.mark.parametrize(("job", "path"), RESTORED.values(), ids=RESTORED)
def test_state_is_restored_wherever_it_is(job: Job, path: str, tmp_path: Path) -> None:
    result, is_equal = job.attempts(tmp_path)
    assert result.resume is not None
    assert path in result.resume.restored
    assert result.resume.reasons == (), reasons(result)
    assert is_equal


NAMED = {
    "a dataset's cache": (Job(data=lambda: DataLoader(Caching(), 3, shuffle=True)), "dataset.cache"),
    "a dataset's cache in a subset": (
        Job(data=lambda: DataLoader(Subset(Caching(), range(12)), 3, shuffle=True)),
        "dataset.cache",
    ),
    "a sampler that changes itself": (Job(data=lambda: DataLoader(Caching(), 3, sampler=Growing())), "sampler.order"),
    "the position of a generator function": (Job(iterating), "task.stream (builtins.generator)"),
}


@pytest.mark.parametrize(("job", "reason"), NAMED.values(), ids=NAMED)
def test_state_that_cannot_be_restored_is_named(job: Job, reason: str, tmp_path: Path) -> None:
    result, _ = job.attempts(tmp_path)
    assert reason in reasons(result)


class Turning:
    """A sampler that can start at any index, and counts how often it did."""

    turns = 0

    def indices(self, seed: int, epoch: int, start: int) -> Any:
        self.turns += 1
        return iter([(number + self.turns) % 15 for number in range(start, 15)])

    def __len__(self) -> int:
        return 15


def test_a_sampler_is_compared_before_the_next_epoch_begins(tmp_path: Path) -> None:
    def fit(folder: str, **options: Any) -> h.RunResult:
        loader = DataLoader(Caching(), 3, sampler=Turning())  # type: ignore[arg-type]  # it has no `__iter__`
        saving = h.Checkpoint(tmp_path / folder, every=h.Every(steps=2 * 15 // 3), keep_last=None, **options)
        trainer = h.Trainer([h.RNGCapture(), saving], device="cpu")
        return trainer.fit(supervised(), loader, optimizer=torch.optim.SGD, steps=STEPS)

    fit("first")
    end_of_epoch, _ = sorted((tmp_path / "first").glob("*.pth"), key=lambda path: path.stat().st_mtime_ns)
    assert "sampler.turns" in reasons(fit("second", resume=end_of_epoch))


def test_an_environment_variable_that_the_training_changed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOSS_SCALE", "LOSS_OFFSET", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "1")

    def change(run: h.Run) -> None:
        os.environ |= {"LOSS_SCALE": "2", "SECRET": "-".join(["s3", "cr3t"]), "TORCHINDUCTOR_CACHE_DIR": "cache"}
        del os.environ["LOSS_OFFSET"]

    job = Job(plugins=lambda: [AtStep(change)])
    first, _ = job.fit(tmp_path / "first", SAVED)
    for name in ("LOSS_SCALE", "LOSS_OFFSET"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("SECRET")
    path = first.last_checkpoint
    assert path is not None
    result, _ = Job(plugins=lambda: [AtStep(lambda run: None)]).fit(tmp_path / "second", STEPS, resume=path)

    assert result.resume is not None
    assert [name for name in result.resume.untracked if "environ" in name] == [
        "os.environ['LOSS_OFFSET']",
        "os.environ['LOSS_SCALE']",
        "os.environ['SECRET']",
    ]
    assert b"s3-cr3t" not in path.read_bytes()


class Reread(Dataset[Any]):
    """Counts its reads."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.full((4,), float(self.reads)), torch.tensor(0)


def test_a_validation_set_that_changed_is_named_although_no_batch_follows(tmp_path: Path) -> None:
    def fit(folder: str, **options: Any) -> h.RunResult:
        saving = h.Checkpoint(tmp_path / folder, every=h.Every(batches=len(batches())), keep_last=None, **options)
        trainer = h.Trainer([h.ValidationSchedule(h.Every(batches=2)), saving], device="cpu")
        validation = DataLoader(Reread(), 2)
        return trainer.fit(supervised(), batches(), validation=validation, optimizer=torch.optim.SGD, epochs=1)

    fit("first")
    *_, before_the_end = sorted((tmp_path / "first").glob("*.pth"), key=lambda path: path.stat().st_mtime_ns)
    result = fit("second", resume=before_the_end)

    assert "validation dataset.reads" in reasons(result)


class Option(h.Plugin):
    """A plugin with an option."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    @h.on(h.StepEnd)
    def look(self, run: h.Run, event: h.StepEnd) -> None:
        return


class Quiet(Option):
    affects_training = False


class Watching(Option):
    policy = "observer"


def with_dropout() -> h.Supervised:
    task = supervised()
    task.model.get_submodule("drop").p = 0.5  # type: ignore[assignment]  # an attribute of its own
    return task


CHANGED: Mapping[str, tuple[Job, Job, str]] = {
    "a plugin that is gone": (
        Job(plugins=lambda: [h.GradientClipping(0.1)]),
        Job(),
        "plugin 'gradient_clipping' is no longer registered",
    ),
    "a plugin that is new": (Job(), Job(plugins=lambda: [h.EMA()]), "plugin 'ema' is new"),
    "a plugin's option": (
        Job(plugins=lambda: [h.GradientClipping(0.1)]),
        Job(plugins=lambda: [h.GradientClipping(0.2)]),
        "plugin 'gradient_clipping' had norm = 0.1 and has 0.2",
    ),
    "another order of plugins": (
        Job(plugins=lambda: [h.GradientClipping(0.1), h.GradientAccumulation(2)]),
        Job(plugins=lambda: [h.GradientAccumulation(2), h.GradientClipping(0.1)]),
        "was rng_capture, gradient_clipping, gradient_accumulation and is rng_capture, gradient_accumulation, grad",
    ),
    "another precision": (Job(), Job(precision="bf16"), "the precision was fp32 and is bf16"),
    "accumulation": (
        Job(plugins=lambda: [h.GradientAccumulation(1)]),
        Job(plugins=lambda: [h.GradientAccumulation(2)]),
        "plugin 'gradient_accumulation' had schedule = {0: 1} and has {0: 2}",
    ),
}


@pytest.mark.parametrize(("before", "now", "reason"), CHANGED.values(), ids=CHANGED)
def test_another_program_is_named(before: Job, now: Job, reason: str, tmp_path: Path) -> None:
    result, _ = before.attempts(tmp_path, now)
    assert result.resume is not None
    assert reason in reasons(result)
    assert result.resume.restored == ()


EDITED = {
    "an option of the user's own": (
        Job(plugins=lambda: [Option(1.0)]),
        Job(plugins=lambda: [Option(2.0)]),
        "plugins.option.value",
    ),
    "an attribute of a module": (Job(), Job(with_dropout), "model.drop.p"),
}


@pytest.mark.parametrize(("before", "now", "path"), EDITED.values(), ids=EDITED)
def test_what_the_program_sets_differently_stays_and_is_listed(
    before: Job, now: Job, path: str, tmp_path: Path
) -> None:
    result, _ = before.attempts(tmp_path, now)
    assert result.resume is not None
    assert (result.resume.edited, result.resume.restored) == ((path,), ())
    assert f"program: {path}" in str(result.resume)


@pytest.mark.parametrize("kind", [Quiet, Watching])
def test_plugins_that_cannot_change_the_training_may_come_go_and_change(kind: type[Option], tmp_path: Path) -> None:
    jobs = [Job(plugins=lambda: [kind(1.0)]), Job(plugins=lambda: [kind(2.0)]), Job()]
    for number, (before, now) in enumerate([jobs[:2], jobs[1:], jobs[::-2]]):
        result, is_equal = before.attempts(tmp_path / str(number), now)
        assert (reasons(result), is_equal) == ("", True), reasons(result)


def test_settings_of_torch_are_named(tmp_path: Path) -> None:
    first, _ = Job().fit(tmp_path / "first", SAVED)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        result, _ = Job().fit(tmp_path / "second", STEPS, resume=first.last_checkpoint)
    finally:
        torch.set_num_threads(threads)
    assert result.resume is not None
    assert result.resume.reasons
    assert_facts(reasons(result), "torch's threads", threads, threads + 1)


def test_a_roll_back_restores_them_too(tmp_path: Path) -> None:
    class Poison(h.Plugin):
        @h.on(h.BatchStart)
        def spoil(self, run: h.Run, event: h.BatchStart) -> None:
            if run.progress.batches == 8:
                run.batch = (run.batch[0] * float("nan"), run.batch[1])

    job = Job(lambda: supervised(Counting), lambda: [h.RollBack(), Poison()])
    result, task = job.fit(tmp_path, STEPS)
    assert result.status == "completed"
    assert task.model.calls == 12


def test_numpy_state_of_a_task_is_restored(tmp_path: Path) -> None:
    class Noisy(CountingTask):
        def __init__(self) -> None:
            super().__init__()
            self.noise = np.zeros(3)

        def training_step(self, run: h.Run, batch: Any) -> Tensor:
            self.noise += 1
            return super().training_step(run, batch) + float(self.noise[0])

    result, is_equal = Job(Noisy).attempts(tmp_path)
    assert result.resume is not None
    assert "task.noise" in result.resume.restored
    assert (reasons(result), is_equal) == ("", True)


def test_options_that_the_checkpoint_overrides_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def job(lr: float, step_size: int, momentum: float = 0.9) -> Job:
        return Job(
            optimizer=lambda each: torch.optim.SGD(each, lr, momentum),
            scheduler=lambda each: torch.optim.lr_scheduler.StepLR(each, step_size),
        )

    result, is_equal = job(0.1, 4).attempts(tmp_path, job(0.1, 5, 0.5))
    facts = [
        ("momentum of optimizer", "0.9", "0.5", "checkpoint"),
        ("step_size", "scheduler of optimizer", "4", "5", "checkpoint"),
    ]
    assert_each([note for note in result.notes if "in the program" in note], *facts)
    assert_each([each for each in caplog.messages if "in the program" in each], *facts)
    assert is_equal
    same, _ = job(0.1, 4).attempts(tmp_path / "same")
    assert not [note for note in same.notes if "in the program" in note]


def exchange(run: h.Run) -> None:
    run.modules["model"].drop = nn.Identity()


def hook(run: h.Run) -> None:
    run.modules["model"].layer.weight.register_hook(lambda gradient: gradient * 0.5)


def hook_the_optimizer(run: h.Run) -> None:
    run.optimizer.register_step_pre_hook(lambda optimizer, arguments, options: None)


def mark(run: h.Run) -> None:
    run.modules["model"].layer.weight.scale = 2.0


@pytest.mark.parametrize(
    ("action", "path"),
    [
        (hook, "model.layer.weight._backward_hooks"),
        (hook_the_optimizer, "run.optimizers.optimizer._optimizer_step_pre_hooks"),
    ],
)
def test_a_hook_that_a_plugin_has_registered_is_named(
    tmp_path: Path, action: Callable[[h.Run], None], path: str
) -> None:
    result, _ = Job(plugins=lambda: [AtStep(action)]).attempts(tmp_path)
    assert path in reasons(result)


@pytest.mark.parametrize(("action", "path"), [(exchange, "model.drop"), (mark, "model.layer.weight.scale")])
def test_what_a_plugin_has_put_into_a_module_is_restored(
    tmp_path: Path, action: Callable[[h.Run], None], path: str
) -> None:
    result, is_equal = Job(plugins=lambda: [AtStep(action)]).attempts(tmp_path)
    assert result.resume is not None
    assert path in result.resume.restored
    assert (reasons(result), is_equal) == ("", True)


class Averaging(CountingTask):
    """Keeps an average of its weights in what was the very weights."""

    def __init__(self) -> None:
        super().__init__()
        self.average: dict[str, Tensor] = dict(self.model.state_dict())

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        for name, weight in self.model.state_dict().items():
            self.average[name] = 0.5 * self.average[name] + 0.5 * weight
        return super().training_step(run, batch) * (1 + self.average["layer.weight"].abs().sum().item())


class Expanding(CountingTask):
    """Keeps a tensor whose elements lie in the same place."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = torch.zeros(1).expand(3)

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        self.spread = (self.spread[:1] + 1).expand(3)
        return super().training_step(run, batch) * (1 + float(self.spread[2]) / 50)


class Tallying(CountingTask):
    """Counts in a Counter."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Counter[str]()

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        self.tally["steps"] += 1
        return super().training_step(run, batch) * (1 + self.tally["steps"] / 50)


class Large(CountingTask):
    """Has a number that no checkpoint can hold as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 10**1000


@pytest.mark.parametrize("task", [Averaging, Expanding, Tallying, Large], ids=lambda each: each.__name__)
def test_attributes_of_odd_kinds_are_restored(tmp_path: Path, task: type[CountingTask]) -> None:
    result, is_equal = Job(task).attempts(tmp_path)
    assert (reasons(result), is_equal) == ("", True), reasons(result)


class Longer(list[int]):
    """Whose length nobody can know."""

    def __len__(self) -> int:
        raise NotImplementedError


def nested() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        Longer(), nested(), torch.zeros(3).to_sparse(), torch.zeros(3, device="meta"),
        10**5000, [Longer()],
    ],
    ids=["list", "nested", "sparse", "meta", "long", "within"],
)  # fmt: skip
def test_a_save_never_fails_for_an_attribute(tmp_path: Path, value: Any) -> None:
    class Holding(CountingTask):
        def __init__(self) -> None:
            super().__init__()
            vars(self)["held"] = value

    result, is_equal = Job(Holding).attempts(tmp_path)
    assert result.status == "completed"
    assert is_equal


class Named(h.Task):
    """Its optimizers have the names of its modules."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.one, self.task = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def training_step(self, run: h.Run, batch: Any) -> Any:
        for name in ("one", "task"):
            yield name, nn.functional.cross_entropy(self.task(self.one(batch[0])), batch[1])


def test_optimizers_may_have_the_names_of_modules(tmp_path: Path) -> None:
    def optimizers(task: Named) -> dict[str, Any]:
        return {name: torch.optim.SGD(getattr(task, name).parameters(), 0.1) for name in ("one", "task")}

    def fit(steps: int, **checkpoint: Any) -> h.RunResult:
        task = Named()
        saving = [h.SaveSchedule(h.At(steps=SAVED)), h.Checkpoint(tmp_path, **checkpoint)]
        return h.Trainer([h.RNGCapture(), *saving], device="cpu").fit(
            task, batches(), optimizer=optimizers(task), steps=steps
        )

    fit(SAVED)
    result = fit(STEPS, resume="auto")
    assert result.resume is not None
    assert (result.resume.restored, result.resume.edited, result.resume.reasons) == ((), (), ())
