from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from math import inf
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest
from heliograph import DeviceEngine, EarlyStopping, Every, Once, Plugin, Trainer, TrainRun, on
from heliograph.events import (
    BatchEnd,
    BatchStart,
    Control,
    EpochEnd,
    EpochStart,
    Event,
    Lane,
    PluginChanged,
    PluginFailed,
    Run,
    RunClosed,
    RunFailed,
    StepEnd,
    TrainStart,
)
from heliograph.plugins import Plugins
from heliograph.tests import kit
from heliograph.tests.kit import class_batches, go_through, make_run
from heliograph.tests.messages import assert_each, assert_facts


class Custom(Event):
    """A third party's event."""


class Noting(Plugin):
    """Notes what it receives, and when it is closed, in a list that several may share."""

    def __init__(self, received: list[str] | None = None) -> None:
        self.received: list[str] = [] if received is None else received

    @on(BatchEnd)
    def receive(self, run: Run, event: BatchEnd) -> None:
        self.received.append(self.name)

    def close(self) -> None:
        self.received.append(f"close {self.name}")


class Other(Noting):
    """Another class of the same kind."""


class Plain:
    """Any object with a marked method."""

    def __init__(self) -> None:
        self.calls = 0

    @on(BatchEnd)
    def count(self, run: Run, event: BatchEnd) -> None:
        self.calls += 1


class Stateful(Plugin):
    """A plugin with a state."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @on(BatchEnd)
    def receive(self, run: Run, event: BatchEnd) -> None:
        self.seen.append(run.progress.batch)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen} if self.seen else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(device="cpu")


@pytest.fixture
def plugins(trainer: Trainer) -> Plugins:
    return trainer.plugins


def fit(trainer: Trainer, batches: int = 3, epochs: int = 1) -> TrainRun:
    return go_through(make_run(trainer, batches, epochs))


def emit(trainer: Trainer, event: Event | None = None) -> None:
    """Emit one event outside a dispatch, as a run would."""
    make_run(trainer).emit(event or BatchEnd())


# Registration.


def test_any_object_with_a_marked_method_can_be_registered(trainer: Trainer, plugins: Plugins) -> None:
    plain = Plain()
    assert plugins.register(plain) is plain
    assert plugins.names() == ["plain"]
    emit(trainer)
    assert plain.calls == 1
    plugins.disable("plain")
    emit(trainer)
    plugins.enable(plain)
    emit(trainer)
    assert plugins.unregister(Plain) is plain
    emit(trainer)
    assert plain.calls == 2


def test_the_trainer_registers_in_the_order_of_its_list() -> None:
    received: list[str] = []
    trainer = Trainer([Noting(received).named("b"), Other(received).named("a")], device="cpu")
    emit(trainer)
    assert (trainer.plugins.names(), received) == (["b", "a"], ["b", "a"])


@pytest.mark.parametrize("thing", [3, object(), Plugin(), None], ids=lambda thing: type(thing).__name__)
def test_what_is_no_plugin_is_refused_with_the_form(plugins: Plugins, thing: object) -> None:
    with pytest.raises(TypeError, match="plugin: register"):
        plugins.register(thing)
    assert len(plugins) == 0


@pytest.mark.parametrize("given", ["early_stopping", ["early_stopping"]], ids=["alone", "in a list"])
def test_a_name_is_refused_with_the_two_ways_to_give_a_plugin(given: Any) -> None:
    words = r"such as EarlyStopping\(.*'early_stopping'.*trainer\.plugins\.load\('early_stopping'\)"
    with pytest.raises(TypeError, match=words):
        Trainer(given)


class Holder(Plugin):
    """Has a state that functions of the user change, and no handlers."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


def test_a_plugin_may_have_a_state_and_no_handlers(tmp_path: Path) -> None:
    first, second = Holder(), Holder()
    for holder, epochs in ((first, 1), (second, 2)):
        trainer = Trainer([holder, *kit.saving(tmp_path, Every(epochs=1), resume="auto")], device="cpu")

        def count(run: Run, event: BatchEnd, holder: Holder = holder) -> None:
            holder.value += 1

        trainer.bus.on(BatchEnd, count)
        assert kit.fit(trainer, epochs=epochs).plugin_errors == {}
    assert (first.value, second.value) == (2, 4)


def test_a_plugin_may_declare_what_functions_request() -> None:
    class Declaring(Plugin):
        asks = ("stop",)

    def stop(run: Run, event: BatchEnd) -> None:
        run.control.stop("enough")

    trainer = Trainer([Declaring()], device="cpu")
    trainer.bus.on(BatchEnd, stop)
    result = kit.fit(trainer, epochs=None)
    assert (result.status, result.reason, result.progress.batches) == ("stopped", "enough", 1)


def test_a_handler_without_its_mark_is_named(plugins: Plugins) -> None:
    class Forgetful(Holder):
        def judge(self, run: Run, event: BatchEnd) -> None: ...

    with pytest.raises(TypeError, match=r"event calls Forgetful\.judge\(run, event\):"):
        plugins.register(Forgetful())
    assert len(plugins) == 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [("EarlyStopping", "early_stopping"), ("NaNGuard", "nan_guard"), ("RNGCapture", "rng_capture"), ("A2C", "a2_c")],
)
def test_the_name_is_the_class_name_in_snake_case(plugins: Plugins, kind: str, name: str) -> None:
    assert vars(type(kind, (Noting,), {}))["name"] == name
    plugins.register(type(kind, (Plain,), {})())
    assert plugins.names() == [name]


def test_a_name_of_ones_own(plugins: Plugins) -> None:
    class Named(Noting):
        name = "fancy name"

    class PlainNamed(Plain):
        name = "plain name"

    class Heir(Named):
        pass

    for plugin in (Named(), PlainNamed(), Heir(), Noting().named("third")):
        plugins.register(plugin)
    plugins.register(Noting(), name="fourth")
    assert plugins.names() == ["fancy name", "plain name", "heir", "third", "fourth"]


def test_named_names_this_object_only() -> None:
    plugin = Noting()
    assert plugin.named("mine") is plugin
    assert (plugin.name, Noting().name) == ("mine", "noting")


