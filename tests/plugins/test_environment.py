"""Plugins that the environment disables and adds: `HELIOGRAPH_PLUGINS=-progress,+handler_times`."""

from __future__ import annotations

from collections.abc import Callable

import heliograph as h
import pytest
from heliograph import Plugin, Run, Trainer, on
from heliograph.tests import kit
from heliograph.tests.messages import assert_each

Set = Callable[[str], None]


class Counts(Plugin):
    """Counts epochs."""

    def __init__(self) -> None:
        self.epochs = 0

    @on(h.EpochEnd)
    def count(self, run: Run, event: h.EpochEnd) -> None:
        self.epochs += 1


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> Set:
    return lambda value: monkeypatch.setenv("HELIOGRAPH_PLUGINS", value)


def test_one_is_disabled_and_another_added_and_the_result_says_so(variable: Set) -> None:
    variable("-counts, +handler_times,+nan_guard")
    counts = Counts()
    with pytest.warns(RuntimeWarning, match=r"^Plugin 'counts' is disabled"):
        trainer = Trainer([counts], device="cpu")
    assert trainer.plugins.names() == ["counts", "handler_times", "nan_guard"]
    result = kit.fit(trainer)
    assert counts.epochs == 0
    assert result.plugin_seconds["nan_guard"] > 0
    assert any("HELIOGRAPH_PLUGINS adds handler_times, nan_guard" in line for line in result.notes)


def test_what_is_there_already_is_not_added(variable: Set) -> None:
    variable("+heliograph:handler_times,+nan_guard")
    times = h.HandlerTimes()
    trainer = Trainer([times], device="cpu")
    assert trainer.plugins.names() == ["handler_times", "nan_guard"]
    assert trainer.plugins["handler_times"] is times


def test_a_misspelt_name_is_an_error_with_the_nearest(variable: Set) -> None:
    variable("+handler_time")
    with pytest.raises(LookupError, match=r"named 'handler_time'. Did"):
        Trainer(device="cpu")
    variable("-count")
    trainer = Trainer([Counts()], device="cpu")
    with pytest.raises(LookupError, match=r"^HELIOGRAPH_PLUGINS disables 'count',"):
        kit.fit(trainer)
    variable("-nan_guard")
    assert kit.fit(trainer).progress.epoch == 1  # the error has left the trainer free


def test_one_that_the_program_does_not_have_is_noted(variable: Set) -> None:
    variable("-nan_guard,-all")
    result = kit.fit(Trainer([Counts()], device="cpu"))
    assert any("HELIOGRAPH_PLUGINS disables nan_guard, all" in line for line in result.notes)


def test_one_that_needs_options_cannot_be_added(variable: Set) -> None:
    variable("+heliograph:checkpoint")
    with pytest.raises(TypeError, match=r"^heliograph:checkpoint needs folder=\.\.\.,") as caught:
        Trainer(device="cpu")
    assert "HELIOGRAPH_PLUGINS adds plugin 'heliograph:checkpoint'" in caught.value.__notes__[0]
    variable("+log_schedule")
    with pytest.raises(TypeError, match="LogSchedule takes an interval") as caught:
        Trainer(device="cpu")
    assert_each(caught.value.__notes__, ("HELIOGRAPH_PLUGINS", "'log_schedule'"))


def test_a_program_may_toggle_what_was_not_loaded(variable: Set) -> None:
    variable("-nan_guard")
    trainer = Trainer([Counts()], device="cpu")
    plugins = trainer.plugins
    with pytest.warns(RuntimeWarning, match=r"^Plugin 'nan_guard' is disabled"):
        guard = plugins.load("heliograph:nan_guard", action="stop")
    for key in ("nan_guard", guard):
        plugins.disable(key, "counts")
        assert [plugins.is_enabled(each) for each in (key, "counts")] == [False, False]
        with plugins.disabled(key):
            pass
    with pytest.warns(RuntimeWarning, match=r"^Plugin 'nan_guard' stays disabled"):
        plugins.enable("nan_guard", "counts")
    assert plugins.is_enabled("counts")
    assert "HELIOGRAPH_PLUGINS disables nan_guard" in kit.fit(trainer).notes
    assert plugins.unregister("nan_guard") is guard
    with pytest.raises(LookupError, match=r"'nan_guard' is registered\. Known:"):
        plugins.unregister("nan_guard")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("nan_guard", r"^HELIOGRAPH_PLUGINS contains 'nan_guard'.*\+"),
        ("+", r"contains '\+'"),
        ("+nan_guard,-nan_guard", "both.*disables 'nan_guard'"),
    ],
)
def test_what_cannot_be_read(variable: Set, value: str, sentence: str) -> None:
    variable(value)
    with pytest.raises(ValueError, match=sentence):
        Trainer(device="cpu")


def test_without_it_nothing_changes(variable: Set) -> None:
    variable("")
    trainer = Trainer(device="cpu")
    assert trainer.plugins.names() == []
    assert not any("HELIOGRAPH_PLUGINS" in note for note in kit.fit(trainer).notes)
