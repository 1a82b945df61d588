"""A rule file put together: what is found wrong before anything runs."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.events import CATALOGUE
from heliograph.packages.rules.tests.scripted import LOSS, STATE, controller, rules, train
from heliograph.packages.tests.facts import assert_facts
from heliograph_rules.base import RuleFiring, RuleMetric, RuleOperation
from heliograph_rules.controller import RuleController
from heliograph_rules.errors import RuleError, RuleKeyError, RuleNameError, RuleSyntaxError, RuleTypeError


class Own(RuleMetric):
    """A metric of the user's."""

    when_read = True

    def __init__(self, name: str, *, fits: bool = True) -> None:
        super().__init__(name)
        self.fits = fits

    def validate(self) -> bool:
        return self.fits

    def compute(self, run: h.Run, event: h.Event) -> int:
        return 1


class Broken(Own):
    def __init__(self, name: str) -> None:
        raise OSError("no sensor")


class Act(RuleOperation):
    """An operation of the user's."""

    asks: Mapping[str, str] = {"should_act": "save"}

    def should_act(self, run: h.Run, firing: RuleFiring) -> None:
        raise AssertionError("not called here")


class Together(Act):
    shared = True


class Lonely(RuleOperation):
    def should_act(self) -> None: ...


def refused(source: Any, **given: Any) -> RuleError:
    with pytest.raises(RuleError) as caught:
        RuleController(source, **given)
    return caught.value


def metric(**entry: Any) -> dict[str, Any]:
    return rules(controller("True"), metrics=[{"name": "own", "class": "Loss"} | entry])


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (
            rules(controller("True", triggers=["on_logs"])),
            RuleKeyError,
            "Did you mean 'on_log'?",
        ),
        (rules(controller("True", triggers=["on_push_begin"])), RuleKeyError, "invalid event (on_push_begin)"),
        (
            rules(controller("True", operations=["missing.should_stop"])),
            RuleKeyError,
            "Invalid operation missing.should_stop",
        ),
        (
            rules(controller("True", operations=["hfcontrols.should_stop"])),
            RuleKeyError,
            "Did you mean 'control.should_stop'?",
        ),
        (
            rules(controller("True", operations=["hfcontrols"])),
            RuleKeyError,
            "Invalid operation hfcontrols for",
        ),
        (
            rules(controller("True", operations=["hfcontrols.name"])),
            RuleKeyError,
            "Invalid operation hfcontrols.name for",
        ),
        (
            rules(controller("True", operations=["hfcontrols.__class__"])),
            RuleKeyError,
            "Invalid operation hfcontrols.__class__ for",
        ),
        (
            rules(controller("True", operations=["hfcontrols.should_skip_batch"])),
            RuleError,
            "trigger 'on_log' is Log.",
        ),
        (metric(**{"class": "Los"}), RuleKeyError, "Did you mean 'Loss'?"),
        (
            metric(arguments={"window": 2}),
            RuleTypeError,
            "unexpected keyword argument 'window'. Its arguments: none.",
        ),
        (
            metric(arguments={"window": 2}, **{"class": "HistoryBasedMetric"}),
            RuleTypeError,
            "unexpected keyword argument 'window'. Its arguments: window_size.",
        ),
        (metric(arguments={"name": "x"}), RuleTypeError, "multiple values for argument 'name'"),
        (
            rules(
                controller("True"), operations=[{"name": "x", "class": "ScaleLearningRate", "arguments": {"facto": 2}}]
            ),
            RuleTypeError,
            "argument 'facto'. Its arguments: factor, minimum, optimizer.",
        ),
        (metric(name="a b"), RuleError, "Rules cannot read a metric named 'a b'"),
        (metric(name="lambda"), RuleError, "Rules cannot read a metric named 'lambda'"),
        (metric(name="a__b"), RuleError, "Rules cannot read a metric named 'a__b'"),
        (metric(name="True"), RuleError, "Rules cannot read a metric named 'True'"),
        (metric(name="max"), RuleError, "'max'"),
        (
            rules(controller("True"), operations=[{"name": "x", "class": "Logs"}]),
            RuleKeyError,
            "Undefined operation handler Logs.",
        ),
        (
            rules(controller("True"), operations=[{"name": "a.b", "class": "HFControls"}]),
            RuleError,
            "got 'a.b'",
        ),
        (rules(controller("lost < 1")), RuleNameError, "Unknown variable 'lost'"),
        (rules(controller("minimum(1, 2) == 1")), RuleNameError, "Unknown function 'minimum'"),
        (
            rules(controller("True and")),
            RuleSyntaxError,
            "invalid syntax. A rule",
        ),
    ],
)
def test_what_is_wrong_is_reported_before_anything_runs(source: Any, kind: type[RuleError], message: str) -> None:
    error = refused(source)
    assert message in str(error)
    assert type(error) is kind


