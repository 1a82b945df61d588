"""What the built-in plugins do in a prediction."""

from __future__ import annotations

import json
import signal
from io import StringIO
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.tests import kit
from heliograph.tests.kit import class_batches, linear_classifier
from torch import Tensor


def inputs(batches: int = 3) -> list[Tensor]:
    return [batch[0] for batch in class_batches(batches)]


class Tracking(h.Supervised):
    """Tracks a value in predictions."""

    def predict_step(self, run: h.Run, batch: Any) -> Any:
        run.track("seen", 2.0)
        return super().predict_step(run, batch)


def tracking() -> Tracking:
    task = linear_classifier()
    return Tracking(task.model, task.loss_fn)


@pytest.mark.parametrize("early", [False, True])
def test_ema_predicts_with_the_average(early: bool) -> None:
    ema, task = h.EMA(0.5), linear_classifier()
    trainer = h.Trainer([ema], device="cpu")
    kit.fit(trainer, task=task, train=class_batches(4))
    plain = [each.detach().clone() for each in task.model.parameters()]
    with ema.applied({"model": task.model}), torch.no_grad():
        average = task.model(inputs(1)[0])
    if early:
        for outputs in trainer.predict_batches(task, inputs()):
            assert torch.equal(outputs, average)
            break
    else:
        assert torch.equal(trainer.predict(task, inputs(1)).predictions, average)
    assert all(map(torch.equal, plain, task.model.parameters()))


def test_exceptions_go_by_the_list_of_tests() -> None:
    class Failing(h.Supervised):
        def predict_step(self, run: h.Run, batch: Any) -> Any:
            raise ArithmeticError

    task = linear_classifier()
    failing = Failing(task.model, task.loss_fn)
    for plugin, kind in (
        (h.ExceptionPassThrough(test=[ArithmeticError]), ArithmeticError),
        (h.ExceptionPassThrough(train=[ArithmeticError]), h.TrainingError),
    ):
        with pytest.raises(kind):
            h.Trainer([plugin], device="cpu").predict(failing, inputs())


def test_the_bar_shows_it() -> None:
    file = StringIO()
    trainer = h.Trainer([h.ProgressBar(plain=False, interval=0, file=file)], device="cpu")
    trainer.predict(tracking(), inputs())
    assert "predict |" in file.getvalue()
    assert "predict  batches 3" in file.getvalue()
    assert "predict/seen 2" in file.getvalue()


def test_logs_have_its_metrics(tmp_path: Path) -> None:
    logs: list[Any] = [h.JsonlLog(tmp_path / "log.jsonl"), h.FileLog(tmp_path), h.TensorBoard(tmp_path / "board")]
    h.Trainer(logs, device="cpu").predict(tracking(), inputs())
    first = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert (first["event"], first["metrics"]) == ("predict_end", {"predict/seen": 2.0})
    (text,) = [path.read_text() for path in tmp_path.glob("*.log")]
    assert "0 step 0] predict/seen" in text
    assert len(list((tmp_path / "board").iterdir())) == 1
    h.Trainer([h.FileLog(tmp_path / "other")], device="cpu").predict(linear_classifier(), inputs())
    (text,) = [path.read_text() for path in (tmp_path / "other").glob("*.log")]
    assert "batches done: 3" in text


def test_times_are_measured() -> None:
    trainer = h.Trainer([h.HandlerTimes(), h.EMA(0.5)], device="cpu")
    assert trainer.predict(linear_classifier(), inputs()).plugin_seconds.keys() == {"handler_times", "ema"}


def test_a_signal_cuts_it_short() -> None:
    class Sending(h.Plugin):
        @h.on(h.PredictBatchStart)
        def send(self, run: h.Run, event: h.PredictBatchStart) -> None:
            signal.raise_signal(signal.SIGTERM)

    trainer = h.Trainer([Sending(), h.Preemption(requeue=99)], device="cpu")
    done = []
    trainer.bus.on(h.PredictBatchEnd, lambda run, event: done.append(run.progress.evaluated))
    for call in (trainer.predict, lambda *given: list(trainer.predict_batches(*given))):
        with pytest.raises(SystemExit) as caught:
            call(linear_classifier(), inputs())
        assert caught.value.code == 99
    assert done == [1, 1]


def test_draws_of_a_step_are_taken_back() -> None:
    class Drawing(h.Supervised):
        def predict_step(self, run: h.Run, batch: Any) -> Any:
            return torch.rand(len(batch))

    task = linear_classifier()
    ends: list[float] = []
    trainer = h.Trainer([h.RNGCapture(seed=3)], device="cpu")
    trainer.bus.on(h.RunClosed, lambda run, event: ends.append(torch.rand(()).item()))
    for batches in (1, 3):
        torch.manual_seed(1)
        trainer.predict(Drawing(task.model, task.loss_fn), inputs(batches))
    assert ends[0] == ends[1]


def test_compiled_code_is_in_place() -> None:
    task = linear_classifier()
    plain = h.Trainer(device="cpu").predict(task, inputs()).predictions
    result = h.Trainer([h.Compile(backend="eager")], device="cpu").predict(task, inputs())
    assert torch.equal(result.predictions, plain)
    assert task.model._compiled_call_impl is None
