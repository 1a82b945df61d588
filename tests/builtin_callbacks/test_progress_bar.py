"""ProgressBar: which bars, where they stand, when they close; plain lines."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import heliograph.builtin_callbacks.progress_bar as module
import pytest
from heliograph import (
    At,
    BatchEnd,
    BatchStart,
    Every,
    LogSchedule,
    ProgressBar,
    Run,
    TestBatchEnd,
    Trainer,
    TrainStart,
    ValidationBatchEnd,
    ValidationSchedule,
)
from tqdm.auto import tqdm

Make = Callable[..., Any]
BARS: list[Any] = []


class RecordingBar(tqdm):  # type: ignore[type-arg]
    """Remembers how it was made and where it ended."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.postfixes: list[dict[str, str]] = []
        self.end: int | None = None
        super().__init__(**options)
        BARS.append(self)

    def set_postfix(self, ordered_dict: Any = None, refresh: bool | None = True, **kwargs: Any) -> None:
        self.postfixes.append(dict(ordered_dict))
        super().set_postfix(ordered_dict, refresh=refresh, **kwargs)

    def close(self) -> None:
        self.end = int(self.n)
        super().close()


@pytest.fixture(autouse=True)
def _no_bars_left() -> Iterator[None]:
    BARS.clear()
    yield
    assert list(getattr(tqdm, "_instances", ())) == []
    assert list(getattr(RecordingBar, "_instances", ())) == []
    BARS.clear()


def bar(**options: Any) -> ProgressBar:
    plugin = ProgressBar(plain=False, file=io.StringIO(), interval=0.0, **options)
    plugin._tqdm = RecordingBar
    return plugin


def made() -> list[tuple[Any, Any, Any, Any]]:
    """Return (description, initial, total, end) of every bar in the order in which they were made."""
    return [(each.options.get("desc"), each.options.get("initial", 0), each.total, each.end) for each in BARS]


def test_by_epochs_two_bars(task: Make, batches: Make, sgd: Any) -> None:
    result = Trainer([bar()], device="cpu").fit(task(), batches(3), optimizer=sgd, epochs=2)

    assert result.plugin_errors == {}
    assert made() == [("epochs", 0, 2, 2), ("epoch 0", 0, 3, 3), ("epoch 1", 0, 3, 3)]
    assert [each.leave for each in BARS] == [True, False, False]


def test_by_steps_one_bar(task: Make, batches: Make, sgd: Any) -> None:
    result = Trainer([bar()], device="cpu").fit(task(), batches(3), optimizer=sgd, steps=5, name="digits")

    assert result.plugin_errors == {}
    assert made() == [("digits", 0, 5, 5)]
    assert BARS[0].leave
    assert BARS[0].options["unit"] == "step"


def test_steps_and_epochs_have_one_bar(task: Make, batches: Make, sgd: Any) -> None:
    Trainer([bar()], device="cpu").fit(task(), batches(3), optimizer=sgd, steps=5, epochs=1)

    assert made() == [("run", 0, 5, 3)]