def test_a_duplicate_name_is_refused_with_the_mend(trainer: Trainer, plugins: Plugins) -> None:
    first, second = Noting(), Noting()
    plugins.register(first)
    sentence = r"'noting' is already registered.*Noting\(...\).named\('noting_2'\)"
    with pytest.raises(ValueError, match=sentence):
        plugins.register(second)
    assert list(plugins) == [first]
    emit(trainer)
    assert (first.received, second.received) == (["noting"], [])
    plugins.register(second.named("noting_2"))
    assert plugins.names() == ["noting", "noting_2"]


def test_one_object_cannot_be_registered_twice(plugins: Plugins) -> None:
    plugin = plugins.register(Noting())
    with pytest.raises(ValueError):
        plugins.register(plugin, name="again")
    assert plugins.names() == ["noting"]


def test_an_exclusive_capability_can_be_claimed_once(plugins: Plugins) -> None:
    class One(Noting):
        exclusive = ("scaling", "clock")

    class Two(Noting):
        exclusive = ("progress", "scaling")

    class Third(Plain):
        exclusive = ("progress",)

    one = plugins.register(One())
    with pytest.raises(ValueError, match=r"^Plugins 'one' and 'two'"):
        plugins.register(Two())
    plugins.register(Third())
    plugins.unregister(one)
    with pytest.raises(ValueError, match=r"^Plugins 'third' and 'two'"):
        plugins.register(Two())
    assert plugins.names() == ["third"]


def test_declarations_of_enabled_plugins_are_collected(plugins: Plugins) -> None:
    class One(Noting):
        asks = ("stop", "log")

    class Two(Plain):
        asks = ("save",)

    plugins.register(One())
    plugins.register(Two())
    plugins.register(Plain())
    assert plugins.declared("asks") == {"stop": "one", "log": "one", "save": "two"}
    plugins.disable("one")
    assert plugins.declared("asks") == {"save": "two"}
    assert plugins.declared("needs") == {}


class WrongSignature(Noting):
    @on(EpochStart)
    def begin(self, run: Run, event: EpochStart) -> None: ...

    @on(EpochEnd)  # type: ignore[arg-type]
    def end(self, run: Run) -> None: ...


class WrongAnnotation(Noting):
    @on(EpochEnd)  # type: ignore[arg-type]
    def end(self, run: Run, event: BatchEnd) -> None: ...


class Coroutine(Noting):
    @on(EpochEnd)  # type: ignore[arg-type]
    async def end(self, run: Run, event: EpochEnd) -> None: ...


