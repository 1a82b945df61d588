"""Models exported at the end of a run: the weights that it leaves, checked, complete or not there."""

from __future__ import annotations

import errno
import logging
import os
from collections import namedtuple
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import onnxruntime
import pytest
import torch
from heliograph import (
    EMA,
    BatchEnd,
    Checkpoint,
    Compile,
    DDPEngine,
    Every,
    FSDPEngine,
    LoadBest,
    Preemption,
    RNGCapture,
    Run,
    RunResult,
    SaveSchedule,
    StrictError,
    Supervised,
    Task,
    Trainer,
    ValidationSchedule,
    tuning,
)
from heliograph.packages.tests.facts import assert_each, assert_facts, has_facts
from heliograph.tests import kit
from heliograph.tests.kit import class_batches, linear_classifier
from heliograph.tests.ranks_pool import Pool
from heliograph_export import Export, plugin
from heliograph_export.plugin import as_arguments, batch_shapes, batch_size, largest_difference, of_size, tensors_in
from torch import Tensor, nn

BOTH = pytest.mark.parametrize("ending", ["onnx", "pt2"])
INPUTS = torch.linspace(-1, 1, 28).reshape(7, 4)


def run_file(path: Path, *inputs: Tensor) -> list[Tensor]:
    """Run an exported model as others would."""
    if path.suffix == ".pt2":
        return tensors_in(torch.export.load(path).module()(*inputs))
    session = onnxruntime.InferenceSession(path)
    named = {each.name: value.numpy() for each, value in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(each) for each in session.run(None, named)]


def train(*plugins: Any, **options: Any) -> RunResult:
    return kit.fit(*plugins, **options)


def dropout_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


@BOTH
def test_the_exported_model_is_the_trained_one_in_eval_mode(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"model.{ending}"
    task = Supervised(dropout_model(), nn.functional.cross_entropy)
    task.model[2].eval()  # type: ignore[index]  # as the user set it
    result = train(Export(path), task=task)
    modes = [part.training for part in task.model.modules()]
    (found,) = run_file(path, INPUTS)

    assert torch.allclose(found, task.model.eval()(INPUTS), rtol=1e-4, atol=1e-6)
    assert modes == [True, True, True, False, True]
    assert result.notes[-1].startswith(f"exported model to {path}, 0.0")
    assert "3 and 4:" in result.notes[-1]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_the_best_weights_and_the_average(tmp_path: Path) -> None:
    """Those that the training leaves: of `LoadBest`, of the average; not those of the last step."""
    others = [(inputs, 1 - targets) for inputs, targets in class_batches(2)]
    schedules = [SaveSchedule(Every(epochs=1)), ValidationSchedule(Every(epochs=1))]
    best = [Checkpoint(tmp_path / "c", keep_best=1, monitor="validation/loss"), LoadBest()]
    for name, leaves in (("best", best), ("average", [EMA(0.5, load_at_end=True)])):
        task, path = linear_classifier(), tmp_path / f"{name}.pt2"
        before = [Export(path), *leaves] if name == "average" else [*leaves, Export(path)]
        train(*schedules, *before, task=task, validation=others, epochs=3)
        plain = linear_classifier()
        train(*schedules, task=plain, validation=others, epochs=3)

        assert torch.allclose(run_file(path, INPUTS)[0], task.model(INPUTS), atol=1e-6)
        assert not torch.allclose(task.model(INPUTS), plain.model(INPUTS), atol=1e-3)


class Several(Task):
    """Modules with several inputs and outputs, in a task whose batches are dicts."""

    def __init__(self) -> None:
        self.model, self.head = Mixing(), nn.Linear(4, 2)

    def training_step(self, run: Run, batch: Any) -> Tensor:
        return self.model(**batch)["sum"].mean()  # type: ignore[no-any-return]


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, one: Tensor, other: Tensor) -> dict[str, Any]:
        return {"sum": self.layer(one) + self.layer(other), "parts": (one.argmax(dim=1), [other * 2])}


