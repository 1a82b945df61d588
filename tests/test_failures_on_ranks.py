"""An error on one rank ends all of them: at once, with the right types, and with the rank named where it began.

On the rank that failed, the handler of `RunFailed` waits until another has ended: so nobody waits for that rank's
closing, nor for any time limit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
from heliograph import (
    BatchStart,
    DDPEngine,
    GradientsReady,
    Lane,
    Plugin,
    RankFailed,
    Run,
    RunClosed,
    RunFailed,
    SavePoint,
    StepEnd,
    Supervised,
    Trainer,
    ValidationBatchEnd,
    ValidationEnd,
    on,
)
from heliograph.core.data.loaders import LoaderParams
from heliograph.tests.kit import Batch
from heliograph.tests.messages import assert_each, assert_facts
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

TIMEOUT = 60.0  # seconds of the engine, and of a wait for another rank's end
OWN, REPORTED = "OwnError", "RankFailed"


class OwnError(Exception):
    """An error of the user's own type."""


class Seen(NamedTuple):
    """What one rank saw."""

    error: BaseException | None
    notes: str
    status: str
    ended: list[str]
    steps: int


def fail() -> None:
    raise OwnError("on purpose")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_at_once() -> None:
    raise KeyboardInterrupt


class Data:
    """Batches whose reading may go wrong."""

    def __init__(self, act: Callable[[], None] | None = None) -> None:
        self._act = act

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        for number in range(4):
            if self._act is not None and number == 2:
                self._act()
            yield torch.randn(3, 4, generator=generator), torch.tensor([0, 1, 0])

    def __len__(self) -> int:
        return 4


class Task(Supervised):
    """A task whose steps may go wrong."""

    def __init__(self, where: str, act: Callable[[], None]) -> None:
        super().__init__(nn.Linear(4, 2), nn.functional.cross_entropy)
        self.where, self.act, self.steps = where, act, 0

    def training_step(self, run: Run, batch: Batch) -> Tensor:
        self.steps += 1
        loss = super().training_step(run, batch)
        if self.where == "training_step" and self.steps == 3:
            self.act()
        return loss

    def validation_step(self, run: Run, batch: Batch) -> Any:
        values = super().validation_step(run, batch)
        if self.where == "validation_step":
            self.act()
        return values


class Act(Plugin):
    """Asks for a validation and a save at step 2, and acts in one place from then on, once."""

    asks = ("validation", "save")

    def __init__(self, where: str, act: Callable[[], None], *, waits: bool) -> None:
        self.where, self.act, self.waits = where, act, waits
        self.has_acted = False
        self.ended: list[str] = []

    @on(StepEnd, lane=Lane.DECIDE)
    def ask(self, run: Run, event: StepEnd) -> None:
        if run.progress.steps == 2:
            run.control.request_validation("due")
            run.control.request_save("due")

    @on(BatchStart, GradientsReady)
    def train(self, run: Run, event: BatchStart | GradientsReady) -> None:
        self._receive(run, event.name)

    @on(ValidationEnd, SavePoint)
    def boundary(self, run: Run, event: ValidationEnd | SavePoint) -> None:
        self._receive(run, event.name)

    @on(RunFailed)
    def failed(self, run: Run, event: RunFailed) -> None:
        self.ended.append(event.name)
        if isinstance(event.error, KeyboardInterrupt):
            self.ended.append(f"{run.engine.reduce(1, 'sum')} ranks are here")
        elif self.waits:
            store().wait(["another rank has ended"], timedelta(seconds=TIMEOUT))

    @on(RunClosed)
    def closed(self, run: Run, event: RunClosed) -> None:
        self.ended.append(f"{event.name} {event.status}")
        self._receive(run, event.name)

    def close(self) -> None:
        if self.where == "close":
            self.act()

    def _receive(self, run: Run, event: str) -> None:
        if event == self.where and run.progress.steps >= 2 and not self.has_acted:
            self.has_acted = True
            self.act()


def store() -> Any:
    return TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)


