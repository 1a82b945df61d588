"""Metrics of a supervised task: objects that measure whole sets, functions that are averaged, and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from heliograph import (
    BatchEnd,
    DDPEngine,
    EarlyStopping,
    Every,
    Log,
    LogSchedule,
    Plugin,
    Run,
    SavePoint,
    SaveSchedule,
    Supervised,
    Trainer,
    TrainStart,
    ValidationEnd,
    ValidationSchedule,
    accuracy,
    on,
)
from heliograph.core.metrics.metric_objects import fresh_copy
from heliograph.tests import kit
from heliograph.tests.messages import assert_facts, pattern
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn

BATCHES = kit.class_batches(6, 5)


class F1:
    """An object of the shape of torchmetrics'; by itself it knows of no other rank."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.counts = torch.zeros(3)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        assert not torch.is_grad_enabled()
        found, true = outputs.argmax(1) == 1, targets == 1
        self.counts = self.counts + torch.stack([(found & true).sum(), found.sum(), true.sum()])

    def compute(self) -> Tensor:
        both, found, true = self.counts.unbind()
        return 2 * both / (found + true)


class F1OfRanks(F1):
    """Adds up over the ranks when it computes, as torchmetrics does."""

    def compute(self) -> Tensor:
        own = self.counts
        if dist.is_initialized():
            dist.all_reduce(self.counts)
        value = super().compute()
        self.counts = own
        return value


class Confusion(nn.Module):
    """A module, as torchmetrics' are, with what these declare of their state; it computes two values."""

    _defaults: Mapping[str, Any] = {"seen": 0}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counted", torch.zeros(()))
        self.reset()

    def reset(self) -> None:
        self.seen, self._update_count = torch.zeros(()), 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen, self._update_count = self.seen + len(targets), self._update_count + 1

    def compute(self) -> dict[str, Any]:
        return {"seen": self.seen, "updates": self._update_count}


def f1_of(task: Supervised, batches: list[kit.Batch]) -> float:
    """Return the value over all batches at once."""
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    whole = F1()
    with torch.no_grad():
        whole.update(task.model(inputs), targets)
    return float(whole.compute())


def f1_function(outputs: Tensor, targets: Tensor) -> Tensor:
    each = F1()
    with torch.no_grad():
        each.update(outputs, targets)
    return each.compute()


def test_an_object_measures_the_whole_set_and_is_left_as_it_was() -> None:
    given = F1()
    given.counts += 7
    task = kit.linear_classifier(metrics={"f1": given, "mean_of_f1": f1_function})
    metrics = Trainer(device="cpu").validate(task, BATCHES).metrics

    assert metrics["validation/f1"] == pytest.approx(f1_of(task, BATCHES), rel=1e-6)
    assert metrics["validation/mean_of_f1"] != pytest.approx(metrics["validation/f1"], rel=1e-3)
    assert given.counts.tolist() == [7, 7, 7]


def test_each_set_and_each_validation_begins_again() -> None:
    task = kit.linear_classifier(metrics={"f1": F1()})
    sets = {"day": BATCHES[:2], "night": BATCHES[2:]}
    trainer = Trainer(device="cpu")
    for _ in range(2):
        metrics = trainer.test(task, sets).metrics
        assert metrics["test/day/f1"] == pytest.approx(f1_of(task, BATCHES[:2]), rel=1e-6)
        assert metrics["test/night/f1"] == pytest.approx(f1_of(task, BATCHES[2:]), rel=1e-6)


class Logged(Plugin):
    """Keeps what is logged, and what the weights were in the batches since."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.expected: list[float] = []
        self._counts = F1()

    @on(BatchEnd)
    def keep(self, run: Run, event: BatchEnd) -> None:
        with torch.no_grad():
            self._counts.update(run.outputs, run.batch[1])

    @on(Log)
    def compare(self, run: Run, event: Log) -> None:
        self.values.append(event.metrics["train/f1"])
        self.expected.append(float(self._counts.compute()))
        self._counts.reset()


def test_in_training_it_measures_since_the_last_log_whatever_is_validated_between() -> None:
    task, logged = kit.linear_classifier(metrics={"f1": F1()}), Logged()
    plugins = [logged, LogSchedule(Every(steps=3)), ValidationSchedule(Every(steps=1))]
    result = kit.fit(*plugins, task=task, train=BATCHES, validation=BATCHES[:2], epochs=2)

    assert logged.values == logged.expected
    assert len(logged.values) == 4
    assert result.metrics["validation/f1"] == pytest.approx(f1_of(task, BATCHES[:2]), rel=1e-6)


class Guarded(F1):
    """Holds what no checkpoint holds, and has a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = state["kept"]


