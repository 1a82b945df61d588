"""Optuna: suggestions, reports, pruning, names, resumes, ranks."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    Every,
    ExceptionPassThrough,
    JsonlLog,
    NotRecorded,
    Plugin,
    Run,
    RunClosed,
    RunResult,
    SaveSchedule,
    ShouldStop,
    Supervised,
    Trainer,
    TrainingError,
    TrainStart,
    ValidationSchedule,
    launch,
    on,
)
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.kit import go_through
from heliograph.tests.ranks_pool import Pool
from heliograph_optuna.plugin import Optuna
from heliograph_optuna.study import open_study
from heliograph_recorder import Recorder
from optuna.pruners import BasePruner, NopPruner
from torch import nn

Make = Callable[..., Any]
Fit = Callable[..., RunResult]


class PruneAt(BasePruner):
    """Prunes at one report, and keeps what it was asked of."""

    def __init__(self, step: int | None = None) -> None:
        self.step = step
        self.asked: list[int | None] = []

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        self.asked.append(trial.last_step)
        return trial.last_step == self.step


class Recall(Plugin):
    """Keeps what others would not report after an exception."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.ends: list[Any] = []

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        self.names.append(run.name)

    @on(RunClosed)
    def end(self, run: Run, event: RunClosed) -> None:
        asked = run.control.stop_request
        self.ends.append((event.status, asked and asked.by, asked and asked.reason, run.progress.epoch))


def study(pruner: BasePruner | None = None, **options: Any) -> optuna.Study:
    return optuna.create_study(pruner=pruner or NopPruner(), **options)


def trial_of(study: optuna.Study, number: int = 0) -> optuna.trial.FrozenTrial:
    return study.trials[number]


@pytest.fixture
def fit(scripted: Make, batches: Make, sgd: Any) -> Fit:
    """Return a function that validates after each of as many epochs as there are values."""

    def run(plugins: Any, values: list[float], **options: Any) -> Any:
        trainer = Trainer([ValidationSchedule(Every(epochs=1)), *plugins], device="cpu")
        options = {"epochs": len(values), **options}
        name = options.pop("metric", "loss")
        return trainer.fit(scripted(values, name), batches(2), validation=batches(1), optimizer=sgd, **options)

    return run


def test_suggestions_are_the_trial_s_own() -> None:
    asked, plain = (study(sampler=optuna.samplers.RandomSampler(seed=1)).ask() for _ in range(2))
    plugin = Optuna(asked)
    values = (
        plugin.suggest("categorical", "layer", choices=["a", "b"]),
        plugin.suggest("int", "width", low=2, high=64, log=True),
        plugin.suggest("float", "rate", low=0.1, high=0.5, step=0.1),
    )

    assert values == (
        plain.suggest_categorical("layer", ["a", "b"]),
        plain.suggest_int("width", 2, 64, log=True),
        plain.suggest_float("rate", 0.1, 0.5, step=0.1),
    )
    assert plugin.suggest("int", "width", low=2, high=64, log=True) == values[1]


def test_no_option_holds_the_study() -> None:
    """A save reads all options, and would read the study and the connection to its database."""
    options = {name: value for name, value in vars(Optuna(study().ask())).items() if not name.startswith("_")}
    assert not [name for name, value in options.items() if isinstance(value, optuna.Trial)]


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float, got suggest\('uniform', 'rate'\)"):
        Optuna(study().ask()).suggest("uniform", "rate", low=0, high=1)  # type: ignore[arg-type]


def test_each_validation_is_reported_and_the_pruner_asked_of_it_once(fit: Fit) -> None:
    pruner = PruneAt()
    asked = study(pruner)
    result = fit([Optuna(asked.ask())], [0.5, 0.4, 0.3])

    assert result.status == "completed"
    assert trial_of(asked).intermediate_values == {1: 0.5, 2: 0.4, 3: 0.3}
    assert pruner.asked == [1, 2, 3]
    assert trial_of(asked).user_attrs == {}


