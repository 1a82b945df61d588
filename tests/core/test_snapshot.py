"""The consistent snapshot: what is in it, what it refuses, what it restores."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    CheckpointLoaded,
    EpochEnd,
    EpochStart,
    Every,
    LearningRate,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SavePoint,
    Supervised,
    Task,
    TrainEnd,
    Trainer,
    TrainStart,
    on,
)
from heliograph.core.checkpoint import checks, schema
from heliograph.core.checkpoint.checks import check_plain
from heliograph.tests.kit import adam, random_batches
from heliograph.tests.messages import assert_each, has_facts
from torch import Tensor, nn

Pair = namedtuple("Pair", "one two")  # the untyped kind is what is tested


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    ONE = "one"


class Real(float):
    pass


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        1.5,
        "text",
        b"bytes",
        torch.ones(2),
        [1, (2.0, {"a": None})],
        OrderedDict(a=[torch.ones(1)]),
        {1: {"b": ()}},
        nn.Parameter(torch.ones(1)),
    ],
)
def test_plain_values_load_safely(tmp_path: Path, value: Any) -> None:
    check_plain(value, "state")
    torch.save(value, tmp_path / "value.pth")
    torch.load(tmp_path / "value.pth", weights_only=True)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.float64(1.0), "numpy.float64"),
        (np.int64(1), "numpy.int64"),
        (np.ones(2), "numpy.ndarray"),
        (Path("x"), "Path"),
        ({1, 2}, "builtins.set"),
        (1j, "builtins.complex"),
        (len, "builtin_function_or_method"),
        (Number.ONE, "Number"),
        (Word.ONE, "Word"),
        (Real(1.0), "Real"),
        (Pair(1, 2), "Pair"),
        (defaultdict(int), "defaultdict"),
        (torch.device("cpu"), "torch.device"),
        (torch.float32, "torch.dtype"),
        (type("Own", (dict,), {})(), "Own"),
        (type("Own", (list,), {})(), "Own"),
    ],
)
def test_what_a_safe_load_might_refuse_is_refused_with_its_place(value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"^state\['a'\]\[1\] is an? .*{kind}:") as info:
        check_plain({"a": [0, value]}, "state")

    assert "Convert it in state_dict()" in str(info.value)


def test_keys_are_looked_at_too() -> None:
    with pytest.raises(TypeError, match=r"^a key of state\['a'\]"):
        check_plain({"a": {Path("x"): 1}}, "state")


def test_a_counter_is_refused_or_loads(tmp_path: Path) -> None:
    try:
        check_plain(Counter(a=1), "state")
    except TypeError:
        return
    torch.save(Counter(a=1), tmp_path / "value.pth")
    torch.load(tmp_path / "value.pth", weights_only=True)


@pytest.mark.parametrize("lacking", checks.REQUIRED)
def test_an_incomplete_snapshot(lacking: str) -> None:
    whole: dict[str, Any] = dict.fromkeys(checks.REQUIRED, 0) | {"schema": schema.SCHEMA}
    checks.check_schema(whole)
    del whole[lacking]
    with pytest.raises(ValueError, match=rf"heliograph: it lacks {lacking}\."):
        checks.check_schema(whole)


def test_a_snapshot_that_is_no_mapping_or_of_another_schema() -> None:
    with pytest.raises(ValueError, match="it lacks schema, run_name"):
        checks.check_schema([])  # type: ignore[arg-type]
    for other in (schema.SCHEMA + 1, schema.SCHEMA - 1, "4"):
        with pytest.raises(ValueError, match=f"schema {other!r}, this version"):
            checks.check_schema(dict.fromkeys(checks.REQUIRED, 0) | {"schema": other})


# In a run.


def supervised() -> Supervised:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Supervised(nn.Linear(4, 2), nn.functional.mse_loss)


def fit(task: Any, saved: Mapping[str, Any] | None = None, **options: Any) -> tuple[RunResult, dict[str, Any]]:
    """Train; return the result and the cut at the end."""
    trainer = Trainer(options.pop("plugins", ()), device="cpu")
    if saved is not None:
        trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
    cut: dict[str, Any] = {}
    trainer.bus.on(TrainEnd, lambda run, event: cut.update(deepcopy(run.state_dict())))
    options = {"optimizer": adam(0.1), "epochs": 2, **options}
    return trainer.fit(task, random_batches(3), **options), cut


def test_the_snapshot_holds_everything() -> None:
    task = supervised()
    _, cut = fit(task, name="digits")

    assert set(cut) >= {*checks.REQUIRED, "schedulers", "versions", "task", "means"}
    assert cut["schema"] == schema.SCHEMA
    assert cut["run_name"] == "digits"
    assert (cut["progress"]["epoch"], cut["progress"]["steps"]) == (2, 6)
    assert torch.equal(cut["modules"]["model"]["weight"], task.model.weight)  # type: ignore[arg-type]
    assert cut["optimizers"]["optimizer"]["state"][0]["step"] == 6
    assert cut["optimizer_kinds"] == {"optimizer": "Adam"}
    assert cut["schedulers"] == cut["scheduler_kinds"] == {}
    assert cut["versions"].keys() == {"heliograph", "python", "torch", "numpy"}
    assert cut["versions"]["torch"] == str(torch.__version__)
    assert cut["world"] == {"size": 1, "batch_size": 1, "accumulation": 1}
    assert cut["ranks"] == [{}]
    assert cut["control"] == {"due": [], "postponed": [], "end_epoch": False}
    assert cut["data"]["source"] == {"source": "sequence", "batches": 3}


def test_the_snapshot_is_of_the_live_tensors() -> None:
    task = supervised()
    shared: list[bool] = []
    trainer = Trainer(device="cpu")
    trainer.bus.on(
        TrainEnd,
        lambda run, event: shared.append(
            run.state_dict()["modules"]["model"]["weight"].data_ptr() == task.model.weight.data_ptr()  # type: ignore[operator]
        ),
    )
    trainer.fit(task, random_batches(3), optimizer=adam(0.1), epochs=1)

    assert shared == [True]


def test_resumed_is_bit_equal_with_adam() -> None:
    whole, halted = supervised(), supervised()
    fit(whole, epochs=4)
    _, cut = fit(halted, epochs=2)
    resumed = supervised()
    result, _ = fit(resumed, cut, epochs=4)

    assert torch.equal(whole.model.weight, resumed.model.weight)  # type: ignore[arg-type]
    assert result.progress.steps == 12
    assert_each(result.notes, ("epoch 2", "batch 0", "step 6", "a state"))


def test_the_note_names_the_path() -> None:
    _, cut = fit(supervised())
    seen: list[Path | None] = []
    trainer = Trainer(device="cpu")
    trainer.bus.on(TrainStart, lambda run, event: run.resume(cut, Path("a.pth")))
    trainer.bus.on(CheckpointLoaded, lambda run, event: seen.append(event.path))
    result = trainer.fit(supervised(), random_batches(3), optimizer=adam(0.1), epochs=3)

    assert seen == [Path("a.pth")]
    assert result.notes[0].endswith("from a.pth")


def test_other_modules_are_refused() -> None:
    _, cut = fit(supervised())
    cut["modules"] = {"net": {}}
    with pytest.raises(ValueError, match=r"modules \['net'\],"):
        fit(supervised(), cut)


def test_optimizers_of_other_names_are_refused() -> None:
    _, cut = fit(supervised())
    cut["optimizers"] = {"generator": cut["optimizers"]["optimizer"]}
    with pytest.raises(ValueError, match=r"optimizers \['generator'\],"):
        fit(supervised(), cut)


def test_a_broken_state_is_refused() -> None:
    with pytest.raises(ValueError, match="checkpoint of heliograph"):
        fit(supervised(), {"schema": schema.SCHEMA})


class Counting(Task):
    """A task with state beside its modules."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 2)
        self.count = 0

    def training_step(self, run: Run, batch: Any) -> Tensor:
        self.count += 1
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.count = saved["count"]


