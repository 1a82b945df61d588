"""What `DDPEngine` computes, on living ranks, beside one process."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from heliograph import BatchStart, DDPEngine, GradientAccumulation, Plugin, Run, Supervised, Trainer, TrainStart, on
from heliograph.core.task import Task
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

State = dict[str, Tensor]
MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    ),
    "norm": lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)),
}


def made(kind: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model: nn.Sequential = MODELS[kind]()
    return model


def micro_batches(count: int, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(5)
    return [
        (torch.randn(size, 6, generator=numbers), torch.randint(3, (size,), generator=numbers)) for _ in range(count)
    ]


def trained(kind: str, steps: int, *, batches_per_step: int, window: int = 1, merged: int = 1, **options: Any) -> State:
    """Train with the same micro-batches, however many processes read them.

    Args:
        kind: of the model.
        steps: of the optimizer.
        batches_per_step: over all processes.
        window: micro-batches per step in each process.
        merged: how many of them make one batch.
        options: of the engine.
    """
    torch.set_num_threads(1)
    batches = micro_batches(steps * batches_per_step)
    if merged > 1:
        parts = [batches[start : start + merged] for start in range(0, len(batches), merged)]
        batches = [(torch.cat([each[0] for each in part]), torch.cat([each[1] for each in part])) for part in parts]
    model = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer([GradientAccumulation(window)], engine=DDPEngine(**options))
    result = trainer.fit(Supervised(model, functional.cross_entropy), batches, optimizer=optimizer, epochs=1)
    assert result.progress.steps == steps
    return model.state_dict()


class HoldThenSkip(Plugin):
    """Holds the step of the first of two batches, and skips the second."""

    asks = ("skip_batch",)

    @on(BatchStart)
    def decide(self, run: Run, event: BatchStart) -> None:
        if run.progress.batch % 2:
            run.control.skip_batch("the second of two")
        else:
            run.control.hold_step("the first of two")


def holds_and_skips(precision: Any) -> State:
    """Train where no window ends with a batch that was taken backward, and no handler sees the gradients."""
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer([HoldThenSkip()], engine=DDPEngine(precision=precision))
    task = Supervised(model, functional.cross_entropy)
    assert trainer.fit(task, micro_batches(8), optimizer=optimizer, epochs=1).progress.steps == 2
    return model.state_dict()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_window_whose_last_batch_was_skipped_is_averaged_too(ranks: Pool, precision: str) -> None:
    first, second = ranks(2).run(holds_and_skips, precision)
    assert_equal(first, second)


def difference(left: State, right: State) -> float:
    """Return the largest difference of two models, relative to the largest value of its tensor."""
    return max(((left[name] - right[name]).abs().max() / right[name].abs().max()).item() for name in left)


def assert_equal(left: State, right: State) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_two_ranks_give_the_same_bits_in_every_run(ranks: Pool, kind: str, window: int) -> None:
    once = ranks(2).run(trained, kind, 10, batches_per_step=2 * window, window=window)
    again = ranks(2).run(trained, kind, 10, batches_per_step=2 * window, window=window)
    for state in (once[1], *again):
        assert_equal(once[0], state)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_two_ranks_give_the_bits_of_one_process_over_the_same_micro_batches(ranks: Pool, kind: str) -> None:
    alone = ranks(1).run(trained, kind, 50, batches_per_step=2, window=2)[0]
    assert_equal(ranks(2).run(trained, kind, 50, batches_per_step=2)[0], alone)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize(("count", "window"), [(2, 1), (2, 2), (4, 1)])
def test_ranks_stay_close_to_one_process_with_whole_batches(ranks: Pool, kind: str, count: int, window: int) -> None:
    together = ranks(count).run(trained, kind, 50, batches_per_step=count * window, window=window)
    alone = ranks(1).run(trained, kind, 50, batches_per_step=count * window, merged=count * window)[0]
    for state in together[1:]:
        assert_equal(state, together[0])
    assert 0.0 < difference(together[0], alone) <= 2e-6


class CountExchanges:
    """Counts the buckets that torch's wrapper averages."""

    name = "count_exchanges"
    ranks = "all"

    def __init__(self) -> None:
        self.count = 0

    @on(TrainStart)
    def begin(self, run: Any, event: TrainStart) -> None:
        run.engine._wrapper.register_comm_hook(self, averaged)