@pytest.mark.parametrize(("ending", "named"), [("onnx", False), ("pt2", False), ("pt2", True)])
def test_several_inputs_and_outputs(tmp_path: Path, ending: str, named: bool) -> None:
    path, task = tmp_path / f"model.{ending}", Several()
    one, other = torch.rand(3, 4), torch.rand(3, 4)
    example: Any = {"one": one, "other": other} if named else (one, other)
    batches = [{"one": one, "other": other}]
    train(Export(path, example=example, module="model"), task=task, train=batches, allow_unused_parameters=True)
    expected = tensors_in(task.model(INPUTS, -INPUTS))
    if ending == "pt2" and named:
        found = tensors_in(torch.export.load(path).module()(one=INPUTS, other=-INPUTS))
    else:
        found = run_file(path, INPUTS, -INPUTS)

    assert [each.shape for each in found] == [(7, 2), (7,), (7, 4)]
    for each, value in zip(found, expected, strict=True):
        assert torch.allclose(each, value, atol=1e-6)


def test_named_tuples_stay_what_they_are() -> None:
    Pair = namedtuple("Pair", ["one", "other"])
    pair = Pair(torch.ones(2), [torch.zeros(2), "text"])
    assert of_size(((pair,), {}), 3) == ((Pair(ANY, [ANY, "text"]),), {})
    shapes = batch_shapes(((pair, torch.tensor(1.0)), {}))
    assert shapes == (Pair({0: ANY}, [{0: ANY}, None]), None)


