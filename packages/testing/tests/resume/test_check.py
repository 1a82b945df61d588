"""The resume check: it accepts what is exact, and finds and names what is not."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.core.program import UsageError
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.tests.kit import adam, saving
from heliograph_testing import assert_resume_exact, check_resume
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info

Made = tuple[h.Trainer, dict[str, Any]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: tiny tensors on several threads are slow if other programs run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(26, 4, generator=generator), torch.randint(0, 2, (26,), generator=generator))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2))


def training(*plugins: h.Plugin, kind: type[h.Supervised] = h.Supervised, **options: Any) -> Made:
    """Return a training of three epochs of seven batches, with the usual plugins."""
    torch.manual_seed(0)
    usual = [
        h.LearningRate("epoch"),
        h.EarlyStopping(patience=9),
        h.LogSchedule(h.Every(steps=2)),
        h.ValidationSchedule(h.Every(epochs=1)),
    ]
    return h.Trainer([*usual, *plugins], device="cpu"), {
        "task": kind(model(), nn.functional.cross_entropy),
        "train": DataLoader(samples(), batch_size=4, shuffle=True),
        "validation": DataLoader(samples(), batch_size=13),
        "optimizer": adam(1e-2),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        "epochs": 3,
        **options,
    }


def exact() -> Made:
    return training(h.RNGCapture(), h.GradientAccumulation(3))


def test_a_correct_program_is_exact() -> None:
    check = assert_resume_exact(exact, resumes=6)
    assert check.is_exact
    assert check.is_deterministic
    assert (check.position, check.reasons, check.set_aside, check.draws) == ("seeked", (), (), None)
    assert len(check.attempts) == 7
    assert check.attempts[0].resumed_at is None
    assert check.attempts[-1].killed_at is None
    assert {each.resumed_at[0] for each in check.attempts if each.resumed_at} == {0, 1, 2}
    assert [kill.rpartition(" ")[2] for kill in check.kills] == [
        "batch_end",
        "epoch_start",
        "gradients_ready",
        "validation_batch_end",
        "batch_start",
        "step_end",
    ]
    assert check.batches >= 21
    assert_facts(str(check), f"exact: {check.batches} batches", "7 attempts")


def test_the_same_kill_points_are_chosen_every_time() -> None:
    assert check_resume(exact) == check_resume(exact)


def test_plugins_may_write_to_the_folder() -> None:
    def make_trainer(folder: Path) -> Made:
        best = h.Checkpoint(folder, resume="auto", keep_last=2, keep_best=1, monitor="validation/loss")
        saving = [h.SaveSchedule(h.Every(steps=2)), best, h.JsonlLog(folder / "log.jsonl"), h.FileLog(folder)]
        return training(h.RNGCapture(), h.GradientClipping(1.0), *saving)

    check = assert_resume_exact(make_trainer)
    assert len(check.kills) == 3


def test_a_later_resume_quotes_the_check(tmp_path: Path) -> None:
    def make(folder: Path = tmp_path / "usual") -> Made:
        return training(*saving(folder / "deep", h.Every(steps=2)), name="it")

    assert check_resume(make, resumes=1).is_exact
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())  # the runs wrote elsewhere
    assert path.parent == tmp_path / "usual" / "deep"
    line = json.loads(path.read_text())
    assert (line["run"], line["steps"], line["by"]) == ("it", 21, "verify-resume")


def test_background_saves_and_roll_backs_are_exact() -> None:
    class Poison(h.Plugin):
        @h.on(h.BatchStart, lane=h.Lane.TRANSFORM)
        def spoil(self, run: h.Run, event: h.BatchStart) -> None:
            if run.progress.batches == 9:
                run.batch = [torch.full_like(run.batch[0], torch.nan), run.batch[1]]

    def in_the_background(folder: Path) -> Made:
        return training(*saving(folder, h.Every(steps=2), background=True))

    def with_roll_back(folder: Path) -> Made:
        return training(*saving(folder, h.Every(steps=1), keep_last=3), h.RollBack(), Poison())

    assert_resume_exact(in_the_background)
    assert_resume_exact(with_roll_back, kill_at=[8, ("epoch_start", 2)])


def test_workers_an_iterable_and_a_length_in_steps_are_exact() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            data = samples()
            yield from (data[index] for index in range(len(data)))

    def with_workers() -> Made:
        return training(h.RNGCapture(), train=DataLoader(samples(), batch_size=4, shuffle=True, num_workers=2))

    def from_a_stream() -> Made:
        return training(h.RNGCapture(), train=DataLoader(Stream(), batch_size=4), epochs=None, steps=12)

    assert assert_resume_exact(with_workers).reasons == ()
    replayed = assert_resume_exact(from_a_stream, kill_at=[4, 10])
    assert (replayed.position, replayed.reasons) == ("replayed", ())
    assert_facts(f"{replayed}\n", "position of the data", "replayed")
    between_epochs = assert_resume_exact(from_a_stream, kill_at=("epoch_start", 2))
    assert "not compared" in between_epochs.reasons[-1]


def test_given_kill_points() -> None:
    check = assert_resume_exact(exact, kill_at=[4, ("validation_batch_end", 2), ("epoch_end", 2), 16])
    assert_each(
        check.kills,
        ("epoch 0, batch 4", "batch_end"),
        ("epoch 1, batch 0", "validation_batch_end"),
        ("epoch 2, batch 0", "epoch_end"),
        ("epoch 2, batch 2", "batch_end"),
    )
    assert [each.resumed_at for each in check.attempts] == [None, (0, 3, 1), (0, 6, 2), (1, 6, 5), (2, 0, 6)]


def test_after_a_kill_before_the_first_save_the_next_attempt_begins_at_the_start() -> None:
    check = assert_resume_exact(exact, kill_at=[("train_start", 1), ("batch_start", 2), 8])
    assert [each.resumed_at for each in check.attempts] == [None, None, None, (1, 0, 3)]


def test_one_kill_point_needs_no_list() -> None:
    assert len(assert_resume_exact(exact, kill_at=5).kills) == 1
    assert len(assert_resume_exact(exact, kill_at=("log", 2)).kills) == 1


def test_finds_that_no_plugin_saves_the_random_state() -> None:
    check = check_resume(training)
    assert check.is_deterministic
    assert check.difference is not None
    assert check.draws is not None
    assert check.difference.what == "loss"
    assert check.difference.place == (0, 4, 4)
    assert_facts(check.draws.text, "(python, numpy, torch)", "epoch 0, batch 4", "step 4")
    assert_each(check.causes, ("untracked: random generators", "add RNGCapture()"))
    with pytest.raises(AssertionError) as caught:
        assert_resume_exact(training)
    assert str(caught.value) == str(check)
    assert "exact: attempt 2" in str(check)


def test_a_random_state_that_is_not_used_is_only_mentioned() -> None:
    def make_trainer() -> Made:
        task = h.Supervised(nn.Linear(4, 2), nn.functional.cross_entropy)
        torch.manual_seed(0)
        return training(task=task, train=DataLoader(samples(), batch_size=4))

    check = assert_resume_exact(make_trainer)
    assert check.draws is not None
    assert f"without consequence: {check.draws}" in str(check)


class Burst(h.Plugin):
    """Scales the loss of every fifth batch, and does not save its counter."""

    def __init__(self) -> None:
        self.batches = 0

    @h.on(h.BatchStart)
    def scale(self, run: h.Run, event: h.BatchStart) -> None:
        self.batches += 1
        if self.batches % 5 == 0:
            run.control.scale_loss(4.0, "a burst")


def test_a_plugin_needs_no_state_dict() -> None:
    assert_resume_exact(lambda: training(h.RNGCapture(), Burst()))


def test_finds_a_plugin_that_restores_its_state_wrongly() -> None:
    class Forgetful(h.Plugin):
        def __init__(self) -> None:
            self.epochs = 0

        @h.on(h.EpochEnd)
        def count(self, run: h.Run, event: h.EpochEnd) -> None:
            self.epochs += 1

        def state_dict(self) -> dict[str, Any]:
            return {"epochs": self.epochs}

        def load_state_dict(self, state: Any) -> None:
            self.epochs = state["epochs"] + 1

    check = check_resume(lambda: training(h.RNGCapture(), Forgetful()))
    assert_facts(
        str(check.difference),
        "plugin 'forgetful' (epochs)",
        "end of epoch 0",
        "1 in the uninterrupted",
        "2 in the interrupted",
    )
    assert check_resume(lambda: training(h.RNGCapture(), Forgetful()), ignore="forgetful").is_exact


class Counting(Dataset[Any]):
    """Returns another item at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.calls += 1
        return torch.full((4,), index + self.calls / 100), index % 2