def test_a_pruned_run_is_closed_as_stopped_and_raises_trial_pruned(fit: Fit) -> None:
    asked, recall = study(PruneAt(2)), Recall()
    with pytest.raises(optuna.TrialPruned, match="pruned at validation 2") as info:
        fit([Optuna(asked.ask()), recall], [0.5, 0.4, 0.3])

    assert_facts(info.value, "trial 0", "validation 2", "validation/loss 0.4")
    assert recall.ends == [("stopped", "optuna", str(info.value), 2)]
    assert trial_of(asked).user_attrs == {"heliograph:pruned": True, "heliograph:validation": 2}
    assert info.value.__cause__ is None


def test_the_study_takes_it_for_what_it_is(fit: Fit) -> None:
    asked = study(PruneAt(2))
    asked.optimize(lambda trial: fit([Optuna(trial)], [0.5, 0.4, 0.3]).metrics["validation/loss"], n_trials=2)

    assert [(each.state.name, each.value) for each in asked.trials] == [("PRUNED", 0.4)] * 2


def test_other_stops_are_no_pruning(fit: Fit) -> None:
    class Stop(Plugin):
        @on(BatchEnd)
        def ask(self, run: Run, event: BatchEnd) -> None:
            run.control.stop("enough")

    asked = study()
    assert fit([Optuna(asked.ask()), Stop()], [0.5, 0.4]).status == "stopped"
    assert trial_of(asked).user_attrs == {}


def test_a_stop_that_is_postponed_for_good_is_no_pruning(fit: Fit) -> None:
    class Veto(Plugin):
        @on(ShouldStop)
        def veto(self, run: Run, event: ShouldStop) -> None:
            run.control.veto_stop("not yet")

    asked = study(PruneAt(1))
    assert fit([Optuna(asked.ask()), Veto()], [0.5, 0.4, 0.3]).status == "completed"
    assert trial_of(asked).intermediate_values == {1: 0.5, 2: 0.4, 3: 0.3}
    assert trial_of(asked).user_attrs == {}


def test_after_the_end_of_the_training_nothing_is_pruned(scripted: Make, batches: Make, sgd: Any) -> None:
    pruner = PruneAt(1)
    asked = study(pruner)
    trainer = Trainer([ValidationSchedule(Every(epochs=9), at_end=True), Optuna(asked.ask())], device="cpu")
    result = trainer.fit(scripted([0.5]), batches(1), validation=batches(1), optimizer=sgd, epochs=1)

    assert result.status == "completed"
    assert (trial_of(asked).intermediate_values, pruner.asked) == ({1: 0.5}, [])


def test_nan_is_reported(fit: Fit) -> None:
    asked = study()
    fit([Optuna(asked.ask())], [math.nan, 0.4])

    assert math.isnan(trial_of(asked).intermediate_values[1])


def test_a_missing_metric_lists_and_suggests(fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"'validation/acuracy'.*Did you mean 'validation/accuracy'"):
        fit([Optuna(study().ask(), "validation/acuracy")], [0.5], metric="accuracy")


def test_a_pruning_of_one_s_own_passes_whatever_the_list_says(fit: Fit) -> None:
    class Prune(Plugin):
        @on(BatchEnd)
        def prune(self, run: Run, event: BatchEnd) -> None:
            raise error

    error: Exception = optuna.TrialPruned("mine")
    for plugins in ([Optuna(study().ask()), ExceptionPassThrough()], [ExceptionPassThrough(), Optuna(study().ask())]):
        with pytest.raises(optuna.TrialPruned) as info:
            fit([*plugins, Prune()], [0.5])
        assert info.value is error
        assert error.__cause__ is None

    error = KeyError()
    with pytest.raises(TrainingError):
        fit([Optuna(study().ask()), ExceptionPassThrough(), Prune()], [0.5])