def test_a_task_s_own_state() -> None:
    _, cut = fit(Counting())
    resumed = Counting()
    fit(resumed, cut, epochs=3)

    assert cut["task"] == {"task": {"count": 6}}
    assert resumed.count == 9


class Module(nn.Module):
    """A task that is itself a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, run: Run, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])


def test_a_task_that_is_a_module_is_saved_once() -> None:
    task = Module()
    _, cut = fit(task)
    resumed = Module()
    fit(resumed, cut)  # at its end already: nothing is trained

    assert list(cut["modules"]) == ["task"]
    assert cut["task"] == {}
    assert torch.equal(task.layer.weight, resumed.layer.weight)


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_scheduler_is_restored_where_there_is_one(scheduled: bool) -> None:
    from heliograph import LearningRate

    def options(epochs: int, *, scheduled: bool) -> dict[str, Any]:
        task = supervised()
        optimizer = adam(0.1)(list(task.model.parameters()))
        made: dict[str, Any] = {"task": task, "optimizer": optimizer, "epochs": epochs}
        if scheduled:
            made |= {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
                "plugins": [LearningRate("epoch")],
            }
        return made

    _, cut = fit(**options(2, scheduled=True))
    assert cut["schedulers"]["optimizer"]["last_epoch"] == 2
    resumed = options(3, scheduled=scheduled)
    fit(saved=cut, **resumed)
    if scheduled:
        assert resumed["scheduler"].last_epoch == 3
        assert resumed["optimizer"].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


def test_a_scheduler_that_is_new_starts_again() -> None:
    from heliograph import LearningRate

    _, cut = fit(supervised(), epochs=1)
    task = supervised()
    optimizer = adam(0.1)(list(task.model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    fit(task, cut, optimizer=optimizer, scheduler=scheduler, plugins=[LearningRate("epoch")], epochs=3)

    assert scheduler.last_epoch == 2


def test_metrics_are_restored() -> None:
    _, cut = fit(supervised())
    cut["metrics"] = {"validation/loss": 0.25}
    result, _ = fit(supervised(), cut)

    assert result.metrics == {"validation/loss": 0.25}


def test_fit_twice_from_one_state() -> None:
    _, cut = fit(supervised())
    results: list[Any] = []
    for _ in range(2):
        task = supervised()
        fit(task, cut, epochs=4)
        results.append(task.model.weight)

    assert torch.equal(*results)


# What of the program is other than it was.


class Remembers(Plugin):
    """Has a state."""

    @on(BatchEnd)
    def listen(self, run: Run, event: BatchEnd) -> None:
        """Listen."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing over."""