@BOTH
def test_a_batch_of_one_is_no_fixed_size(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"model.{ending}"
    result = train(Export(path), train=class_batches(2, size=1))

    assert run_file(path, INPUTS)[0].shape == (7, 2)
    assert "1, 2 and 3" in result.notes[-1]


class OddAlone(nn.Linear):
    """A layer that treats a batch of one differently."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs - outputs.mean(0) if len(inputs) > 1 else outputs


@pytest.mark.sample(1)
@pytest.mark.parametrize("example", [(torch.ones(1, 4),), {"inputs": torch.ones(1, 4)}, None])
def test_the_example_is_checked_with_its_own_size(tmp_path: Path, example: Any) -> None:
    path = tmp_path / "model.onnx"
    task = Supervised(OddAlone(4, 1), lambda outputs, targets: outputs.square().mean())
    batches = class_batches(2, size=1 if example is None else 3)
    with pytest.raises(RuntimeError, match=r"a batch of 1.*dynamic=False"):
        train(Export(path, example=example), task=task, train=batches)
    assert not path.exists()
    example = batches[0][0] if example is None else example
    assert "differs by at most" in train(Export(path, example=example, dynamic=False), task=task).notes[-1]


@pytest.mark.sample(1)
@BOTH
def test_fixed_shapes(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"model.{ending}"
    result = train(Export(path, dynamic=False, example=torch.rand(1, 4)))

    assert ", checked: it differs" in result.notes[-1]
    assert run_file(path, INPUTS[:1])[0].shape == (1, 2)
    with pytest.raises(Exception, match=r"(?i)shape|dimension|size"):
        run_file(path, INPUTS)


class ByBatch(nn.Module):
    """Its code goes by the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs * 2 if len(inputs) == 3 else outputs


@pytest.mark.sample(1)
@BOTH
def test_a_module_that_goes_by_the_batch_size_is_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"model.{ending}"
    task = Supervised(ByBatch(), nn.functional.cross_entropy)
    with pytest.raises(RuntimeError, match=r"exported .*dynamic=False"):
        train(Export(path), task=task)
    assert not list(tmp_path.iterdir())
    train(Export(path, dynamic=False), task=task)
    assert path.is_file()


class ByContent(nn.Module):
    """Its code goes by its inputs, whatever their number is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs if inputs.sum().item() > 0 else -outputs


def test_a_module_that_goes_by_its_inputs_is_refused(tmp_path: Path) -> None:
    task = Supervised(ByContent(), nn.functional.cross_entropy)
    with pytest.raises(RuntimeError, match="module cannot be exported"):
        train(Export(tmp_path / "model.pt2"), task=task)
    assert not list(tmp_path.iterdir())


class Counting(nn.Module):
    """Counts its calls, and draws in each."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 2), 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        outputs: Tensor = self.layer(inputs)
        return outputs + torch.rand(()) * 0


class Uncopied(Counting):
    """Cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise ArithmeticError("not me")


def test_trying_the_example_leaves_no_trace(tmp_path: Path) -> None:
    found = []
    for example in (None, torch.rand(2, 4)):
        torch.manual_seed(0)
        module = Counting()
        train(
            Export(tmp_path / "model.pt2", example=example, check=False, overwrite=True),
            task=Supervised(module, nn.functional.cross_entropy),
        )
        found.append((module.calls, module.seen.tolist(), torch.get_rng_state().tolist()))
    assert found[0] == found[1]


def test_a_module_that_cannot_be_copied_is_not_tried(tmp_path: Path) -> None:
    task = Supervised(Uncopied(), nn.functional.cross_entropy)
    result = train(Export(tmp_path / "model.pt2", example=torch.rand(2, 4)), task=task)
    facts = ("example=", "cannot be copied", "ArithmeticError: not me")
    assert any(has_facts(note, *facts) for note in result.notes)


class Different(nn.Module):
    """Computes something else where it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs + 0.5 if torch.compiler.is_exporting() else outputs


@pytest.mark.sample(1)
@BOTH
def test_a_difference_is_an_error_and_leaves_no_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"model.{ending}"
    path.write_bytes(b"former")
    task = Supervised(Different(), nn.functional.cross_entropy)
    facts = ("batch of 3", "was not written", "output 0: ", "absolute difference: 0.5")
    with pytest.raises(RuntimeError) as caught:
        train(Export(path, overwrite=True), task=task)
    assert_facts(caught.value, *facts)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {path.name: b"former"}
    assert task.model.training


def test_an_error_at_the_end_names_the_newest_checkpoint(tmp_path: Path) -> None:
    task, saving = Supervised(Different(), nn.functional.cross_entropy), Checkpoint(tmp_path, every=Every(epochs=1))
    with pytest.raises(RuntimeError, match="was not written") as caught:
        train(saving, Export(tmp_path / "model.pt2"), task=task)
    (newest,) = tmp_path.glob("*.pth")
    assert_facts(caught.value.__notes__[0], "training was complete", str(newest))


def test_what_may_differ_and_what_is_not_compared(tmp_path: Path) -> None:
    task, path = Supervised(Different(), nn.functional.cross_entropy), tmp_path / "model.pt2"
    result = train(Export(path, overwrite=True, tolerance=(0.0, 0.6)), task=task)
    assert "most 0.5" in result.notes[-1]
    result = train(Export(path, overwrite=True, check=False), task=task)
    assert result.notes[-1].endswith(" MB")


def test_a_full_disk_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"former")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"model .*No space left.*Nothing"):
        train(Export(path, overwrite=True))
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {path.name: b"former"}


def test_a_large_onnx_model_has_its_weights_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "LARGEST_ONNX_FILE", 0)
    task = Supervised(nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 2)), nn.functional.cross_entropy)
    train(Export(tmp_path / "model.onnx"), task=task)

    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert torch.allclose(run_file(tmp_path / "model.onnx", INPUTS)[0], task.model(INPUTS), atol=1e-5)