def averaged(
    counter: CountExchanges,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # public, but not for strict checkers
) -> torch.futures.Future[Tensor]:
    counter.count += 1
    dist.all_reduce(bucket.buffer().div_(2))
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def exchanges(window: int, batches: int) -> tuple[int, int]:
    counter, model = CountExchanges(), made("mlp")
    trainer = Trainer([GradientAccumulation(window), counter], engine=DDPEngine())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = Supervised(model, functional.cross_entropy)
    result = trainer.fit(task, micro_batches(2 * batches), optimizer=optimizer, epochs=1)
    return result.progress.steps, counter.count


@pytest.mark.parametrize(("window", "steps"), [(1, 6), (3, 2), (4, 2)])
def test_gradients_travel_once_per_step_and_not_per_micro_batch(ranks: Pool, window: int, steps: int) -> None:
    assert ranks(2).run(exchanges, window, 6) == [(steps, steps)] * 2


# The engine alone.


class Bare:
    """A task whose model is called in any way."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def training_step(self, run: Any, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch).square().mean()
        return loss


class Session:
    """A run on an engine, without a loop."""

    def __init__(self, engine: DDPEngine, model: nn.Module, task: Any = None) -> None:
        self.engine, self.model, self.task = engine, model, task or Bare(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.set_up(self.task, {"model": model}, {"optimizer": self.optimizer})
        self.forward = engine.bind(self.task.training_step)
        self.numbers = torch.Generator().manual_seed(engine.rank)

    def batch(self) -> Tensor:
        return torch.randn(4, 6, generator=self.numbers)

    def step(self, times: int = 1, held: Sequence[int] = ()) -> None:
        for turn in range(times):
            with self.engine.no_sync() if turn in held else nullcontext():
                self.engine.backward(self.forward(None, self.batch()))
            if turn not in held:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def assert_same(self) -> None:
        """Assert that all ranks hold the same model, and that it holds numbers."""
        states = self.engine.gather_objects([each.tolist() for each in self.model.parameters()])
        assert all(state == states[0] for state in states)
        assert "nan" not in str(states)


def begins_alike() -> State:
    engine = DDPEngine()
    model = made("norm", seed=engine.rank)
    with engine.process():
        model.state_dict()["1.running_mean"].fill_(float(engine.rank))
        engine.set_up(Bare(model), {"model": model}, {})
        engine.tear_down()
    return model.state_dict()


def test_all_ranks_begin_with_the_weights_and_buffers_of_rank_0(ranks: Pool) -> None:
    first, second = ranks(2).run(begins_alike)
    assert_equal(first, second)
    assert torch.equal(first["0.weight"], made("norm", seed=0).state_dict()["0.weight"])
    assert first["1.running_mean"].tolist() == [0.0] * 16


def goes_on(engine: DDPEngine, pauses: Sequence[int]) -> State:
    """Take 9 steps, with the engine torn down and set up again before some of them."""
    model, numbers = made("mlp"), torch.Generator().manual_seed(engine.rank)
    session = Session(engine, model)
    for step in range(9):
        if step in pauses:
            engine.tear_down()
            session = Session(engine, model)
        session.numbers = numbers
        session.step()
    engine.tear_down()
    return model.state_dict()


def goes_on_twice(options: dict[str, Any]) -> tuple[State, State]:
    engine = DDPEngine(**options)
    with engine.process():
        return goes_on(engine, ()), goes_on(engine, (1, 5))


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_a_run_that_was_resumed_adds_up_in_the_same_order_on_four_ranks(ranks: Pool, options: dict[str, Any]) -> None:
    for straight, resumed in ranks(4).run(goes_on_twice, options):
        assert_equal(straight, resumed)


def evaluates() -> list[list[float]]:
    engine, means = DDPEngine(), []
    model = made("norm")
    with engine.process():
        session = Session(engine, model)
        session.step(3)
        means.append(model.state_dict()["1.running_mean"].tolist())
        with engine.evaluating():
            means.append(model.state_dict()["1.running_mean"].tolist())
        session.step(2)
        engine.tear_down()
        means.append(model.state_dict()["1.running_mean"].tolist())
    return means


def test_validation_sees_the_buffers_of_rank_0(ranks: Pool) -> None:
    first, second = ranks(2).run(evaluates)
    assert first[0] != second[0]
    assert first[0] == first[1] == second[1]
    assert first[2] == second[2]


class Branches(nn.Module):
    """Uses one of its branches, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 2), nn.Linear(6, 2)
        self.uses_right = True

    def forward(self, batch: Tensor) -> Tensor:
        left: Tensor = self.left(batch)
        return left + self.right(batch) if self.uses_right else left


