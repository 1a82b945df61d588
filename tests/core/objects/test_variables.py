"""Numbers in the user's code: reported if the training changed them and they differ after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import heliograph as h
import pytest
import torch
from heliograph.core.objects.listeners import Chains, connections, find_numbers, is_number
from heliograph.tests.kit import sgd
from torch import Tensor, nn

SAVED, STEPS = 4, 8
NUMBER = 0


class Task(h.Supervised):
    """Multiplies its loss by what a function of a test counts."""

    def __init__(self, count: Callable[[], float]) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 2), nn.functional.cross_entropy)
        self.count = count

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        return super().training_step(run, batch) * (1 + self.count() / 10)


def in_global() -> float:
    global NUMBER  # what is tested
    NUMBER += 1
    return NUMBER


def in_attribute() -> float:
    in_attribute.calls += 1  # type: ignore[attr-defined]
    return float(in_attribute.calls)  # type: ignore[attr-defined]


def through_another() -> float:
    return in_global()


def in_default(seen: list[int] = []) -> float:  # noqa: B006  # what is tested
    seen.append(1)
    return float(len(seen))


class Counter:
    """Counts on the class."""

    calls: ClassVar[int] = 0

    @classmethod
    def count(cls) -> float:
        cls.calls += 1
        return cls.calls


def forget() -> None:
    """Be as a new process is."""
    global NUMBER
    NUMBER = Counter.calls = in_attribute.calls = 0  # type: ignore[attr-defined]


def fit(folder: Path, count: Callable[[], float], steps: int, *plugins: Any, **checkpoint: Any) -> h.RunResult:
    forget()
    batches = [(torch.full((3, 4), number / 10), torch.tensor([0, 1, 0])) for number in range(4)]
    saving = [h.SaveSchedule(h.At(steps=SAVED)), h.Checkpoint(folder, **checkpoint)]
    trainer = h.Trainer([h.RNGCapture(), *plugins, *saving], device="cpu")
    return trainer.fit(Task(count), batches, optimizer=sgd(), steps=steps)


def two_attempts(folder: Path, count: Callable[[], float], *plugins: Any) -> tuple[str, ...]:
    first = fit(folder / "first", count, SAVED, *plugins)
    result = fit(folder / "second", count, STEPS, *plugins, resume=first.last_checkpoint)
    assert result.resume is not None
    assert (result.resume.reasons == ()) == (not result.resume.reasons)
    return result.resume.reasons


@pytest.mark.parametrize(
    ("count", "where"),
    [
        (in_global, f"the global NUMBER of {__name__}"),
        (through_another, f"the global NUMBER of {__name__}"),
        (Counter.count, f"{__name__}.Counter.calls"),
        (in_attribute, f"{__name__}.in_attribute.calls"),
    ],
    ids=["global", "through another function", "class", "function"],
)
def test_a_number_that_the_training_counted_in_is_named(tmp_path: Path, count: Callable[[], float], where: str) -> None:
    reasons = two_attempts(tmp_path, count)
    said = (
        f"the training changed {where}, which no checkpoint restores: it was 4, and is 0: keep it in a state_dict, or "
        f"let an observer count it, if no bit of the training depends on it"
    )
    assert said in reasons


def test_a_list_that_is_a_default_argument_is_named(tmp_path: Path) -> None:
    defaults = in_default.__defaults__
    assert defaults is not None
    defaults[0].clear()
    first = fit(tmp_path / "first", in_default, SAVED)
    defaults[0].clear()
    result = fit(tmp_path / "second", in_default, STEPS, resume=first.last_checkpoint)
    assert result.resume is not None
    assert f"the training changed default 0 of {__name__}.in_default" in str(result.resume.reasons)


class Connects(h.Plugin):
    """Connects a handler that counts in a closure."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    @h.on(h.TrainStart)
    def connect(self, run: h.Run, event: h.TrainStart) -> None:
        count = 0

        def scale(run: h.Run, event: h.BatchStart) -> None:
            nonlocal count
            count += 1
            run.control.scale_loss(1 + count / 10, "it counts")

        run.bus.on(h.BatchStart, scale)


