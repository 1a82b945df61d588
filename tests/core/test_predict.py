"""`trainer.predict` and `predict_batches`: what they return, and the events of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from heliograph import (
    DataModule,
    EpochEnd,
    Lane,
    Plugin,
    PredictBatchEnd,
    PredictBatchStart,
    PredictEnd,
    PredictionWriter,
    PredictStart,
    Run,
    RunClosed,
    StrictError,
    Supervised,
    Task,
    TestEnd,
    Trainer,
    ValidationEnd,
    on,
    read_predictions,
)
from heliograph.core.engines.options import PrecisionName
from heliograph.tests import kit
from heliograph.tests.kit import EventRecorder, class_batches, linear_classifier, random_batches
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, SubsetRandomSampler, TensorDataset

BATCH = ["predict_batch_start", "predict_batch_end"]
CLOSED = ["run_closed"]


class Returning(Task):
    """Returns from its step what a function makes of the inputs."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self.model, self.make = nn.Linear(4, 2), make

    def predict_step(self, run: Run, batch: Any) -> Any:
        run.track("mean", batch[0].mean())
        return self.make(batch[0])


def traced(*plugins: Any) -> tuple[Trainer, list[str]]:
    trainer = Trainer(plugins, device="cpu")
    return trainer, EventRecorder(trainer.bus).trace


def inputs(batches: int = 3) -> list[Tensor]:
    return [batch[0] for batch in random_batches(batches)]