@pytest.mark.parametrize("workers", [0, 2])
def test_finds_a_dataset_that_counts(workers: int) -> None:
    check = check_resume(
        lambda: training(h.RNGCapture(), train=DataLoader(Counting(), batch_size=4, num_workers=workers))
    )
    assert check.difference is not None
    assert (check.difference.what, check.difference.paths, check.difference.place[0]) == ("batch", ("[0]",), 0)
    assert check.difference.place[1] == 4
    assert check.reasons
    assert "Counting loads the same" in check.causes[0]
    if not workers:
        assert_facts(check.causes[1], "dataset.calls was 16", "changed it")


class Reshuffling(Sampler[int]):
    """Counts its epochs in an attribute."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(torch.randperm(26, generator=torch.Generator().manual_seed(self.times)).tolist())

    def __len__(self) -> int:
        return 26


def test_finds_a_sampler_that_counts() -> None:
    check = check_resume(
        lambda: training(h.RNGCapture(), train=DataLoader(samples(), batch_size=4, sampler=Reshuffling())), kill_at=11
    )
    assert check.difference is not None
    assert check.difference.what == "batch"
    assert "sampler.times was 2" in check.causes[0]
    assert_facts(check.causes[0], "changed it")


class Shifted(TensorDataset):
    """Adds what the `worker_init_fn` sets."""

    shift = 0

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)  # type: ignore[no-untyped-call]  # torch has no annotation here
        return image + self.shift, label


def shift_by_worker(number: int) -> None:
    get_worker_info().dataset.shift = number  # type: ignore[union-attr]  # only called in a worker


def test_finds_workers_that_differ() -> None:
    def make_trainer() -> Made:
        data = Shifted(*samples().tensors)
        loader = DataLoader(data, batch_size=4, num_workers=2, worker_init_fn=shift_by_worker)
        return training(h.RNGCapture(), train=loader)

    check = check_resume(make_trainer, kill_at=5)
    assert check.difference is not None
    assert check.difference.what == "batch"
    assert_each(check.causes, ("worker_init_fn depends on the worker",))


class Growing(h.Plugin):
    """Changes the weights at every `EpochStart`, or only if it was not emitted again after a resume."""

    def __init__(self, *, again: bool) -> None:
        self.again = again

    @h.on(h.EpochStart)
    def grow(self, run: h.Run, event: h.EpochStart) -> None:
        if self.again or not event.resumed:
            with torch.no_grad():
                run.modules["model"][0].weight.mul_(1.1)


def test_finds_a_plugin_that_ignores_that_an_epoch_was_resumed() -> None:
    check = check_resume(lambda: training(h.RNGCapture(), Growing(again=True)), kill_at=5)
    assert check.difference is not None
    assert (check.difference.what, check.difference.place[1]) == ("loss", 4)
    assert_each(check.causes, ("after EpochStart", "growing", "model.0.weight"))
    assert_resume_exact(lambda: training(h.RNGCapture(), Growing(again=False)), kill_at=5)


def test_finds_a_function_that_ignores_that_an_epoch_was_resumed() -> None:
    def grow(run: h.Run, event: h.EpochStart) -> None:
        Growing(again=True).grow(run, event)

    def make_trainer() -> Made:
        trainer, options = training(h.RNGCapture())
        trainer.bus.on(h.EpochStart, grow)
        return trainer, options

    (cause,) = check_resume(make_trainer, kill_at=5).causes
    assert "<locals>.grow: model.0.weight changed" in cause


class Misdeclared(Burst):
    """Declares that it does not affect the training, but does."""

    affects_training = False


def test_finds_a_difference_that_no_report_explains() -> None:
    check = check_resume(lambda: training(h.RNGCapture(), Misdeclared()))
    assert check.reasons == ()
    assert check.difference is not None
    assert str(check).startswith("NOT exact")
    assert_facts(check.causes[0], "task or a plugin", "state")


def test_finds_data_from_unseeded_draws() -> None:
    def make_trainer() -> Made:
        data = TensorDataset(torch.randn(20, 4), torch.arange(20) % 2)
        return training(h.RNGCapture(), train=DataLoader(data, batch_size=4))

    check = check_resume(make_trainer)
    assert check.difference is not None
    assert check.difference.what == "batch"
    assert_each(check.causes, ("dataset.tensors", "a tuple", "the program sets it"))


class Warming(h.Supervised):
    """Counts with an iterator, whose position no checkpoint holds."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        super().__init__(model, loss_fn)
        self.seen = iter([*range(1, 100)])

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        loss: Tensor = super().training_step(run, batch)
        weight: float = min(1.0, next(self.seen) / 10)
        return loss * weight