def test_a_handler_that_counts_is_named_and_an_observer_is_not(tmp_path: Path) -> None:
    (reason,) = two_attempts(tmp_path / "critical", lambda: 1.0, Connects("critical"))
    assert reason.startswith("the training changed count in ")
    assert two_attempts(tmp_path / "observer", lambda: 1.0, Connects("observer")) == ()


def test_what_the_training_never_changed_may_be_another_number(tmp_path: Path) -> None:
    def one(factor: float = 1.0) -> float:
        return factor

    def other(factor: float = 2.0) -> float:
        return factor

    first = fit(tmp_path / "first", one, SAVED)
    result = fit(tmp_path / "second", other, STEPS, resume=first.last_checkpoint)
    assert result.resume is not None
    assert "default" not in str(result.resume.reasons)


def test_logs_are_no_numbers(tmp_path: Path) -> None:
    losses: list[float] = []
    history: dict[str, Any] = {"all": losses}

    class Logs(h.Plugin):
        @h.on(h.BatchEnd)
        def log(self, run: h.Run, event: h.BatchEnd) -> None:
            losses.append(run.loss.item() if run.loss is not None else 0.0)
            history["last"] = losses[-1]

    assert two_attempts(tmp_path, lambda: 1.0, Logs()) == ()
    assert len(losses) == SAVED + STEPS - SAVED


def test_what_a_number_is() -> None:
    assert all(map(is_number, (True, 3, 0.5, None, -(2**63) + 1)))
    assert not any(map(is_number, ("text", 2**64, [1], 1j, torch.zeros(()))))


class Named(type):
    """Knows attributes that nobody gave it, and no others."""

    def __getattr__(cls, name: str) -> Any:
        raise KeyError(name)


class Odd(metaclass=Named):
    """Whose attributes cannot all be read."""

    __slots__ = ("held",)
    number = 3
    held: Any

    def __len__(self) -> int:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    @property
    def broken(self) -> int:
        raise ValueError


ODD = [Odd(), Odd]


def reads_odd() -> float:
    return 1.0 if ODD and Odd is not None else 0.0


def test_code_that_cannot_be_read_costs_nothing(tmp_path: Path) -> None:
    assert two_attempts(tmp_path, reads_odd) == ()


def test_functions_of_the_same_name_are_numbered() -> None:
    def made(number: int) -> Any:
        def listen(run: h.Run, event: h.BatchEnd) -> int:
            return number

        return listen

    bus = h.Bus()
    for number in (1, 2):
        bus.on(h.BatchEnd, made(number))
    plugins = h.Plugins(bus)
    run: Any = SimpleNamespace(task=None, modules={}, optimizers={}, schedulers={}, plugins=plugins, bus=bus)
    found = {where.partition(".<locals>.made")[2]: each["value"] for where, each in find_numbers(run).items()}
    assert found == {".<locals>.listen": 1, ".<locals>.listen (2)": 2}


def test_events_that_only_the_library_listens_to_are_looked_at_once() -> None:
    bus, known = h.Bus(), Chains()
    plugins = h.Plugins(bus)
    plugins.register(h.EarlyStopping())
    run: Any = SimpleNamespace(bus=bus)
    assert connections(run, known) == []
    assert known.keys() >= {h.TrainStart, h.ValidationEnd}
    signal = bus.signal(h.ValidationEnd)
    looked = list[str]()
    signal.listeners, ask = lambda: looked.append("again") or ask(), signal.listeners  # type: ignore[method-assign, func-returns-value]
    assert connections(run, known) == []
    assert looked == []

    def listen(run: h.Run, event: h.ValidationEnd) -> None:
        return

    handle = bus.on(h.ValidationEnd, listen)
    [(event, listeners)] = connections(run, known)
    assert event is h.ValidationEnd
    assert listen in [receiver for receiver, _ in listeners]
    handle.pause()
    assert connections(run, known) == []
    handle.resume()
    assert len(connections(run, known)) == 1


class Listening(h.LogSchedule):
    """A class of the user's whose handlers are the library's."""


def test_methods_of_the_library_on_an_object_of_the_user_count_as_the_user_s() -> None:
    bus = h.Bus()
    h.Plugins(bus).register(Listening(h.Every(steps=1)))
    assert connections(SimpleNamespace(bus=bus)) != []