def lacks_gradients(lacks_on: Sequence[int], **options: Any) -> tuple[str, list[str]] | None:
    engine = DDPEngine(**options)
    torch.manual_seed(0)
    model = Branches()
    model.uses_right = engine.rank not in lacks_on
    with engine.process():
        session = Session(engine, model)
        try:
            session.step(2)
        except RuntimeError as error:
            engine.abandon()
            return str(error), error.__notes__ if hasattr(error, "__notes__") else []
        session.assert_same()
        engine.tear_down()
    return None


def test_parameters_without_gradients_are_named(ranks: Pool) -> None:
    for message, notes in ranks(2).run(lacks_gradients, (0, 1)):
        assert "Expected to have finished" in message
        assert "gradient for model.right.weight, model.right.bias" in notes[0]
        assert "DDPEngine(find_unused_parameters=True)" in notes[0]


def test_parameters_without_gradients_on_one_rank_fail_there_and_end_the_other(ranks: Pool) -> None:
    waited, (message, notes) = ranks(2).run(lacks_gradients, (1,))
    assert "gradient for model.right.weight, model.right.bias" in notes[0]
    assert "Expected to have finished" in message
    assert "finished reduction" not in waited[0]


def test_parameters_without_gradients_are_found_where_that_is_asked(ranks: Pool) -> None:
    assert ranks(2).run(lacks_gradients, (1,), find_unused_parameters=True) == [None, None]
    assert ranks(2).run(lacks_gradients, (0, 1), static_graph=True) == [None, None]


def freezes() -> None:
    engine, model = DDPEngine(), made("mlp")
    last = model[2]
    with engine.process():
        model.requires_grad_(False)
        session = Session(engine, model)
        assert engine._wrapper is None
        session.forward(None, session.batch())
        last.requires_grad_(True)
        session.step()
        session.assert_same()
        before = model.state_dict()["0.weight"].clone()
        model.requires_grad_(True)
        session.step()
        assert not torch.equal(before, model.state_dict()["0.weight"])
        session.assert_same()
        last.requires_grad_(False)
        session.step(2)
        session.assert_same()
        engine.tear_down()


def test_parameters_may_be_frozen_and_thawed_during_a_run(ranks: Pool) -> None:
    ranks(2).run(freezes)


def gradients(how: str) -> State:
    """Return the gradients of two micro-batches per rank, which reach the others in one way or another."""
    engine, model = DDPEngine(), made("mlp")
    with engine.process():
        session = Session(engine, model)
        if how == "as usual":
            with engine.no_sync():
                engine.backward_scaled(session.forward(None, session.batch()), 0.5)
            engine.backward_scaled(session.forward(None, session.batch()), 0.5)
        elif how == "the window ends unforeseen":
            with engine.no_sync():
                for _ in range(2):
                    engine.backward_scaled(session.forward(None, session.batch()), 0.5)
            engine.unscale(session.optimizer)
        elif how == "an own loop":
            with engine.no_sync():
                engine.backward_scaled(session.task.training_step(None, session.batch()), 0.5)
            engine.backward_scaled(session.task.training_step(None, session.batch()), 0.5)
        else:
            parameters = list(model.parameters())
            for _ in range(2):
                engine.backward_for(session.task.training_step(None, session.batch()), 0.5, parameters)
            engine.exchange_gradients(parameters)
        engine.unscale(session.optimizer)
        engine.tear_down()
    assert all(each.grad is not None for each in model.parameters())
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("how", ["the window ends unforeseen", "an own loop", "one loss of several"])
def test_gradients_are_the_same_whichever_way_they_are_exchanged(ranks: Pool, how: str) -> None:
    usual, other = ranks(2).run(gradients, "as usual"), ranks(2).run(gradients, how)
    assert_equal(usual[0], usual[1])
    assert_equal(usual[0], other[0])
    assert_equal(usual[0], other[1])