class HalfOfTheState(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {}


class OtherHalfOfTheState(Plain):
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Cyclic(Noting):
    @on(EpochEnd, before="cyclic")
    def end(self, run: Run, event: EpochEnd) -> None: ...


class Unruly:
    """A filter that cannot be copied."""

    def __call__(self, run: Run) -> bool:
        return True

    def __deepcopy__(self, memo: object) -> Unruly:
        raise TypeError("cannot copy this filter")


class FilterThatCannotBeCopied(Noting):
    @on(EpochEnd, when=Unruly())
    def end(self, run: Run, event: EpochEnd) -> None: ...


@pytest.mark.parametrize(
    ("kind", "error", "sentence"),
    [
        (
            WrongSignature,
            TypeError,
            r"^WrongSignature\.end\(run: .*\).*EpochEnd",
        ),
        (WrongAnnotation, TypeError, r"^WrongAnnotation\.end .*EpochEnd.*as BatchEnd"),
        (Coroutine, TypeError, r"^Coroutine\.end .*EpochEnd.*coroutine or generator"),
        (HalfOfTheState, TypeError, "^HalfOfTheState .*state_dict and load_state_dict"),
        (OtherHalfOfTheState, TypeError, "^OtherHalfOfTheState .*state_dict and load_state_dict"),
        (Cyclic, ValueError, "EpochEnd cannot be ordered"),
        (FilterThatCannotBeCopied, TypeError, "^cannot copy this filter$"),
    ],
)
def test_a_failed_registration_leaves_nothing_behind(
    trainer: Trainer, plugins: Plugins, kind: type, error: type[Exception], sentence: str
) -> None:
    good = plugins.register(Noting().named("good"))
    before = trainer.plan()
    with pytest.raises(error, match=sentence):
        plugins.register(kind())
    assert list(plugins) == [good]
    assert trainer.plan() == before
    emit(trainer)
    assert good.received == ["good"]


def test_a_trainer_with_a_bad_plugin_is_not_made() -> None:
    with pytest.raises(TypeError, match="cannot handle EpochEnd"):
        Trainer([WrongSignature()], device="cpu")


# What a plugin brings.


class Brought(Noting):
    """Is brought by others."""


class Special(Brought):
    """Takes the place of a `Brought`."""

    name = "brought"


class Bringer(Noting):
    """Brings another plugin."""

    brings = (Brought,)


def test_a_plugin_brings_another(trainer: Trainer, plugins: Plugins) -> None:
    plugins.register(Bringer())
    assert plugins.names() == ["bringer", "brought"]
    assert type(plugins["brought"]) is Brought
    plugins.register(Bringer().named("second"))
    assert plugins.names() == ["bringer", "brought", "second"]

    plugins.unregister("bringer")
    assert plugins.names() == ["brought", "second"]
    plugins.unregister("second")
    assert plugins.names() == []


def test_one_that_is_registered_before_is_not_brought(plugins: Plugins) -> None:
    own = plugins.register(Special())
    plugins.register(Bringer())
    assert next(iter(plugins)) is own
    assert plugins.names() == ["brought", "bringer"]
    plugins.unregister("bringer")
    assert list(plugins) == [own]


@pytest.mark.parametrize("name", ["brought", "mine"])
def test_one_that_is_registered_later_replaces_what_was_brought(trainer: Trainer, plugins: Plugins, name: str) -> None:
    plugins.register(Bringer())
    brought = plugins["brought"]
    own = plugins.register(Special().named(name))
    assert list(plugins)[1:] == [own]
    emit(trainer)
    assert own.received == [name]
    assert brought.received == ["close brought"]
    plugins.unregister("bringer")
    assert list(plugins) == [own]


def test_the_name_of_what_is_brought_must_be_free(plugins: Plugins) -> None:
    plugins.register(Noting().named("brought"))
    with pytest.raises(ValueError, match="brings a plugin 'brought'"):
        plugins.register(Bringer())
    assert plugins.names() == ["brought"]


# Looking up.


def test_looking_up_by_name_and_class(plugins: Plugins) -> None:
    noting, plain = plugins.register(Noting()), plugins.register(Plain())
    assert plugins["noting"] is noting
    assert plugins[Plain] is plain
    assert plugins[Plugin] is noting
    assert (list(plugins), len(plugins)) == ([noting, plain], 2)
    assert [key in plugins for key in ("noting", Noting, noting, "other", Other, Noting())] == [True] * 3 + [False] * 3


def test_several_of_a_class_are_distinguished_by_name(plugins: Plugins) -> None:
    first, second = plugins.register(Noting()), plugins.register(Other())
    with pytest.raises(LookupError, match="class Noting:"):
        plugins[Noting]
    assert plugins[Other] is second
    assert plugins["noting"] is first
    assert Noting in plugins


@pytest.mark.parametrize("key", ["earlystopping", Other, Plain()], ids=["name", "class", "object"])
@pytest.mark.parametrize("method", ["__getitem__", "unregister", "enable", "disable", "is_enabled"])
def test_an_unknown_plugin_is_refused_with_the_known_ones(plugins: Plugins, method: str, key: Any) -> None:
    plugins.register(Noting().named("early_stopping"))
    given = key if isinstance(key, str) else key.__name__ if isinstance(key, type) else "Plain"
    with pytest.raises(LookupError, match=f"^No plugin '{given}' is registered..*Known: early_stopping.$"):
        getattr(plugins, method)(key)
    with pytest.raises(LookupError, match=f"^No plugin '{given}' is registered."), plugins.disabled(key):
        pass


def test_a_misspelt_name_is_answered_with_the_nearest(plugins: Plugins) -> None:
    plugins.register(Noting().named("early_stopping"))
    with pytest.raises(LookupError, match=r"Did you mean 'early_stopping'\?"):
        plugins["early_stoping"]


@pytest.mark.parametrize("by", ["name", "class", "object"])
def test_unregistering(trainer: Trainer, plugins: Plugins, by: str) -> None:
    received: list[str] = []
    plugin, other = plugins.register(Noting(received)), plugins.register(Plain())
    key: Any = {"name": "noting", "class": Noting, "object": plugin}[by]
    assert plugins.unregister(key) is plugin
    emit(trainer)
    assert (received, list(plugins), other.calls) == (["close noting"], [other], 1)
    with pytest.raises(LookupError):
        plugins.unregister(key)
    plugins.register(plugin)
    emit(trainer)
    assert received == ["close noting", "noting"]


# Toggling.


def test_disabling_and_enabling_keeps_the_place(trainer: Trainer, plugins: Plugins) -> None:
    received: list[str] = []
    for name in "abc":
        plugins.register(Noting(received).named(name))
    emit(trainer)
    plugins.disable("a", "c")
    assert [plugins.is_enabled(name) for name in "abc"] == [False, True, False]
    emit(trainer)
    plugins.enable("c", "a")
    plugins.enable("a")
    emit(trainer)
    assert received == ["a", "b", "c", "close a", "close c", "b", "a", "b", "c"]


def test_toggling_all_or_none_where_a_name_is_wrong(plugins: Plugins) -> None:
    plugins.register(Noting())
    with pytest.raises(LookupError, match="nobody"):
        plugins.disable("noting", "nobody")
    assert plugins.is_enabled("noting")


def test_disabled_for_a_while(trainer: Trainer, plugins: Plugins) -> None:
    received: list[str] = []
    plugins.register(Noting(received))
    with plugins.disabled("noting"):
        assert not plugins.is_enabled("noting")
        emit(trainer)
    emit(trainer)
    assert received == ["close noting", "noting"]


def test_disabled_nests(plugins: Plugins) -> None:
    plugins.register(Noting().named("a"))
    plugins.register(Noting().named("b"))
    states = []

    def note() -> None:
        states.append((plugins.is_enabled("a"), plugins.is_enabled("b")))

    with plugins.disabled("a"):
        with plugins.disabled("a", "b"):
            note()
        note()
    note()
    assert states == [(False, False), (False, True), (True, True)]


def test_disabled_comes_to_its_end_after_an_error_too(plugins: Plugins) -> None:
    plugins.register(Noting())
    with pytest.raises(KeyError), plugins.disabled(Noting):
        raise KeyError
    assert plugins.is_enabled("noting")


def test_disabled_leaves_what_was_off_before(plugins: Plugins) -> None:
    plugins.register(Noting())
    plugins.disable("noting")
    with plugins.disabled("noting"):
        assert not plugins.is_enabled("noting")
    assert not plugins.is_enabled("noting")


def test_disabled_bears_that_the_plugin_leaves_meanwhile(plugins: Plugins) -> None:
    plugin = plugins.register(Noting())
    with plugins.disabled(plugin):
        plugins.unregister(plugin)
        other = plugins.register(Noting())
        plugins.disable(other)
    assert list(plugins) == [other]
    assert not plugins.is_enabled(other)


class Acting(Plugin):
    """Does something at the first batch."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.actions = [action]

    @on(BatchEnd)
    def act(self, run: Run, event: BatchEnd) -> None:
        while self.actions:
            self.actions.pop()()


def test_disabling_from_within_a_handler_takes_effect_from_the_next_event(trainer: Trainer, plugins: Plugins) -> None:
    noting = Noting()
    plugins.register(Acting(lambda: plugins.disable("noting")))
    plugins.register(noting)
    fit(trainer)
    assert noting.received[0] == "noting"
    assert noting.received.count("noting") == 1
    assert noting.received[1] == "close noting"  # not before the dispatch that still calls it is over


def test_registering_from_within_a_handler_takes_effect_from_the_next_event(trainer: Trainer, plugins: Plugins) -> None:
    noting = Noting()
    plugins.register(Acting(lambda: plugins.register(noting)))
    fit(trainer)
    assert noting.received == ["noting", "noting", "close noting"]


def test_unregistering_from_within_a_handler_takes_effect_from_the_next_event(
    trainer: Trainer, plugins: Plugins
) -> None:
    noting = Noting()
    plugins.register(Acting(lambda: plugins.unregister(noting)))
    plugins.register(noting)
    fit(trainer)
    assert noting.received == ["noting", "close noting"]
    assert plugins.names() == ["acting"]


def test_a_plugin_can_unregister_itself(trainer: Trainer, plugins: Plugins) -> None:
    class OneShot(Noting):
        @on(StepEnd)
        def leave(self, run: Run, event: StepEnd) -> None:
            plugins.unregister(self)

    one_shot = plugins.register(OneShot())
    fit(trainer)
    assert one_shot.received == ["close one_shot"]
    assert one_shot not in plugins


def test_disabled_around_a_nested_emission_within_a_handler(trainer: Trainer, plugins: Plugins) -> None:
    received: list[str] = []

    class Listening(Plugin):
        @on(Custom)
        def receive(self, run: Run, event: Custom) -> None:
            received.append("custom")

    def receive(run: Run, event: BatchEnd) -> None:
        run.emit(Custom())
        with plugins.disabled("listening"):
            run.emit(Custom())
        run.emit(Custom())

    plugins.register(Listening())
    trainer.bus.on(BatchEnd, receive)
    emit(trainer)
    assert received == ["custom", "custom"]


# Closing.


def test_every_plugin_is_closed_at_the_end_after_run_closed(trainer: Trainer, plugins: Plugins) -> None:
    received: list[str] = []
    for name in "ab":
        plugins.register(Noting(received).named(name))
    plugins.register(Plain())
    trainer.bus.on(RunClosed, lambda run, event: received.append("run_closed"))
    fit(trainer, batches=1)
    assert received == ["a", "b", "run_closed", "close a", "close b"]


def test_a_plugin_that_left_between_two_runs_is_not_closed_by_the_next(trainer: Trainer, plugins: Plugins) -> None:
    noting = plugins.register(Noting())
    fit(trainer, batches=1)
    plugins.unregister(noting)
    fit(trainer, batches=1)
    assert noting.received == ["noting", "close noting", "close noting"]


class FailingToClose(Plugin):
    """Fails when it is closed."""

    @on(BatchEnd)
    def receive(self, run: Run, event: BatchEnd) -> None: ...

    def close(self) -> None:
        raise OSError("disk full")


def test_an_error_at_closing_fails_the_run_when_all_are_closed(trainer: Trainer, plugins: Plugins) -> None:
    noting = Noting()
    plugins.register(FailingToClose(), name="sink")
    plugins.register(FailingToClose(), name="second_sink")
    plugins.register(noting)
    with pytest.raises(OSError, match="disk full") as caught:
        fit(trainer, batches=1)
    assert noting.received == ["noting", "close noting"]
    assert "in sink on close" in caught.value.__notes__[0]
    assert "second_sink failed on close:" in caught.value.__notes__[1]


def test_plugins_that_left_are_all_closed_even_if_one_of_them_fails(trainer: Trainer, plugins: Plugins) -> None:
    noting, failing = plugins.register(Noting()), plugins.register(FailingToClose())

    def leave(run: Run, event: RunClosed) -> None:
        plugins.unregister(failing)
        plugins.unregister(noting)

    trainer.bus.on(RunClosed, leave)
    with pytest.raises(OSError, match="disk full"):
        fit(trainer, batches=1)
    assert noting.received == ["noting", "close noting"]


def test_a_plugin_that_left_before_a_failing_handler_is_closed_at_the_end(trainer: Trainer, plugins: Plugins) -> None:
    noting = plugins.register(Noting())

    def fail(run: Run, event: StepEnd) -> None:
        plugins.unregister(noting)
        raise KeyError("x")

    trainer.bus.on(StepEnd, fail)
    with pytest.raises(KeyError):
        fit(trainer, batches=1)
    assert noting.received == ["close noting"]


def test_a_trainer_runs_one_run_at_a_time(trainer: Trainer, plugins: Plugins) -> None:
    def again(run: Run, event: BatchEnd) -> None:
        trainer.engine = DeviceEngine("cpu")
        fit(trainer)

    handle = trainer.bus.on(BatchEnd, again)
    with pytest.raises(RuntimeError, match=r"^This trainer is already"):
        fit(trainer)
    handle.remove()
    assert fit(trainer).result.status == "completed"


def in_a_run_of_another_trainer(shared: Plugin, act: Callable[[], object]) -> None:
    """Call `act` in the middle of a run named `outer` that has a plugin."""
    outer = Trainer([shared], device="cpu")
    outer.bus.on(StepEnd, lambda run, event: act(), when=Once())
    go_through(make_run(outer, name="outer"))


def test_a_plugin_is_in_one_run_at_a_time(trainer: Trainer, plugins: Plugins) -> None:
    shared = plugins.register(Noting())
    trainer.bus.on(TrainStart, lambda run, event: shared.received.append("begun"))

    def train_within() -> None:
        with pytest.raises(RuntimeError) as caught:
            fit(trainer)
        assert_facts(caught.value, "'noting'", "'outer'", "another trainer", "new Noting")

    in_a_run_of_another_trainer(shared, train_within)
    assert shared.received == ["noting"] * 3 + ["close noting"]  # of the outer run alone
    assert fit(trainer).result.status == "completed"


def test_nothing_is_done_before_a_plugin_is_refused(trainer: Trainer, plugins: Plugins) -> None:
    shared, task = plugins.register(Noting()), kit.linear_classifier()
    task.model.eval()

    def train_within() -> None:
        with pytest.raises(RuntimeError, match="'outer' of another trainer"):
            kit.fit(trainer, task=task)
        with pytest.raises(RuntimeError, match="'outer' of another trainer"):
            trainer.validate(task, class_batches(1))

    in_a_run_of_another_trainer(shared, train_within)
    assert not task.model.training


def test_a_failed_run_lets_go_of_its_plugins(trainer: Trainer, plugins: Plugins) -> None:
    shared = plugins.register(Noting())

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        in_a_run_of_another_trainer(shared, fail)
    assert fit(trainer).result.status == "completed"


def test_a_run_that_does_not_begin_lets_go_of_its_plugins(
    trainer: Trainer, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.register(Noting())
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(Control, "open", Mock(side_effect=KeyError("x")))
        fit(trainer)
    assert fit(trainer).result.status == "completed"


def test_a_run_that_nobody_closed_holds_its_plugins_no_longer_than_its_trainer(plugins: Plugins) -> None:
    shared = plugins.register(Noting())
    abandoned = make_run(Trainer([shared], device="cpu"))
    abandoned.__enter__()
    with pytest.raises(RuntimeError, match="'run' of another trainer"):
        plugins.check_free()
    del abandoned
    gc.collect()
    plugins.check_free()


def test_a_plugin_comes_into_one_run_at_a_time(trainer: Trainer, plugins: Plugins) -> None:
    shared = Noting()

    def take(run: Run, event: BatchEnd) -> None:
        with pytest.raises(RuntimeError, match="'outer' of another trainer"):
            plugins.register(shared)

    trainer.bus.on(BatchEnd, take)
    in_a_run_of_another_trainer(shared, lambda: fit(trainer))
    assert len(plugins) == 0
    assert shared.received == ["noting"] * 3 + ["close noting"]


def test_a_plugin_that_left_a_run_may_be_in_another(trainer: Trainer, plugins: Plugins) -> None:
    shared = Noting()
    outer = Trainer([shared], device="cpu")

    def hand_over(run: Run, event: StepEnd) -> None:
        plugins.register(outer.plugins.unregister(shared))
        fit(trainer, batches=2)

    outer.bus.on(StepEnd, hand_over, when=Once())
    fit(outer)
    assert shared.received.count("noting") == 2


# What is declared.


class Declares(Plugin):
    asks = ("stopp",)


class Lacks(Plugin):
    needs = ("validation data", "logs")
    asks = ("scheduler", "veto_stop")


@pytest.mark.parametrize(
    ("plugin", "sentence"),
    [
        (
            Declares(),
            r".*'declares'.*asks.*\('stopp',\).*mean 'stop'",
        ),
        (Lacks(), r".*'lacks'.*needs.*\('logs',\).*mean 'log'"),
    ],
)
def test_what_no_loop_does_can_be_neither_asked_for_nor_needed(plugins: Plugins, plugin: Plugin, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        plugins.register(plugin)
    assert plugins.names() == []


# Loading by name.


def test_loading_by_name_with_options(plugins: Plugins) -> None:
    plugin = plugins.load("early_stopping", patience=5, monitor="validation/accuracy", mode="max")
    assert isinstance(plugin, EarlyStopping)
    assert (plugin.patience, plugin.monitor.name) == (5, "validation/accuracy")
    assert plugins["early_stopping"] is plugin
    assert plugins.is_enabled(plugin)


def test_loading_with_a_bad_option_leaves_nothing_behind(plugins: Plugins) -> None:
    with pytest.raises(TypeError, match=r"you mean 'patience'\? Known:"):
        plugins.load("early_stopping", patients=5)
    form = r"plugins\.load\('checkpoint', folder=\.\.\.\)"
    with pytest.raises(TypeError, match=rf"folder=\.\.\., as in {form}\.$"):
        plugins.load("checkpoint", keep_last=1)
    with pytest.raises(ValueError, match="patience"):
        plugins.load("early_stopping", patience=0)
    with pytest.raises(LookupError, match=r"Did you mean 'early_stopping'\?"):
        plugins.load("early_stoping")
    assert plugins.names() == []


def test_installed_is_never_enabled(plugins: Plugins) -> None:
    assert "early_stopping" in {each.name for each in plugins.available()}
    assert plugins.names() == []


@pytest.fixture
def kill_switch(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda value: monkeypatch.setenv("HELIOGRAPH_PLUGINS", value)


def test_the_kill_switch_keeps_a_plugin_from_being_loaded(plugins: Plugins, kill_switch: Callable[[str], None]) -> None:
    kill_switch("-nan_guard,-early_stopping")
    sentence = "^Plugin 'early_stopping'.*HELIOGRAPH_PLUGINS"
    with pytest.warns(RuntimeWarning, match=sentence) as warned:
        plugins.load("early_stopping", patience=5)
    assert warned[0].filename == __file__
    assert not plugins.is_enabled("early_stopping")


def test_the_kill_switch_silences_what_is_registered(
    trainer: Trainer, plugins: Plugins, kill_switch: Callable[[str], None]
) -> None:
    kill_switch("-noting")
    with pytest.warns(RuntimeWarning, match=r"^Plugin 'noting' is disabled"):
        noting = plugins.register(Noting())
    plain = plugins.register(Plain())
    emit(trainer)
    assert (noting.received, plain.calls) == ([], 1)
    assert (plugins.is_enabled(noting), plugins.is_enabled(plain)) == (False, True)
    assert "noting (off)" in trainer.plan()


def test_the_kill_switch_for_all_spares_what_the_user_wrote_himself(
    plugins: Plugins, kill_switch: Callable[[str], None]
) -> None:
    kill_switch("-all")
    plugins.register(Noting())
    plugins.load("early_stopping")
    assert [plugins.is_enabled(name) for name in plugins.names()] == [True, True]


# State.


def test_a_state_round_trip(trainer: Trainer) -> None:
    first, second = Stateful(), Stateful().named("second")
    for plugin in (first, second, Plain()):
        trainer.plugins.register(plugin)
    fit(trainer)
    saved = trainer.plugins.state_dict()
    assert saved == {"stateful": {"seen": [1, 2, 3]}, "second": {"seen": [1, 2, 3]}}
    first.seen.append(9)
    assert saved["stateful"] == {"seen": [1, 2, 3]}  # a copy

    other = Trainer([Stateful(), Stateful().named("second")], device="cpu")
    assert other.plugins.load_state_dict(saved) == ([], [])
    assert other.plugins["second"].seen == [1, 2, 3]
    other.plugins["second"].seen.append(9)
    assert saved["second"] == {"seen": [1, 2, 3]}


def test_the_state_of_a_disabled_plugin_is_kept(plugins: Plugins) -> None:
    plugin = plugins.register(Stateful())
    plugin.seen = [4]
    plugins.disable(plugin)
    assert plugins.state_dict() == {"stateful": {"seen": [4]}}


def test_missing_and_unknown_states_are_reported(plugins: Plugins) -> None:
    for name in ("full", "empty", "known"):
        plugins.register(Stateful().named(name))
    plugins["full"].seen = [1]
    states = {"known": {"seen": [7]}, "gone": {"seen": [8]}, "gone and empty": {}}
    assert plugins.load_state_dict(states) == (["full"], ["gone"])
    assert (plugins["known"].seen, plugins["full"].seen) == ([7], [1])


def test_any_object_may_have_a_state(plugins: Plugins) -> None:
    class PlainStateful(Plain):
        def state_dict(self) -> dict[str, Any]:
            return {"calls": self.calls}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.calls = state["calls"]

    plugin = plugins.register(PlainStateful())
    assert plugins.load_state_dict({"plain_stateful": {"calls": 4}}) == ([], [])
    assert (plugin.calls, plugins.state_dict()) == (4, {"plain_stateful": {"calls": 4}})


def test_the_base_class_has_an_empty_state(plugins: Plugins) -> None:
    plugin = plugins.register(Acting(lambda: None))
    assert plugins.state_dict() == {"acting": {}}
    plugin.load_state_dict({})
    assert plugins.load_state_dict({}) == ([], [])


# Policy.


class Failing(Plugin):
    """Fails at every batch."""

    def __init__(self, policy: Literal["critical", "observer"]) -> None:
        self.policy = policy
        self.calls = 0
        self.closed = 0

    @on(BatchEnd)
    def fail(self, run: Run, event: BatchEnd) -> None:
        self.calls += 1
        raise KeyError(f"call {self.calls}")

    def close(self) -> None:
        self.closed += 1


def test_an_error_of_a_critical_plugin_leaves_unchanged(trainer: Trainer, plugins: Plugins) -> None:
    plugin = plugins.register(Failing("critical"))
    with pytest.raises(KeyError, match="call 1") as caught:
        fit(trainer)
    assert_each(caught.value.__notes__, ("in train", "epoch 0", "batch 1", "step 1", "in failing on batch_end"))
    assert (plugin.calls, plugins.errors()) == (1, {})


def test_an_observer_is_logged_counted_and_switched_off(
    trainer: Trainer, plugins: Plugins, caplog: pytest.LogCaptureFixture
) -> None:
    plugin, plain = plugins.register(Failing("observer")), plugins.register(Plain())
    with caplog.at_level(logging.ERROR, "heliograph"):
        run = fit(trainer, batches=5)
    assert (plugin.calls, plain.calls, run.result.status) == (3, 5, "completed")
    errors = tuple(f"batch_end at step {step}: KeyError: 'call {step}'" for step in (1, 2, 3))
    assert plugins.errors() == {"failing": errors}
    assert run.result.plugin_errors == {"failing": errors}
    assert not plugins.is_enabled(plugin)
    assert_each(
        [record.getMessage() for record in caplog.records],
        *[("'failing'", "batch_end", f"KeyError: 'call {call}'") for call in (1, 2, 3)],
        ("'failing'", "switched off", "3 errors"),
    )
    assert caplog.records[0].exc_info is not None
    assert plugin.closed >= 1


def test_what_the_system_refuses_is_logged_without_a_traceback(
    trainer: Trainer, plugins: Plugins, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(Plugin):
        policy = "observer"

        @on(BatchEnd)
        def write(self, run: Run, event: BatchEnd) -> None:
            raise OSError(28, "No space left", "log.jsonl")

    plugins.register(Full())
    fit(trainer, batches=1)
    (record,) = caplog.records
    assert_facts(record.getMessage(), "'full'", "batch_end", "[Errno 28]", "'log.jsonl'")
    assert record.exc_info is None


def test_the_dispatch_continues_after_a_forgiven_error(trainer: Trainer, plugins: Plugins) -> None:
    received: list[str] = []
    plugins.register(Noting(received).named("before"))
    plugins.register(Failing("observer"))
    plugins.register(Noting(received).named("after"))
    emit(trainer)
    assert received == ["before", "after"]


def test_how_many_errors_are_forgiven_is_the_observers_choice(trainer: Trainer, plugins: Plugins) -> None:
    class Once(Failing):
        max_errors = 1

    class PlainObserver:
        policy = "observer"
        calls = 0

        @on(BatchEnd)
        def fail(self, run: Run, event: BatchEnd) -> None:
            self.calls += 1
            raise ValueError

    once, plain = plugins.register(Once("observer")), plugins.register(PlainObserver())
    fit(trainer, batches=5)
    assert (once.calls, plain.calls) == (1, 3)
    assert {name: len(errors) for name, errors in plugins.errors().items()} == {"once": 1, "plain_observer": 3}


def test_the_next_run_begins_with_a_clean_slate(trainer: Trainer, plugins: Plugins) -> None:
    plugin = plugins.register(Failing("observer"))
    fit(trainer, batches=2)
    assert len(plugins.errors()["failing"]) == 2
    fit(trainer, batches=2)
    assert [error.partition("'")[2] for error in plugins.errors()["failing"]] == ["call 3'", "call 4'"]
    assert plugins.is_enabled(plugin)


def test_an_observer_may_fail_in_the_last_events(trainer: Trainer, plugins: Plugins) -> None:
    class FailingLate(Plugin):
        policy = "observer"

        @on(RunFailed, RunClosed)
        def fail(self, run: Run, event: Event) -> None:
            raise ValueError(event.name)

    plugins.register(FailingLate())
    assert fit(trainer).result.status == "completed"
    assert list(plugins.errors()) == ["failing_late"]
    assert_each(plugins.errors()["failing_late"], ("run_closed", "step 3", "ValueError: run_closed"))
    plugins.register(Failing("critical"))
    with pytest.raises(KeyError) as caught:
        fit(trainer)
    assert [text.partition(" at ")[0] for text in plugins.errors()["failing_late"]] == ["run_failed", "run_closed"]
    assert len(caught.value.__notes__) == 1


def test_an_interrupt_in_an_observer_is_not_forgiven(trainer: Trainer, plugins: Plugins) -> None:
    class Interrupted(Plugin):
        policy = "observer"

        @on(BatchEnd)
        def interrupt(self, run: Run, event: BatchEnd) -> None:
            raise KeyboardInterrupt

    plugins.register(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    assert plugins.errors() == {}


def test_a_critical_failure_leaves_also_through_an_observers_emission(trainer: Trainer, plugins: Plugins) -> None:
    class Announcing(Plugin):
        policy = "observer"

        @on(BatchEnd)
        def announce(self, run: Run, event: BatchEnd) -> None:
            run.emit(Custom())

    class Storing(Plugin):
        @on(Custom)
        def store(self, run: Run, event: Custom) -> None:
            raise OSError("disk full")

    plugins.register(Announcing())
    plugins.register(Storing())
    with pytest.raises(OSError, match="disk full"):
        fit(trainer)
    assert plugins.errors() == {}


def test_an_observer_that_leaves_and_then_fails_is_forgiven(trainer: Trainer, plugins: Plugins) -> None:
    class Leaving(Plugin):
        policy = "observer"

        @on(StepEnd, when=lambda run: True)
        def leave(self, run: Run, event: StepEnd) -> None:
            plugins.disable(self)
            raise ValueError("last words")

    plugins.register(Leaving())
    errors = fit(trainer).result.plugin_errors
    assert list(errors) == ["leaving"]
    assert_each(errors["leaving"], ("step_end", "step 1", "ValueError: last words"))


def test_a_failure_names_its_plugin_also_when_the_plugins_have_changed_since(
    trainer: Trainer, plugins: Plugins
) -> None:
    class Bound(Plugin):
        @on(BatchEnd, lane=Lane.REPORT, when=lambda run: True)
        def fail(self, run: Run, event: BatchEnd) -> None:
            raise ValueError("bound")

    plugins.register(Acting(lambda: plugins.register(Noting())))
    plugins.register(Bound())
    with pytest.raises(ValueError, match="bound") as caught:
        fit(trainer)
    assert "bound on batch_end" in caught.value.__notes__[0]


def test_an_error_in_train_start_closes_the_plugins(trainer: Trainer, plugins: Plugins) -> None:
    noting = plugins.register(Noting())

    def fail(run: Run, event: TrainStart) -> None:
        raise ValueError("no")

    trainer.bus.on(TrainStart, fail)
    with pytest.raises(ValueError, match="no"):
        fit(trainer)
    assert noting.received == ["close noting"]


def test_handlers_of_one_plugin_for_several_events(trainer: Trainer, plugins: Plugins) -> None:
    received: list[str] = []

    class Several(Plugin):
        @on(BatchStart, StepEnd, BatchEnd)
        def receive(self, run: Run, event: Event) -> None:
            received.append(event.name)

        @on(EpochEnd)
        def end(self, run: Run, event: EpochEnd) -> None:
            received.append(f"epoch {event.epoch}")

    plugins.register(Several())
    fit(trainer, batches=1, epochs=2)
    once = ["batch_start", "step_end", "batch_end"]
    assert received == [*once, "epoch 0", *once, "epoch 1"]
    plugins.disable("several")
    fit(trainer)
    assert len(received) == 8


# What is reported of plugins during a run.


Change = tuple[str, str, str]


def changes(trainer: Trainer) -> list[Change]:
    """Begin to note what is reported of a trainer's plugins."""
    reported: list[Change] = []
    trainer.bus.on(PluginChanged, lambda run, event: reported.append((event.plugin, event.change, event.by)))
    return reported


def failures(trainer: Trainer) -> list[tuple[str, str, str]]:
    """Begin to note whose failures are reported."""
    reported: list[tuple[str, str, str]] = []
    trainer.bus.on(PluginFailed, lambda run, event: reported.append((event.plugin, event.event, str(event.error))))
    return reported


def for_a_while(plugins: Plugins) -> None:
    with plugins.disabled("noting", "silent"):
        pass


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda plugins: plugins.register(Other()), [("other", "registered")]),
        (lambda plugins: plugins.load("early_stopping"), [("early_stopping", "registered")]),
        (lambda plugins: plugins.unregister("noting"), [("noting", "unregistered")]),
        (lambda plugins: plugins.disable("noting"), [("noting", "disabled")]),
        (lambda plugins: plugins.disable("noting", "acting"), [("noting", "disabled"), ("acting", "disabled")]),
        (lambda plugins: plugins.enable("silent"), [("silent", "enabled")]),
        (lambda plugins: plugins.enable("noting"), []),
        (lambda plugins: plugins.disable("silent"), []),
        (for_a_while, [("noting", "disabled"), ("noting", "enabled")]),
    ],
    ids=["register", "load", "unregister", "disable", "two", "enable", "on already", "off already", "for a while"],
)
def test_a_change_during_a_run_is_reported_with_who_did_it(
    trainer: Trainer, plugins: Plugins, act: Callable[[Plugins], object], expected: list[tuple[str, str]]
) -> None:
    plugins.register(Noting())
    plugins.register(Noting().named("silent"))
    plugins.disable("silent")
    plugins.register(Acting(lambda: act(plugins)))
    reported = changes(trainer)
    fit(trainer)
    assert reported == [(*each, "acting") for each in expected]


