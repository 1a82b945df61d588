"""`run.collect`: the values of a whole set, for handlers of its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    Every,
    Lane,
    Plugin,
    PredictEnd,
    RNGCapture,
    Run,
    SaveSchedule,
    TestEnd,
    Trainer,
    ValidationBatchEnd,
    ValidationEnd,
    ValidationSchedule,
    ValidationStart,
    on,
)
from heliograph.core.task import Supervised
from heliograph.tests import kit
from heliograph.tests.kit import class_batches, counters
from torch import Tensor, nn


class Collecting(Supervised):
    """Collects logits and labels in validation, test and predict."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)), nn.functional.cross_entropy)

    def validation_step(self, run: Run, batch: tuple[Tensor, Tensor]) -> Any:
        values = super().validation_step(run, batch)
        run.collect("logits", run.outputs)
        run.collect("both", {"labels": batch[1], "names": [str(int(each)) for each in batch[1]]})
        return values

    def predict_step(self, run: Run, batch: Any) -> Any:
        outputs = super().predict_step(run, batch)
        run.collect("logits", outputs)
        return outputs


class Area(Plugin):
    """A metric of the whole set."""

    def __init__(self) -> None:
        self.shapes: list[dict[str, Any]] = []

    @on(ValidationEnd, TestEnd, PredictEnd, lane=Lane.MEASURE)
    def measure(self, run: Run, event: ValidationEnd | TestEnd | PredictEnd) -> None:
        self.shapes.append({name: len(each) for name, each in run.collected.items()})
        for name in run.collected:
            if name.endswith("logits"):
                scores = run.collected[name].softmax(1)[:, 1]
                event.metrics[f"{run.phase}/{name.removesuffix('logits')}spread"] = (scores.max() - scores.min()).item()


def test_the_end_of_a_validation_has_the_whole_set() -> None:
    task, batches, found = Collecting(), class_batches(3), []
    trainer = Trainer(device="cpu")
    trainer.bus.on(ValidationEnd, lambda run, event: found.append(dict(run.collected)))
    trainer.validate(task, batches)
    labels = torch.cat([batch[1] for batch in batches])
    (collected,) = found
    assert collected["logits"].shape == (9, 2)
    assert torch.equal(collected["both"]["labels"], labels)
    assert collected["both"]["names"] == [str(each) for each in labels.tolist()]
    task.model.eval()
    with torch.no_grad():
        assert torch.equal(collected["logits"], torch.cat([task.model(batch[0]) for batch in batches]))


def test_of_named_sets_the_names_have_the_set_before() -> None:
    area = Area()
    trainer = Trainer([area], device="cpu")
    result = trainer.test(Collecting(), {"a": class_batches(2), "b": class_batches(1)})
    assert area.shapes == [{"a/logits": 6, "a/both": 2, "b/logits": 3, "b/both": 2}]
    assert {"test/a/spread", "test/b/spread"} < result.metrics.keys()
    result = trainer.predict(Collecting(), class_batches(2))
    assert area.shapes[1:] == [{"logits": 6}]
    assert "predict/spread" in result.metrics


def test_it_is_let_go_after_the_end() -> None:
    after: list[Any] = []
    trainer = Trainer([ValidationSchedule(Every(epochs=1))], device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: after.append((dict(run.collected), run.work.collection)))
    kit.fit(trainer, task=Collecting(), validation=class_batches(2), epochs=2)
    assert after == [({}, None)] * 4


def test_one_that_is_cut_short_has_nothing() -> None:
    class Cut(Plugin):
        @on(ValidationBatchEnd)
        def cut(self, run: Run, event: ValidationBatchEnd) -> None:
            run.control.cut_validation("no time")

    area = Area()
    assert Trainer([Cut(), area], device="cpu").validate(Collecting(), class_batches(2)).status == "stopped"
    assert area.shapes == []


def test_a_handler_may_collect_too() -> None:
    found: list[Any] = []

    class Handler(Plugin):
        @on(ValidationBatchEnd)
        def collect(self, run: Run, event: ValidationBatchEnd) -> None:
            run.collect("mine", run.outputs.argmax(1))

        @on(ValidationEnd)
        def read(self, run: Run, event: ValidationEnd) -> None:
            found.append(run.collected["mine"].shape)

    Trainer([Handler()], device="cpu").validate(kit.linear_classifier(), class_batches(2))
    assert found == [(6,)]


@pytest.mark.parametrize("event", [BatchEnd, ValidationEnd])
def test_elsewhere_it_is_refused(event: type[BatchEnd | ValidationEnd]) -> None:
    trainer = Trainer([ValidationSchedule(Every(epochs=1))], device="cpu")
    trainer.bus.on(event, lambda run, event: run.collect("x", torch.ones(1)))
    with pytest.raises(RuntimeError, match=r"in a training, use run\.track"):
        kit.fit(trainer, validation=class_batches(1))


def test_before_the_first_batch_it_is_refused() -> None:
    trainer = Trainer(device="cpu")
    trainer.bus.on(ValidationStart, lambda run, event: run.collect("x", torch.ones(1)))
    with pytest.raises(RuntimeError, match="needs a current batch:"):
        trainer.validate(kit.linear_classifier(), class_batches(1))


def test_a_name_that_was_not_collected_says_what_there_is() -> None:
    trainer = Trainer(device="cpu")
    trainer.bus.on(ValidationEnd, lambda run, event: run.collected["logit"])
    with pytest.raises(KeyError, match="'logit'; collected: 'logits', 'both'"):
        trainer.validate(Collecting(), class_batches(1))


def trained(
    folder: Path, steps: int, task: Supervised | None = None
) -> tuple[list[Tensor], dict[str, Any], dict[str, float]]:
    """Train with dropout and validations, from the newest checkpoint of the folder."""
    torch.manual_seed(0)
    task = task or Collecting()
    plugins: list[Any] = [RNGCapture(), SaveSchedule(Every(steps=2), at_end=False), Checkpoint(folder, resume="auto")]
    plugins += [ValidationSchedule(Every(steps=2)), Area()]
    result = kit.fit(*plugins, task=task, train=class_batches(4), validation=class_batches(2), steps=steps)
    return [each.detach() for each in task.model.parameters()], counters(result), result.metrics


def test_a_training_that_collects_is_resumed_exactly(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 7)
    trained(tmp_path / "killed", 5)
    resumed = trained(tmp_path / "killed", 7)
    assert all(map(torch.equal, whole[0], resumed[0]))
    assert whole[1:] == resumed[1:]
    assert "validation/spread" in whole[2]


def test_collecting_changes_no_bit_of_a_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Supervised(Collecting().model, nn.functional.cross_entropy)
    with_it, without = trained(tmp_path / "one", 5), trained(tmp_path / "other", 5, plain)
    assert all(map(torch.equal, with_it[0], without[0]))
    assert {**with_it[2]} == {**without[2], "validation/spread": with_it[2]["validation/spread"]}