def expected(task: Supervised, batches: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.cat([task.model(batch) for batch in batches])


# What comes of it.


@pytest.mark.parametrize("form", ["pairs", "bare", "singles", "loader", "dataset"])
def test_the_outputs_of_all_samples_in_the_order_of_the_data(form: str) -> None:
    task, pairs = linear_classifier(), random_batches(3)
    xs, dataset = [batch[0] for batch in pairs], TensorDataset(torch.cat([batch[0] for batch in pairs]))
    forms: dict[str, Any] = {
        "pairs": pairs, "bare": xs, "singles": [[x] for x in xs], "loader": DataLoader(dataset, 5), "dataset": dataset,
    }  # fmt: skip
    options: Any = {"loader_params": {"batch_size": 5, "shuffle": True}} if form == "dataset" else {}
    result = Trainer(device="cpu").predict(task, forms[form], **options)
    assert torch.allclose(result.predictions, expected(task, xs), atol=1e-6)
    assert not result.predictions.requires_grad
    assert (result.status, result.progress.samples, result.progress.evaluated) == ("completed", 12, 3)
    assert result.reason == "3 batches predicted"


def test_dicts_of_several_kinds() -> None:
    task = Returning(lambda x: {"x": x, "y": (x.numpy(), [f"{each:.3f}" for each in x[:, 0].tolist()])})
    xs = inputs()
    result = Trainer(device="cpu").predict(task, [(x,) for x in xs])
    whole = torch.cat(xs)
    assert torch.equal(result.predictions["x"], whole)
    array, texts = result.predictions["y"]
    assert np.array_equal(array, whole.numpy())
    assert texts == [f"{each:.3f}" for each in whole[:, 0].tolist()]
    assert result.metrics == pytest.approx({"predict/mean": whole.mean().item()}, abs=1e-6)


def test_the_result_shows_the_shapes_only() -> None:
    result = Trainer(device="cpu").predict(linear_classifier(), {"a": inputs(2), "b": inputs(1)})
    said = "predictions {'a': float32 [8, 2], 'b': float32 [4, 2]}"
    assert repr(result) == f"<RunResult: completed, {said}>"
    assert said in str(result).splitlines()
    assert Trainer(device="cpu").test(linear_classifier(), class_batches(1)).predictions is None


def test_an_empty_batch_adds_nothing() -> None:
    xs = [*inputs(2), torch.empty(0, 4)]
    task = linear_classifier()
    assert torch.equal(Trainer(device="cpu").predict(task, xs).predictions, expected(task, xs[:2]))


def test_a_data_module_has_data_to_predict() -> None:
    class Module(DataModule):
        closed = 0

        def __init__(self) -> None:
            self.loader_params = {"batch_size": 2}

        def predict(self) -> Any:
            return {"all": TensorDataset(torch.cat(inputs(2)))}

        def tear_down(self) -> None:
            self.closed += 1

    module, task = Module(), linear_classifier()
    result = Trainer(device="cpu").predict(task, module)
    assert torch.allclose(result.predictions["all"], expected(task, inputs(2)))
    assert [name for name, _ in Trainer(device="cpu").predict_batches(task, module)] == ["all"] * 4
    assert module.closed == 2
    with pytest.raises(TypeError, match=r"define predict\(\)"):
        Trainer(device="cpu").predict(task, DataModule())


# What is refused.


def test_a_task_without_outputs_is_refused() -> None:
    with pytest.raises(TypeError, match=r"predict_step\(run, batch\) that returns"):
        Trainer(device="cpu").predict(Task(), inputs())
    with pytest.raises(TypeError, match=r"predict_step\(run, batch\)"):
        Trainer(device="cpu").predict(object(), inputs())
    with pytest.raises(TypeError, match="predict_step returned None: return"):
        Trainer(device="cpu").predict(Returning(lambda x: None), [(x,) for x in inputs()])


def test_ragged_outputs_are_refused_at_the_batch() -> None:
    lengths = iter([3, 4, 4])
    trainer, trace = traced()
    with pytest.raises(ValueError, match=r"joined.*\[3\]\] and .*float32"):
        trainer.predict(Returning(lambda x: torch.ones(len(x), next(lengths))), [(x,) for x in inputs()])
    assert trace == ["predict_start", *BATCH, "predict_batch_start", "run_failed", "run_closed"]


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (lambda data: DataLoader(data, 2, shuffle=True), r"\(RandomSampler\): use shuffle=False"),
        (lambda data: DataLoader(data, 2, sampler=SubsetRandomSampler([0, 1])), r"\(SubsetRandomSampler\)"),
        (lambda data: DataLoader(data, 5, drop_last=True), "drop_last=False"),
    ],
)
def test_a_loader_that_would_mix_up_samples_is_refused_before_anything_begins(loader: Any, said: str) -> None:
    data = TensorDataset(torch.cat(inputs()))
    for call in (Trainer.predict, lambda *given: list(Trainer.predict_batches(*given))):
        trainer, trace = traced()
        with pytest.raises(ValueError, match=said):
            call(trainer, linear_classifier(), {"a": loader(data)})
        assert trace == []
    assert (
        len(Trainer(device="cpu").predict(linear_classifier(), DataLoader(data, 4, drop_last=True)).predictions) == 12
    )


def test_other_samplers_are_read_as_they_are() -> None:
    data = TensorDataset(torch.cat(inputs()))
    task = linear_classifier()
    given = Trainer(device="cpu").predict(task, DataLoader(Subset(data, [3, 1]), 1)).predictions
    assert torch.allclose(given, expected(task, [torch.cat(inputs())[[3, 1]]]))
    assert isinstance(DataLoader(data, shuffle=True).sampler, RandomSampler)


def test_an_iterable_dataset_is_read_in_its_order() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield from torch.cat(inputs())

    task = linear_classifier()
    assert torch.allclose(
        Trainer(device="cpu").predict(task, DataLoader(Stream(), 5)).predictions, expected(task, inputs())
    )
    with pytest.raises(ValueError, match="drops the last"):
        Trainer(device="cpu").predict(task, DataLoader(Stream(), 5, drop_last=True))


def test_no_set_and_no_batch_are_errors() -> None:
    with pytest.raises(ValueError, match="predict data:"):
        Trainer(device="cpu").predict(linear_classifier(), {})
    with pytest.raises(ValueError, match="predict set 'a' yielded"):
        Trainer(device="cpu").predict(linear_classifier(), {"a": iter([])})