def test_a_change_outside_of_a_handler_is_the_callers(trainer: Trainer, plugins: Plugins) -> None:
    reported = changes(trainer)
    with make_run(trainer) as run:
        plugins.register(Noting())
        with plugins.disabled("noting"):
            pass
        for _ in run.epochs():
            break
    by = "the caller"
    assert reported == [("noting", "registered", by), ("noting", "disabled", by), ("noting", "enabled", by)]


def test_a_change_outside_of_a_run_is_not_reported(trainer: Trainer, plugins: Plugins) -> None:
    reported = changes(trainer)
    plugins.register(Noting())
    plugins.disable("noting")
    fit(trainer)
    plugins.enable("noting")
    plugins.unregister("noting")
    assert reported == []


def test_a_change_is_reported_after_it(trainer: Trainer, plugins: Plugins) -> None:
    """Who learns of it sees the plugins as they are now."""
    seen: list[tuple[str, bool, bool]] = []

    def look(run: Run, event: PluginChanged) -> None:
        seen.append((event.change, is_there := event.plugin in plugins, is_there and plugins.is_enabled(event.plugin)))

    trainer.bus.on(PluginChanged, look)
    with make_run(trainer):
        plugins.register(Noting())
        plugins.disable("noting")
        plugins.enable("noting")
        plugins.unregister("noting")
    assert seen == [
        ("registered", True, True),
        ("disabled", True, False),
        ("enabled", True, True),
        ("unregistered", False, False),
    ]


