"""Limits of an epoch and of validation sets, and sets that are read now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.core.data.limited import limited_length
from heliograph.tests.core.data.test_streams import LOADING, Flow, Samples, Two, check_resumes, class_of, fitted
from heliograph.tests.kit import sgd
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata with torch 2.13


@pytest.mark.parametrize(
    ("limit", "length", "expected"),
    [(3, 9, 3), (30, 9, 30), (0.5, 9, 4), (0.1, 9, 1), (1.0, 9, 9), (0.29, 100, 29), (0.1, 30, 3), (5, None, 5)],
)
def test_what_a_limit_leaves(limit: float, length: int | None, expected: int) -> None:
    assert limited_length(limit, length, "loader") == expected


def test_a_fraction_needs_a_length() -> None:
    with pytest.raises(ValueError, match=r"0\.5 is a fraction"):
        fitted(DataLoader(Flow(4)), limit_train=0.5)


@pytest.mark.parametrize("limit", [0, -1, 0.0, 1.5, True, "3", float("nan")])
def test_what_is_no_limit_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match="100, at least 1,"):
        fitted(class_of(3), limit_train=limit)
    with pytest.raises(ValueError, match=r"limit_validation\['a'\] is a number"):
        validated(limit_validation={"a": limit}, validation={"a": class_of(2)})


KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "a dataset": (lambda: Samples(12), "seeked"),
    "a list": (lambda: class_of(6), "seeked"),
    "an iterable dataset": (lambda: DataLoader(Flow(11), 2), "replayed"),
    "a stateful loader": (lambda: StatefulDataLoader(Samples(12), 2), "seeked"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_limited_run_resumes_from_every_batch(kind: str) -> None:
    make, position = KINDS[kind]
    options: dict[str, Any] = {"loader_params": LOADING} if kind == "a dataset" else {}
    whole = check_resumes(make, position=position, limit_train=4, **options)
    assert len(whole.seen) == 8


def test_the_next_epoch_is_what_it_would_be_and_the_rest_is_not_read() -> None:
    asked: list[int] = []

    class Asked(Samples):
        def __getitem__(self, index: int) -> Tensor:
            asked.append(index)
            return super().__getitem__(index)

    whole = fitted(Samples(12), loader_params=LOADING)
    limited = fitted(Asked(12), loader_params=LOADING, limit_train=0.4)
    assert limited.seen == whole.seen[:2] + whole.seen[6:8]
    assert len(asked) <= 2 * 4 + 4  # the first batch is loaded again, to be compared
    assert limited.result.progress.samples == 8


def test_a_limit_beyond_the_end_is_none() -> None:
    assert len(fitted(class_of(3), limit_train=100, epochs=1).seen) == 3
    unsized = fitted(DataLoader(Flow(6), 2), limit_train=100, epochs=1)
    assert len(unsized.seen) == 3
    assert unsized.result.warnings == ()


def test_a_window_ends_with_a_limited_epoch() -> None:
    for train in (class_of(5), DataLoader(Flow(10), 2)):
        result = fitted(train, h.GradientAccumulation(2), limit_train=3).result
        assert (result.progress.steps, result.progress.batches) == (4, 6)


def test_another_limit_is_said_and_changes_no_position() -> None:
    whole = fitted(Samples(12), loader_params=LOADING, limit_train=4)
    for limit, batches in ((5, 3 + 5), (None, 4 + 6), (2, 0 + 2), (0.5, 1 + 3)):
        resumed = fitted(Samples(12), saved=whole.cuts[0, 2], loader_params=LOADING, limit_train=limit)
        assert len(resumed.seen) == batches
        assert resumed.seen[0] == (whole.seen[2] if batches > 2 else whole.seen[4])
        assert resumed.result.resume is not None
        assert resumed.result.resume.reasons
        text = "none" if limit is None else str(limit)
        assert any(f"4 and is {text}," in line for line in resumed.result.resume.reasons)


def test_limits_of_streams() -> None:
    def passes(limit: Any) -> list[list[int]]:
        streams = h.Streams({"a": Samples(6), "b": Samples(4)}, mode="cycle")
        return [
            [
                int(batch[name][0][0])
                for batch in fitted(streams, loader_params={"batch_size": 1}, epochs=1, limit_train=limit).seen
            ]
            for name in "ab"
        ]

    assert passes(None) == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 1]]
    assert passes(3) == [[0, 1, 2], [0, 1, 2]]
    assert passes({"b": 0.5}) == [[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 0, 1]]
    assert passes({"a": 2, "b": 3}) == [[0, 1, 0], [0, 1, 2]]
    with pytest.raises(ValueError, match="limit_train takes limits"):
        fitted(class_of(3), limit_train={"a": 3})


def validated(*plugins: Any, validation: Any, epochs: int = 4, **options: Any) -> tuple[h.RunResult, list[Any]]:
    read: list[Any] = []
    trainer = h.Trainer([h.RNGCapture(1), *plugins, h.ValidationSchedule(h.Every(epochs=1))], device="cpu")
    trainer.bus.on(h.ValidationStart, lambda run, event: read.append([run.data.evaluation_batches]))
    trainer.bus.on(h.ValidationBatchEnd, lambda run, event: read[-1].append(event.dataset))
    trainer.bus.on(h.ValidationEnd, lambda run, event: read[-1].append(sorted(event.metrics)))
    given: dict[str, Any] = {"optimizer": sgd(0.01), "epochs": epochs} | options
    return trainer.fit(Two(), class_of(2), validation=validation, **given), read


def test_validation_sets_are_limited() -> None:
    sets = {"a": class_of(4), "b": DataLoader(Samples(8), 2)}
    _, read = validated(validation=sets, epochs=1, limit_validation={"a": 1, "b": 0.5})
    assert read == [[3, "a", "b", "b", ["validation/a/loss", "validation/b/loss"]]]
    _, read = validated(validation=sets, epochs=1, limit_validation=3)
    assert [len(each) for each in read] == [8]
    _, read = validated(validation=class_of(4), epochs=1, limit_validation=0.25)
    assert read == [[1, "", ["validation/loss"]]]


def test_outside_of_a_training_too() -> None:
    class Tested(Two):
        test_step = Two.validation_step

    trainer = h.Trainer(device="cpu")
    for run in (trainer.validate, trainer.test):
        assert run(Tested(), class_of(4), limit=3).progress.evaluated == 3
        assert run(Tested(), {"a": class_of(4), "b": class_of(4)}, limit={"b": 0.5}).progress.evaluated == 6
        assert run(Tested(), {"a": h.Periodic(class_of(4), every=9)}).progress.evaluated == 4
        with pytest.raises(ValueError, match=r"(validation|test) set 'c'.*Known: a"):
            run(Tested(), {"a": class_of(4)}, limit={"c": 1})


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="limit_validation=3 has no effect:"):
        fitted(class_of(2), limit_validation=3)
    with pytest.raises(ValueError, match=r"validation set 'lrge'\. Did"):
        validated(validation={"large": class_of(2)}, limit_validation={"lrge": 2})


SETS: dict[str, Any] = {"small": class_of(1), "large": h.Periodic(class_of(2), every=2)}
SMALL, BOTH = ["validation/small/loss"], ["validation/large/loss", "validation/small/loss"]


def test_a_periodic_set_is_read_by_every_so_many_validations() -> None:
    _, read = validated(validation=SETS)
    assert read == [[1, "small", SMALL], [3, "small", "large", "large", BOTH]] * 2


def test_a_plugin_that_monitors_a_periodic_set_does_nothing_without_it() -> None:
    """Neither an infinity nor the value of an earlier validation counts."""
    worse = iter([1.0, 2.0, 3.0])

    class Worse(Two):
        def validation_step(self, run: h.Run, batch: Any) -> Tensor:
            return torch.tensor(next(worse) if len(batch) == 3 else 0.0)

    stopping = h.EarlyStopping("validation/large/loss", patience=2)
    trainer = h.Trainer([stopping, h.ValidationSchedule(h.Every(epochs=1))], device="cpu")
    sets = {"small": class_of(1), "large": h.Periodic([torch.ones(3, 4)], every=3)}
    result = trainer.fit(Worse(), class_of(2), validation=sets, optimizer=sgd(0.01), epochs=20)
    assert (result.status, result.progress.epoch) == ("stopped", 9)
    assert result.warnings == ()


def test_a_metric_that_a_set_never_has_is_still_an_error() -> None:
    stopping = h.EarlyStopping("validation/large/accuracy", mode="max")
    with pytest.raises(ValueError, match="metric 'validation/large/accuracy'"):
        validated(stopping, validation=SETS)


def test_the_best_checkpoint_is_judged_by_the_set_when_it_is_read(tmp_path: Any) -> None:
    plugins = [
        h.SaveSchedule(h.Every(epochs=1), at_end=False),
        h.Checkpoint(tmp_path, keep_last=None, keep_best=1, monitor="validation/large/loss"),
    ]
    result, _ = validated(*plugins, validation=SETS)
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.name in ("run_epoch_2_iter_4.pth", "run_epoch_4_iter_8.pth")


def test_which_validations_read_a_periodic_set_survives_a_resume(tmp_path: Any) -> None:
    def run(epochs: int, resume: Any) -> list[Any]:
        saving = [h.SaveSchedule(h.Every(epochs=1)), h.Checkpoint(tmp_path, resume=resume)]
        return validated(*saving, validation=SETS, epochs=epochs)[1]

    assert run(1, None) == [[1, "small", SMALL]]
    assert run(3, "auto") == [[3, "small", "large", "large", BOTH], [1, "small", SMALL]]


def test_what_a_set_draws_does_not_depend_on_the_others() -> None:
    """Its place among all sets is a part of the key, read or not."""

    def metrics(sets: Any) -> float:
        return validated(validation=sets, epochs=1)[0].metrics["validation/second/loss"]

    first: dict[str, Any] = {"first": DataLoader(Samples(3), 3)}
    second = {"second": DataLoader(Samples(3), 3)}
    assert metrics({**first, **second}) == metrics({"first": h.Periodic(first["first"], every=2), **second})


def test_sets_that_are_all_periodic_are_refused() -> None:
    with pytest.raises(ValueError, match="validation sets are Periodic,"):
        validated(validation=h.Periodic(class_of(1), every=2))
    with pytest.raises(ValueError, match="least 1; got 0"):
        h.Periodic(class_of(1), every=0)


def test_loader_params_are_for_validation_where_the_training_data_are_a_loader() -> None:
    _, read = validated(validation=Samples(6), epochs=1, loader_params={"batch_size": 2})
    assert read == [[3, "", "", "", ["validation/loss"]]]
    sets = {"small": class_of(1), "large": h.Periodic(Samples(4), every=2)}
    assert len(validated(validation=sets, epochs=2, loader_params={"batch_size": 2})[1][1]) == 5
    with pytest.raises(ValueError, match=r"loader_params\['shuffle'\]"):
        validated(validation=Samples(6), loader_params={"batch_size": 2, "shuffle": True})
    with pytest.raises(ValueError, match="list, list is already"):
        validated(validation=class_of(2), loader_params={"batch_size": 2})
