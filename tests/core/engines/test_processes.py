"""What engines of several processes have in common, shown on `DDPEngine`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from heliograph import DDPEngine, Plugin, RankFailed, Run, RunResult, StepEnd, Supervised, Trainer, on
from heliograph.tests.messages import assert_facts, pattern
from heliograph.tests.ranks_pool import Pool
from torch import nn

OF_TWO = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 4


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be the second of two."""
    for name, value in OF_TWO.items():
        monkeypatch.setenv(name, value)


def test_a_single_process_needs_no_group() -> None:
    engine = DDPEngine(device="cpu")
    value = torch.ones(2)
    for _ in range(2):
        with engine.process():
            assert not dist.is_initialized()
            assert engine.group is None
            assert engine.watch is None
            assert torch.equal(engine.reduce(value, "sum"), value)
            assert engine.gather(value) == [value]
            assert engine.gather_objects("x") == ["x"]
            assert engine.broadcast("x") == "x"
            assert engine.vote([1.0]) == [1.0]
            engine.barrier()
            with engine.refusing("CSVLog", "epoch_end"):
                assert engine.reduce(1.0) == 1.0
    assert (engine.rank, engine.local_rank, engine.world_size) == (0, 0, 1)
    assert engine.is_main
    assert engine.is_local_main


def test_knows_its_place_before_it_joins(second: None) -> None:
    engine = DDPEngine(device="cpu")
    assert (engine.rank, engine.local_rank, engine.world_size) == (1, 1, 2)
    assert not engine.is_main
    assert not engine.is_local_main
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", ["reduce", "gather", "gather_objects", "broadcast", "barrier", "vote"])
def test_collectives_outside_of_the_group_are_refused(second: None, name: str) -> None:
    engine = DDPEngine(device="cpu")
    arguments = [] if name == "barrier" else [torch.ones(1)]
    with pytest.raises(RuntimeError, match=rf"DDPEngine.{name} was called outside"):
        getattr(engine, name)(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "mpi"}, "backend=.*got 'mpi'"),
        ({"backend": "nccl", "device": "cpu"}, "got 'nccl'.*'cpu'"),
        ({"device": "mps"}, "processes need.*got device='mps'"),
        ({"device": "gpu"}, "Unknown device 'gpu'.*'cuda'"),
        ({"timeout": 0}, "timeout=.*than 0; got 0"),
        ({"timeout": "5"}, "timeout=.*than 0; got '5'"),
        ({"report_after": -1.0}, "report_after=.*than 0; got -1.0"),
        ({"grace": 0}, "grace=.*than 0; got 0"),
    ],
)
def test_refuses_what_it_cannot_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDPEngine(**options)


def test_there_must_be_a_gpu_for_each_process_of_a_machine(second: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="1 has no GPU:"):
        DDPEngine(device="cuda")


def test_a_rank_that_nobody_joins_says_so(second: None) -> None:
    engine = DDPEngine(device="cpu", timeout=0.1)
    with pytest.raises(TimeoutError, match="Rank 1 of 2"), engine.process():
        pytest.fail("nobody is there")
    assert engine.group is None
    assert not dist.is_initialized()


