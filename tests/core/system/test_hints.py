"""What the words of other frameworks are here, in errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import heliograph
import pytest
from heliograph import (
    EMA,
    EpochEnd,
    Plugin,
    Run,
    StepEnd,
    Supervised,
    Task,
    Trainer,
    on,
)
from heliograph.plugins.hints import OF_RUN, OF_SELF, REFUSED
from heliograph.plugins.providers import hint, hints
from heliograph.tests import kit
from torch import nn


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("resume", r"Checkpoint\(folder, resume='auto'\)"),
        ("ckpt_path", r"Checkpoint\(folder, resume='auto'\)"),
        ("max_steps", "epochs= or steps="),
        ("val_dataloaders", "validation="),
        ("callbacks", r"Trainer\(\[EarlyStopping\(\), \.\.\.\]\)"),
        ("batch_size", "loader_params="),
        ("lr", "optimizer=partial"),
        ("device", r"Trainer\(device='cuda'\)"),
        ("precision", r"Trainer\(precision='bf16'"),
        ("fast_dev_run", "tuning.rehearse"),
        ("limit_train_batches", "limit_train="),
    ],
)
def test_fit_explains_the_words_of_other_frameworks(word: str, words: str) -> None:
    with pytest.raises(TypeError, match=rf"argument {word!r}\. .*{words}"):
        kit.fit(**{word: 3})


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("callbacks", r"Trainer\(\[EarlyStopping\(\), \.\.\.\]\)"),
        ("max_epochs", "epochs= or steps="),
        ("epochs", "epochs= or steps="),
        ("logger", r"JsonlLog\(path\)"),
        ("accelerator", r"Trainer\(device='cuda'\)"),
        ("gradient_clip_val", r"GradientClipping\(1\.0\)"),
        ("accumulate_grad_batches", r"GradientAccumulation\(4\)"),
        ("optimizer", "argument of fit"),
        ("seed", r"RNGCapture\(seed\)"),
        ("fast_dev_run", "tuning.rehearse"),
        ("num_train_epochs", "epochs= or steps="),
        ("train_dataset", r"fit\(task, train"),
    ],
)
def test_the_trainer_explains_them_too(word: str, words: str) -> None:
    options: dict[str, Any] = {word: 3}
    with pytest.raises(TypeError, match=rf"option {word!r}\. .*{words}"):
        Trainer(**options)


def test_a_misspelt_argument_gets_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"argument 'epoch'\. Did"):
        kit.fit(epoch=3)


def test_each_word_is_explained_once() -> None:
    for table in hints().values():
        words = [word for each in table.values() for word in each.split()]
        assert len(words) == len(set(words))
    assert set(f"{OF_SELF} {REFUSED} {OF_RUN}".split()) <= {
        word for each in hints()["attributes"].values() for word in each.split()
    }
    assert hint("schedular") == ""


ANY: Any = None
OURS: Any = heliograph  # its wrong calls are what is tested
TRAINER: Any = Trainer(device="cpu")


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: OURS.Trainer(OURS.EMA(), OURS.RNGCapture()), ["Trainer([EMA(...), RNGCapture(...)])"]),
        (lambda: OURS.Trainer(kit.linear_classifier(), []), ["arguments of fit"]),
        (lambda: OURS.Every(5), ["Every(steps=5)"]),
        (lambda: OURS.EarlyStopping(patient=3), ["no argument 'patient'", "'patience'", "min_delta"]),
        (lambda: OURS.EarlyStopping("validation/loss", 3), ["patience=..."]),
        (lambda: OURS.Checkpoint("runs", save_top_k=3), ["'save_top_k'", "keep_best="]),
        (lambda: OURS.Checkpoint(), ["'folder'"]),
        (lambda: OURS.standard(patiance=3), ["no argument 'patiance'", "'patience'"]),
        (lambda: OURS.standard("runs", patiance=3), ["'patience'"]),
        (lambda: OURS.standard("runs", max_epochs=3), ["epochs="]),
        (lambda: OURS.Supervised(nn.Linear(1, 1), los_fn=nn.MSELoss()), ["'los_fn'", "'loss_fn'"]),
        (
            lambda: TRAINER.fit(kit.linear_classifier(), train_dataloaders=[]),
            ["'train_dataloaders'", "fit(task, train"],
        ),
        (lambda: TRAINER.fit(model=1, train=[]), ["'model'", "fit(task, train)"]),
        (lambda: TRAINER.fit(kit.linear_classifier(), [], []), ["validation=..."]),
        (lambda: TRAINER.run(kit.linear_classifier(), train_loader=[]), ["'train_loader'", "fit(task, train"]),
        (lambda: TRAINER.test(kit.linear_classifier(), dataloaders=[]), ["'dataloaders'", "second argument"]),
        (lambda: TRAINER.validate(kit.linear_classifier(), [], ckpt_path="best"), ["'ckpt_path'", "weights="]),
        (lambda: TRAINER.predict(kit.linear_classifier(), [], weigths="best"), ["'weigths'", "'weights'"]),
    ],
)
def test_a_wrong_call_says_the_nearest_argument_or_ours(call: Callable[[], Any], facts: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_plugins_of_users_explain_their_arguments_too() -> None:
    class Mine(Plugin):
        def __init__(self, rate: float = 1.0) -> None:
            self.rate = rate + ANY

    wrong: Any = Mine
    with pytest.raises(TypeError, match=r"argument 'rates'\. Did"):
        wrong(rates=3)
    with pytest.raises(TypeError, match="unsupported operand"):  # an error within is left as it is
        Mine(3)


class Reading(Plugin):
    """Reads an attribute of the run, or of itself."""

    def __init__(self, read: Callable[[Any, Any], Any]) -> None:
        self.read = read

    @on(StepEnd)
    def look(self, run: Run, event: StepEnd) -> None:
        self.read(self, run)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda self, run: self.log("loss", 1), r"run\.track\(name, value\)"),
        (lambda self, run: self.log_dict({}), r"run\.track\(name, value\)"),
        (lambda self, run: self.trainer, r"run\.progress"),
        (lambda self, run: run.log("loss", 1), r"run\.track\(name, value\)"),
        (lambda self, run: run.stop("enough"), r"run\.control\.stop\(reason\)"),
        (lambda self, run: setattr(run, "should_stop", True), r"run\.control\.stop\(reason\)"),
        (lambda self, run: run.should_stop, r"run\.control\.stop\(reason\)"),
        (lambda self, run: run.save_checkpoint("a"), r"run\.control\.request_save"),
        (lambda self, run: run.logger, r"run\.plugins\['tensorboard'\]"),
        (lambda self, run: run.global_step, r"run\.progress\.steps"),
        (lambda self, run: run.model, r"run\.modules"),
        (lambda self, run: run.callbacks, r"trainer\.plugins"),
    ],
)
def test_attributes_of_other_frameworks_say_what_to_use(read: Callable[[Any, Any], Any], words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        kit.fit(Reading(read))


def test_a_task_explains_self_log_and_may_have_its_own() -> None:
    class Logging(Supervised):
        def training_step(self, run: Run, batch: Any) -> Any:
            self.log("loss", 1.0)  # type: ignore[attr-defined]

    class Own(Task, nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logger = nn.Linear(2, 1)
            self.log = print

    with pytest.raises(AttributeError, match=r"run\.track"):
        kit.fit(task=Logging(nn.Linear(4, 2), nn.functional.cross_entropy))
    own = Own()
    assert own.log is print
    assert len(list(own.logger.parameters())) == 2


def test_what_explains_is_not_an_attribute() -> None:
    for thing in (
        TRAINER,
        EMA(),
        kit.linear_classifier(),
        TRAINER.run(kit.linear_classifier(), kit.class_batches(1), optimizer=kit.sgd(), epochs=1),
    ):
        assert not hasattr(thing, "log")
        assert not hasattr(type(thing), "log")
        assert "log" not in dir(thing)
    assert "fit" in dir(TRAINER)


class Hooks(Plugin):
    @on(StepEnd)
    def count(self, run: Run, event: StepEnd) -> None: ...


def hook(name: str) -> Plugin:
    """Return a plugin with a handler and a method of this name."""
    method = lambda self, trainer, module: None  # noqa: E731
    return type("Mine", (Hooks,), {name: method})()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("on_epoch_end", "EpochEnd"),
        ("on_train_epoch_end", "EpochEnd"),
        ("on_train_batch_end", "BatchEnd"),
        ("on_epoch_begin", "EpochStart"),
        ("on_step_end", "StepEnd"),
        ("on_train_begin", "TrainStart"),
        ("on_validation_epoch_end", "ValidationEnd"),
        ("validation_epoch_end", "ValidationEnd"),
        ("on_evaluate", "ValidationEnd"),
        ("on_log", "Log"),
        ("on_before_optimizer_step", "GradientsReady"),
        ("on_exception", "RunFailed"),
    ],
)
def test_a_method_that_only_other_frameworks_call_is_refused(name: str, event: str) -> None:
    with pytest.raises(TypeError, match=rf"No event calls Mine\.{name}\(self, trainer, module\).*\n +@on\({event}\)"):
        Trainer([hook(name)], device="cpu")


def test_a_task_has_no_such_methods_either() -> None:
    class Net(Supervised):
        def on_train_epoch_end(self) -> None: ...

    class Calling(Net):
        def training_step(self, run: Run, batch: Any) -> Any:
            self.on_train_epoch_end()
            return super().training_step(run, batch)

    model = nn.Linear(4, 2)
    with pytest.raises(TypeError, match=r"event calls Net\.on_train_epoch_end\(self\).*Move"):
        kit.fit(task=Net(model, nn.functional.cross_entropy))
    assert kit.fit(task=Calling(model, nn.functional.cross_entropy)).status == "completed"


def test_a_method_that_the_plugin_calls_itself_is_none() -> None:
    class Template(Plugin):
        @on(EpochEnd)
        def end(self, run: Run, event: EpochEnd) -> None:
            self.on_epoch_end(run)

        def on_epoch_end(self, run: Run) -> None: ...

    plugins = [Template(), hook("on_stop_button"), hook("log").named("other")]
    assert Trainer(plugins, device="cpu").plugins.names() == ["template", "mine", "other"]


def test_an_optimizer_that_only_lightning_would_ask_for_is_named() -> None:
    class Net(Supervised):
        def configure_optimizers(self) -> None: ...

    with pytest.raises(TypeError, match=r"Net\.configure_optimizers"):
        kit.fit(task=Net(nn.Linear(4, 2), nn.functional.cross_entropy), optimizer=None)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ModelCheckpoint", "Checkpoint"),
        ("TrainerCallback", "Plugin"),
        ("LightningModule", "Task"),
        ("WandbLogger", "WandB"),
    ],
)
def test_classes_of_other_frameworks_say_what_to_import(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=rf"heliograph has no {name!r}.*{instead}"):
        getattr(heliograph, name)