def test_without_gather_somebody_must_take_the_outputs() -> None:
    class Taker(Plugin):
        rows = 0

        @on(PredictBatchEnd, lane=Lane.PERSIST)
        def take(self, run: Run, event: PredictBatchEnd) -> None:
            self.rows += len(run.outputs)

    taker, task = Taker(), linear_classifier()
    trainer = Trainer([taker], device="cpu")
    assert trainer.predict(task, inputs(), gather=False).predictions is None
    assert taker.rows == 12
    trainer.plugins.disable(taker)
    with pytest.raises(ValueError, match="takes them: add PredictionWriter"):
        trainer.predict(task, inputs(), gather=False)
    taken: list[Tensor] = []
    trainer.bus.on(PredictBatchEnd, lambda run, event: taken.append(run.outputs))
    trainer.predict(task, inputs(), gather=False)
    assert torch.equal(torch.cat(taken), expected(task, inputs()))
    with pytest.raises(TypeError, match="gather"):
        trainer.predict(task, inputs(), gather=1)  # type: ignore[arg-type]


# Events.


def test_the_trace_of_one_set() -> None:
    trainer, trace = traced()
    trainer.predict(linear_classifier(), inputs(2))
    assert trace == ["predict_start", *BATCH, *BATCH, "predict_end", *CLOSED]


def test_the_trace_of_two_sets_with_their_names() -> None:
    trainer, trace = traced()
    names: list[str] = []
    trainer.bus.on(PredictBatchStart, lambda run, event: names.append(f"+{event.dataset}"))
    trainer.bus.on(PredictBatchEnd, lambda run, event: names.append(f"-{event.dataset}"))
    trainer.predict(linear_classifier(), {"a": inputs(2), "b": inputs(1)})
    assert trace == ["predict_start", *BATCH, *BATCH, *BATCH, "predict_end", *CLOSED]
    assert names == ["+a", "-a", "+a", "-a", "+b", "-b"]


@pytest.mark.parametrize(("error", "status"), [(ArithmeticError("no"), "failed"), (KeyboardInterrupt(), "interrupted")])
def test_the_trace_of_a_failure_in_the_middle(error: BaseException, status: str) -> None:
    def fail(x: Tensor) -> Tensor:
        if len(trace) > 3:
            raise error
        return x

    trainer, trace = traced()
    closed: list[str] = []
    trainer.bus.on(RunClosed, lambda run, event: closed.append(event.status))
    task = Returning(fail)
    with pytest.raises(type(error)) as caught:
        trainer.predict(task, [(x,) for x in inputs()])
    assert trace == ["predict_start", *BATCH, "predict_batch_start", "run_failed", "run_closed"]
    assert (closed, caught.value) == ([status], error)
    assert task.model.training
    assert trainer.predict(linear_classifier(), inputs(1)).status == "completed"


def test_the_trace_of_one_that_a_plugin_cuts_short() -> None:
    class Cut(Plugin):
        @on(PredictBatchEnd)
        def cut(self, run: Run, event: PredictBatchEnd) -> None:
            run.control.cut_validation("no time")

    trainer, trace = traced(Cut())
    result = trainer.predict(linear_classifier(), inputs())
    assert trace == ["predict_start", *BATCH, "validation_cut", "run_closed"]
    assert (result.status, result.stopped_by, result.predictions) == ("stopped", "cut", None)