class TestRefused:
    """What is refused at the start, not after hours."""

    def test_an_existing_file(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt2"
        path.write_bytes(b"precious")
        with pytest.raises(ValueError, match="already: give another"):
            train(Export(path))
        with pytest.raises(ValueError, match="already: give another"):
            tuning.rehearse(
                Trainer([Export(path)], device="cpu"),
                linear_classifier(),
                class_batches(2),
                optimizer=kit.adam(),
                epochs=1,
            )
        assert path.read_bytes() == b"precious"

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(ValueError, match="Nothing can be saved"):
            train(Export(tmp_path / "file" / "model.pt2"))

    def test_a_module_that_is_not_known(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"task": Several(), "train": [{"one": INPUTS, "other": INPUTS}]}
        with pytest.raises(ValueError, match="head: choose one, module='model'"):
            train(Export(tmp_path / "model.pt2"), **options)
        with pytest.raises(ValueError, match="no module 'heat'"):
            train(Export(tmp_path / "model.pt2", module="heat"), **options)
        with pytest.raises(ValueError, match=r"pairs \(inputs, targets\)"):
            train(Export(tmp_path / "model.pt2", module="head"), **options)

    def test_arguments(self, tmp_path: Path) -> None:
        for path in ("model.pth", "model", "model.onnx.gz"):
            with pytest.raises(ValueError, match=r"\.onnx or \.pt2"):
                Export(tmp_path / path)
        with pytest.raises(TypeError, match="tuple of positional arguments"):
            Export(tmp_path / "model.pt2", example=[1, 2])
        with pytest.raises(TypeError, match=r"^Export\(path\) takes the path"):
            Export(None)  # type: ignore[arg-type]
        for tolerance in (5, (1e-3,)):
            with pytest.raises(TypeError, match=r"tolerance is \(relative, absolute\),"):
                Export(tmp_path / "model.pt2", tolerance=tolerance)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="dynamic is True or"):
            Export(tmp_path / "model.pt2", dynamic=1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="number, at least 0"):
            Export(tmp_path / "model.pt2", tolerance=(-1.0, 0.0))
        with pytest.raises(ValueError, match="the exported file"):
            Trainer([Export(tmp_path / "a.pt2"), Export(tmp_path / "a.pt2").named("other")])

    @pytest.mark.parametrize(
        ("ending", "option", "words"),
        [
            (
                "pt2",
                "opset",
                r"'opset'.* torch\.export\.export\. .*Known: dynamic_shapes",
            ),
            ("onnx", "opset_versions", r"torch\.onnx\.export\. .*'opset_version'"),
            ("onnx", "f", "no option 'f'"),
            ("pt2", "kwargs", "no option 'kwargs'"),
        ],
    )
    def test_an_option_that_the_exporter_does_not_take(
        self, tmp_path: Path, ending: str, option: str, words: str
    ) -> None:
        options: dict[str, Any] = {option: 18}
        with pytest.raises(TypeError, match=words):
            Export(tmp_path / f"model.{ending}", **options)

    def test_inputs_without_a_batch(self, tmp_path: Path) -> None:
        apart = (torch.ones(2), torch.ones(3))
        with pytest.raises(ValueError, match=r"first dimensions \[2, 3\],"):
            Export(tmp_path / "model.pt2", example=apart)
        Export(tmp_path / "model.pt2", example=apart, dynamic=False)
        steps: list[int] = []
        trainer = Trainer([Export(tmp_path / "model.pt2")], device="cpu")
        trainer.bus.on(BatchEnd, lambda run, event: steps.append(run.progress.steps))
        with pytest.raises(ValueError, match="batch is not known"):
            kit.fit(trainer, train=[(apart, torch.ones(2))])
        assert steps == []

    @pytest.mark.parametrize("example", [torch.zeros(2, 5), torch.zeros(2, 4).long(), {"image": torch.zeros(2, 4)}])
    def test_an_example_that_the_module_does_not_take(self, tmp_path: Path, example: Any) -> None:
        steps: list[int] = []
        trainer = Trainer([Export(tmp_path / "model.pt2", example=example)], device="cpu")
        trainer.bus.on(BatchEnd, lambda run, event: steps.append(run.progress.steps))
        with pytest.raises(ValueError, match=r"example=: .*\. Give"):
            kit.fit(trainer)
        assert steps == []

    def test_a_missing_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
        with pytest.raises(ImportError, match=r"ONNX needs onnxscript.*pip install"):
            Export(tmp_path / "model.onnx")
        Export(tmp_path / "model.pt2")