def doubts(result: RunResult) -> list[str]:
    """Return the reasons, but for those that an uninterrupted run without RNGCapture has too."""
    assert result.resume is not None
    return [reason for reason in result.resume.reasons if "RNGCapture" not in reason]


def test_an_unchanged_program_leaves_no_doubt() -> None:
    _, cut = fit(supervised(), plugins=[Remembers()], epochs=1)
    result, _ = fit(supervised(), cut, plugins=[Remembers()])

    assert doubts(result) == []


def test_a_plugin_that_found_no_state_is_a_doubt_unless_it_observes() -> None:
    _, cut = fit(supervised(), plugins=[Remembers()], epochs=1)
    del cut["plugins"]["remembers"]
    observer = Remembers().named("observer")
    observer.policy = "observer"
    result, _ = fit(supervised(), cut, plugins=[Remembers(), observer])

    assert_each(doubts(result), ["'remembers' has no state"])
    assert result.resume is not None
    assert result.resume.reasons
    assert result.resume.fresh_plugins == ("remembers", "observer")


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def exponential(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        (None, step_lr, ("was none", "is StepLR")),
        (step_lr, None, ("was StepLR", "is none")),
        (step_lr, exponential, ("was StepLR", "is ExponentialLR")),
    ],
)
def test_another_scheduler_is_a_doubt_and_starts_again(before: Any, now: Any, reason: tuple[str, str]) -> None:
    def options(make: Any) -> dict[str, Any]:
        return {} if make is None else {"scheduler": make, "plugins": [LearningRate("step")]}

    _, cut = fit(supervised(), epochs=1, **options(before))
    result, _ = fit(supervised(), cut, **options(now))

    assert any(has_facts(doubt, "scheduler", *reason) for doubt in doubts(result))


def test_other_software_is_a_doubt() -> None:
    _, cut = fit(supervised(), epochs=1)
    cut["versions"]["numpy"] = "1.0"
    result, _ = fit(supervised(), cut)

    assert_each(doubts(result), ("numpy 1.0", np.__version__))


