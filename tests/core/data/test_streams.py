"""Trainings on several streams: what a user gives and gets, and resumes from every step, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.core.data.streams import MODES
from heliograph.tests import kit
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph.tests.messages import assert_facts, has_facts
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata with torch 2.13


class Samples(Dataset[Tensor]):
    """Samples that draw."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.first + index, random.random(), np.random.rand(), torch.rand(()).item()])


class Flow(IterableDataset[Tensor]):
    """The same, one after the other."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.samples = Samples(size, first)

    def __iter__(self) -> Iterator[Tensor]:
        return (self.samples[index] for index in range(len(self.samples)))


class Two(h.Task):
    """A model with dropout, trained on whatever streams there are."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3), nn.Linear(3, 1))

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        parts = [batch] if isinstance(batch, Tensor) else [part for part in batch.values() if part is not None]
        loss: Tensor = torch.stack([self.model(part / 10).square().mean() for part in parts]).sum()
        return loss + random.random() * loss.detach()

    def validation_step(self, run: h.Run, batch: Tensor) -> Tensor:
        return self.model(batch / 10).square().mean()  # type: ignore[no-any-return]  # a module returns Any


@dataclass
class Trial:
    """What a training did, batch by batch, and what it saved after each."""

    seen: list[Any]
    losses: list[float]
    weights: list[Any]
    result: h.RunResult
    cuts: dict[tuple[int, int], Any]

    @property
    def counts(self) -> dict[str, Any]:
        return kit.counters(self.result)


def named(run: h.Run) -> dict[str, Any]:
    of_one = isinstance(run.batch, Tensor)
    parts = {run.data.stream or "": run.batch} if of_one else run.batch
    return {name: None if part is None else part.tolist() for name, part in parts.items()}


def fitted(train: Any, *plugins: Any, saved: Any = None, **options: Any) -> Trial:
    seen: list[Any] = []
    losses: list[float] = []
    cuts: dict[tuple[int, int], Any] = {}
    each = [h.SaveSchedule(h.Every(batches=1), at_end=False), h.SaveSchedule(h.Every(epochs=1)).named("epochs")]
    trainer = h.Trainer([h.RNGCapture(6691), *plugins, *each], device="cpu")

    def note(run: h.Run, event: h.BatchEnd) -> None:
        seen.append(named(run))
        losses.append(run.loss.item())

    def keep(run: h.Run, event: h.SavePoint) -> None:
        cuts[run.progress.epoch, run.progress.batch] = deepcopy(run.state_dict())

    trainer.bus.on(h.BatchEnd, note)
    trainer.bus.on(h.SavePoint, keep, lane=h.Lane.PERSIST)
    if saved is not None:
        trainer.bus.on(h.TrainStart, lambda run, event: run.resume(deepcopy(saved)))
    task = options.pop("task", None) or Two()
    given: dict[str, Any] = {"optimizer": sgd(0.01, momentum=0.9), "epochs": 2} | options
    result = trainer.fit(task, train, **given)
    weights = [each.tolist() for each in task.model.state_dict().values()]
    return Trial(seen, losses, weights, result, cuts)


def check_report(report: Any, position: str, place: tuple[int, int]) -> None:
    """Compare what a resume at (epoch, batch) reports: between two epochs, nothing is read again and compared."""
    epoch, batch = place
    is_uncompared = position == "replayed" and epoch > 0 and batch == 0
    assert report.position == position, report
    assert ["not compared" in reason for reason in report.reasons] == [True] * is_uncompared, report


def check_resumes(make: Callable[[], Any], *plugins: Any, position: str = "seeked", **options: Any) -> Trial:
    """Compare a run with one that is resumed from each of its saves, bit for bit; return it."""
    whole = fitted(make(), *deepcopy(plugins), **options)
    assert whole.result.resume is not None
    assert (whole.result.resume.position, whole.result.resume.reasons) == (position, ())
    for place, saved in whole.cuts.items():
        done = saved["progress"]["earlier_batches"] + saved["progress"]["batch"]
        resumed = fitted(make(), *deepcopy(plugins), saved=saved, **options)
        assert resumed.seen == whole.seen[done:], place
        assert resumed.losses == whole.losses[done:], place
        assert resumed.weights == whole.weights, place
        assert resumed.counts == whole.counts, place
        check_report(resumed.result.resume, position, place)
    return whole