def test_an_error_in_a_file_says_where(tmp_path: Path) -> None:
    text = """\
controller_metrics:
  - name: training_loss
    class: Loss
controllers:
  - name: stopper
    triggers:
      - on_log
    rule: training_loss["loss"] < maximum
    operations:
      - hfcontrols.should_training_stop
"""
    path = tmp_path / "rules.yaml"
    path.write_text(text, encoding="utf-8")
    error = refused(path)
    assert (error.file, error.line, error.controller, error.column) == (str(path), 8, "stopper", 25)
    assert_facts(str(error), f"{path}, line 8", "controller 'stopper'", "column 25", "Unknown variable")

    for old, new, line in (
        ("- on_log", "- on_lag", 7),
        ("should_training_stop", "should_halt", 10),
        ("Loss", "Lost", 2),
    ):
        path.write_text(text.replace("maximum", "1").replace(old, new), encoding="utf-8")
        assert refused(path).line == line


def test_classes_of_ones_own_are_named_or_given() -> None:
    by_name = rules(
        controller("own == 1", operations=["act.should_act"]),
        metrics=[{"name": "own", "class": "Own"}],
        operations=[{"name": "act", "class": "Act"}],
    )
    plugin = RuleController(by_name, metrics=[Own], operations=[Act])
    assert plugin.asks == ("save",)
    assert "Undefined metric handler Own" in str(refused(by_name))
    by_class = rules(
        controller("own == 1", operations=["act.should_act"]),
        metrics=[{"name": "own", "class": Own}],
        operations=[{"name": "act", "class": Act}],
    )
    assert RuleController(by_class).asks == ("save",)
    error = refused(rules(controller("True"), metrics=[{"name": "own", "class": dict}]))
    assert "subclass of RuleMetric" in str(error)


def test_a_metric_that_does_not_validate_is_refused() -> None:
    source = rules(controller("True"), metrics=[{"name": "own", "class": "Own", "arguments": {"fits": False}}])
    assert_facts(str(refused(source, metrics=[Own])), "Metric handler own", "failed")


def test_a_metric_may_say_why_it_does_not_validate() -> None:
    class Wordy(Own):
        def validate(self) -> bool:
            raise ValueError("there is no sensor")

    error = refused(rules(controller("True"), metrics=[{"name": "own", "class": Wordy}]))
    assert "handler own failed validation:" in str(error)


def test_an_action_that_cannot_be_called_is_refused() -> None:
    error = refused(rules(controller("True"), operations=[{"name": "own", "class": Lonely}]))
    assert isinstance(error, RuleTypeError)
    assert "Lonely.should_act is not an action" in str(error)


def test_a_metric_that_cannot_be_made_is_refused_with_its_own_error() -> None:
    error = refused(rules(controller("True"), metrics=[{"name": "own", "class": Broken}]))
    assert "Broken 'own': no sensor." in str(error)
    assert isinstance(error.__cause__, OSError)


def test_a_metric_that_would_never_be_computed_is_refused() -> None:
    class Deaf(Own):
        when_read = False

    error = refused(rules(controller("True"), metrics=[{"name": "own", "class": Deaf}]))
    assert "Deaf would never be computed" in str(error)


@pytest.mark.parametrize("trigger", ["run_failed", "run_closed", "on_prediction_step", "plugin_failed", "Replay"])
def test_what_all_ranks_do_together_has_a_trigger_that_all_receive(trigger: str) -> None:
    together = rules(
        controller("True", triggers=[trigger], operations=["act.should_act"]),
        operations=[{"name": "act", "class": Together}],
    )
    assert "act.should_act acts on all" in str(refused(together))


