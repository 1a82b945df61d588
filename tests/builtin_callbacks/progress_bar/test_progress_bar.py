"""ProgressBar: which bars, where they stand, when they close; plain lines."""

from __future__ import annotations

import io
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    At,
    BatchEnd,
    BatchStart,
    Checkpoint,
    EpochStart,
    Every,
    Lane,
    Log,
    LogSchedule,
    ProgressBar,
    Replay,
    RNGCapture,
    Run,
    RunClosed,
    SaveSchedule,
    Task,
    TestBatchEnd,
    Trainer,
    TrainStart,
    ValidationBatchEnd,
    ValidationEnd,
    ValidationSchedule,
)
from heliograph.builtin_callbacks.progress_bar import plugin as module
from heliograph.tests.kit import Clock
from heliograph.tests.messages import assert_each, assert_facts, has_facts
from torch import nn
from tqdm import tqdm

Make = Callable[..., Any]
BARS: list[Any] = []


class RecordingBar(tqdm):  # type: ignore[type-arg]
    """Remembers how it was made and where it ended."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.postfixes: list[str] = []
        self.end: int | None = None
        super().__init__(**options)
        BARS.append(self)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        self.postfixes.append(s)
        super().set_postfix_str(s, refresh=refresh)

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
    plugin = ProgressBar(plain=False, file=io.StringIO(), interval=0.0, show_plan=False, **options)
    record(plugin)
    return plugin


def record(plugin: ProgressBar) -> None:
    """Let a plugin draw with `RecordingBar`."""
    display: Any = plugin._display
    display._tqdm = RecordingBar


def written(plugin: ProgressBar) -> list[str]:
    """Return the lines that stay when the bars are gone."""
    file: Any = plugin._display._file
    return [line.rpartition("\r")[2] for line in file.getvalue().splitlines()]


def made() -> list[tuple[Any, Any, Any, Any]]:
    """Return (description, initial, total, end) of every bar in the order in which they were made."""
    return [(each.options.get("desc"), each.options.get("initial", 0), each.total, each.end) for each in BARS]


def test_by_epochs_two_bars(task: Make, batches: Make, sgd: Any) -> None:
    result = Trainer([bar()], device="cpu").fit(task(), batches(3), optimizer=sgd, epochs=2)

    assert result.plugin_errors == {}
    assert made() == [("epochs ", 0, 2, 2), ("batches", 0, 3, 3), ("batches", 0, 3, 3)]
    assert not any(each.leave for each in BARS)


def test_by_steps_one_bar(task: Make, batches: Make, sgd: Any) -> None:
    result = Trainer([bar()], device="cpu").fit(task(), batches(3), optimizer=sgd, steps=5, name="digits")

    assert result.plugin_errors == {}
    assert made() == [("digits", 0, 5, 5)]
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
    record(plugin)
    trainer = Trainer([plugin], device="cpu")

    def stop(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 4:
            run.control.stop("enough")

    trainer.bus.on(BatchEnd, stop)
    trainer.fit(task(), Unsized(), optimizer=sgd)

    assert made() == [("epochs ", 0, None, 1), ("batches", 0, None, 3), ("batches", 0, None, 1)]


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

    assert made()[:3] == [("epochs ", 0, 1, 1), ("batches", 0, 3, 3), ("validation", 0, 5, 5)]
    assert [each for each in made()[3:] if each[0] not in ("epochs ", "batches")] == [
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

    assert [each[0] for each in made()] == ["epochs ", "batches"]


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
        ("epochs ", 1, 3, 3),
        ("batches", 2, 3, 3),
        ("batches", 0, 3, 3),
        ("run", 5, 8, 8),
    ]


@pytest.mark.parametrize("error", [ArithmeticError(), KeyboardInterrupt()])
@pytest.mark.parametrize("options", [{"epochs": 2}, {"steps": 4}])
def test_closed_after_a_failure(
    task: Make, batches: Make, sgd: Any, error: BaseException, options: dict[str, Any]
) -> None:
    plugin = bar()
    trainer = Trainer([plugin], device="cpu")

    def fail(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 2:
            raise error

    trainer.bus.on(BatchEnd, fail)
    with pytest.raises(type(error)):
        trainer.fit(task(), batches(3), optimizer=sgd, **options)

    assert all(each.end is not None for each in BARS)
    status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    assert_facts(written(plugin)[-1], "run", status, "step 2", "no checkpoint")


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

    assert made() == [("epochs ", 0, 2, 0), ("batches", 0, 3, 1)]


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
    assert ("batches", 4, 5, 5) in made()


def test_the_postfix_shows_logged_metrics_only(task: Make, batches: Make, sgd: Any) -> None:
    plugins = [bar(), LogSchedule(At(steps=2)), ValidationSchedule(At(steps=3), at_end=False)]
    trainer = Trainer(plugins, device="cpu")
    result = trainer.fit(task(), batches(4), validation=batches(1), optimizer=sgd, steps=4)
    shown = BARS[0].postfixes

    assert shown[0] == ""
    assert shown[-1] == f"train loss={result.metrics['train/loss']:.4g}"
    assert [each.options["desc"] for each in BARS if "desc" in each.options] == ["run", "validation"]
    assert BARS[2].desc == f"validation loss={result.metrics['validation/loss']:.4g}"


def test_a_second_fit_forgets_bars_and_numbers(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([bar(), LogSchedule(At(steps=2))], device="cpu")
    for _ in range(2):
        trainer.fit(task(), batches(3), optimizer=sgd, steps=3)

    assert made() == [("run", 0, 3, 3)] * 2
    assert BARS[1].postfixes[0] == ""


# Plain lines.


def plain(file: io.StringIO, **options: Any) -> ProgressBar:
    return ProgressBar(plain=True, file=file, **{"show_plan": False} | options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the plugin."""
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