def test_finds_a_task_with_state_of_its_own() -> None:
    check = check_resume(lambda: training(h.RNGCapture(6691), kind=Warming))
    assert check.difference is not None
    assert check.difference.what == "loss"
    assert_facts(check.difference.text, "the loss", "epoch 0, batch 4", "step 4: 0.364")
    assert ", 0.0911" in check.difference.text
    assert check.causes == ("untracked: task.seen (builtins.list_iterator)",)


def test_finds_weights_that_are_changed_after_the_loss() -> None:
    class Decay(h.Plugin):
        def __init__(self) -> None:
            self._factor = iter([1.0, 0.5, 0.25])

        @h.on(h.EpochEnd)
        def shrink(self, run: h.Run, event: h.EpochEnd) -> None:
            with torch.no_grad():
                run.modules["model"][0].bias.mul_(next(self._factor))

    check = check_resume(lambda: training(h.RNGCapture(), Decay()), kill_at=("epoch_start", 2))
    assert check.difference is not None
    assert (check.difference.what, check.difference.paths[0]) == ("modules", "model.0.bias")
    assert_facts(check.difference.text, "model.0.bias", "end of epoch 1", "by up to ")
    assert check.causes == ("untracked: plugins.decay._factor (builtins.list_iterator)",)


def test_finds_a_log_at_another_time() -> None:
    class Rarely(h.Plugin):
        asks = ("log",)

        def __init__(self) -> None:
            self._rest = iter(range(100))

        @h.on(h.BatchEnd)
        def ask(self, run: h.Run, event: h.BatchEnd) -> None:
            if next(self._rest) == 4:
                run.control.request_log("now and then")

    check = check_resume(lambda: training(h.RNGCapture(), Rarely()), kill_at=4)
    assert check.difference is not None
    assert check.difference.what == "order"
    assert_facts(check.difference.text, "the order differs", "metrics in the log")
    assert check.causes == ("untracked: plugins.rarely._rest (builtins.range_iterator)",)


