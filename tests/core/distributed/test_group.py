from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from heliograph import DDPEngine
from heliograph.core.distributed.exchange import average_gradients, broadcast_tensors
from heliograph.core.distributed.group import Group
from heliograph.core.distributed.membership import Membership, membership
from heliograph.tests.messages import assert_facts
from heliograph.tests.ranks_pool import Pool
from torch import nn

CPU = torch.device("cpu")


@contextmanager
def joined() -> Iterator[Group]:
    group = Group(membership(), "gloo", CPU, 60.0)
    yield group
    group.leave()


def reduces() -> None:
    with joined() as group:
        one = group.rank + 1  # 1 and 2
        assert group.reduce(one, "sum") == 3
        assert isinstance(group.reduce(one, "sum"), int)
        assert group.reduce(one) == 1.5
        assert group.reduce(0.5 if group.rank else 1, "max") == 1  # one rank has a whole number, the other has not
        assert group.reduce(one == 1, "max") is True
        assert group.reduce(one == 1, "sum") == 1
        assert group.reduce(2**70, "sum") == 2**71
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            given = torch.full((2, 3), float(one), dtype=dtype)
            assert torch.equal(group.reduce(given), torch.full((2, 3), 1.5, dtype=dtype))
            assert torch.equal(group.reduce(given, "sum"), torch.full((2, 3), 3.0, dtype=dtype))
            assert torch.equal(group.reduce(given, "max"), torch.full((2, 3), 2.0, dtype=dtype))
            assert torch.equal(given, torch.full((2, 3), float(one), dtype=dtype))
        small = torch.tensor([200, one], dtype=torch.uint8)
        assert group.reduce(small, "sum").tolist() == [400, 3]
        assert group.reduce(small, "max").tolist() == [200, 2]
        assert group.reduce(small, "max").dtype == torch.uint8
        flags = torch.tensor([True, one == 1, False])
        assert group.reduce(flags, "sum").tolist() == [2, 1, 0]
        assert group.reduce(flags, "max").tolist() == [True, True, False]
        assert group.reduce(torch.tensor(float(one), requires_grad=True)).item() == 1.5
        assert group.reduce(torch.tensor([1j * one])).tolist() == [1.5j]
        assert group.reduce(torch.empty(0)).shape == (0,)
        turned = torch.arange(6.0).reshape(2, 3).T * one
        assert group.reduce(turned, "sum").tolist() == [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]
        for whole in (small, flags):
            with pytest.raises(TypeError, match=r"has no mean: reduce\(value.float\(\), 'mean'\)"):
                group.reduce(whole)
        with pytest.raises(TypeError, match="reduce takes a tensor or a number, got str"):
            group.reduce("1")
        with pytest.raises(ValueError, match="takes 'sum', 'mean' or 'max', got 'min'"):
            group.reduce(1, "min")  # type: ignore[arg-type]  # what a user may write


def forms() -> list[Any]:
    """Return what one process reduces to, and what two that hold the same do: types, values, or the error."""
    engine = DDPEngine(device="cpu")
    values = [
        1,
        True,
        2.5,
        torch.tensor([3], dtype=torch.uint8),
        torch.tensor([True]),
        torch.tensor([1.5]),
        "x",
        {"a": 1},
    ]
    found: list[Any] = []
    with engine.process():
        for how in ("sum", "mean", "max", "all"):
            for value in values:
                try:
                    reduced = engine.reduce(value, how)  # type: ignore[arg-type]  # what a user may write
                except (TypeError, ValueError) as error:
                    found.append(repr(error))
                    continue
                of = engine.world_size if how == "sum" else 1
                number = reduced.item() if isinstance(reduced, torch.Tensor) else reduced
                found.append((type(reduced), getattr(reduced, "dtype", None), type(number), number / of))
    return found


def test_one_process_reduces_to_the_same_kinds_and_refuses_the_same(ranks: Pool) -> None:
    (alone,) = ranks(1).run(forms)
    assert ranks(2).run(forms) == [alone, alone]
    assert sum(isinstance(each, str) for each in alone) == 8 + 3 * 2 + 2


def test_reduces_numbers_and_tensors_of_any_type(ranks: Pool) -> None:
    ranks(2).run(reduces)