def test_the_engine_is_made_when_the_place_of_the_process_is_settled(
    second: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = DDPEngine(device="cpu")
    for name in OF_TWO:
        monkeypatch.delenv(name)
    match = pattern("rank 1 of 2", "rank 0 of 1")
    with pytest.raises(RuntimeError, match=match), engine.process():
        pytest.fail("it is another process")
    assert engine.group is None


def joins_again() -> None:
    engine = DDPEngine(timeout=60.0)
    for _ in range(2):
        with engine.process():
            group = engine.group
            assert group is not None
            with engine.process():
                assert engine.group is group
            assert engine.group is group
            assert engine.reduce(engine.rank, "sum") == 1
        assert engine.group is None
        assert engine.watch is None
        assert not dist.is_initialized()
    with engine.process():
        former = engine.group
        engine.abandon()
        assert engine.group is None
        assert engine.watch is None
        with engine.process():
            assert engine.group is not former
            assert engine.reduce(engine.rank, "sum") == 1
        assert engine.reduce(engine.rank, "sum") == 1
    assert not dist.is_initialized()


def test_the_group_lasts_from_the_outermost_context_to_its_end(ranks: Pool) -> None:
    ranks(2).run(joins_again)


def fit(engine: DDPEngine, model: nn.Module) -> RunResult:
    task = Supervised(model, nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(engine=engine).fit(task, DATA, optimizer=optimizer, epochs=1)


def enters_one_run_of_two(held: str) -> None:
    engine, model = DDPEngine(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with engine.process() if held == "held" else nullcontext():
        run = Trainer(engine=engine).run(Supervised(model, nn.functional.mse_loss), DATA, optimizer=optimizer, epochs=1)
        assert engine.group is not None
        del run
        assert fit(engine, model).status == "completed"
        assert (engine.group is not None) == (held == "held")
        assert fit(engine, model).status == "completed"
    assert engine.group is None
    assert not dist.is_initialized()


@pytest.mark.parametrize("held", ["held", "not held"])
def test_a_run_that_was_never_entered_leaves_later_ones_alone(ranks: Pool, held: str) -> None:
    ranks(2).run(enters_one_run_of_two, held)


def limits_of_the_watch() -> tuple[float, float]:
    engine = DDPEngine(report_after=5, grace=7)
    with engine.process():
        assert engine.watch is not None
        return engine.watch.limits.report_after, engine.watch.limits.grace


def test_the_watch_is_given_its_patience(ranks: Pool) -> None:
    assert ranks(2).run(limits_of_the_watch) == [(5.0, 7.0)] * 2


def nests(own: bool) -> tuple[int, str]:
    """Validate during a training; return the steps of the training, and how the validation went."""
    engine, model = DDPEngine(), nn.Linear(2, 1)
    reported: list[str] = []
    task = Supervised(model, nn.functional.mse_loss)

    class Nested(Plugin):
        @on(StepEnd)
        def validate(self, run: Run, event: StepEnd) -> None:
            try:
                reported.append(Trainer(engine=DDPEngine() if own else engine).validate(task, DATA).status)
            except RuntimeError as error:
                reported.append(str(error))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = Trainer([Nested()], engine=engine).fit(task, DATA, optimizer=optimizer, epochs=1)
    assert not dist.is_initialized()
    assert fit(engine, model).status == "completed"
    (once,) = set(reported)
    return result.progress.steps, once


@pytest.mark.parametrize("own", [False, True])
def test_a_run_within_another_needs_an_engine_of_its_own(ranks: Pool, own: bool) -> None:
    for count, outcome in ranks(2).run(nests, own):
        assert count == 2
        assert_facts(outcome, *(["completed"] if own else ["DDPEngine", "in use", "another run"]))


def fails_outside_of_a_run() -> tuple[str, str]:
    engine = DDPEngine()
    with pytest.raises((KeyError, RankFailed)) as caught, engine.process():
        if engine.rank == 1:
            raise KeyError("batch_size")
        engine.barrier()
    assert engine.group is None
    assert engine.watch is None
    assert not dist.is_initialized()
    return type(caught.value).__name__, str(caught.value)


def test_a_rank_that_fails_before_its_run_ends_the_others(ranks: Pool) -> None:
    waited, failed = ranks(2).run(fails_outside_of_a_run)
    assert failed == ("KeyError", "'batch_size'")
    assert waited[0] == "RankFailed"
    assert_facts(waited[1], "rank 1", "KeyError: 'batch_size'", "outside of a run")


def within_another_group() -> None:
    dist.init_process_group("gloo")
    engine = DDPEngine()
    model = nn.Linear(3, 1)
    with engine.process():
        engine.set_up(None, {"model": model}, {"optimizer": torch.optim.SGD(model.parameters())})
        forward = engine.bind(lambda run, batch: model(batch).sum())
        engine.backward(forward(None, torch.full((1, 3), float(engine.rank))))
        engine.tear_down()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.5, 0.5, 0.5]]
    assert dist.is_initialized()
    assert dist.get_world_size() == 2
    dist.destroy_process_group()


def test_a_group_that_was_initialised_before_is_used_and_left_as_it_was(ranks: Pool) -> None:
    ranks(2).run(within_another_group)


def differing(what: str) -> str:
    engine = DDPEngine()
    model = nn.Sequential(nn.Linear(2, 3 + engine.rank * (what == "shape"), bias=what != "number" or engine.rank == 0))
    if what == "type" and engine.rank:
        model.double()
    with pytest.raises(ValueError, match="The task's modules are not the same on all ranks: ") as caught:  # noqa: SIM117
        with engine.process():
            engine.set_up(None, {"model": model}, {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("shape", ("model.0.weight", "torch.float32 [4, 2]")),
        ("type", ("model.0.weight", "torch.float64 [3, 2]")),
        ("number", ("nothing more",)),
    ],
)
def test_models_that_differ_between_ranks_are_refused(ranks: Pool, what: str, named: tuple[str, ...]) -> None:
    for message in ranks(2).run(differing, what):
        assert "0 has the parameter" in message
        assert_facts(message, "rank 1 has", *named)