def test_handlers_see_eval_mode_outputs_and_metrics() -> None:
    seen: list[Any] = []

    class Looking(Plugin):
        @on(PredictStart, PredictBatchEnd, PredictEnd)
        def look(self, run: Run, event: PredictStart | PredictBatchEnd | PredictEnd) -> None:
            outputs = None if run.outputs is None else len(run.outputs)
            seen.append((run.phase, run.modules["model"].training, torch.is_grad_enabled(), outputs))
            if isinstance(event, PredictEnd):
                event.metrics["predict/more"] = 1.0

        @on(PredictBatchStart, lane=Lane.TRANSFORM)
        def double(self, run: Run, event: PredictBatchStart) -> None:
            run.batch = run.batch * 2

    task = linear_classifier()
    result = Trainer([Looking()], device="cpu").predict(task, inputs(1))
    assert seen == [("predict", False, False, None), ("predict", False, False, 4), ("predict", False, False, 4)]
    assert torch.equal(result.predictions, expected(task, [inputs(1)[0] * 2]))
    assert result.metrics == {"predict/more": 1.0}
    assert task.model.training


def test_strict_raises_at_the_end() -> None:
    trainer = Trainer(device="cpu", strict=True)
    trainer.bus.on(PredictEnd, lambda run, event: run.warn("Something is missing."))
    with pytest.raises(StrictError, match="Something is missing"):
        trainer.predict(linear_classifier(), inputs(1))
    with pytest.raises(StrictError, match="Something is missing"):
        list(trainer.predict_batches(linear_classifier(), inputs(1)))


# Batch by batch.


def test_batches_come_as_the_step_returns_them() -> None:
    task = Returning(lambda x: {"x": x})
    trainer, trace = traced()
    xs = inputs()
    with torch.enable_grad():
        found = [outputs["x"] for outputs in trainer.predict_batches(task, [(x,) for x in xs])]
    assert all(found[index] is xs[index] for index in range(3))
    assert trace == ["predict_start", *BATCH, *BATCH, *BATCH, "predict_end", *CLOSED]
    assert [name for name, _ in trainer.predict_batches(task, {"a": [(xs[0],)], "b": [(xs[1],)]})] == ["a", "b"]


def test_the_caller_keeps_its_mode_of_gradients() -> None:
    task, modes = linear_classifier(), []
    weight = torch.ones(2, requires_grad=True)
    for outputs in Trainer(device="cpu").predict_batches(task, inputs()):
        modes.append((torch.is_grad_enabled(), task.model.training))
        (outputs @ weight).sum().backward()
        assert not outputs.requires_grad
    assert weight.grad is not None
    with torch.no_grad():
        modes += [(torch.is_grad_enabled(), True) for _ in Trainer(device="cpu").predict_batches(task, inputs(1))]
    assert modes == [(True, False)] * 3 + [(False, True)]
    assert (torch.is_grad_enabled(), task.model.training) == (True, True)


def test_leaving_early_closes_the_run() -> None:
    trainer, trace = traced()
    closed: list[tuple[str, str]] = []
    trainer.bus.on(RunClosed, lambda run, event: closed.append((event.status, run.report.reason(None))))
    task = linear_classifier()
    for _ in trainer.predict_batches(task, inputs()):
        break
    whole = ["predict_start", *BATCH, "validation_cut", "run_closed"]
    assert trace == whole
    [(status, reason)] = closed
    assert status == "stopped"
    assert_facts(reason, "predict_batches")
    assert task.model.training
    batches = trainer.predict_batches(task, inputs())
    next(batches)
    with pytest.raises(RuntimeError, match="in use by another"):
        trainer.predict(task, inputs())
    batches.close()  # type: ignore[attr-defined]
    assert trace == whole * 2
    assert trainer.predict(task, inputs(1)).status == "completed"


def test_an_error_of_the_caller_closes_the_run() -> None:
    trainer, trace = traced()
    with pytest.raises(ArithmeticError):
        for _ in trainer.predict_batches(linear_classifier(), inputs()):
            raise ArithmeticError
    assert trace == ["predict_start", *BATCH, "validation_cut", "run_closed"]