def gathers() -> None:
    with joined() as group:
        rank = group.rank
        for dtype in (torch.float32, torch.bool, torch.bfloat16, torch.int16, torch.complex64):
            rows = [torch.arange(3 * (2 * each + 1)).reshape(-1, 3).to(dtype) for each in range(group.world_size)]
            gathered = group.gather(rows[rank])
            assert all(
                torch.equal(got, wanted) and got.dtype == dtype for got, wanted in zip(gathered, rows, strict=True)
            )
        assert torch.stack(group.gather(torch.tensor(rank, dtype=torch.int64))).tolist() == [0, 1]
        assert [each.tolist() for each in group.gather(torch.zeros(rank, 2))] == [[], [[0.0, 0.0]]]
        assert [each.shape for each in group.gather(torch.empty(0, 4))] == [(0, 4), (0, 4)]
        assert [each.tolist() for each in group.gather(torch.ones(2, 1, requires_grad=True).T)] == [[[1.0, 1.0]]] * 2
        assert group.gather_objects({"rank": rank, "rows": "x" * rank}) == [
            {"rank": 0, "rows": ""},
            {"rank": 1, "rows": "x"},
        ]


def test_gathers_tensors_of_unequal_length_and_objects(ranks: Pool) -> None:
    ranks(2).run(gathers)


def broadcasts() -> None:
    with joined() as group:
        rank = group.rank
        for source in (0, 1):
            assert group.broadcast({"of": rank}, source) == {"of": source}
            assert group.broadcast(None if rank == source else "x", source) is None
            sent = group.broadcast(torch.full((2, source + 1), rank, dtype=torch.int16), source)
            assert torch.equal(sent, torch.full((2, source + 1), source, dtype=torch.int16))
            assert group.broadcast(torch.tensor(rank + 0.5), source).item() == source + 0.5
            assert group.broadcast(torch.empty(0) if rank == source else None, source).shape == (0,)
        group.barrier()
        assert group.vote([float(rank), -float(rank), 2.0**53 - 1]) == [1.0, 0.0, 2.0**53 - 1]
        assert group.vote([(each + rank) % 2 for each in range(1_000)]) == [1.0] * 1_000


def test_broadcasts_what_the_others_do_not_know_and_votes(ranks: Pool) -> None:
    ranks(2).run(broadcasts)


def refuses() -> None:
    with joined() as group:
        calls: list[tuple[str, Any]] = [
            ("reduce", lambda: group.reduce(1.0)),
            ("reduce", lambda: group.reduce(torch.ones(1))),
            ("gather", lambda: group.gather(torch.ones(1))),
            ("gather_objects", lambda: group.gather_objects(1)),
            ("broadcast", lambda: group.broadcast(1)),
            ("barrier", group.barrier),
            ("vote", lambda: group.vote([1.0])),
        ]
        if group.rank == 0:
            with group.refusing("CSVLog", "epoch_end"):
                for name, call in calls:
                    with pytest.raises(RuntimeError, match=f"CSVLog calls {name} on epoch_end, .* ranks = 'all'"):
                        call()
                    assert group.waiting_in is None
        assert group.reduce(1.0, "sum") == 2.0


def test_refuses_collectives_where_only_some_ranks_are(ranks: Pool) -> None:
    ranks(2).run(refuses)