def test_a_plugin_learns_of_its_own_arrival_and_not_of_its_leave(trainer: Trainer, plugins: Plugins) -> None:
    class Listening(Plugin):
        def __init__(self) -> None:
            self.received: list[str] = []

        @on(PluginChanged)
        def receive(self, run: Run, event: PluginChanged) -> None:
            self.received.append(event.change)

    listening = Listening()
    with make_run(trainer):
        plugins.register(listening)
        plugins.disable(listening)
        plugins.enable(listening)
        plugins.unregister(listening)
    assert listening.received == ["registered", "enabled"]


def test_a_forgiven_failure_is_reported_and_who_is_switched_off_by_it(trainer: Trainer, plugins: Plugins) -> None:
    plugins.register(Failing("observer"))
    changed, failed = changes(trainer), failures(trainer)
    fit(trainer, batches=5)
    assert failed == [("failing", "batch_end", f"'call {call}'") for call in (1, 2, 3)]
    assert changed == [("failing", "disabled", "3 errors")]


def test_a_clean_slate_at_the_next_run_is_no_change_during_it(trainer: Trainer, plugins: Plugins) -> None:
    plugins.register(Failing("observer"))
    fit(trainer)
    changed = changes(trainer)
    fit(trainer, batches=1)
    assert changed == []