def taking(trainer: Trainer, clock: Clock, seconds: float) -> None:
    """Let every batch take so long, by the plugin's clock and by the run's."""

    def tick(run: Run, event: BatchStart) -> None:
        clock.now += seconds
        run.progress.set_seconds(clock.now - 1000.0 + run.origin.earlier_seconds)

    trainer.bus.on(TrainStart, lambda run, event: run.progress.set_seconds(clock.now - 1000.0))
    trainer.bus.on(BatchStart, tick)


def test_plain_lines_at_an_interval(task: Make, batches: Make, sgd: Any, clock: Clock) -> None:
    file = io.StringIO()
    trainer = Trainer([plain(file, plain_interval=10.0)], device="cpu")
    taking(trainer, clock, 4.0)
    trainer.fit(task(), batches(4), optimizer=sgd, epochs=2, name="digits")

    assert file.getvalue().splitlines() == [
        "digits  epochs 0/2  steps 3  00:12  4 s/step  ETA 00:20",
        "digits  epochs 1/2  steps 6  00:24  4 s/step  ETA 00:08",
        "digits  epochs 2/2  steps 8  00:32  4 s/step",
        "digits  completed: 2 epochs done",
    ]
    assert BARS == []


def test_a_metric_is_printed_once(task: Make, batches: Make, sgd: Any, clock: Clock) -> None:
    """A validation's line, and the next one at its interval after it."""
    file = io.StringIO()
    plugins = [
        plain(file, plain_interval=10.0),
        LogSchedule(At(steps=2)),
        ValidationSchedule(At(steps=3), at_end=False),
    ]
    trainer = Trainer(plugins, device="cpu")
    taking(trainer, clock, 4.0)
    result = trainer.fit(task(), batches(4), validation=batches(1), optimizer=sgd, steps=7)
    train, validation = (f"{name} {result.metrics[name]:.4g}" for name in ("train/loss", "validation/loss"))

    assert file.getvalue().splitlines() == [
        f"run  epochs 0  steps 3/7  00:12  4 s/step  ETA 00:16  {train}",
        f"run  epochs 0  steps 3/7  00:12  4 s/step  ETA 00:16  {validation}",
        "run  epochs 1  steps 6/7  00:24  4 s/step  ETA 00:04",
        "run  epochs 1  steps 7/7  00:28  4 s/step",
        "run  completed: 7 steps done",
    ]


def test_plain_lines_by_steps_with_metrics(task: Make, batches: Make, sgd: Any) -> None:
    file = io.StringIO()
    plugins = [plain(file), LogSchedule(At(steps=2)), ValidationSchedule(At(steps=3), at_end=False)]
    result = Trainer(plugins, device="cpu").fit(task(), batches(4), validation=batches(1), optimizer=sgd, steps=4)
    first, second, last = file.getvalue().splitlines()

    assert_facts(first, "run", "epochs 0", "steps 3/4", "00:00")
    train, validation = (f"{name} {result.metrics[name]:.4g}" for name in ("train/loss", "validation/loss"))
    assert first.endswith(f"{train}  {validation}")
    assert_facts(second, "run", "epochs 1", "steps 4/4", "00:00")
    assert "loss" not in second
    assert_facts(last, "run", "completed", "4 steps")