class Noisy(h.Supervised):
    """Returns another loss at every call."""

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        return super().training_step(run, batch) * (1 + int.from_bytes(os.urandom(2), "big"))


def test_a_program_that_is_not_deterministic() -> None:
    check = check_resume(lambda: training(h.RNGCapture(), kind=Noisy))
    assert not check.is_exact
    assert not check.is_deterministic
    assert check.attempts == ()
    assert check.difference is not None
    assert (check.difference.what, *check.difference.place[:2]) == ("loss", 0, 1)
    assert_facts(str(check), "NOT deterministic", "two uninterrupted runs differ")
    assert_facts(check.causes[0], "unseeded generator")


def test_values_that_depend_on_the_clock_are_set_aside() -> None:
    class Speed(h.Plugin):
        def __init__(self) -> None:
            self.seconds = 0.0

        @h.on(h.Log, lane=h.Lane.MEASURE)
        def measure(self, run: h.Run, event: h.Log) -> None:
            self.seconds = random.SystemRandom().random()
            event.metrics["train/speed"] = self.seconds

        def state_dict(self) -> dict[str, Any]:
            return {"seconds": self.seconds, "since": f"{self.seconds:.3f} o'clock"}

        def load_state_dict(self, state: Any) -> None:
            self.seconds = state["seconds"]

    check = assert_resume_exact(lambda: training(h.RNGCapture(), Speed()))
    assert check.set_aside == ("plugin speed (seconds)", "train/speed")
    assert "kill: plugin speed (seconds)," in str(check)


def test_the_random_state_of_the_caller_does_not_change() -> None:
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    check_resume(exact)
    assert random.getstate() == before[0]
    assert repr(np.random.get_state()) == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_an_error_of_the_program_is_raised_unchanged() -> None:
    class Failing(h.Plugin):
        @h.on(h.CheckpointLoaded)
        def fail(self, run: h.Run, event: h.CheckpointLoaded) -> None:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as caught:
        check_resume(lambda: training(h.RNGCapture(), Failing()))
    assert any("heliograph: in attempt 2" in line for line in caught.value.__notes__)


def test_a_kill_with_a_plugin_that_replaces_errors() -> None:
    assert_resume_exact(lambda: training(h.RNGCapture(), h.ExceptionPassThrough()))


# Usage errors.