def test_an_operation_of_the_file_takes_the_place_of_a_default_one() -> None:
    source = rules(
        controller("True", operations=["hfcontrols.should_act"]), operations=[{"name": "hfcontrols", "class": Act}]
    )
    assert RuleController(source).asks == ("save",)
    error = refused(source | {"controllers": [controller("True")]})
    assert "Invalid operation hfcontrols.should_training_stop" in str(error)


@pytest.mark.parametrize(
    ("triggers", "needs"),
    [
        (["on_log"], ("log",)),
        (["on_evaluate"], ("validation",)),
        (["validation_start", "ValidationEnd"], ("validation",)),
        (["on_save"], ("save",)),
        (["on_log", "on_step_end"], ()),
        (["on_log", "on_evaluate"], ()),
        (["on_predict", "on_train_end"], ()),
    ],
    ids="-".join,
)
def test_it_needs_what_its_rules_would_wait_for_in_vain(triggers: list[str], needs: tuple[str, ...]) -> None:
    assert RuleController(rules(controller("True", triggers=triggers))).needs == needs


@pytest.mark.parametrize("action", ["hfcontrols.should_evaluate", "control.should_validate"])
def test_a_rule_that_asks_for_a_validation_needs_data_for_it(action: str) -> None:
    source = rules(controller("True", triggers=["on_step_end"], operations=[action]))
    assert RuleController(source).needs == ("validation data",)
    with pytest.raises(ValueError, match="without validation data"):
        train(source)
    assert train(source, validation=[1.0], epochs=1).progress.validations == 4 + 1


@pytest.mark.parametrize(
    ("action", "trigger", "asks"),
    [
        ("hfcontrols.should_training_stop", "on_log", ("stop",)),
        ("hfcontrols.should_evaluate", "on_log", ("validation",)),
        ("hfcontrols.should_save", "on_log", ("save",)),
        ("hfcontrols.should_log", "on_step_end", ("log",)),
        ("hfcontrols.should_epoch_stop", "on_log", ()),
        ("control.should_skip_batch", "on_step_begin", ("skip_batch",)),
        ("control.should_skip_step", "on_pre_optimizer_step", ("skip_step",)),
    ],
)
def test_it_says_what_its_rules_ask_for(action: str, trigger: str, asks: tuple[str, ...]) -> None:
    assert RuleController(rules(controller("True", triggers=[trigger], operations=[action]))).asks == asks


def test_it_receives_only_what_its_rules_need() -> None:
    always = {h.TrainStart, h.ValidationStart, h.TestStart, h.PredictStart, h.CheckpointLoaded}

    def received(source: Any) -> set[type[h.Event]]:
        return set(CATALOGUE) - set(RuleController(source).ignores)

    assert received(rules(controller("True", triggers=["on_step_end"]), metrics=[])) == always | {h.StepEnd}
    assert received(rules(controller("True"), metrics=[LOSS])) == always | {h.Log}
    on_save = rules(controller("True", triggers=["on_save"]), metrics=[])
    assert received(on_save) == always | {h.CheckpointSaved, h.SavePoint, h.LastBoundary}
    stateful = rules(controller("True", triggers=["epoch_end"]), metrics=[STATE])
    assert received(stateful) == always | {
        h.EpochEnd,
        h.Log,
        h.ValidationEnd,
        h.TestEnd,
        h.PredictEnd,
        h.SavePoint,
        h.LastBoundary,
    }


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="warn, disable, got 'shout'"):
        RuleController(rules(controller("True")), on_error="shout")  # type: ignore[arg-type]


def test_a_class_of_a_wrong_type_is_refused() -> None:
    source = rules(controller("True"), metrics=[{"name": "own", "class": "Own"}])
    with pytest.raises(TypeError, match="a subclass of RuleMetric"):
        RuleController(source, metrics=[dict])  # type: ignore[list-item]


def test_it_can_be_sent_to_other_processes() -> None:
    plugin = RuleController(rules(controller("training_loss['loss'] < 1", patience={})), on_error="raise")
    copy = pickle.loads(pickle.dumps(plugin))
    assert copy.state_dict() == plugin.state_dict()
    assert (copy.asks, copy.needs, copy.ignores) == (plugin.asks, plugin.needs, plugin.ignores)