def test_a_failure_in_the_middle_of_the_batches() -> None:
    trainer, trace = traced()
    lengths = iter([torch.ones(1), None])
    batches = trainer.predict_batches(Returning(lambda x: next(lengths)), [(x,) for x in inputs()])
    next(batches)
    with pytest.raises(TypeError, match="returned None"):
        next(batches)
    assert trace == ["predict_start", *BATCH, "predict_batch_start", "run_failed", "run_closed"]


def test_nothing_begins_before_the_first_batch() -> None:
    trainer, trace = traced()
    trainer.predict_batches(linear_classifier(), inputs())
    assert trace == []
    assert trainer.predict(linear_classifier(), inputs(1)).status == "completed"


# Beside a training.


def test_a_prediction_within_a_training_changes_nothing_of_it() -> None:
    def losses(*plugins: Any) -> list[float]:
        torch.manual_seed(1)
        kept = kit.Losses()
        kit.fit(kept, *plugins, task=linear_classifier(), train=class_batches(3), epochs=2)
        return kept.values

    class Predicting(Plugin):
        rows = 0

        @on(EpochEnd)
        def predict(self, run: Run, event: EpochEnd) -> None:
            loader = DataLoader(TensorDataset(torch.randn(6, 4)), 4)
            self.rows += len(Trainer(device="cpu").predict(run.task, loader).predictions)

    plugin = Predicting()
    assert losses() == losses(plugin)
    assert plugin.rows == 12


# Precision.


class Nested(Supervised):
    """Returns tensors of several types within others, and collects the same."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 2), nn.functional.cross_entropy)

    def _outputs(self, batch: Any) -> Any:
        logits = self.model(batch[0])
        pair = Named(logits.double(), [logits[0]] * len(logits))
        return {"logits": logits, "parts": (logits, {"again": logits}, pair), "class": logits.argmax(1), "none": None}

    def predict_step(self, run: Run, batch: Any) -> Any:
        run.collect("logits", self._outputs(batch))
        return self._outputs(batch)

    def validation_step(self, run: Run, batch: Any) -> Any:
        run.collect("logits", self._outputs(batch))
        return super().validation_step(run, batch)


class Named(NamedTuple):
    wide: Tensor
    rows: list[Tensor]


def check_float32(outputs: Any) -> None:
    logits, again, (wide, rows) = outputs["parts"]
    tensors = [outputs["logits"], logits, again["again"], *rows]
    assert {each.dtype for each in tensors} == {torch.float32}
    assert (wide.dtype, outputs["class"].dtype, outputs["none"]) == (torch.float64, torch.int64, None)
    assert torch.equal(outputs["logits"].to(torch.float64), wide), "the values are those of autocast"
    outputs["logits"].numpy()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_outputs_of_autocast_are_float32(precision: PrecisionName, tmp_path: Path) -> None:
    task, data, seen = Nested(), class_batches(2), []
    trainer = Trainer([PredictionWriter(tmp_path)], device="cpu", precision=precision)
    trainer.bus.on(PredictBatchEnd, lambda run, event: check_float32(run.outputs))
    for event in (PredictEnd, ValidationEnd, TestEnd):
        trainer.bus.on(event, lambda run, event: seen.append(run.collected["logits"]))
    check_float32(trainer.predict(task, data).predictions)
    check_float32(read_predictions(tmp_path))
    trainer.validate(task, data)
    trainer.test(task, data)
    assert len(seen) == 3
    for outputs in seen:
        check_float32(outputs)
    for outputs in Trainer(device="cpu", precision=precision).predict_batches(task, data):
        check_float32(outputs)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.bfloat16), ("bf16", torch.float16)])
def test_outputs_in_another_type_than_that_of_autocast_are_kept(precision: PrecisionName, dtype: torch.dtype) -> None:
    class Low(Supervised):
        def predict_step(self, run: Run, batch: Any) -> Any:
            return super().predict_step(run, batch).to(dtype)

    task = Low(nn.Linear(4, 2), nn.functional.cross_entropy)
    assert Trainer(device="cpu", precision=precision).predict(task, class_batches(2)).predictions.dtype == dtype