def names_what_it_waits_in() -> list[str]:
    seen = []
    with joined() as group:
        real, meet = dist.all_reduce, group.begin

        def watched(*args: Any, **kwargs: Any) -> Any:
            assert group.waiting_in is not None
            seen.append(group.waiting_in[0])
            return real(*args, **kwargs)

        def meeting(*args: Any) -> Any:
            assert group.waiting_in is not None
            seen.append(group.waiting_in[0])
            return meet(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", watched)
            patch.setattr(group, "begin", meeting)
            group.vote([1.0])
            group.reduce(torch.ones(1))
        assert group.waiting_in is None
    return seen


def test_says_which_collective_it_is_in(ranks: Pool) -> None:
    assert ranks(2).run(names_what_it_waits_in) == [["vote", "reduce", "reduce"]] * 2


def comes_and_goes(times: int) -> list[float]:
    votes = []
    for turn in range(times):
        with joined() as group:
            votes += group.vote([turn + group.rank])
            torch_group = weakref.ref(group.tensors)
        assert not dist.is_initialized()
        assert torch_group() is None
    return votes


def test_is_joined_and_left_many_times_in_one_process(ranks: Pool) -> None:
    assert ranks(2).run(comes_and_goes, 5) == [[1.0, 2.0, 3.0, 4.0, 5.0]] * 2


def hosts_its_own_store(port: int) -> list[float]:
    """As where the user set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT himself."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)
    return comes_and_goes(3)


def test_rank_0_hosts_the_store_where_no_agent_does(ranks: Pool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert ranks(2).run(hosts_its_own_store, port) == [[1.0, 2.0, 3.0]] * 2


def lives_beside_another_group() -> None:
    dist.init_process_group("gloo")
    theirs = dist.group.WORLD
    for turn in range(2):
        with joined() as group:
            assert group.tensors is not theirs
            assert group.reduce(turn + group.rank, "sum") == 2 * turn + 1
            group.store.set(f"rank {group.rank}", str(turn))
            assert group.store.get(f"rank {1 - group.rank}") == str(turn).encode()
        assert dist.group.WORLD is theirs
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2.0
    dist.destroy_process_group()


def test_leaves_a_process_group_of_somebody_else_as_it_was(ranks: Pool) -> None:
    ranks(2).run(lives_beside_another_group)


def is_left_by_one() -> str:
    group = Group(membership(), "gloo", CPU, 60.0)
    if group.rank == 0:
        group.leave(aborting=True)
        return ""
    with pytest.raises(RuntimeError) as caught:
        group.vote([1.0])
    group.leave(aborting=True)
    return str(caught.value)


def test_who_waits_for_a_rank_that_left_learns_of_it(ranks: Pool) -> None:
    left, waited = ranks(2).run(is_left_by_one)
    assert not left
    assert_facts(waited, "board", "rank 0", "gone")


def shares_many_tensors() -> None:
    with joined() as group:
        rank = group.rank
        tensors = [
            torch.full((3, 2), float(rank)),
            torch.tensor(rank, dtype=torch.int64),
            torch.tensor([rank == 0, False]),
            torch.full((2, 2), rank, dtype=torch.bfloat16).T,
            torch.empty(0),
        ]
        broadcast_tensors(group, tensors, "the buffers")
        assert [each.tolist() for each in tensors] == [[[0.0, 0.0]] * 3, 0, [True, False], [[0.0, 0.0]] * 2, []]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("heliograph.core.distributed.exchange.BYTES", 16)
            many = [torch.full((3,), float(rank + each)) for each in range(4)]
            broadcast_tensors(group, many, "the buffers")
            assert [each.tolist() for each in many] == [[float(each)] * 3 for each in range(4)]
        broadcast_tensors(group, [], "the buffers")


def test_many_tensors_travel_in_few_collectives(ranks: Pool) -> None:
    ranks(2).run(shares_many_tensors)


def averages() -> list[Any]:
    with joined() as group:
        both, single, neither, wide = (nn.Parameter(torch.zeros(2)) for _ in range(4))
        wide.data = wide.data.double()
        both.grad = torch.tensor([1.0, 2.0]) * (group.rank + 1)
        wide.grad = torch.tensor([1.0, 1.0], dtype=torch.float64) * group.rank
        if group.rank:
            single.grad = torch.tensor([4.0, 8.0])
        average_gradients(group, [both, single, neither, wide], "the gradients")
        sparse = nn.Embedding(3, 2, sparse=True)
        sparse(torch.tensor([1])).sum().backward()
        with pytest.raises(TypeError, match="A sparse gradient"):
            average_gradients(group, list(sparse.parameters()), "the gradients")
        return [None if each.grad is None else each.grad.tolist() for each in (both, single, neither, wide)]


def test_gradients_that_some_ranks_lack_count_as_zero(ranks: Pool) -> None:
    assert ranks(2).run(averages) == [[[1.5, 3.0], [2.0, 4.0], None, [0.5, 0.5]]] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_on_a_gpu_travel_by_nccl_and_the_rest_by_gloo() -> None:
    device = torch.device("cuda", 0)
    for aborting in (False, True):
        group = Group(Membership(), "nccl", device, 60.0)
        value = torch.ones(3, device=device)
        assert group.reduce(value, "sum").tolist() == [1.0, 1.0, 1.0]
        assert group.reduce(value).device == device
        assert group.reduce(value.cpu()).device == CPU
        assert [each.device for each in group.gather(value)] == [device]
        assert group.broadcast(value) is value
        assert group.vote([2.0]) == [2.0]
        broadcast_tensors(group, [value], "the buffers")
        weight = nn.Parameter(value.clone())
        weight.grad = value.clone()
        average_gradients(group, [weight], "the gradients")
        assert weight.grad.tolist() == [1.0, 1.0, 1.0]
        group.barrier()
        group.leave(aborting=aborting)
        assert not dist.is_initialized()
