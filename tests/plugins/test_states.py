"""What a plugin is given back: its own state, of its own version, or a sentence that says why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import Checkpoint, Every, Plugin, SaveSchedule, Trainer, on
from heliograph.events import BatchEnd, Run
from heliograph.tests import kit
from heliograph.tests.kit import class_batches, make_run
from heliograph.tests.messages import assert_facts


class Momentum(Plugin):
    """The first version of a plugin."""

    name = "momentum"

    def __init__(self) -> None:
        self.value = 0

    @on(BatchEnd)
    def receive(self, run: Run, event: BatchEnd) -> None:
        self.value += 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


class Changed(Momentum):
    """The next one, whose author forgot the states that are there."""

    name = "momentum"

    def state_dict(self) -> dict[str, Any]:
        return {"m": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["m"]


class Second(Changed):
    """The next one, done well."""

    name = "momentum"
    state_version = 2

    def migrate_state(self, state: dict[str, Any], version: int) -> Mapping[str, Any]:
        assert version == 1
        return {"m": state.pop("value")}


class Third(Second):
    """One that takes no state of the first version any more."""

    name = "momentum"
    state_version = 3

    def migrate_state(self, state: dict[str, Any], version: int) -> Mapping[str, Any]:
        return {2: state}[version]


def fit(plugin: Any, folder: Path, *, resume: Any = None, epochs: int = 1) -> Any:
    saving = SaveSchedule(Every(epochs=1)), Checkpoint(folder, resume=resume)
    return kit.fit(plugin, *saving, train=class_batches(3), epochs=epochs)


def test_a_changed_state_fails_the_resume_with_plugin_file_error_and_mend(tmp_path: Path) -> None:
    path = fit(Momentum(), tmp_path).last_checkpoint
    with pytest.raises(ValueError) as caught:
        fit(Changed(), tmp_path, resume=path, epochs=2)
    text = str(caught.value)
    assert_facts(text, "'momentum'", path)
    for fact in ("load_state_dict raised KeyError: 'm'", "migrate_state", "Changed(...).named('momentum_2')"):
        assert fact in text
    assert isinstance(caught.value.__cause__, KeyError)
    fresh = Changed().named("momentum_2")
    assert fit(fresh, tmp_path, resume=path, epochs=2).resume.fresh_plugins == ("momentum_2",)
    assert fresh.value == 3


def test_an_older_state_is_brought_up_to_date_and_the_version_is_saved(tmp_path: Path) -> None:
    old = fit(Momentum(), tmp_path).last_checkpoint
    assert "plugin_versions" not in torch.load(old, weights_only=True)
    plugin = Second()
    new = fit(plugin, tmp_path, resume=old, epochs=2).last_checkpoint
    saved = torch.load(new, weights_only=True)
    assert plugin.value == 6
    assert (saved["plugins"]["momentum"], saved["plugin_versions"]) == ({"m": 6}, {"momentum": 2})
    again = Second()
    fit(again, tmp_path, resume=new, epochs=3)
    assert again.value == 9


def test_a_newer_state_is_refused(tmp_path: Path) -> None:
    path = fit(Second(), tmp_path).last_checkpoint
    with pytest.raises(ValueError) as caught:
        fit(Momentum(), tmp_path, resume=path, epochs=2)
    text = str(caught.value)
    assert_facts(text, "'momentum'", path)
    for fact in ("version 2,", "up to 1.", "Momentum(...).named('momentum_2')"):
        assert fact in text


def test_a_migration_that_fails_is_reported_like_that(tmp_path: Path) -> None:
    path = fit(Momentum(), tmp_path).last_checkpoint
    sentence = r"migrate_state.*KeyError: 1\..*version 1\..*Third\("
    with pytest.raises(ValueError, match=sentence):
        fit(Third(), tmp_path, resume=path, epochs=2)


def test_the_saved_state_is_not_changed_by_a_migration() -> None:
    plugins = Trainer([Second()], device="cpu").plugins
    states = {"momentum": {"value": 4}}
    assert plugins.load_state_dict(states) == ([], [])
    assert (plugins["momentum"].value, states) == (4, {"momentum": {"value": 4}})


@pytest.mark.parametrize("version", [0, -1, True, 1.5, "2", None], ids=repr)
def test_a_version_that_is_none_is_refused_at_once(version: Any) -> None:
    plugin = Second()
    plugin.state_version = version
    with pytest.raises(ValueError, match=r"^state_version of plugin 'momentum'"):
        Trainer([plugin], device="cpu")


def test_a_version_without_a_migration_is_refused_at_once() -> None:
    class Lacking(Changed):
        state_version = 2

    with pytest.raises(TypeError, match=r"^Lacking has state_version 2"):
        Trainer([Lacking()], device="cpu")


# Going back.


class Summing(Plugin):
    """Has nothing to remember at first."""

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}

    @on(BatchEnd)
    def receive(self, run: Run, event: BatchEnd) -> None:
        self.sums["batches"] = self.sums.get("batches", 0) + 1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.sums)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sums = dict(state)


class Stubborn(Summing):
    """Does not take the empty state that it returned."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sums = {"batches": state["batches"]}


def goes_back(plugin: Plugin, change: Callable[[dict[str, Any]], object] = id) -> Any:
    """Train four batches, and go back to the beginning after the third, once."""
    trainer, cuts = Trainer([plugin], device="cpu"), list[dict[str, Any]]()

    def receive(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 3 and len(cuts) == 1:
            cuts.append({})
            run.roll_back(cuts[0])

    def keep(run: Any) -> None:
        cuts.append(deepcopy(run.state_dict()))
        change(cuts[0]["plugins"])

    trainer.bus.on(BatchEnd, receive)
    run = make_run(trainer, 4)
    with run:
        for _ in run.epochs():
            if not cuts:
                keep(run)
            for batch in run.batches():
                run.step(run.task.training_step(run, batch))
    return run.result


def test_a_plugin_that_had_an_empty_state_is_put_back_there() -> None:
    plugin = Summing()
    result = goes_back(plugin)
    assert plugin.sums == {"batches": 4}
    assert not [note for note in result.notes if "without state" in note]
    assert result.resume.fresh_plugins == ()


def test_a_plugin_of_which_the_checkpoint_knows_nothing_keeps_what_it_has_and_that_is_said() -> None:
    plugin = Summing()
    result = goes_back(plugin, lambda states: states.pop("summing"))
    assert plugin.sums == {"batches": 7}
    assert any("checkpoint keep their state:" in line for line in result.notes)
    assert result.resume.reasons


def test_a_plugin_that_does_not_take_its_empty_state_fails_the_run_by_name() -> None:
    with pytest.raises(ValueError) as caught:
        goes_back(Stubborn())
    assert_facts(caught.value, "'stubborn'", "snapshot", "load_state_dict({})", "KeyError: 'batches'")