LOADING: dict[str, Any] = {"batch_size": 2, "shuffle": True}


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumes_from_every_batch(mode: Any, workers: int) -> None:
    def make() -> h.Streams:
        sizes = (5, 2) if workers else (9, 4)
        return h.Streams({"digit": Samples(sizes[0]), "parity": Samples(sizes[1], 100)}, mode=mode)

    params = {**LOADING, "parity": {"num_workers": workers, "batch_size": 1}}
    whole = check_resumes(make, loader_params=params)
    assert whole.result.progress.streams == {
        name: sum(batch.get(name) is not None for batch in whole.seen) for name in ("digit", "parity")
    }
    samples = sum(len(part) for batch in whole.seen for part in batch.values() if part is not None)
    assert whole.result.progress.samples == samples
    assert len({str(batch) for batch in whole.seen}) == len(whole.seen)


SOURCES: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: [torch.full((2, 4), float(number)) for number in range(3)], "seeked"),
    "an iterable dataset": (lambda: DataLoader(Flow(5, 100), 2), "replayed"),
    "a stateful loader": (lambda: StatefulDataLoader(Samples(5, 100), 2), "seeked"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "cycle": {"length": 5},
    "min": {},
    "max": {},
    "weighted": {"length": 5, "weights": {"a": 1, "b": 2}},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", SOURCES)
def test_so_does_one_on_other_kinds_of_streams(kind: str, mode: Any) -> None:
    other, position = SOURCES[kind]
    options = OPTIONS[mode]
    check_resumes(
        lambda: h.Streams({"a": Samples(9), "b": other()}, mode=mode, **options),
        loader_params=LOADING,
        position=position,
    )


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_loader_with_a_position_beside_one_without_a_length(mode: Any) -> None:
    """One batch is read ahead of the loop then."""
    check_resumes(
        lambda: h.Streams({"a": StatefulDataLoader(Samples(7), 2), "b": DataLoader(Flow(5, 100), 2)}, mode=mode),
        position="replayed",
    )


def test_windows_phases_and_limits_resume_too() -> None:
    def make() -> h.Phases:
        return h.Phases(
            {"a": Samples(7), "b": Samples(3, 100)}, h.Streams({"b": Samples(5), "c": Samples(4)}, mode="min")
        )

    class Advance(h.Plugin):
        @h.on(h.BatchEnd)
        def advance(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.batches == 2:
                run.control.next_phase("enough")

    whole = check_resumes(make, h.GradientAccumulation(2), Advance(), loader_params=LOADING, limit_train=3, epochs=3)
    assert [sorted(batch) for batch in whole.seen] == [["a", "b"]] * 2 + [["b", "c"]] * 4
    assert whole.result.progress.streams == {"a": 2, "b": 6, "c": 4}
    assert whole.result.progress.steps == 3


def test_a_dict_is_the_short_form() -> None:
    streams = {"digit": Samples(5), "parity": Samples(2, 100)}
    short, long = (fitted(each, loader_params=LOADING) for each in (streams, h.Streams(streams, mode="cycle")))
    assert short.seen == long.seen
    assert [len(batch["parity"]) for batch in short.seen] == [2] * 6
    assert short.result.progress.streams == {"digit": 6, "parity": 6}


def test_the_events_of_a_run_on_two_streams() -> None:
    trace: list[Any] = []
    trainer = h.Trainer([h.RNGCapture(2), h.SaveSchedule(h.Every(batches=3), at_end=False)], device="cpu")
    for event in (h.EpochStart, h.BatchStart, h.StepEnd, h.BatchEnd, h.SavePoint, h.EpochEnd):

        def note(run: h.Run, event: h.Event) -> None:
            trace.append((event.name, run.data.stream, dict(run.progress.streams)))

        trainer.bus.on(event, note)
    lists = {"digit": [torch.zeros(2, 4)] * 2, "parity": [torch.zeros(1, 4)] * 4}
    streams = h.Streams(lists, mode="weighted", weights={"digit": 1, "parity": 1}, length=3)
    result = trainer.fit(Two(), streams, optimizer=sgd(), epochs=1)

    assert trace == [
        ("epoch_start", None, {}),
        ("batch_start", "parity", {"digit": 0, "parity": 1}),
        ("step_end", "parity", {"digit": 0, "parity": 1}),
        ("batch_end", "parity", {"digit": 0, "parity": 1}),
        ("batch_start", "digit", {"digit": 1, "parity": 1}),
        ("step_end", "digit", {"digit": 1, "parity": 1}),
        ("batch_end", "digit", {"digit": 1, "parity": 1}),
        ("batch_start", "digit", {"digit": 2, "parity": 1}),
        ("step_end", "digit", {"digit": 2, "parity": 1}),
        ("batch_end", "digit", {"digit": 2, "parity": 1}),
        ("save_point", "digit", {"digit": 2, "parity": 1}),
        ("epoch_end", None, {"digit": 2, "parity": 1}),
    ]
    assert result.progress.samples == 5


def test_a_task_counts_the_samples_itself() -> None:
    class Own(Two):
        def batch_size(self, batch: Any) -> int:
            return 10

    assert fitted({"a": Samples(4), "b": Samples(4)}, loader_params=LOADING, task=Own()).result.progress.samples == 40


def test_a_dict_of_tensors_in_one_loader_stays_one_batch() -> None:
    class Dicts(h.Task):
        def __init__(self) -> None:
            self.model = nn.Linear(4, 1)

        def training_step(self, run: h.Run, batch: Mapping[str, Tensor]) -> Tensor:
            return self.model(batch["a"] + batch["b"]).square().mean()  # type: ignore[no-any-return]

    batches = [{"a": torch.ones(3, 4), "b": torch.ones(3, 4)}] * 2
    result = kit.fit(task=Dicts(), train=batches)
    assert (result.progress.samples, result.progress.streams) == (6, {})


def test_a_loop_of_ones_own() -> None:
    trainer = h.Trainer([h.RNGCapture(6691)], device="cpu")
    run = trainer.run(Two(), {"a": Samples(7), "b": Samples(3)}, loader_params=LOADING, optimizer=sgd(), epochs=1)
    seen = []
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                seen.append({name: part.tolist() for name, part in batch.items()})
                run.step(run.stepping.forward(run, batch))
    assert seen == fitted({"a": Samples(7), "b": Samples(3)}, loader_params=LOADING, epochs=1).seen
    assert isinstance(run.data.train_loader, h.Streams)
    assert run.length.batches_per_epoch == 4


def test_the_plan_names_the_streams() -> None:
    trainer = h.Trainer([h.RNGCapture(1), h.ValidationSchedule(h.Every(epochs=1))], device="cpu")
    streams = h.Streams({"digit": Samples(9), "parity": Samples(4)}, mode="weighted", weights={"digit": 3, "parity": 1})
    sets = {"small": [torch.zeros(2, 4)], "large": h.Periodic([torch.zeros(2, 4)], every=5)}
    options: Any = {"optimizer": sgd(), "epochs": 1, "validation": sets, "limit_train": 4}
    plan = trainer.plan(Two(), streams, loader_params=LOADING, **options)
    assert "4 batches an epoch," in plan
    assert "(2 batches); weighted 3," in plan
    assert "validation: 2 sets small," in plan


def test_a_data_module_gives_streams() -> None:
    class Module(h.DataModule):
        def __init__(self) -> None:
            self.loader_params = {"batch_size": 2, "parity": {"batch_size": 1}}

        def train(self) -> Any:
            return {"digit": Samples(5), "parity": Samples(3)}

        def validation(self) -> Any:
            return Samples(5)

    trial = fitted(Module(), h.ValidationSchedule(h.Every(epochs=1)), epochs=1)
    assert trial.result.progress.evaluated == 3
    assert h.Trainer(device="cpu").validate(Two(), Module()).progress.evaluated == 3
    assert [(len(batch["digit"]), len(batch["parity"])) for batch in trial.seen] == [(2, 1), (2, 1), (1, 1)]


def test_parameters_by_the_names_of_streams() -> None:
    params = {**LOADING, "b": {"batch_size": 3, "shuffle": False}}
    trial = fitted({"a": Samples(4), "b": Samples(6)}, loader_params=params, epochs=1)
    assert [[row[0] for row in batch["b"]] for batch in trial.seen] == [[0, 1, 2], [3, 4, 5]]
    only = fitted({"a": class_of(2), "b": Samples(6)}, loader_params={"b": {"batch_size": 3}}, epochs=1)
    assert len(only.seen) == 2


def class_of(count: int) -> list[Tensor]:
    return [torch.ones(2, 4)] * count


WRONG: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "a mode": (lambda: h.Streams({"a": [1]}, mode="all"), {}, ValueError, "mode is one of cycle, min, max, weighted"),  # type: ignore[arg-type]
    "no stream": (dict, {}, TypeError, "Streams takes a dict of loaders or datasets"),
    "a list of streams": (lambda: h.Streams([[1], [2]]), {}, TypeError, "Streams takes a dict of loaders or datasets"),  # type: ignore[arg-type]
    "a name": (lambda: {"a/b": [1]}, {}, ValueError, "The name of a train stream is a string without '/', got 'a/b'"),
    "weights of another mode": (
        lambda: h.Streams({"a": [1]}, weights={"a": 1}),
        {},
        ValueError,
        "weights= is for mode='weighted', got mode='cycle'",
    ),
    "weights of another name": (
        lambda: h.Streams({"digit": [1]}, mode="weighted", weights={"digt": 1}),
        {},
        ValueError,
        "weights= takes a number for each of the streams digit",
    ),
    "a weight that is missing": (
        lambda: h.Streams({"a": [1], "b": [1]}, mode="weighted", weights={"a": 1}),
        {},
        ValueError,
        "weights= takes a number for each of the streams a, b",
    ),
    "a weight": (
        lambda: h.Streams({"a": [1]}, mode="weighted", weights={"a": 0}),
        {},
        ValueError,
        "weights['a'] must be a finite number, more than 0; got 0",
    ),
    "a length": (lambda: h.Streams({"a": [1]}, length=0), {}, ValueError, "length must be a whole number of batches"),
    "a length of the streams": (
        lambda: h.Streams({"a": [1]}, mode="max", length=3),
        {},
        ValueError,
        "With mode='max' the streams define the length of an epoch",
    ),
    "no length": (
        lambda: {"a": DataLoader(Flow(3)), "b": [1]},
        {},
        ValueError,
        "mode='cycle' needs the length of an epoch, but the stream 'a' has no length",
    ),
    "an empty stream": (lambda: {"a": [1], "b": []}, {}, ValueError, "The train stream 'b' loader is empty"),
    "a dataset without parameters": (
        lambda: {"a": [1], "b": TensorDataset(torch.ones(2))},
        {},
        TypeError,
        "The train stream 'b' loader is a TensorDataset, not batches",
    ),
    "streams in a stream": (lambda: {"a": {"b": [1]}}, {}, TypeError, "The train stream 'a' loader is a dict with"),
    "phases in a stream": (lambda: {"a": h.Phases([1])}, {}, TypeError, "must be an iterable of batches, got Phases"),
    "parameters of another name": (
        lambda: {"digit": Samples(2)},
        {"loader_params": {"batch_size": 2, "digt": {"batch_size": 1}}},
        ValueError,
        "loader_params= has no 'digt'",
    ),
    "parameters of a loader": (
        lambda: {"a": Samples(2), "b": [1]},
        {"loader_params": {"batch_size": 2, "b": {"shuffle": True}}},
        ValueError,
        "list is already a loader",
    ),
    "one generator for two": (
        lambda: dict.fromkeys("ab", iter([1, 2])),
        {},
        ValueError,
        "The train stream 'a' is the same object",
    ),
    "a limit of another name": (
        lambda: {"a": [1]},
        {"limit_train": {"b": 3}},
        ValueError,
        "limit_train has no stream 'b'. Known: a",
    ),
}


@pytest.mark.parametrize(("make", "options", "error", "text"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(make: Callable[[], Any], options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        fitted(make(), **options)
    assert text in str(caught.value)


def test_the_same_dataset_may_be_two_streams() -> None:
    data = Samples(8)
    trial = fitted({"a": data, "b": data}, loader_params=LOADING, epochs=1)
    first, second = ([[row[0] for row in batch[name]] for batch in trial.seen] for name in "ab")
    assert first != second


def change(train: Any, place: tuple[int, int], now: Any, **options: Any) -> Trial:
    whole = fitted(train, loader_params=LOADING, epochs=2)
    return fitted(now, saved=whole.cuts[place], **{"loader_params": LOADING} | options)


def test_other_streams_are_refused_within_an_epoch_and_said_between_two() -> None:
    def made(**options: Any) -> h.Streams:
        return h.Streams({"a": Samples(8), "b": Samples(4)}, **options)

    others: list[tuple[Any, dict[str, Any], tuple[str, str]]] = [
        (made(mode="max"), {}, ("mode was 'cycle'", "is 'max'")),
        (h.Streams({"a": Samples(8), "c": Samples(4)}), {}, ("streams was ['a', 'b']", "is ['a', 'c']")),
        (made(), {"loader_params": {**LOADING, "b": {"batch_size": 1}}}, ("b global_batch was 2", "is 1")),
        (h.Streams({"a": Samples(8), "b": Samples(6)}), {}, ("b samples was 4", "is 6")),
        (made(), {"limit_train": {"b": 1}}, ("b limit was None", "is 1")),
        (class_of(4), {"loader_params": None}, ("source was 'streams'", "is 'sequence'")),
    ]
    for now, options, facts in others:
        with pytest.raises(ValueError, match="epoch of different") as caught:
            change(made(), (0, 1), now, **options)
        resumed = change(made(), (1, 0), now, **options)
        assert resumed.result.resume is not None
        assert resumed.result.resume.reasons
        assert_facts(caught.value, *facts)
        assert_facts(resumed.result.resume.reasons, *facts)


def test_the_order_in_which_streams_are_given_does_not_matter() -> None:
    def made(names: str, mode: Any) -> h.Streams:
        return h.Streams({name: Samples(6, ord(name)) for name in names}, mode=mode)

    for mode in ("cycle", "weighted"):
        whole = fitted(made("ab", mode), loader_params=LOADING)
        resumed = fitted(made("ba", mode), loader_params=LOADING, saved=whole.cuts[0, 2])
        assert resumed.seen == whole.seen[2:]
        assert resumed.result.resume is not None
        assert resumed.result.resume.reasons == ()


class Shifting(Flow):
    """Yields other samples each time."""

    reads = 0

    def __iter__(self) -> Iterator[Tensor]:
        type(self).reads += 1
        return (each + type(self).reads for each in super().__iter__())


@pytest.mark.parametrize(("other", "repeats"), [(Flow, True), (Shifting, False)])
def test_a_stream_that_is_read_again_has_to_repeat_itself(other: Any, repeats: bool) -> None:
    def made() -> h.Streams:
        return h.Streams({"a": Samples(8), "b": DataLoader(other(6, 100), 2)}, mode="min")

    whole = fitted(made(), loader_params=LOADING, epochs=1)
    resumed = fitted(made(), loader_params=LOADING, epochs=1, saved=whole.cuts[0, 2])
    assert resumed.result.resume is not None
    assert resumed.result.resume.position == "replayed"
    assert (resumed.result.resume.reasons == ()) is repeats
    assert sum(has_facts(note, "2 batches", "epoch 0", "again") for note in resumed.result.notes) == 1


def test_a_state_that_no_key_reaches_is_named_by_its_stream() -> None:
    class Counting(Samples):
        count = 0

        def __getitem__(self, index: int) -> Tensor:
            self.count += 1
            return super().__getitem__(index) + self.count

    result = fitted({"a": Samples(4), "b": Counting(4)}, loader_params=LOADING, epochs=1).result
    assert result.resume is not None
    assert result.resume.reasons
    assert any("Counting loads the same" in reason for reason in result.resume.reasons)


def test_a_foreign_loader_that_is_left_early_is_not_trusted() -> None:
    class Cursor:
        def __iter__(self) -> Iterator[Tensor]:
            return iter(class_of(5))

        def __len__(self) -> int:
            return 5

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            """Nothing to load."""

    def reasons(**options: Any) -> Any:
        result = fitted(h.Streams({"a": Cursor(), "b": class_of(3)}, **options), epochs=1).result
        assert result.resume is not None
        return result.resume.reasons

    assert reasons(mode="max") == reasons()
    assert_facts(reasons(mode="min"), "a: ", "epoch ends", "Cursor")


def test_batches_are_moved_to_the_device() -> None:
    """`meta` stands for any device but the CPU."""
    engine = h.DeviceEngine("cpu")
    engine.device = torch.device("meta")
    batches = [{"a": torch.ones(2), "b": None}, {"a": torch.ones(2), "b": [torch.ones(1)]}]
    moved: list[Any] = list(engine.feed(iter(batches)))
    assert moved[0]["b"] is None
    assert [moved[0]["a"].device.type, moved[1]["b"][0].device.type] == ["meta", "meta"]


def test_samples_are_an_interval() -> None:
    places = []
    trainer = h.Trainer([h.LogSchedule(h.Every(samples=6))], device="cpu")
    trainer.bus.on(h.Log, lambda run, event: places.append((run.progress.batch, run.progress.samples)))
    trainer.fit(Two(), {"a": class_of(6), "b": class_of(6)}, optimizer=sgd(), epochs=1)
    assert places == [(2, 8), (3, 12), (5, 20), (6, 24)]


def test_a_classifier_on_streams_of_pairs() -> None:
    class Both(h.Task):
        def __init__(self) -> None:
            self.inner = linear_classifier()
            self.model = self.inner.model

        def training_step(self, run: h.Run, batch: Any) -> Tensor:
            losses = [self.inner.training_step(run, part) for part in batch.values()]
            return torch.stack(losses).mean()

    result = kit.fit(task=Both(), train={"digit": class_batches(3), "parity": class_batches(1)})
    assert result.progress.samples == 18
    assert result.progress.streams == {"digit": 3, "parity": 3}