def test_a_failure_that_fails_the_run_is_not_reported_as_forgiven(trainer: Trainer, plugins: Plugins) -> None:
    plugins.register(Failing("critical"))
    failed = failures(trainer)
    with pytest.raises(KeyError):
        fit(trainer)
    assert failed == []


class FailingListener(Plugin):
    """Fails at every event of its own, and when it receives a failure, or a change."""

    policy = "observer"

    def __init__(self) -> None:
        self.received: list[str] = []

    @on(BatchEnd, PluginFailed, PluginChanged)
    def fail(self, run: Run, event: BatchEnd | PluginFailed | PluginChanged) -> None:
        self.received.append(event.name)
        raise KeyError(event.name)


def test_one_that_fails_on_failures_does_not_receive_its_own(trainer: Trainer, plugins: Plugins) -> None:
    listener, failed = plugins.register(FailingListener()), failures(trainer)
    run = fit(trainer)
    assert listener.received == ["batch_end", "plugin_failed", "batch_end", "plugin_failed"]
    assert [event for _, event, _ in failed] == ["batch_end", "batch_end"]
    assert len(run.result.plugin_errors["failing_listener"]) == 4
    assert run.result.status == "completed"


def test_one_that_fails_on_changes_is_reported_like_any_other(trainer: Trainer, plugins: Plugins) -> None:
    failed = failures(trainer)
    plugins.register(FailingListener())
    with make_run(trainer):
        plugins.register(Noting())
    assert failed == [("failing_listener", "plugin_changed", "'plugin_changed'")]