def test_without_a_runtime_the_result_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    path = tmp_path / "model.onnx"
    result = train(Export(path))

    assert_each(result.warnings, (str(path), "was not checked", "'heliograph[onnx]'"))
    assert path.is_file()
    with pytest.raises(StrictError):
        kit.fit(Trainer([Export(path, overwrite=True)], device="cpu", strict=True))


def test_nothing_is_exported_of_a_run_that_did_not_end_well(tmp_path: Path) -> None:
    def fail(run: Run, event: BatchEnd) -> None:
        raise ArithmeticError

    def preempt(run: Run, event: BatchEnd) -> None:
        run.control.stop("the machine is needed", by="preemption")

    for handler in (fail, preempt):
        trainer = Trainer(
            [Export(tmp_path / "model.pt2"), Preemption(), Checkpoint(tmp_path), SaveSchedule(Every(epochs=1))]
        )
        trainer.bus.on(BatchEnd, handler)
        if handler is fail:
            with pytest.raises(ArithmeticError):
                kit.fit(trainer)
        else:
            kit.fit(trainer)
        assert not list(tmp_path.glob("model*"))


def test_an_evaluation_exports_nothing(tmp_path: Path) -> None:
    Trainer([Export(tmp_path / "model.pt2")], device="cpu").test(linear_classifier(), class_batches(1))
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_that_has_nothing_left_to_do(tmp_path: Path) -> None:
    def plugins(**options: Any) -> list[Any]:
        saving = [RNGCapture(), SaveSchedule(Every(epochs=1)), Checkpoint(tmp_path / "c", resume="auto")]
        return [*saving, Export(tmp_path / "model.pt2", overwrite=True, **options)]

    train(*plugins())
    (tmp_path / "model.pt2").unlink()
    result = train(*plugins())
    assert f"exported to {tmp_path / 'model.pt2'}:" in result.warnings[0]
    assert "example=" in result.warnings[0]
    train(*plugins(example=torch.rand(2, 4)))
    assert (tmp_path / "model.pt2").is_file()


def test_it_leaves_the_training_as_it_is(tmp_path: Path) -> None:
    """The same bits with and without it, also where it is taken away between a save and a resume."""
    weights = []
    for name, plugins in (("with", [Export(tmp_path / "model.pt2")]), ("without", [])):
        torch.manual_seed(0)
        task = Supervised(dropout_model(), nn.functional.cross_entropy)
        saving = kit.saving(tmp_path / name, Every(epochs=1), resume="auto")
        kit.fit(*saving, *plugins, task=task, epochs=1)
        result = kit.fit(*saving, task=task, epochs=2)
        assert result.resume is not None
        assert (result.resume.reasons, result.resume.epoch) == ((), 1)
        weights.append([each.tolist() for each in task.model.state_dict().values()])

    assert weights[0] == weights[1]


def test_compiled_code_does_not_get_in(tmp_path: Path) -> None:
    task, path = linear_classifier(), tmp_path / "model.pt2"
    train(Compile(backend="eager"), Export(path), task=task)

    assert torch.allclose(run_file(path, INPUTS)[0], task.model(INPUTS), atol=1e-6)


def test_a_loop_of_ones_own_exports_too(tmp_path: Path) -> None:
    kit.go_through(kit.make_run(Trainer([Export(tmp_path / "model.pt2")], device="cpu")))
    assert run_file(tmp_path / "model.pt2", INPUTS)[0].shape == (7, 2)


def test_the_exporters_own_words_are_not_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    level = logging.getLogger("torch.onnx").level
    train(Export(tmp_path / "model.onnx"))

    assert capfd.readouterr() == ("", "")
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []
    assert logging.getLogger("torch.onnx").level == level