def test_an_unsized_loader_and_an_endless_run(task: Make, batches: Make, sgd: Any) -> None:
    class Unsized:
        def __iter__(self) -> Iterator[Any]:
            return iter(batches(3))

    class Stop(ProgressBar):
        name = "progress_bar"
        asks = ("stop",)

    plugin = Stop(plain=False, file=io.StringIO(), interval=0.0)
    plugin._tqdm = RecordingBar
    trainer = Trainer([plugin], device="cpu")

    def stop(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 4:
            run.control.stop("enough")

    trainer.bus.on(BatchEnd, stop)
    trainer.fit(task(), Unsized(), optimizer=sgd)

    assert made() == [("epochs", 0, None, 1), ("epoch 0", 0, None, 3), ("epoch 1", 0, None, 1)]


def test_the_bar_moves_with_every_batch_from_the_first_on(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([bar()], device="cpu")
    places: list[int] = []
    trainer.bus.on(BatchStart, lambda run, event: places.append(BARS[-1].n))
    trainer.fit(task(), batches(4), optimizer=sgd, epochs=1)

    assert places == [0, 1, 2, 3]


def test_redraws_keep_their_interval(task: Make, batches: Make, sgd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    plugin = bar()
    plugin.interval = 5.0
    trainer = Trainer([plugin], device="cpu")
    places: list[int] = []

    def tick(run: Run, event: BatchStart) -> None:
        places.append(BARS[-1].n)
        now[0] += 3.0

    trainer.bus.on(BatchStart, tick)
    trainer.fit(task(), batches(6), optimizer=sgd, epochs=1)

    assert places == [0, 1, 1, 3, 3, 5]
    assert BARS[-1].end == 6


def test_validation_and_test_have_transient_bars(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([bar(), ValidationSchedule(Every(epochs=1))], device="cpu")
    sets = {"one": batches(2), "two": batches(3)}
    during: list[int] = []
    trainer.bus.on(ValidationBatchEnd, lambda run, event: during.append(BARS[-1].n))
    trainer.fit(task(), batches(3), validation=sets, optimizer=sgd, epochs=1)
    trainer.test(task(), batches(4))
    trainer.validate(task(), batches(1))

    assert made()[:3] == [("epochs", 0, 1, 1), ("epoch 0", 0, 3, 3), ("validation", 0, 5, 5)]
    assert [each for each in made()[3:] if not each[0].startswith("epoch")] == [
        ("test", 0, 4, 4),
        ("validation", 0, 1, 1),
    ]
    assert during == [0, 1, 2, 3, 4, 0]  # a handler in an earlier lane sees the bar of before
    assert all(not each.leave for each in BARS if each.options["desc"] in ("validation", "test"))


def test_a_validation_that_is_cut_short_takes_its_bar_along(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([bar(), ValidationSchedule(Every(epochs=1))], device="cpu")
    trainer.bus.on(ValidationBatchEnd, lambda run, event: run.control.cut_validation("test"))
    trainer.fit(task(), batches(3), validation=batches(4), optimizer=sgd, epochs=2)

    assert [each for each in made() if each[0] == "validation"] == [("validation", 0, 4, 1)] * 2


def test_a_completed_run_makes_no_bar_at_its_close(task: Make, batches: Make, sgd: Any) -> None:
    Trainer([bar()], device="cpu").fit(task(), batches(3), optimizer=sgd, epochs=1)

    assert [each[0] for each in made()] == ["epochs", "epoch 0"]


def test_the_position_after_a_resume(task: Make, batches: Make, sgd: Any) -> None:
    saved: dict[str, Any] = {}
    first = Trainer(device="cpu")

    def stop(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 5:
            run.control.stop("enough")

    first.bus.on(BatchEnd, stop)
    with first.run(task(), batches(3), optimizer=sgd, epochs=3) as run:
        for _ in run.epochs():
            for inputs, targets in run.batches():
                run.step(((run.task.model(inputs) - targets) ** 2).mean())
    saved = run.state_dict()

    endings: list[dict[str, Any]] = [{"epochs": 3}, {"steps": 8}]
    for options in endings:
        trainer = Trainer([bar()], device="cpu")
        trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
        trainer.fit(task(), batches(3), optimizer=sgd, **options)

    assert made() == [
        ("epochs", 1, 3, 3),
        ("epoch 1", 2, 3, 3),
        ("epoch 2", 0, 3, 3),
        ("run", 5, 8, 8),
    ]


@pytest.mark.parametrize("error", [ArithmeticError(), KeyboardInterrupt()])
@pytest.mark.parametrize("options", [{"epochs": 2}, {"steps": 4}])
def test_closed_after_a_failure(
    task: Make, batches: Make, sgd: Any, error: BaseException, options: dict[str, Any]
) -> None:
    trainer = Trainer([bar()], device="cpu")

    def fail(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 2:
            raise error

    trainer.bus.on(BatchEnd, fail)
    with pytest.raises(type(error)):
        trainer.fit(task(), batches(3), optimizer=sgd, **options)

    assert all(each.end is not None for each in BARS)
    assert BARS[-1].end == 2


@pytest.mark.parametrize("phase", ["fit", "test"])
def test_closed_after_a_failure_in_an_evaluation(task: Make, batches: Make, sgd: Any, phase: str) -> None:
    trainer = Trainer([bar(), ValidationSchedule(Every(steps=1), at_end=False)], device="cpu")

    def fail(run: Run, event: ValidationBatchEnd | TestBatchEnd) -> None:
        raise ArithmeticError

    trainer.bus.on(ValidationBatchEnd, fail)
    trainer.bus.on(TestBatchEnd, fail)
    with pytest.raises(ArithmeticError):
        if phase == "fit":
            trainer.fit(task(), batches(3), validation=batches(2), optimizer=sgd, epochs=1)
        else:
            trainer.test(task(), batches(2))

    assert len(BARS) == (3 if phase == "fit" else 1)
    assert all(each.end is not None for each in BARS)


def test_closed_after_a_stop(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([bar()], device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: run.control.stop("enough"))
    trainer.fit(task(), batches(3), optimizer=sgd, epochs=2)

    assert made() == [("epochs", 0, 2, 0), ("epoch 0", 0, 3, 1)]


def test_closed_when_disabled_in_the_midst_and_back_when_enabled(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([bar()], device="cpu")

    def toggle(run: Run, event: BatchStart) -> None:
        if run.progress.batch == 1:
            trainer.plugins.disable(ProgressBar)
        if run.progress.batch == 3:
            trainer.plugins.enable(ProgressBar)

    def look(run: Run, event: BatchEnd) -> None:
        if run.progress.batch == 2:
            assert all(each.end is not None for each in BARS)

    trainer.bus.on(BatchStart, toggle)
    trainer.bus.on(BatchEnd, look)
    result = trainer.fit(task(), batches(5), optimizer=sgd, epochs=1)

    assert result.plugin_errors == {}
    assert ("epoch 0", 4, 5, 5) in made()


def test_the_postfix_shows_logged_metrics_only(task: Make, batches: Make, sgd: Any) -> None:
    plugins = [bar(), LogSchedule(At(steps=2)), ValidationSchedule(At(steps=3))]
    trainer = Trainer(plugins, device="cpu")
    result = trainer.fit(task(), batches(4), validation=batches(1), optimizer=sgd, steps=4)
    shown = [set(each) for each in BARS[0].postfixes]

    assert shown[0] == set()
    assert shown[-1] == {"train/loss", "validation/loss"}
    assert set().union(*shown) == set(result.metrics)
    assert BARS[0].postfixes[-1]["validation/loss"] == f"{result.metrics['validation/loss']:.4g}"


def test_a_second_fit_forgets_bars_and_numbers(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([bar(), LogSchedule(At(steps=2))], device="cpu")
    for _ in range(2):
        trainer.fit(task(), batches(3), optimizer=sgd, steps=3)

    assert made() == [("run", 0, 3, 3)] * 2
    assert BARS[1].postfixes[0] == {}


# Plain lines.


def plain(file: io.StringIO, **options: Any) -> ProgressBar:
    return ProgressBar(plain=True, file=file, **options)


def test_plain_lines_at_an_interval(task: Make, batches: Make, sgd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    file = io.StringIO()
    trainer = Trainer([plain(file, plain_interval=10.0)], device="cpu")

    def tick(run: Run, event: BatchStart) -> None:
        now[0] += 4.0

    trainer.bus.on(BatchStart, tick)
    trainer.fit(task(), batches(4), optimizer=sgd, epochs=2, name="digits")
    lines = file.getvalue().splitlines()

    assert [line.split("  ")[:3] for line in lines] == [
        ["digits", "epoch 0/2", "step 3"],
        ["digits", "epoch 1/2", "step 6"],
        ["digits", "epoch 2/2", "step 8"],
    ]
    assert lines[-1].endswith("completed")
    assert BARS == []


def test_plain_lines_by_steps_with_metrics(task: Make, batches: Make, sgd: Any) -> None:
    file = io.StringIO()
    plugins = [plain(file), LogSchedule(At(steps=2)), ValidationSchedule(At(steps=3), at_end=False)]
    result = Trainer(plugins, device="cpu").fit(task(), batches(4), validation=batches(1), optimizer=sgd, steps=4)
    lines = file.getvalue().splitlines()

    assert len(lines) == 2
    assert "step 3/4" in lines[0]
    assert f"validation/loss {result.metrics['validation/loss']:.4g}" in lines[0]
    assert f"train/loss {result.metrics['train/loss']:.4g}" in lines[1]
    assert lines[1].endswith("completed")


def test_plain_says_how_it_failed(task: Make, batches: Make, sgd: Any) -> None:
    file = io.StringIO()
    trainer = Trainer([plain(file)], device="cpu")

    def fail(run: Run, event: BatchEnd) -> None:
        raise KeyboardInterrupt

    trainer.bus.on(BatchEnd, fail)
    trainer.fit(task(), batches(4), optimizer=sgd, steps=4, on_interrupt="return")

    assert file.getvalue().splitlines()[-1].endswith("interrupted")


def test_plain_test_after_fit_shows_its_own_numbers(task: Make, batches: Make, sgd: Any) -> None:
    file = io.StringIO()
    trainer = Trainer([plain(file), LogSchedule(At(steps=2))], device="cpu")
    trainer.fit(task(), batches(4), optimizer=sgd, steps=4)
    before = len(file.getvalue().splitlines())
    trainer.test(task(), batches(1))
    lines = file.getvalue().splitlines()[before:]

    assert lines
    assert "test/loss" in lines[0]
    assert "train/loss" not in lines[0]


class Terminal(io.StringIO):
    """Says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_finds_out_whether_there_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, task: Make, batches: Make, sgd: Any
) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    assert ProgressBar().plain
    assert ProgressBar(file=io.StringIO()).plain
    assert not ProgressBar(file=Terminal()).plain
    assert ProgressBar(file=Terminal(), plain=True).plain
    assert ProgressBar(file=object()).plain  # type: ignore[arg-type]

    Trainer([ProgressBar()], device="cpu").fit(task(), batches(1), optimizer=sgd, epochs=1)
    assert errors.getvalue().startswith("run  epoch 1/1  step 1")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert not ProgressBar().plain


def test_a_notebook_has_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = type("ZMQInteractiveShell", (), {})()
    notebook = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    assert not ProgressBar(file=io.StringIO()).plain
    terminal = types.SimpleNamespace(get_ipython=lambda: None)
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    assert ProgressBar(file=io.StringIO()).plain


@pytest.mark.parametrize("options", [{"interval": -1.0}, {"plain_interval": -0.1}])
def test_intervals_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="interval must be a number of seconds, at least 0"):
        ProgressBar(**options)  # type: ignore[arg-type]


def test_two_of_them_are_refused() -> None:
    with pytest.raises(ValueError, match="both claim progress"):
        Trainer([ProgressBar(), ProgressBar().named("other")], device="cpu")


def test_a_missing_tqdm_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"needs tqdm, which cannot be imported \(.*\): pip install tqdm$"):
        ProgressBar()


@pytest.mark.parametrize(("size", "plain"), [((24, 80), False), ((0, 0), True)])
def test_a_terminal_without_a_size_gets_plain_lines(size: tuple[int, int], plain: bool) -> None:
    import fcntl
    import os
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb"):
        assert ProgressBar(file=terminal).plain is plain