@pytest.mark.parametrize("metric", [F1, Guarded, Confusion])
def test_a_resume_between_two_logs_measures_what_was_before(metric: Any) -> None:
    states: list[Any] = []

    def fit(*plugins: Any) -> dict[str, float]:
        trainer = Trainer([LogSchedule(Every(steps=4)), *plugins], device="cpu")
        if states:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(states[0]))
        else:
            trainer.bus.on(SavePoint, lambda run, event: states.append(deepcopy(run.state_dict())))
        result = kit.fit(trainer, task=kit.linear_classifier(metrics={"own": metric()}), train=BATCHES, steps=4)
        return {name: value for name, value in result.metrics.items() if name.startswith("train/own")}

    whole = fit(SaveSchedule(Every(steps=3)))
    assert fit() == whole
    assert whole.keys() == ({"train/own/seen", "train/own/updates"} if metric is Confusion else {"train/own"})


def test_a_state_that_no_checkpoint_can_hold_stops_no_save() -> None:
    class Hiding(F1):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[int] = set()

    saved: list[Any] = []
    trainer = Trainer([LogSchedule(Every(steps=4)), SaveSchedule(Every(steps=3), at_end=False)], device="cpu")
    trainer.bus.on(SavePoint, lambda run, event: saved.append(run.state_dict()["means"]))
    kit.fit(trainer, task=kit.linear_classifier(metrics={"own": Hiding()}), train=BATCHES, steps=4)
    assert [each["own"] for each in saved][:1] == [{}]


def test_what_is_neither_a_function_nor_an_object_is_refused() -> None:
    for given in (F1, 3, object()):
        with pytest.raises(TypeError, match=r"function of \(outputs, targets\),"):
            kit.linear_classifier(metrics={"f1": given})


class Counts(F1):
    """Computes what is not a number."""

    def compute(self) -> Tensor:
        return self.counts


def test_what_is_not_a_number_is_collected_and_noted_once() -> None:
    task, collected = kit.linear_classifier(metrics={"counts": Counts(), "f1": F1()}), list[Any]()
    trainer = Trainer([LogSchedule(Every(steps=1)), ValidationSchedule(Every(steps=3))], device="cpu")
    trainer.bus.on(ValidationEnd, lambda run, event: collected.append(dict(run.collected)))
    result = kit.fit(trainer, task=task, train=BATCHES, validation={"day": BATCHES[:2], "night": BATCHES[2:]})

    assert "train/counts" not in result.metrics
    assert "validation/day/counts" not in result.metrics
    assert [each.keys() for each in collected] == [{"day/counts", "night/counts"}] * 2
    whole = Counts()
    for outputs, targets in ((task.model(inputs).detach(), targets) for inputs, targets in BATCHES[2:]):
        with torch.no_grad():
            whole.update(outputs, targets)
    assert collected[1]["night/counts"].tolist() == whole.counts.tolist()
    (note,) = [each for each in result.notes if "counts" in each]
    assert_facts(note, "'counts'", "[3]", "not a number", "run.collected")


@pytest.mark.parametrize("dataset", ["", "night"])
def test_what_is_not_a_number_cannot_be_monitored(dataset: str) -> None:
    name = f"{dataset}/counts".removeprefix("/")
    facts = (f"'validation/{name}'", "cannot be monitored", "[3]", "not a number", f"run.collected[{name!r}]")
    with pytest.raises(ValueError, match=pattern(*facts)):
        kit.fit(
            ValidationSchedule(Every(steps=1)),
            EarlyStopping(f"validation/{name}", mode="max"),
            task=kit.linear_classifier(metrics={"counts": Counts()}),
            validation={dataset: BATCHES} if dataset else BATCHES,
        )


def test_a_collection_that_names_its_metrics_stands_for_the_dict() -> None:
    class Several(Confusion):
        def keys(self) -> list[str]:
            return ["seen", "updates"]

    metrics = Trainer(device="cpu").validate(kit.linear_classifier(metrics=Several()), BATCHES).metrics
    assert (metrics["validation/seen"], metrics["validation/updates"]) == (30, 6)
    with pytest.raises(TypeError, match="MetricCollection; got"):
        kit.linear_classifier(metrics=F1())


def test_metrics_get_nested_outputs_without_their_graphs_and_follow_their_device() -> None:
    class Nested(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            return {"scores": super().forward(inputs), "parts": [inputs]}

    seen: list[Any] = []

    def share(outputs: Any, targets: Tensor) -> Tensor:
        seen.append(outputs)
        return accuracy(outputs["scores"], targets)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs["scores"], targets)

    kit.fit(LogSchedule(Every(steps=1)), task=Supervised(Nested(4, 2), loss, metrics={"share": share}))
    assert [each["scores"].requires_grad for each in seen] == [False, False]

    own = fresh_copy(Confusion(), {"scores": torch.ones(1, device="meta")})
    assert own.counted.device.type == "meta"


@pytest.mark.parametrize("kind", ["function", "object"])
def test_an_error_of_a_metric_names_it_and_the_shapes(kind: str) -> None:
    def fail(*given: Any) -> Tensor:
        raise IndexError("too many indices")

    class Fails(F1):
        def update(self, outputs: Tensor, targets: Tensor) -> None:
            fail()

    with pytest.raises(IndexError) as error:
        kit.fit(
            LogSchedule(Every(steps=1)),
            task=kit.linear_classifier(metrics={"auroc": Fails() if kind == "object" else fail}),
            train=BATCHES,
        )
    assert any("outputs of [5, 2]" in line for line in error.value.__notes__)