def test_options_go_to_the_exporter(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    shapes = ({0: torch.export.Dim("rows")},)
    train(Export(path, input_names=["image"], output_names=["scores"], dynamic_shapes=shapes))
    session = onnxruntime.InferenceSession(path)

    assert [(each.name, each.shape) for each in session.get_inputs()] == [("image", ["rows", 4])]
    assert [each.name for each in session.get_outputs()] == ["scores"]


class TestParts:
    """Inputs and outputs."""

    def test_inputs_of_another_size(self) -> None:
        arguments = as_arguments({"ids": torch.arange(2), "more": [torch.eye(2), 5], "scale": torch.tensor(1.0)})
        _, kwargs = of_size(arguments, 3)

        assert kwargs["ids"].tolist() == [0, 1, 0]
        assert kwargs["more"][0].tolist() == [[1, 0], [0, 1], [1, 0]]
        assert (kwargs["more"][1], kwargs["scale"].item()) == (5, 1.0)
        assert batch_size(arguments) == 2
        with pytest.raises(ValueError, match=r"first dimensions \[2, 3\],"):
            batch_size(as_arguments((torch.ones(2), torch.ones(3))))
        with pytest.raises(ValueError, match=r"first dimensions \[\]"):
            batch_size(as_arguments((torch.tensor(1.0),)))

    @pytest.mark.parametrize(
        ("one", "other", "words"),
        [
            ([torch.ones(2)], [], "returns 0 tensors"),
            ([torch.ones(2)], [torch.ones(3)], r"output 0: .*shape.*\[3\].*\[2\]"),
            ([torch.ones(2)], [torch.ones(2).double()], "output 0: .*torch.float64.*torch.float32"),
            ([torch.ones(2)], [torch.ones(2) + 2e-3], "(?s)output 0: .*difference: 0.001999.*1e-05"),
            ([torch.ones(2)], [torch.tensor([1.0, torch.nan])], "(?s)output 0.*Mismatched elements: 1"),
            ([torch.arange(2)], [torch.arange(2) + 1], "(?s)output 0.*not equal.*difference: 1"),
        ],
    )
    def test_differences(self, one: list[Tensor], other: list[Tensor], words: str) -> None:
        with pytest.raises((AssertionError, ValueError), match=words):
            largest_difference(one, other, None)

    def test_no_difference(self) -> None:
        nothing = torch.tensor([torch.nan, 1.0])
        assert largest_difference([nothing, torch.empty(0)], [nothing.clone(), torch.empty(0)], None) == 0.0
        half = torch.ones(2, dtype=torch.bfloat16)
        assert largest_difference([half], [half * 1.01], None) == pytest.approx(0.0078125)


def export_on_ranks(path: Path, kind: str) -> tuple[str, ...] | str:
    engine = DDPEngine(device="cpu") if kind == "ddp" else FSDPEngine(device="cpu")
    trainer = Trainer([Export(path)], engine=engine)
    try:
        return trainer.fit(linear_classifier(), class_batches(4), optimizer=kit.adam(), epochs=1).notes
    except ValueError as error:
        return str(error)
    except RuntimeError as error:  # of the other rank
        return type(error).__name__


def test_the_main_rank_exports(tmp_path: Path, ranks: Pool) -> None:
    path = tmp_path / "model.pt2"
    one, other = ranks(2).run(export_on_ranks, path, "ddp")

    assert [note[:18] for note in one] == ["exported model to "]
    assert other == ()
    assert run_file(path, INPUTS)[0].shape == (7, 2)


def test_shards_are_refused_at_the_start(tmp_path: Path, ranks: Pool) -> None:
    one, other = ranks(2).run(export_on_ranks, tmp_path / "model.pt2", "fsdp")

    assert_facts(str(one), "FSDPEngine", "shards", "cannot be exported")
    assert other == "RankFailed"