def refused(make_trainer: Any = exact, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        check_resume(make_trainer, **options)
    return str(caught.value)


def test_a_kill_point_that_is_never_reached() -> None:
    assert_facts(refused(kill_at=22), "kill_at=('batch_end', 22) is never", "21 emissions")
    assert_facts(
        refused(kill_at=("validation_batch_end", 0)),
        "kill_at=('validation_batch_end', 0)",
        "6 emissions",
        "'validation_batch_end'",
    )
    assert_facts(refused(kill_at=("test_end", 1)), "kill_at=('test_end', 1)", "has 0")
    assert_facts(
        refused(kill_at=[7, 2]),
        "Attempt 2",
        "epoch 0, batch 6",
        "step 2",
        "did not reach",
        "('batch_end', 2)",
    )


def test_an_event_that_does_not_exist() -> None:
    assert "'epoch_end'? Known: backward_end, batch_end," in refused(kill_at=("epoch_ends", 1))
    assert "0 emissions of 'run_closed'" in refused(kill_at=("run_closed", 1))


@pytest.mark.parametrize("kill_at", [[], "batch_end", ("batch_end",), [1.5], True, [("batch_end", 1, 2)], {}])
def test_what_is_not_a_kill_point(kill_at: Any) -> None:
    assert_facts(refused(kill_at=kill_at), f"got {kill_at!r}.")


def test_a_run_that_is_too_short() -> None:
    batches = [(torch.zeros(2, 4), torch.tensor([0, 1]))]
    text = refused(lambda: training(h.RNGCapture(), train=batches), resumes=50)
    assert_facts(text, "too short", "50 kills", "3 batches")


def test_numbers_out_of_range() -> None:
    assert_facts(refused(resumes=0), "resumes=", "at least 1", "got 0")
    assert_facts(refused(save_every=True), "save_every=", "at least 1", "got True")


def test_a_run_without_a_limit() -> None:
    assert "pass epochs= or steps=" in refused(lambda: training(h.RNGCapture(), epochs=None))


def test_an_unknown_name_to_ignore() -> None:
    assert "ignore= contains 'early_stoping'," in refused(ignore=["early_stoping"])


def test_a_folder_that_has_a_default_is_given_too(tmp_path: Path) -> None:
    own, given = tmp_path / "own", list[tuple[int, Path]]()

    def make_trainer(seed: int = 3, folder: Path = own) -> Made:
        given.append((seed, folder))
        return training(*saving(folder, h.Every(steps=2)))

    assert_resume_exact(make_trainer)
    assert given
    assert all(seed == 3 and folder != own for seed, folder in given)


FORM = "build returns a trainer and the keywords of its fit: return trainer, {'task': ..., 'train': ..., ...}; "


def test_wrong_results_of_make_trainer() -> None:
    assert_facts(refused(3), "make_trainer", "a function, got 3")
    assert_facts(refused(lambda folder, seed: None), "arguments folder, seed", "a folder")
    returned: Any = None

    def build() -> Any:
        return returned

    assert refused(build) == f"{FORM}it returned NoneType."
    returned = {}, h.Trainer(device="cpu")
    assert refused(build) == f"{FORM}it returned (dict, Trainer)."
    returned = h.Trainer(device="cpu"), {"task": None}
    assert_facts(refused(build), FORM, "'train' is missing", "'task'")


@pytest.mark.parametrize("shared", ["trainer", "task", "module 'model'", "plugin 'burst'", "optimizer", "train loader"])
def test_objects_that_two_runs_must_not_share(shared: str) -> None:
    trainer, options = training(burst := Burst())
    task, loader = options["task"], options["train"]
    optimizer = torch.optim.SGD(task.model.parameters(), 0.1)
    again = {
        "trainer": lambda: (trainer, training()[1]),
        "task": lambda: training(task=task),
        "module 'model'": lambda: training(task=h.Supervised(task.model, nn.functional.cross_entropy)),
        "plugin 'burst'": lambda: training(burst),
        "optimizer": lambda: training(optimizer=optimizer, task=TaskOf(task.model)),
        "train loader": lambda: training(train=loader),
    }
    if shared == "plugin 'burst'":
        trainer.plugins.unregister("burst")
    assert_facts(refused(again[shared]), "<lambda>", f"the same {shared} twice")


class TaskOf(h.Task):
    """Has a model of its own, so that only the optimizer is shared."""

    def __init__(self, model: nn.Module) -> None:
        self.model = nn.Sequential(model)

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, run: h.Run, batch: Any) -> Tensor:
        return self.training_step(run, batch)


def test_a_run_that_resumes_by_itself(tmp_path: Path) -> None:
    def make_trainer() -> Made:
        return training(*saving(tmp_path, h.Every(epochs=1), resume="auto"))

    assert_facts(refused(make_trainer), "resumed from a checkpoint", "existed before")
