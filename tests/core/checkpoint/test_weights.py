"""Weights found in folders, read from files of several kinds, and loaded into tasks and modules."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heliograph import (
    EMA,
    Checkpoint,
    DDPEngine,
    Every,
    SaveSchedule,
    Supervised,
    TrainedOnly,
    Trainer,
    ValidationSchedule,
    load_weights,
)
from heliograph.core.checkpoint import weights
from heliograph.core.checkpoint.storage import Store, reader
from heliograph.core.engines.options import modules_of
from heliograph.tests import kit
from heliograph.tests.kit import class_batches, damage
from heliograph.tests.messages import assert_facts
from heliograph.tests.ranks_pool import Pool
from heliograph.tests.stores import unseal
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

Make = Callable[..., Any]
LOSS = "validation/loss"


def linear(value: float, inputs: int = 4) -> nn.Linear:
    layer = nn.Linear(inputs, 2)
    nn.init.constant_(layer.weight, value)
    return layer


def supervised(value: float = 0.0) -> Supervised:
    return Supervised(linear(value), nn.functional.mse_loss)


def weights_of(value: float, inputs: int = 4) -> dict[str, Tensor]:
    return {"weight": torch.full((2, inputs), value), "bias": torch.zeros(2)}


def filled(module: Any) -> float:
    """Return the value that all weights of a layer have."""
    (value,) = set(module.weight.flatten().tolist())
    return float(value)


@pytest.fixture
def saved(opened: Make, state: Make) -> Callable[..., Path]:
    """Return a function that saves a model that is filled with a value as the next checkpoint of a run."""
    stores: dict[str, Store] = {}

    def save(value: float, *, run: str = "run", loss: float | None = None, **more: Any) -> Path:
        if run not in stores:
            stores[run] = opened(run)
        store = stores[run]
        store.write_as(more.get("training_id", "0" * 32), run)
        more = {"training_id": "0" * 32, "modules": {"model": weights_of(value)}, **more}
        judged = None if loss is None else (LOSS, "min", loss)
        held = state(int(value), name=run, **more)
        return store.save(f"{run}_epoch_0_iter_{value:g}.pth", held, judged_by=judged).path

    return save


def test_the_newest_in_a_folder_is_taken_and_named(saved: Make, tmp_path: Path) -> None:
    _, _, newest = saved(1), saved(3), saved(2)
    task = supervised()
    loaded = load_weights(task, tmp_path)

    assert (loaded.path, loaded.step, loaded.modules, loaded.skipped) == (newest, 2, ("model",), ())
    assert str(loaded) == f"{newest}, of step 2"
    assert filled(task.model) == 2.0


def test_a_damaged_one_is_skipped_and_reported(saved: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad, short = saved(1), saved(2), saved(3)
    damage(bad)
    short.write_bytes(short.read_bytes()[:-100])
    task = supervised()
    with caplog.at_level(logging.WARNING, "heliograph"):
        loaded = load_weights(task, tmp_path)

    assert (loaded.path, filled(task.model)) == (good, 1.0)
    assert [str(short) in loaded.skipped[0], str(bad) in loaded.skipped[1]] == [True, True]
    assert len(caplog.records) == 2
    damage(good)
    with pytest.raises(ValueError, match=r"No checkpoint in.*intact.*damaged"):
        load_weights(task, tmp_path)
    assert filled(task.model) == 1.0


def test_the_best_is_that_of_the_metric_and_no_other_for_it(saved: Make, tmp_path: Path) -> None:
    saved(1, loss=0.5), saved(2, loss=float("nan"))
    best = saved(3, loss=0.25)
    saved(4, loss=0.5)
    task = supervised()

    assert load_weights(task, tmp_path, which="best").path == best
    assert filled(task.model) == 3.0
    assert filled_after(load_weights, tmp_path, which="last") == 4.0
    damage(best)
    with pytest.raises(ValueError, match="damaged"):
        load_weights(task, tmp_path, which="best")


def filled_after(load: Make, *arguments: Any, **options: Any) -> float:
    task = supervised()
    load(task, *arguments, **options)
    return filled(task.model)


def test_no_best_without_a_metric(saved: Make, tmp_path: Path) -> None:
    saved(1)
    with pytest.raises(ValueError, match=r"metric.* Checkpoint\("):
        load_weights(supervised(), tmp_path, which="best")
    saved(2, loss=float("nan"))
    with pytest.raises(ValueError, match="'validation/loss' was NaN"):
        load_weights(supervised(), tmp_path, which="best")


def test_the_best_is_of_the_newest_training(saved: Make, tmp_path: Path) -> None:
    saved(1, loss=0.1)
    best = saved(2, loss=0.9, training_id="1" * 32)

    assert load_weights(supervised(), tmp_path, which="best").path == best


def test_one_of_several_runs_has_to_be_named(saved: Make, tmp_path: Path) -> None:
    saved(1, run="night")
    saved(2, run="day")
    with pytest.raises(ValueError, match="several runs, 'day', 'night':"):
        load_weights(supervised(), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"run 'dusk' .* Runs"):
        load_weights(supervised(), tmp_path, run_name="dusk")

    assert filled_after(load_weights, tmp_path, run_name="night") == 1.0


def test_what_chooses_in_a_folder_is_refused_for_a_file(saved: Make, tmp_path: Path) -> None:
    path = saved(1)
    for options in ({"which": "best"}, {"run_name": "run"}):
        with pytest.raises(ValueError, match="which= and run_name= select"):
            load_weights(supervised(), path, **options)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*gone"):
        load_weights(supervised(), tmp_path / "gone", which="best")
    with pytest.raises(ValueError, match="which= is 'last'"):
        load_weights(supervised(), tmp_path, which="newest")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="Runs with checkpoints: none"):
        (tmp_path / "empty").mkdir()
        load_weights(supervised(), tmp_path / "empty")
    with pytest.raises(TypeError, match=r"^load_weights\(task, path\) takes"):
        load_weights(supervised(), None)  # type: ignore[arg-type]
    for name, content in {"counts": {"epoch": 3, "step": torch.tensor(4)}, "list": [1], "empty": {}}.items():
        for ending in ("pt", "pth"):
            torch.save(content, tmp_path / f"{name}.{ending}")
            with pytest.raises(ValueError, match="state_dict") as refusal:
                load_weights(supervised(), tmp_path / f"{name}.{ending}")
            assert name != "counts" or "epoch, step" in str(refusal.value)
    with pytest.raises(FileNotFoundError, match=r"gone.pth.* Known: .*run_epoch_0"):
        load_weights(supervised(), tmp_path / "gone.pth")


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", ["x.pth", "x.ckpt", "x.pt"])
@pytest.mark.parametrize("wrapper", ["model", "state_dict", "model_state_dict", "net"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model.", "_orig_mod.module."])
def test_the_state_of_a_wrapped_module(tmp_path: Path, name: str, wrapper: str, prefix: str) -> None:
    state = {prefix + key: value for key, value in weights_of(3.0).items()}
    optimizer = torch.optim.Adam([torch.zeros(2, requires_grad=True)]).state_dict()
    for content in (state, {wrapper: state, "epoch": 3, "optimizer": optimizer, "rng": torch.zeros(3)}):
        torch.save(content, tmp_path / name)
        for target in (supervised(), linear(0.0), Supervised(nn.DataParallel(linear(0.0)), nn.functional.mse_loss)):
            loaded = load_weights(target, tmp_path / name)
            assert loaded.modules == ("",)
            assert {each.mean().item() for each in modules_of(target).popitem()[1].parameters()} == {3.0, 0.0}
        result = Trainer(device="cpu").test(supervised(), kit.random_batches(1), weights=tmp_path / name)
        assert name in result.notes[0]


def test_several_states_in_a_file_are_loaded_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"model": weights_of(1.0), "ema": {f"module.{k}": v for k, v in weights_of(2.0).items()}}, path)
    both = SimpleNamespace(model=linear(0.0), ema=linear(0.0))
    assert sorted(load_weights(both, path).modules) == ["ema", "model"]
    assert (filled(both.model), filled(both.ema)) == (1.0, 2.0)
    task = supervised()
    with pytest.raises(ValueError, match=r"\['ema', 'model'\], the task"):
        load_weights(task, path)
    assert load_weights(task, path, module="model").modules == ("model",)
    assert load_weights(task.model, path, module="ema").modules == ("ema",)
    assert filled(task.model) == 2.0


def test_names_that_a_wrapper_does_not_explain_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for odd in ({"module.weight": 1, "bias": 1}, {"module.other": 1, "module.bias": 1}, {"weight": 1, "a.weight": 1}):
        torch.save(dict.fromkeys(odd, torch.zeros(2, 4)), path)
        with pytest.raises(ValueError, match=r"another network|has the shape"):
            load_weights(supervised(), path)


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_exported_trained_weights_are_called_a_part_of_the_network(tmp_path: Path, ending: str) -> None:
    task = supervised(1.0)
    task.model.bias.requires_grad_(False)
    plugins = [SaveSchedule(Every(epochs=1)), Checkpoint(tmp_path / "x"), TrainedOnly()]
    result = kit.fit(
        *plugins, task=task, train=kit.random_batches(2), optimizer=lambda _: kit.sgd()([task.model.weight])
    )
    assert result.last_checkpoint is not None
    weights = Store(tmp_path, "run").load(result.last_checkpoint)["modules"]["model"]
    save_file(weights, tmp_path / "out.safetensors")
    torch.save(weights, tmp_path / "out.pth")
    with pytest.raises(ValueError, match=r"bias.*only a part.*TrainedOnly") as refusal:
        load_weights(supervised(), tmp_path / f"out.{ending}")
    assert "bias" in str(refusal.value)


def test_other_modules_and_shapes_are_refused_and_nothing_is_loaded(saved: Make) -> None:
    path = saved(7, modules={"model": weights_of(7.0), "head": weights_of(7.0, inputs=5)})
    task = SimpleNamespace(model=linear(0.0), head=linear(0.0, inputs=6))
    with pytest.raises(ValueError, match=r"\[2, 5\], the task's"):
        load_weights(task, path)
    assert filled(task.model) == 0.0
    with pytest.raises(ValueError, match=r"modules \['head', 'model'\],"):
        load_weights(supervised(), path)
    incomplete = saved(8, modules={"model": {"weight": torch.ones(2, 4)}})
    with pytest.raises(ValueError, match="network than the task's:"):
        load_weights(supervised(), incomplete)


def test_a_module_gets_the_one_that_fits_or_the_one_that_is_named(saved: Make) -> None:
    modules = {"generator": weights_of(1.0), "critic": weights_of(2.0), "head": weights_of(3.0, inputs=6)}
    path = saved(1, modules=modules)
    head = linear(0.0, inputs=6)
    loaded = load_weights(head, path)

    assert (filled(head), loaded.modules) == (3.0, ("head",))
    with pytest.raises(ValueError, match=r"module: generator, critic. Choose"):
        load_weights(linear(0.0), path)
    with pytest.raises(ValueError, match=r"critic, generator, head.*given module"):
        load_weights(linear(0.0, inputs=9), path)
    with pytest.raises(ValueError, match=r"module 'citric'. Did"):
        load_weights(linear(0.0), path, module="citric")
    critic = linear(0.0)
    load_weights(critic, path, module="critic")
    assert filled(critic) == 2.0


def test_one_module_of_a_task(saved: Make) -> None:
    path = saved(1, modules={"generator": weights_of(1.0), "critic": weights_of(2.0)})
    task = SimpleNamespace(generator=linear(0.0), critic=linear(0.0))
    load_weights(task, path, module="critic")

    assert (filled(task.generator), filled(task.critic)) == (0.0, 2.0)
    with pytest.raises(ValueError, match=r"'head'. Known: critic, generator"):
        load_weights(task, path, module="head")


def test_the_average_of_the_module_that_fits(saved: Make) -> None:
    modules = {"small": weights_of(1.0), "large": weights_of(2.0, inputs=9)}
    average = {"small": weights_of(3.0), "large": weights_of(4.0, inputs=9)}
    path = saved(1, modules=modules, plugins={"ema": {"weights": average, "evaluates": True}})
    layer = linear(0.0, inputs=9)

    assert (load_weights(layer, path).average, filled(layer)) == ("ema", 4.0)
    assert (load_weights(layer, path, average=False).average, filled(layer)) == (None, 2.0)
    with pytest.raises(ValueError, match=r"plugin 'swa'.* Known: ema"):
        load_weights(linear(0.0), path, module="small", average="swa")


def test_an_average_that_is_not_there_leaves_the_module_alone(saved: Make) -> None:
    task = supervised()
    with pytest.raises(ValueError, match="plugin 'ema'"):
        load_weights(task, saved(1), average="ema")
    assert filled(task.model) == 0.0


class TestOtherFiles:
    """Files of other programs, which hold the weights of one module."""

    def test_a_state_dict_of_torch_save(self, tmp_path: Path) -> None:
        path = tmp_path / "plain.pt"
        torch.save(linear(5.0).state_dict(), path)
        task = supervised()
        loaded = load_weights(task, path)

        assert (filled(task.model), loaded.metrics, loaded.step, loaded.modules) == (5.0, {}, None, ("",))
        five = struct.pack("<f", 5.0)
        path.write_bytes(path.read_bytes().replace(five * 8, five * 7 + struct.pack("<f", 5.5)))
        with pytest.raises(ValueError, match="damaged"):
            load_weights(task, path)
        assert filled(task.model) == 5.0

    def test_a_lack_of_memory_is_no_damage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "plain.pt"
        torch.save(linear(5.0).state_dict(), path)
        for error in (MemoryError(), RuntimeError("can't allocate memory"), SystemError("NULL without an exception")):

            def load(*args: Any, error: Exception = error, **kwargs: Any) -> None:
                raise error

            monkeypatch.setattr(torch, "load", load)
            with pytest.raises(type(error)) as info:
                load_weights(supervised(), path)
            assert info.value is error

    def test_a_whole_model_of_torch_save_is_refused(self, tmp_path: Path) -> None:
        torch.save(linear(5.0), tmp_path / "model.pth")
        with pytest.raises(ValueError, match=r"objects of .*Linear.*could run"):
            load_weights(supervised(), tmp_path / "model.pth")

    def test_a_checkpoint_that_has_lost_its_manifest_is_refused(self, saved: Make) -> None:
        path = saved(1)
        unseal(path)
        with pytest.raises(ValueError, match="has no manifest"):
            load_weights(supervised(), path)

    def test_safetensors(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        save_file(weights_of(6.0), path)
        both = SimpleNamespace(small=linear(0.0, inputs=3), large=linear(0.0))
        load_weights(both, path)

        assert (filled(both.small), filled(both.large)) == (0.0, 6.0)
        with pytest.raises(ValueError, match=r"\[2, 4\], the task's"):
            load_weights(both, path, module="small")
        with pytest.raises(ValueError, match=r"holds no module 'small'"):
            load_weights(linear(0.0), path, module="small")

    def test_a_truncated_or_foreign_safetensors_file(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        save_file({"embeddings": torch.zeros(3), **weights_of(6.0)}, path)
        with pytest.raises(ValueError, match="network than the task's:"):
            load_weights(supervised(), path)
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(ValueError, match="not a safetensors file"):
            load_weights(supervised(), path)
        path.write_bytes(b"not at all")
        with pytest.raises(ValueError, match="not a safetensors file"):
            load_weights(supervised(), path)
        with pytest.raises(FileNotFoundError):
            load_weights(supervised(), tmp_path / "none.safetensors")

    def test_shared_tensors_that_the_file_holds_once(self, tmp_path: Path) -> None:
        class Tied(nn.Module):
            def __init__(self, value: float) -> None:
                super().__init__()
                self.embedding, self.out = nn.Embedding(2, 4), nn.Linear(4, 2, bias=False)
                self.out.weight = self.embedding.weight
                nn.init.constant_(self.out.weight, value)

        save_model(Tied(3.0), str(tmp_path / "noted.safetensors"))
        save_file({"out.weight": torch.full((2, 4), 4.0)}, tmp_path / "foreign.safetensors")
        for name, value in (("noted", 3.0), ("foreign", 4.0)):
            module = Tied(0.0)
            load_weights(module, tmp_path / f"{name}.safetensors")
            assert filled(module.embedding) == filled(module.out) == value
        untied = nn.ModuleDict({"embedding": nn.Embedding(2, 4), "out": nn.Linear(4, 2, bias=False)})
        with pytest.raises(ValueError, match=r"differ in embedding.weight"):
            load_weights(untied, tmp_path / "foreign.safetensors")

    def test_parts_that_an_index_names(self, tmp_path: Path) -> None:
        task, index = supervised(), tmp_path / "model.safetensors.index.json"
        parts = {"weight": "model-1.safetensors", "bias": "model-2.safetensors"}
        for name, part in parts.items():
            save_file({name: weights_of(6.0)[name], "of another": torch.zeros(1)}, tmp_path / part)
        index.write_text(json.dumps({"metadata": {}, "weight_map": parts}))
        assert load_weights(task, index).path == index
        assert filled(task.model) == 6.0
        trained = Trainer(device="cpu").test(kit.linear_classifier(), class_batches(2), weights=index)
        assert str(index) in trained.notes[0]

        (tmp_path / "model-2.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"model-2\.safetensors"):
            load_weights(task, index)
        index.write_text(json.dumps({"weight_map": {"weight": "model-1.safetensors", "bias": "model-1.safetensors"}}))
        with pytest.raises(ValueError, match=r"model-1\.safetensors.*'bias'"):
            load_weights(task, index)

    @pytest.mark.parametrize(
        "content", ["{", "[]", "{}", '{"weight_map": {"weight": "../x.safetensors"}}', '{"weight_map": {"weight": 3}}']
    )
    def test_an_index_that_names_no_parts_beside_it(self, tmp_path: Path, content: str) -> None:
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(content)
        with pytest.raises(ValueError, match=r"weight_map"):
            load_weights(supervised(), index)

    def test_parts_that_torch_wrote(self, tmp_path: Path) -> None:
        task, index = supervised(), tmp_path / "pytorch_model.bin.index.json"
        torch.save(weights_of(5.0), tmp_path / "pytorch_model-1.bin")
        index.write_text(json.dumps({"weight_map": dict.fromkeys(weights_of(0.0), "pytorch_model-1.bin")}))
        load_weights(task, index)
        assert filled(task.model) == 5.0
        index.write_text(json.dumps({"weight_map": {"weight": index.name}}))
        with pytest.raises(ValueError, match="weight_map"):
            load_weights(task, index)

    def test_the_package_is_named_where_it_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
        with pytest.raises(ImportError, match=r"pip install 'heliograph\[safetensors\]'"):
            load_weights(supervised(), tmp_path / "model.safetensors")


def trainer(folder: Path, *plugins: Any, **options: Any) -> Trainer:
    options = {"keep_last": None, "keep_best": 1, "monitor": LOSS, **options}
    schedules = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))]
    return Trainer([*schedules, *plugins, Checkpoint(folder, **options)], device="cpu")


def overfit(trainer: Trainer, **options: Any) -> tuple[Any, Any]:
    """Train such that the validation gets worse: the first epoch is the best."""
    task = kit.linear_classifier()
    others = [(inputs, 1 - targets) for inputs, targets in class_batches(2)]
    return task, kit.fit(trainer, task=task, validation=others, epochs=3, **options)


class TestEvaluations:
    """`weights=` of `Trainer.test` and `Trainer.validate`."""

    def test_the_best_and_the_last(self, tmp_path: Path) -> None:
        """The best file holds the weights of its step, not those of a later one."""
        made = trainer(tmp_path)
        task, result = overfit(made, name="night")
        others = [(inputs, 1 - targets) for inputs, targets in class_batches(2)]
        trained = task.model.weight.clone()
        assert result.best_checkpoint.name == "night_epoch_1_iter_2.pth"

        best = made.test(task, others, weights="best")
        assert best.metrics["test/loss"] == load_weights(kit.linear_classifier(), result.best_checkpoint).metrics[LOSS]
        assert_facts(best.notes[0], result.best_checkpoint, "step 2")
        assert torch.equal(task.model.weight, torch.load(result.best_checkpoint)["modules"]["model"]["weight"])

        last = made.validate(task, others, weights="last")
        assert last.metrics[LOSS] == result.metrics[LOSS] > best.metrics["test/loss"]
        assert torch.equal(task.model.weight, trained)

    def test_a_path_and_a_folder(self, tmp_path: Path) -> None:
        made = trainer(tmp_path)
        task, result = overfit(made)
        plain = Trainer(device="cpu")

        assert plain.test(task, class_batches(2), weights=result.best_checkpoint).notes[0].count("of step 2") == 1
        assert plain.test(task, class_batches(2), weights=str(tmp_path)).notes[0].count("of step 6") == 1

    def test_what_is_not_a_path_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="'best' or 'last',"):
            trainer(tmp_path).test(kit.linear_classifier(), class_batches(2), weights=True)  # type: ignore[arg-type]

    def test_a_word_that_is_neither_gets_the_nearest(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError) as raised:
            trainer(tmp_path).test(kit.linear_classifier(), class_batches(2), weights="bst")
        assert_facts(raised.value, "weights='bst'", "Did you mean 'best'", "best, last")

    def test_another_process_finds_the_run_by_its_name(self, tmp_path: Path) -> None:
        overfit(trainer(tmp_path), name="night")
        overfit(trainer(tmp_path), name="day")
        task = kit.linear_classifier()
        notes = trainer(tmp_path).test(task, class_batches(2), name="day", weights="best").notes

        assert str(tmp_path / "day_epoch_1_iter_2.pth") in notes[0]
        with pytest.raises(FileNotFoundError, match=r"run 'run' .* Runs"):
            trainer(tmp_path).test(task, class_batches(2), weights="best")

    def test_the_training_that_was_just_done_is_meant_not_another_of_its_name(self, tmp_path: Path) -> None:
        made = trainer(tmp_path)
        task, first = overfit(made)
        overfit(trainer(tmp_path))  # as run-2, later

        assert f"{first.last_checkpoint}, of step 6" in made.test(task, class_batches(2), weights="last").notes[0]

    def test_without_a_checkpoint_or_a_metric(self, tmp_path: Path) -> None:
        task = kit.linear_classifier()
        with pytest.raises(FileNotFoundError) as info:
            trainer(tmp_path / "a").test(task, class_batches(2), weights="best")
        assert str(tmp_path / "a") in str(info.value)
        with pytest.raises(ValueError, match="weights='best' is the best"):
            Trainer(device="cpu").test(task, class_batches(2), weights="best")
        two = [Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "b").named("other")]
        with pytest.raises(ValueError, match="2 of its plugins"):
            Trainer(two, device="cpu").test(task, class_batches(2), weights="last")
        made = trainer(tmp_path, keep_best=0, monitor=None)
        task, _ = overfit(made)
        with pytest.raises(ValueError, match=r"by a metric.*last one"):
            made.test(task, class_batches(2), weights="best")

    def test_the_weights_that_were_measured_are_loaded(self, tmp_path: Path) -> None:
        made = trainer(tmp_path, EMA(0.5))
        task, result = overfit(made)
        others = [(inputs, 1 - targets) for inputs, targets in class_batches(2)]
        best = made.test(task, others, weights="best")

        assert "averaged by 'ema'" in best.notes[0]
        assert best.metrics["test/loss"] == load_weights(task, result.best_checkpoint).metrics[LOSS]


def refuse(path: Path) -> None:
    raise AssertionError(path)


def evaluate_on_ranks(folder: Path, is_hidden: bool) -> tuple[bool, float, str]:
    """Test with the best weights of a folder; where it is hidden, only the main rank sees it."""
    made, task = trainer(folder), kit.linear_classifier()
    made.engine = DDPEngine(device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        if is_hidden and made.engine.rank == 1:
            patch.setattr(reader, "_checksum", lambda path: None)
            patch.setattr(weights, "read_weights", refuse)
        result = made.test(task, class_batches(2), weights="best")
    saved = torch.load(folder / "run_epoch_1_iter_2.pth")["modules"]["model"]["weight"]
    weight: Any = task.model.weight
    return torch.equal(weight, saved), result.metrics["test/loss"], result.notes[0]


def find_nothing(folder: Path) -> str:
    made = trainer(folder)
    made.engine = DDPEngine(device="cpu")
    try:
        made.test(kit.linear_classifier(), class_batches(2), weights="best")
    except FileNotFoundError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_hidden", [False, True])
def test_every_rank_gets_the_weights_of_the_same_file(tmp_path: Path, ranks: Pool, is_hidden: bool) -> None:
    overfit(trainer(tmp_path))
    one, other = ranks(2).run(evaluate_on_ranks, tmp_path, is_hidden)
    alone = trainer(tmp_path).test(kit.linear_classifier(), class_batches(2), weights="best")

    assert one == other == (True, pytest.approx(alone.metrics["test/loss"], rel=1e-12), alone.notes[0])


def test_every_rank_says_that_there_is_none(tmp_path: Path, ranks: Pool) -> None:
    one, other = ranks(2).run(find_nothing, tmp_path)

    assert one == other
    assert one.startswith("There is no checkpoint")