class Named(Task):
    """Yields its one loss with the name of its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def training_step(self, run: Any, batch: Any) -> Iterator[tuple[str, Tensor]]:
        yield "only", functional.cross_entropy(self.model(batch[0]), batch[1])


def trained_by_name(kind: str, steps: int) -> State:
    model = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    Trainer(engine=DDPEngine()).fit(Named(model), micro_batches(2 * steps), optimizer={"only": optimizer}, epochs=1)
    return model.state_dict()


@pytest.mark.parametrize("kind", ["mlp", "norm"])
def test_a_step_of_several_losses_gives_the_bits_of_a_plain_one(ranks: Pool, kind: str) -> None:
    plain = ranks(2).run(trained, kind, 10, batches_per_step=2)
    named = ranks(2).run(trained_by_name, kind, 10)
    for state in (plain[1], *named):
        assert_equal(plain[0], state)


def skips() -> list[bool]:
    """Step a few times; rank 1 alone has an infinite gradient in the fifth."""
    engine, model = DDPEngine(precision="fp16"), made("mlp")
    stepped = []
    with engine.process():
        session = Session(engine, model)
        step, zero_grad = engine.bind_step(session.optimizer), engine.bind_zero_grad(session.optimizer)
        for turn in range(6):
            batch = session.batch() * (1e30 if turn == 4 and engine.rank == 1 else 1.0)
            engine.backward(session.forward(None, batch))
            engine.unscale(session.optimizer)
            stepped.append(step() is not False)
            zero_grad()
        session.assert_same()
        engine.tear_down()
    return stepped


def test_all_ranks_skip_a_step_that_one_rank_spoils_in_fp16(ranks: Pool) -> None:
    first, second = ranks(2).run(skips)
    assert first == second
    assert first[3:] == [True, False, True]  # the scale finds its place before


def test_computes_in_bf16(ranks: Pool) -> None:
    first, second = ranks(2).run(trained, "mlp", 5, batches_per_step=2, precision="bf16")
    assert_equal(first, second)
    assert difference(first, ranks(2).run(trained, "mlp", 5, batches_per_step=2)[0]) > 1e-4


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}])
def test_options_of_torchs_wrapper_change_no_bit_on_two_ranks(ranks: Pool, options: dict[str, Any]) -> None:
    plain = ranks(2).run(trained, "mlp", 5, batches_per_step=4, window=2)
    assert_equal(ranks(2).run(trained, "mlp", 5, batches_per_step=4, window=2, **options)[1], plain[0])


def accumulates_a_static_graph() -> None:
    with pytest.raises(ValueError, match=r"DDPEngine\(static_graph=True\) does not support accumulation"):
        trained("mlp", 5, batches_per_step=4, window=2, static_graph=True)


def test_a_static_graph_is_not_accumulated(ranks: Pool) -> None:
    ranks(2).run(accumulates_a_static_graph)
    assert_equal(
        ranks(2).run(trained, "mlp", 5, batches_per_step=2, static_graph=True)[0],
        ranks(2).run(trained, "mlp", 5, batches_per_step=2)[0],
    )


def is_used_again() -> int:
    engine = DDPEngine()
    models = []
    for turn in range(4):
        with engine.process():
            models.append(made("mlp", seed=turn))
            session = Session(engine, models[-1])
            session.step(2)
            if turn % 2:
                engine.abandon()
            else:
                session.assert_same()
                engine.tear_down()
    del session
    return len([each for each in gc.get_objects() if type(each) is DistributedDataParallel])


def test_nothing_of_the_wrapper_is_left_behind_a_run(ranks: Pool) -> None:
    assert ranks(2).run(is_used_again) == [0, 0]


def normalizes_together() -> State:
    """Train a batch norm on one GPU that all ranks share."""
    engine = DDPEngine("gloo", device="cuda:0")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(made("norm"))  # type: ignore[no-untyped-call]  # torch's own lack
    with engine.process():
        session = Session(engine, model)
        rows = torch.arange(48.0).reshape(8, 6).sin()
        loss = session.forward(None, engine.move(rows.chunk(2)[engine.rank]))
        engine.backward(loss)
        session.optimizer.step()
        engine.tear_down()
    return {name: each.cpu() for name, each in model.state_dict().items()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_shared_batch_norms_see_the_whole_batch(ranks: Pool) -> None:
    model = made("norm").cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(48.0).reshape(8, 6).sin().cuda()).square().mean().backward()
    optimizer.step()
    whole = {name: each.cpu() for name, each in model.state_dict().items()}
    for state in ranks(2).run(normalizes_together):
        assert whole.keys() == state.keys()
        for name in whole:
            torch.testing.assert_close(state[name], whole[name], rtol=1e-5, atol=1e-6)