def test_a_critical_plugin_that_fails_on_a_failure_fails_the_run(trainer: Trainer, plugins: Plugins) -> None:
    class Strict(Plugin):
        @on(PluginFailed)
        def refuse(self, run: Run, event: PluginFailed) -> None:
            raise ValueError(f"{event.plugin} failed") from event.error

    plugins.register(Failing("observer"))
    plugins.register(Strict())
    with pytest.raises(ValueError, match="failing failed") as caught:
        fit(trainer)
    assert_each(caught.value.__notes__, ("in train", "epoch 0", "batch 1", "step 1", "in strict on plugin_failed"))


# The states of filters.


class Counting(Plugin):
    """Receives every third batch, the first step, and whatever a function says."""

    def __init__(self) -> None:
        self.received: list[tuple[str, int]] = []

    @on(BatchEnd, when=Every(emissions=3))
    def third(self, run: Run, event: BatchEnd) -> None:
        self.received.append(("third", run.progress.batches))

    @on(StepEnd, EpochEnd, when=Once())
    def first(self, run: Run, event: StepEnd | EpochEnd) -> None:
        self.received.append((event.name, run.progress.batches))

    @on(BatchEnd, when=lambda run: run.progress.batches == 4)
    def fourth(self, run: Run, event: BatchEnd) -> None:
        self.received.append(("fourth", run.progress.batches))