def test_a_loop_of_one_s_own_asks(task: Make, batches: Make, sgd: Any) -> None:
    plugin = Optuna(study(PruneAt(1)).ask())
    trainer = Trainer([ValidationSchedule(Every(epochs=1)), plugin], device="cpu")

    run = trainer.run(task(), batches(1), validation=batches(1), optimizer=sgd, epochs=2)
    plugin.check_pruned()
    go_through(run)
    with pytest.raises(optuna.TrialPruned):
        plugin.check_pruned()


def test_a_signal_goes_before_a_pruning(fit: Fit) -> None:
    class Ask(Plugin):
        @on(RunClosed)
        def exit(self, run: Run, event: RunClosed) -> None:
            run.hooks.exit_with(75)

    with pytest.raises(SystemExit) as info:
        fit([Optuna(study(PruneAt(1)).ask()), Ask()], [0.5, 0.4])
    assert info.value.code == 75
    with pytest.raises(optuna.TrialPruned):
        fit([Optuna(study(PruneAt(1)).ask()), Ask()], [0.5, 0.4], on_interrupt="return")


def test_the_run_has_a_name_of_its_own_for_all_plugins(fit: Fit, tmp_path: Path) -> None:
    asked, recall = study(), Recall()
    asked.ask()
    plugins = [
        Recorder(tmp_path),
        JsonlLog(tmp_path / "log.jsonl"),
        Checkpoint(tmp_path),
        SaveSchedule(Every(epochs=1)),
    ]
    result = fit([*plugins, Optuna(asked.ask()), recall], [0.5], name="digits")

    assert recall.names == ["digits_trial-1"]
    assert result.last_checkpoint == tmp_path / "digits_trial-1_epoch_1_iter_2.pth"
    assert result.recording is not None
    assert result.recording.name.startswith("digits_trial-1")
    assert '"run": "digits_trial-1"' in (tmp_path / "log.jsonl").read_text()


def test_a_second_fit_starts_again(scripted: Make, batches: Make, sgd: Any) -> None:
    recall, plugin = Recall(), Optuna(study(PruneAt(2)).ask())
    trainer = Trainer([ValidationSchedule(Every(epochs=1)), plugin, recall], device="cpu")

    def fit(epochs: int) -> RunResult:
        values, data = [0.5, 0.4, 0.3], batches(1)
        return trainer.fit(scripted(values), data, validation=data, optimizer=sgd, epochs=epochs)

    with pytest.raises(optuna.TrialPruned):
        fit(3)
    assert fit(1).status == "completed"
    assert recall.names == ["run_trial-0", "run_trial-0"]
    assert trainer.test(scripted([9.0]), batches(1)).status == "completed"
    assert trainer.validate(scripted([9.0]), batches(1)).status == "completed"


def checkpoints(folder: Path) -> list[Plugin]:
    return [SaveSchedule(Every(steps=3)), Checkpoint(folder, resume="auto")]