# On ranks.


def validated_together(metric: Any, count: int) -> tuple[dict[str, float], list[float]]:
    """Validate so many batches, and train on six; return the metrics of the sets, and what was logged."""
    torch.manual_seed(0)
    task, logged = kit.linear_classifier(metrics={"own": metric()}), list[float]()
    trainer = Trainer([LogSchedule(Every(steps=1))], engine=DDPEngine(device="cpu"))
    trainer.bus.on(Log, lambda run, event: logged.append(event.metrics["train/own"]))
    metrics = trainer.validate(task, BATCHES[:count]).metrics
    size = trainer.engine.world_size
    merged = [tuple(torch.cat(each) for each in zip(*BATCHES[at : at + 2], strict=True)) for at in range(0, 6, 2)]
    trainer.fit(task, BATCHES if size == 2 else merged, optimizer=kit.sgd(), epochs=1)
    return metrics, logged


@pytest.mark.parametrize("count", [1, 3, 4])
def test_ranks_measure_what_one_process_measures_also_where_one_has_no_batch(ranks: Pool, count: int) -> None:
    ((whole, logged),) = ranks(1).run(validated_together, F1OfRanks, count)
    for metrics, of_rank in ranks(2).run(validated_together, F1OfRanks, count):
        assert metrics == pytest.approx(whole, rel=1e-6)
        assert of_rank == pytest.approx(logged, rel=1e-6)


def test_an_object_that_does_not_add_up_over_the_ranks_is_an_error(ranks: Pool) -> None:
    with pytest.raises(ValueError, match="metric 'own'"):
        ranks(2).run(validated_together, F1, 3)


# Weights, and shapes.


class Weighted(Supervised):
    """Counts the samples of a batch by its targets that are not -1."""

    def batch_size(self, batch: Any) -> int:
        return int((batch[1] >= 0).sum())


def test_a_tasks_own_count_of_samples_weighs_every_metric() -> None:
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.0], [1.0]]))  # class 1 for positive inputs
    batches = [(torch.ones(4, 1), torch.tensor([0, -1, -1, -1])), (torch.ones(2, 1), torch.tensor([1, 1]))]

    def share(outputs: Tensor, targets: Tensor) -> Tensor:
        return accuracy(outputs[targets >= 0], targets[targets >= 0])

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, ignore_index=-1)

    result = kit.fit(
        LogSchedule(Every(epochs=1)),
        ValidationSchedule(Every(epochs=1)),
        task=Weighted(model, loss, metrics={"accuracy": share}),
        train=batches,
        validation=batches,
        optimizer=kit.sgd(0.0),
    )
    assert result.metrics["validation/accuracy"] == pytest.approx(2 / 3)
    assert result.metrics["train/accuracy"] == result.metrics["validation/accuracy"]
    assert result.metrics["train/loss"] == pytest.approx(result.metrics["validation/loss"])
    assert result.progress.samples == 3


def test_an_attribute_of_that_name_that_cannot_be_called_counts_nothing() -> None:
    task = kit.linear_classifier()
    task.batch_size = 3  # type: ignore[attr-defined]
    assert kit.fit(task=task, train=BATCHES).progress.samples == 30


OUTPUTS = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])


@pytest.mark.parametrize("targets", [torch.tensor([1, 1, 1, 0]), torch.tensor([[1], [1], [1], [0]])])
def test_accuracy_takes_indices_with_and_without_a_dimension_of_one(targets: Tensor) -> None:
    assert accuracy(OUTPUTS, targets) == 0.75


def test_accuracy_of_mixed_targets_goes_by_the_likeliest_class() -> None:
    assert accuracy(OUTPUTS, torch.tensor([[0.2, 0.8], [0.1, 0.9], [0.4, 0.6], [1.0, 0.0]])) == 0.75


@pytest.mark.parametrize(
    "targets", [torch.eye(4)[:, :2].long(), torch.tensor([1, 0, 1]), torch.tensor(1), torch.ones(1, 4)]
)
def test_accuracy_refuses_targets_of_other_shapes(targets: Tensor) -> None:
    with pytest.raises(ValueError, match=r"\[4, 2\], got targets"):
        accuracy(OUTPUTS, targets)


def test_one_hot_integers_as_many_as_classes_are_refused_by_the_metrics_name() -> None:
    task = kit.linear_classifier(metrics={"share": lambda outputs, targets: accuracy(outputs, targets.long())})
    batches = [(torch.randn(2, 4), torch.eye(2))]
    with pytest.raises(ValueError, match=r"targets of \[2, 2\]") as error:
        Trainer(device="cpu").validate(task, batches)
    assert any("in the metric 'share'" in note for note in error.value.__notes__)