def counted(plugin: Any, saved: dict[str, Any], *, at: int = 0) -> list[tuple[str, int]]:
    """Train four batches twice with a plugin, from a state if there is one, or store the state after some batches."""
    trainer = Trainer([plugin], device="cpu")
    if saved:
        trainer.bus.on(TrainStart, lambda run, event: run.resume(dict(saved)))

    def save(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == at:
            saved.update(deepcopy(run.state_dict()))

    trainer.bus.on(BatchEnd, save, lane=Lane.REPORT)
    kit.fit(trainer, train=class_batches(4), epochs=2)
    received: list[tuple[str, int]] = plugin.received
    return received


def test_filters_of_handlers_continue_after_a_resume() -> None:
    saved: dict[str, Any] = {}
    whole = counted(Counting(), saved, at=5)

    assert whole == [("step_end", 0), ("third", 3), ("fourth", 4), ("epoch_end", 4), ("third", 6)]
    assert saved["filters"] == {
        "counting": {
            "third/batch_end": {"rule": "every 3 emissions", "due": 6, "emissions": 5},
            "first/step_end": {"rule": "once 1 emissions", "due": inf, "emissions": 5},
            "first/epoch_end": {"rule": "once 1 emissions", "due": inf, "emissions": 1},
        }
    }
    assert "counting" not in {name for name, state in saved["plugins"].items() if state}
    assert counted(Counting(), saved) == [each for each in whole if each[1] > 5]


def test_filters_without_a_saved_state_begin_where_the_run_was_resumed() -> None:
    saved: dict[str, Any] = {}
    counted(Counting(), saved, at=5)
    del saved["filters"]

    assert counted(Counting(), saved) == [("step_end", 5), ("third", 8), ("epoch_end", 8)]