class Crash(Plugin):
    """Fails after so many batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    @on(BatchEnd)
    def crash(self, run: Run, event: BatchEnd) -> None:
        if run.progress.batches == self.batches:
            raise ArithmeticError


def test_what_a_resume_repeats_is_neither_reported_nor_asked_again(fit: Fit, tmp_path: Path) -> None:
    pruner = PruneAt()
    asked = study(pruner)
    trial = asked.ask()
    with pytest.raises(ArithmeticError):  # the checkpoint is of step 3, in the second epoch of three begun
        fit([Optuna(trial), *checkpoints(tmp_path), Crash(5)], [0.5, 0.4, 0.3, 0.2])
    fit([Optuna(trial), *checkpoints(tmp_path)], [0.41, 0.3, 0.2], epochs=4)

    assert trial_of(asked).intermediate_values == {1: 0.5, 2: 0.4, 3: 0.3, 4: 0.2}
    assert pruner.asked == [1, 2, 2, 3, 4]


def test_a_trial_that_was_pruned_is_when_it_is_resumed(fit: Fit, tmp_path: Path) -> None:
    for saves in ([SaveSchedule(Every(steps=3))], [SaveSchedule(Every(steps=1))]):
        pruner = PruneAt(2)
        asked, folder = study(pruner), tmp_path / str(len(list(tmp_path.iterdir())))
        trial = asked.ask()
        for values in ([0.5, 0.4, 0.3], [0.4, 0.3]):
            recall = Recall()
            with pytest.raises(optuna.TrialPruned, match=r"2, with validation/loss 0\.4"):
                fit([Optuna(trial), *saves, Checkpoint(folder, resume="auto"), recall], values, epochs=3)
            assert recall.ends[0][3] == 2
        assert pruner.asked == [1, 2]


def test_a_trial_as_it_was_handed_out_learns_what_was_reported_since(fit: Fit) -> None:
    """As where a launcher starts the ranks again with the arguments that it has."""
    pruner = PruneAt()
    asked = study(pruner)
    trial = asked.ask()
    with pytest.raises(ArithmeticError):
        fit([Optuna(trial), Crash(3)], [0.5, 0.4])
    old = pickle.dumps(trial)
    fresh = pickle.loads(old)
    fresh.study, fresh.storage = asked, asked._storage
    trial.report(0.4, 2)
    fit([Optuna(fresh)], [0.5, 0.4, 0.3])

    assert trial_of(asked).intermediate_values == {1: 0.5, 2: 0.4, 3: 0.3}
    assert pruner.asked == [1, 2, 3]


def test_a_checkpoint_of_another_study_s_trial_is_refused(fit: Fit, tmp_path: Path) -> None:
    first, second = study(sampler=optuna.samplers.RandomSampler(seed=1)), study()
    for each in (first, second):
        trial = each.ask()
        trial.suggest_float("rate", 0, 1)
        if each is first:
            fit([Optuna(trial), *checkpoints(tmp_path)], [0.5, 0.4])
    with pytest.raises(ValueError, match=r"0 .* another name="):
        fit([Optuna(trial), *checkpoints(tmp_path)], [0.5, 0.4])


def test_the_best_trial_is_gone_on_with_and_reports_to_nobody(fit: Fit, tmp_path: Path) -> None:
    asked = study()
    asked.optimize(
        lambda trial: fit([Optuna(trial), *checkpoints(tmp_path)], [0.5, 0.4, 0.3]).metrics["validation/loss"], 1
    )
    plugin = Optuna(asked.best_trial)
    result = fit([plugin, *checkpoints(tmp_path)], [0.3, 0.2], epochs=4)  # that of step 6 is of before its validation

    assert result.resume is not None
    assert (result.resume.step, result.progress.epoch, result.status) == (6, 4, "completed")
    assert trial_of(asked).intermediate_values == {1: 0.5, 2: 0.4, 3: 0.3}


@pytest.mark.parametrize("trial", [None, 3, optuna.trial.FixedTrial({})])
def test_no_trial_is_refused(trial: Any) -> None:
    with pytest.raises(TypeError, match="trial of the objective"):
        Optuna(trial)


@pytest.mark.parametrize(
    ("metric", "words"),
    [("train/loss", "a validation metric"), ("loss", "<split>/<name>"), ("test/loss", "validation/loss")],
)
def test_a_metric_is_one_of_a_validation(metric: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Optuna(study().ask(), metric)


def test_several_objectives_are_refused() -> None:
    with pytest.raises(ValueError, match="has 2 objectives"):
        Optuna(optuna.create_study(directions=["minimize", "maximize"]).ask())


def test_any_metric_goes_with_the_study_s_direction(fit: Fit) -> None:
    asked = study(direction="maximize")
    fit([Optuna(asked.ask(), "validation/accuracy")], [0.5], metric="accuracy")

    assert trial_of(asked).intermediate_values == {1: 0.5}


def test_it_would_never_act_without_a_validation(task: Make, batches: Make, sgd: Any) -> None:
    with pytest.raises(ValueError, match="Plugin 'optuna' would never"):
        Trainer([Optuna(study().ask())], device="cpu").fit(task(), batches(1), optimizer=sgd, epochs=1)


def test_two_trials_in_one_run_are_refused() -> None:
    with pytest.raises(ValueError, match="both claim trial"):
        Trainer([Optuna(study().ask()), Optuna(study().ask()).named("other")], device="cpu")


# Several ranks.


def fit_on_ranks(trial: optuna.Trial) -> None:
    data = [(torch.ones(2, 4), torch.zeros(2, 2)) for _ in range(4)]
    torch.manual_seed(0)
    trainer = Trainer([ValidationSchedule(Every(epochs=1)), Optuna(trial), recall := Recall()], device="cpu")
    try:
        trainer.fit(
            Supervised(nn.Linear(4, 2), nn.functional.mse_loss),
            data,
            validation=data,
            optimizer=lambda parameters: torch.optim.SGD(
                parameters, Optuna(trial).suggest("float", "rate", low=0.5, high=0.5)
            ),
            epochs=4,
        )
    finally:
        SEEN[:] = [recall.names, recall.ends]


SEEN: list[Any] = []


def refuse(*args: Any) -> Any:
    raise AssertionError("Only the main rank talks to the storage.")


def pruned(trial: optuna.Trial) -> Any:
    """Train as one of several ranks; return what it saw."""
    if os.environ["RANK"] != "0":
        trial.report = trial.should_prune = trial.set_user_attr = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="call suggest in the objective, before launch"):
        Optuna(trial).suggest("float", "momentum", low=0.0, high=1.0)
    with pytest.raises(optuna.TrialPruned) as info:
        fit_on_ranks(trial)
    return SEEN, str(info.value)


def test_ranks_are_pruned_together_and_the_main_one_reports(ranks: Pool, tmp_path: Path) -> None:
    asked = open_study("study", storage=f"sqlite:///{tmp_path}/study.db", pruner=PruneAt(2))

    def objective(trial: optuna.Trial) -> float:
        Optuna(trial).suggest("float", "rate", low=0.5, high=0.5)
        mine, other = ranks(2).run(pruned, trial)
        assert mine == other
        (names, ((status, by, reason, epoch),)), text = mine
        assert (names, status, by, epoch) == (["run_trial-0"], "stopped", "optuna", 2)
        assert reason == text
        raise optuna.TrialPruned

    asked.optimize(objective, n_trials=1)
    (trial,) = asked.trials
    assert trial.intermediate_values.keys() == {1, 2}
    assert trial.user_attrs == {"heliograph:pruned": True, "heliograph:validation": 2}


def refused(of_ranks: list[optuna.Trial], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit_on_ranks(of_ranks[int(os.environ["RANK"])])


def ready(study: optuna.Study) -> optuna.Trial:
    trial = study.ask()
    Optuna(trial).suggest("float", "rate", low=0.5, high=0.5)
    return trial


def test_ranks_with_different_trials_are_refused(ranks: Pool, tmp_path: Path) -> None:
    asked = open_study("study", storage=f"sqlite:///{tmp_path}/study.db")
    words = r"0 with \{'rate': 0.5\}.*\{'rate'"
    ranks(2).run(refused, [ready(asked), ready(asked)], words)


def test_ranks_of_a_study_in_memory_are_refused(ranks: Pool) -> None:
    trial = ready(study())
    ranks(2).run(refused, [trial, trial], "is in the memory")


def launched(trial: optuna.Trial) -> None:
    fit_on_ranks(trial)


@pytest.mark.whole
def test_a_pruning_leaves_launch_as_it_is(tmp_path: Path) -> None:
    asked = open_study("study", storage=f"sqlite:///{tmp_path}/study.db", pruner=PruneAt(1))

    def objective(trial: optuna.Trial) -> float:
        Optuna(trial).suggest("float", "rate", low=0.5, high=0.5)
        launch(launched, trial, nprocs=2)
        return 0.0

    asked.optimize(objective, n_trials=1)
    assert asked.trials[0].state.name == "PRUNED"


def test_a_replay_has_no_trial() -> None:
    with pytest.raises(NotRecorded, match="trial of a study"):
        Optuna(study().ask()).begin(SimpleNamespace(report=SimpleNamespace(is_replay=True)), TrainStart())