def train(where: str, act: Callable[[], None], *, rank: int, loader_params: LoaderParams | None = None) -> Seen:
    """Train 2 epochs of 4 steps; in one place of one rank (of all: -1), act. Return what this rank saw."""
    engine = DDPEngine(timeout=TIMEOUT)
    mine = where if rank in (engine.rank, -1) else ""
    plugin, task = Act(mine, act, waits=bool(mine) and rank >= 0), Task(mine, act)
    data = Data(act if mine == "loader" else None)
    run = Trainer([plugin], engine=engine).run(
        task,
        torch.utils.data.TensorDataset(torch.ones(32, 4), torch.zeros(32).long()) if loader_params else data,
        loader_params=loader_params,
        validation=Data(),
        optimizer=torch.optim.SGD(task.model.parameters(), 0.1),
        epochs=2,
    )
    caught: BaseException | None = None
    try:
        with run:
            for _ in run.epochs():
                for batch in run.batches():
                    run.step(run.stepping.forward(run, batch))
    except BaseException as error:  # noqa: BLE001  # looked at in the test
        caught = error.with_traceback(None)
    if not mine:
        store().set("another rank has ended", "")
    notes = "\n".join(getattr(caught, "__notes__", []))
    return Seen(caught, notes, run.result.status, plugin.ended, run.result.progress.steps)