def test_who_comes_later_finds_all_metrics(task: Make, batches: Make, sgd: Any) -> None:
    """Those that are printed are not taken out."""
    trainer = Trainer(
        [plain(io.StringIO()), LogSchedule(Every(steps=1)), ValidationSchedule(Every(epochs=1))], device="cpu"
    )
    found: list[set[str]] = []
    for event in (Log, ValidationEnd):
        trainer.bus.on(event, lambda run, event: found.append(set(event.metrics)), lane=Lane.REPORT)
    trainer.fit(task(), batches(1), validation=batches(1), optimizer=sgd, epochs=1)

    assert found == [{"train/loss"}, {"validation/loss"}]


def test_the_order_of_metrics_is_that_of_before_the_resume(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    """The run that is resumed measures first what the other one logged last."""
    orders = []
    for resume in (None, "auto"):
        file = io.StringIO()
        schedules = [
            LogSchedule(Every(steps=2)),
            ValidationSchedule(Every(steps=3)),
            SaveSchedule(At(steps=2), at_end=False),
        ]
        plugins = [plain(file), *schedules, Checkpoint(tmp_path, resume=resume), RNGCapture()]
        Trainer(plugins, device="cpu").fit(task(), batches(6), validation=batches(1), optimizer=sgd, epochs=1)
        lines = file.getvalue().splitlines()
        orders.append([re.findall(r"\w+/loss", line) for line in lines if "validation/loss" in line])
        assert any(has_facts(line, "resumed", "step 2") for line in lines) is (resume is not None)

    assert orders == [[["train/loss", "validation/loss"]] * 2, [["validation/loss"], ["train/loss", "validation/loss"]]]


def test_an_interrupted_run_names_the_newest_checkpoint(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    file = io.StringIO()
    plugins = [plain(file), SaveSchedule(At(steps=1)), Checkpoint(tmp_path)]
    trainer = Trainer(plugins, device="cpu")

    def fail(run: Run, event: BatchEnd) -> None:
        if run.progress.steps == 3:
            raise KeyboardInterrupt

    trainer.bus.on(BatchEnd, fail)
    result = trainer.fit(task(), batches(4), optimizer=sgd, steps=4, on_interrupt="return")

    assert_facts(file.getvalue().splitlines()[-1], "interrupted", "step 3", result.last_checkpoint)


def test_a_stopped_run_says_by_whom(task: Make, batches: Make, sgd: Any) -> None:
    file = io.StringIO()
    trainer = Trainer([plain(file)], device="cpu")
    handle = trainer.bus.on(BatchEnd, lambda run, event: run.control.stop("enough"))
    trainer.fit(task(), batches(4), optimizer=sgd, steps=4)
    handle.remove()

    assert_facts(file.getvalue().splitlines()[-1], "stopped", "step 1", "by ")
    assert file.getvalue().endswith(": enough\n")


def test_plain_test_after_fit_shows_its_own_numbers_once(task: Make, batches: Make, sgd: Any) -> None:
    file = io.StringIO()
    trainer = Trainer([plain(file), LogSchedule(At(steps=2))], device="cpu")
    trainer.fit(task(), batches(4), optimizer=sgd, steps=4)
    before = len(file.getvalue().splitlines())
    result = trainer.test(task(), batches(1))

    assert_each(
        file.getvalue().splitlines()[before:],
        ("test", "batches 1", "completed", f"test/loss {result.metrics['test/loss']:.4g}"),
    )


@pytest.mark.parametrize("drawn", [True, False])
def test_data_that_is_read_again_is_shown(task: Make, batches: Make, sgd: Any, drawn: bool) -> None:
    plugin = bar() if drawn else plain(io.StringIO())
    trainer = Trainer([plugin], device="cpu")

    def read_again(run: Run, event: EpochStart) -> None:
        for done in range(4):
            run.emit(Replay(done, 3))

    trainer.bus.on(EpochStart, read_again, lane=Lane.MEASURE)
    trainer.fit(task(), batches(2), optimizer=sgd, epochs=1)

    assert [each for each in made() if each[0] == "read again"] == [("read again", 0, 3, 3)] * drawn
    assert any(has_facts(line, "3 batches", "epoch 0", "again") for line in written(plugin)) is not drawn


def test_several_optimizers_have_their_losses_beside_the_bar(batches: Make) -> None:
    class Two(Task):
        def __init__(self) -> None:
            self.model = nn.ModuleDict({"one": nn.Linear(4, 2), "two": nn.Linear(4, 2)})

        def training_step(self, run: Run, batch: Any) -> Any:
            for name, model in self.model.items():
                yield name, (model(batch[0]) - batch[1]).square().mean()

    plugin = bar()
    trainer = Trainer([plugin, LogSchedule(Every(steps=1))], device="cpu")
    task = Two()
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in task.model.items()}
    trainer.fit(task, batches(4), optimizer=optimizers, steps=6)

    assert BARS[0].postfixes[-1].startswith("train one_loss=")


# Warnings.

SENTENCE = (
    "Nothing was validated: no plugin requests it. Add ValidationSchedule(Every(epochs=1)), or give no validation set."
)
WARNED = [
    "WARNING: Nothing was validated: no plugin requests it. Add",
    "  ValidationSchedule(Every(epochs=1)), or give no validation set.",
]


@pytest.mark.parametrize("make", [bar, lambda: plain(io.StringIO())])
def test_the_warnings_of_a_run_are_its_last_lines(task: Make, batches: Make, sgd: Any, make: Make) -> None:
    plugin = make()
    trainer = Trainer([plugin], device="cpu")
    trainer.bus.on(RunClosed, lambda run, event: run.warn(SENTENCE), lane=Lane.PERSIST)
    trainer.fit(task(), batches(2), optimizer=sgd, epochs=1)

    completed, *warned = written(plugin)[-3:]
    assert_facts(completed, "completed", "1 epoch")
    assert warned == WARNED


def test_a_metric_that_never_came_is_a_warning(task: Make, batches: Make, sgd: Any) -> None:
    def warnings(*names: str) -> tuple[str, ...]:
        plugin = ProgressBar(plain=True, file=io.StringIO(), metrics=names)
        plugins = [plugin, LogSchedule(At(steps=1))]
        return Trainer(plugins, device="cpu").fit(task(), batches(2), optimizer=sgd, epochs=1).warnings

    assert_each(warnings("train/loss", "train/los"), ("ProgressBar", "train/los,", "train/loss"))
    assert warnings("train/loss") == ()


def test_a_single_name_of_metrics_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got 'train/loss': give \['train/loss'\]\."):
        ProgressBar(metrics="train/loss")


# Where it writes.


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

    Trainer([ProgressBar(show_plan=False)], device="cpu").fit(task(), batches(1), optimizer=sgd, epochs=1)
    assert_facts(errors.getvalue(), "run", "epochs 1/1", "steps 1")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert not ProgressBar().plain


def test_a_notebook_has_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shell = type("ZMQInteractiveShell", (), {})()
    notebook = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    assert not ProgressBar().plain
    assert ProgressBar(file=io.StringIO()).plain
    terminal = types.SimpleNamespace(get_ipython=lambda: None)
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    assert ProgressBar().plain


@pytest.mark.parametrize("options", [{"interval": -1.0}, {"plain_interval": -0.1}])
def test_intervals_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="seconds, at least 0"):
        ProgressBar(**options)  # type: ignore[arg-type]


def test_two_of_them_are_refused() -> None:
    with pytest.raises(ValueError, match="both claim progress"):
        Trainer([ProgressBar(), ProgressBar().named("other")], device="cpu")


def test_a_missing_tqdm_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"imported \(.*\): pip install"):
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


def test_what_the_run_will_do_comes_first(task: Make, batches: Make, sgd: Make) -> None:
    def lines() -> list[str]:
        file = io.StringIO()
        Trainer([plain(file, show_plan=True)], device="cpu").fit(task(), batches(2), optimizer=sgd, epochs=2)
        return file.getvalue().splitlines()

    shown = lines()
    assert shown[0] == "run 'run'"
    assert any(has_facts(line, "length", "2 epochs", "4 steps", "2 batches", "global batch 4") for line in shown)
    assert shown.count("run 'run'") == 1