def test_the_learning_rate_of_the_checkpoint_continues_and_a_changed_one_is_a_warning() -> None:
    _, cut = fit(supervised(), epochs=1)
    result, again = fit(supervised(), cut, optimizer=adam(0.5), epochs=2)

    facts = ("learning rate 0.5", "0.1", "CheckpointLoaded", "optimizer.param_groups", "base_lrs")
    assert_each(result.warnings, facts)
    assert fit(supervised(), cut)[0].warnings == ()
    assert fit(supervised(), again, optimizer=adam(0.5), epochs=3)[0].warnings == result.warnings  # it is still so


def test_a_learning_rate_that_a_plugin_had_changed_is_not_one_of_another_program() -> None:
    class Halves(Plugin):
        @on(EpochEnd)
        def halve(self, run: Run, event: EpochEnd) -> None:
            run.optimizer.param_groups[0]["lr"] /= 2

        @on(SavePoint)
        def save(self, run: Run, event: SavePoint) -> None:
            """Keeps the program's rates."""

    _, cut = fit(supervised(), epochs=1, plugins=[Halves()])
    result, _ = fit(supervised(), cut, plugins=[Halves()], epochs=2)
    assert result.warnings == ()


@pytest.mark.parametrize("resumed_at", [(1, 0), (0, 2)])
def test_an_epoch_that_continues_says_so(resumed_at: tuple[int, int]) -> None:
    starts: list[tuple[int, bool]] = []
    cuts: dict[tuple[int, int], dict[str, Any]] = {}

    class Watch(Plugin):
        @on(BatchEnd, EpochEnd)
        def keep(self, run: Run, event: BatchEnd | EpochEnd) -> None:
            cuts[run.progress.epoch, run.progress.batch] = deepcopy(run.state_dict())

        @on(EpochStart)
        def note(self, run: Run, event: EpochStart) -> None:
            starts.append((event.epoch, event.resumed))

    fit(supervised(), plugins=[Watch()])
    assert starts == [(0, False), (1, False)]

    starts.clear()
    fit(supervised(), cuts[resumed_at], plugins=[Watch()])
    epoch, batch = resumed_at
    assert starts[0] == (epoch, batch > 0)


class Cosine(Plugin):
    """Sets the rate of each step to a number of NumPy, which it keeps in its state, too."""

    def __init__(self, kind: type[np.floating[Any]]) -> None:
        self.kind, self.rate = kind, kind(0.05)

    @on(BatchEnd)
    def set(self, run: Run, event: BatchEnd) -> None:
        self.rate = self.kind(self.rate * self.kind(0.9))
        run.optimizer.param_groups[0]["lr"] = self.rate

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate, "done": np.bool_(True), "seen": [np.int64(1), np.array(2.0)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rate = state["rate"]
        kinds = [type(value) for value in (state["done"], *state["seen"])]
        assert kinds == [np.bool_, np.int64, np.ndarray]


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_rates_of_numpy_are_saved_and_a_resumed_run_equals_an_uninterrupted_one(
    kind: type[np.floating[Any]], tmp_path: Path
) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5 * (1 + np.cos(done / 18 * np.pi)))

    def train(epochs: int) -> tuple[RunResult, dict[str, Any]]:
        torch.manual_seed(0)
        task = Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
        options: dict[str, Any] = {"betas": (np.float64(0.9), 0.999), "weight_decay": kind(0.01)}
        saves = Checkpoint(tmp_path, every=Every(epochs=1), resume="auto")
        trainer = Trainer([RNGCapture(), LearningRate("epoch"), Cosine(kind), saves], device="cpu")
        result = trainer.fit(
            task,
            random_batches(3),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1, **options),
            scheduler=scheduler,
            epochs=epochs,
        )
        return result, task.model.state_dict()

    train(1)
    result, resumed = train(3)
    assert (result.resume and result.resume.step, result.warnings) == (3, ())
    assert result.last_checkpoint is not None
    saved = torch.load(result.last_checkpoint, weights_only=True)
    (group,) = saved["optimizers"]["optimizer"]["param_groups"]
    assert (type(group["lr"]), type(group["betas"][0]), group["weight_decay"]) == (float, float, float(kind(0.01)))
    result.last_checkpoint.unlink()
    _, whole = train(3)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