PLACES = {
    "training_step": "in train, epoch 0, batch 2, step 2",
    "batch_start": "in train, epoch 0, batch 2, step 2; in act on batch_start",
    "gradients_ready": "in train, epoch 0, batch 2, step 2; in act on gradients_ready",
    "validation_step": "in validation (batch 0), epoch 0, batch 2, step 2",
    "validation_end": "in validation, epoch 0, batch 2, step 2; in act on validation_end",
    "save_point": "in train, epoch 0, batch 2, step 2; in act on save_point",
    "loader": "in train, epoch 0, batch 2, step 2",
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", PLACES)
def test_an_error_of_one_rank_ends_both(ranks: Pool, where: str, rank: int) -> None:
    seen = ranks(2).run(train, where, fail, rank=rank)
    mine, other = seen[rank], seen[1 - rank]
    assert isinstance(mine.error, OwnError)
    assert mine.notes == f"heliograph: {PLACES[where]}"
    assert isinstance(other.error, RankFailed)
    assert (other.error.rank, other.error.kind) == (rank, "tests.test_failures_on_ranks.OwnError")
    assert (other.error.text, other.error.place) == ("on purpose", PLACES[where])
    for each in seen:
        assert (each.status, each.ended) == ("failed", ["run_failed", "run_closed failed"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("where", "owner"), [("run_closed", "act on run_closed"), ("close", "act on close")])
def test_an_error_of_one_rank_that_closes_fails_both(ranks: Pool, where: str, owner: str, rank: int) -> None:
    seen = ranks(2).run(train, where, fail, rank=rank)
    mine, other = seen[rank], seen[1 - rank]
    facts = ("in train", "epoch 2", "batch 0", "step 8", f"in {owner}")
    assert isinstance(mine.error, OwnError)
    assert_facts(mine.notes, *facts)
    assert isinstance(other.error, RankFailed)
    assert other.error.rank == rank
    assert_facts(other.error.place, *facts)
    for each in seen:
        assert (each.status, each.ended, each.steps) == ("failed", ["run_closed completed"], 8)


def test_errors_of_both_ranks_are_each_their_own(ranks: Pool) -> None:
    for each in ranks(2).run(train, "save_point", fail, rank=-1):
        assert isinstance(each.error, OwnError)
        assert each.status == "failed"


@pytest.mark.whole
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("where", ["training_step", "save_point"])
def test_four_ranks_name_the_one_that_failed(ranks: Pool, where: str, rank: int) -> None:
    """Whether the others wait for gradients or at a boundary: the one that failed is not everybody's neighbour."""
    seen = ranks(4).run(train, where, fail, rank=rank)
    assert isinstance(seen.pop(rank).error, OwnError)
    assert_each([each.error for each in seen], *[(f"rank {rank}", "OwnError: on purpose", PLACES[where])] * 3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork")
@pytest.mark.filterwarnings("ignore:This process .*multi-threaded:DeprecationWarning")
def test_workers_that_still_live_keep_nobody_waiting(ranks: Pool) -> None:
    params: LoaderParams = {
        "batch_size": 4,
        "num_workers": 1,
        "persistent_workers": True,
        "multiprocessing_context": "fork",
    }
    seen = ranks(2).run(train, "save_point", fail, rank=1, loader_params=params)
    assert [type(each.error) for each in seen] == [RankFailed, OwnError]
    assert seen[1].notes == f"heliograph: {PLACES['save_point']}"


@pytest.mark.sample(3)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", PLACES)
def test_an_interrupt_of_one_rank_ends_both_at_the_same_step(ranks: Pool, where: str, rank: int) -> None:
    seen = ranks(2).run(train, where, interrupt, rank=rank)
    steps = {each.steps for each in seen}
    assert len(steps) == 1
    assert steps <= {2, 3, 4}  # 4: it came in the third step, and the other rank asked for nothing in that
    for each in seen:
        assert isinstance(each.error, KeyboardInterrupt)
        assert str(each.error) == f"on rank {rank}"
        assert each.status == "interrupted"
        assert each.ended == ["run_failed", "2 ranks are here", "run_closed interrupted"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["run_closed", "close"])
def test_an_interrupt_of_one_rank_that_closes_interrupts_both(ranks: Pool, where: str, rank: int) -> None:
    for each in ranks(2).run(train, where, interrupt, rank=rank):
        assert isinstance(each.error, KeyboardInterrupt)
        assert (each.status, each.steps, each.ended) == ("interrupted", 8, ["run_closed completed"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_that_is_not_voted_on_ends_both(ranks: Pool, rank: int) -> None:
    seen = ranks(2).run(train, "save_point", interrupt_at_once, rank=rank)
    for each in seen:
        assert isinstance(each.error, KeyboardInterrupt)
        assert each.status == "interrupted"
    assert str(seen[rank].error) == ""
    assert_facts(seen[1 - rank].error, f"rank {rank}", "KeyboardInterrupt", PLACES["save_point"])


def evaluate_for_long(rank: int) -> list[str]:
    """Fail on one rank while another has a batch in hand; return what the others received from then on."""
    engine = DDPEngine(timeout=TIMEOUT)
    task = Task("validation_step" if engine.rank == rank else "", fail)
    received: list[str] = []

    def wait_for_news(run: Run, event: ValidationBatchEnd) -> None:
        received.append(event.name)
        assert engine.watch is not None
        while engine.watch.failure() is None:
            engine.watch._run_job(lambda: None)

    trainer = Trainer(engine=engine)
    trainer.bus.on(ValidationBatchEnd, wait_for_news)
    with pytest.raises(OwnError if engine.rank == rank else RankFailed):
        trainer.validate(task, Data())
    return received


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_evaluation_is_left_at_its_next_batch(ranks: Pool, rank: int) -> None:
    received = ranks(2).run(evaluate_for_long, rank)
    assert received.pop(rank) == []
    assert received == [["validation_batch_end"]]


def fail_before(rank: int) -> tuple[str, str]:
    """Fail on one rank before the run begins; then train."""
    engine = DDPEngine(timeout=TIMEOUT)
    task = Task("", fail)

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if engine.rank == rank:
            fail()
        return torch.optim.SGD(parameters, 0.1)

    trainer = Trainer(engine=engine)
    try:
        trainer.fit(task, Data(), optimizer=optimizer, epochs=1)
    except Exception as error:  # noqa: BLE001  # looked at in the test
        caught = error
    result = trainer.fit(task, Data(), optimizer=torch.optim.SGD(task.model.parameters(), 0.1), epochs=1)
    return str(caught), result.status


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_before_the_run_ends_both_and_the_engine_serves_on(ranks: Pool, rank: int) -> None:
    seen = ranks(2).run(fail_before, rank)
    assert seen.pop(rank) == ("on purpose", "completed")
    [(reported, status)] = seen
    assert status == "completed"
    assert_facts(reported, f"rank {rank}", "OwnError: on purpose", "outside of a run")


def evaluate(rank: int) -> tuple[str, list[str]]:
    """Fail on one rank in a validation without a training."""
    engine = DDPEngine(timeout=TIMEOUT)
    plugin = Act("", fail, waits=engine.rank == rank)
    task = Task("validation_step" if engine.rank == rank else "", fail)
    with pytest.raises(OwnError if engine.rank == rank else RankFailed) as caught:
        Trainer([plugin], engine=engine).validate(task, Data())
    if engine.rank != rank:
        store().set("another rank has ended", "")
    return str(caught.value), plugin.ended


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_ends_an_evaluation_of_both(ranks: Pool, rank: int) -> None:
    seen = ranks(2).run(evaluate, rank)
    ended = ["run_failed", "run_closed failed"]
    assert seen.pop(rank) == ("on purpose", ended)
    [(reported, closed)] = seen
    assert closed == ended
    place = ("in validation", "batch 0", "epoch 0", "batch 0", "step 0")
    assert_facts(reported, f"rank {rank}", "OwnError: on purpose", *place)
