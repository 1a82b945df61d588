"""What differs from rank to rank: found, saved once, merged again."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from heliograph import DDPEngine
from heliograph.core.checkpoint.ranks import digest, gather_rank_parts, select_rank_part
from heliograph.tests.ranks_pool import Pool


def cut(rank: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "progress": {"steps": 4, "batch": 2},
        "plugins": {"same": {"weights": torch.ones(3)}, "own": {"value": torch.tensor(float(rank))}},
        "control": {"due": [], "end_epoch": False},
        "objects": {},
        "data": {"seed": 1},
        "last_seen": False,
        "engine": {},
        "task": {},
        "metrics": {"validation/loss": 0.5},
        "means": {"loss": [rank + 0.5, 4.0]},
        "filters": {},
        **more,
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (True, 1),
        ("1", 1),
        (0.0, -0.0),
        ([1], (1,)),
        ([[1], 2], [[1, 2]]),
        (["ab", "c"], ["a", "bc"]),
        ({"a": 1}, {"a": 2}),
        ({"a": {}, "b": 1}, {"a": {"b": 1}}),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse()),
    ],
)
def test_different_values_have_different_digests(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    assert digest(one) == digest(deepcopy(one))


def test_a_digest_is_of_the_values_not_of_their_memory_layout() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    assert digest(values.t().contiguous().t()) == digest(values)
    assert digest(torch.nn.Parameter(values)) == digest(values)
    assert digest(torch.full((1,), float("nan"))) == digest(torch.full((1,), float("nan")))
    assert digest(torch.zeros(0, dtype=torch.bfloat16)) == digest(torch.zeros(0, dtype=torch.bfloat16))


def test_the_main_ranks_part_is_the_cut() -> None:
    whole = {**cut(), "ranks": [{}, {"last_seen": True}]}
    assert select_rank_part(whole, 0, 2)["last_seen"] is False
    assert select_rank_part(whole, 1, 2)["last_seen"] is True


def test_plugins_and_counters_go_by_name() -> None:
    part = {"plugins": {"own": {"value": 1}}, "progress": {"batch": 3}}
    mine = select_rank_part({**cut(), "ranks": [{}, part]}, 1, 2)
    assert mine["progress"] == {"steps": 4, "batch": 3}
    assert mine["plugins"]["own"] == {"value": 1}
    assert mine["plugins"]["same"]["weights"].tolist() == [1.0] * 3


def test_a_new_rank_has_nothing_to_log_yet() -> None:
    new = select_rank_part({**cut(), "ranks": [{}]}, 1, 2)
    assert new["means"] == {}
    assert new["plugins"]["own"]["value"] == 0.0


def test_the_main_rank_logs_what_ranks_that_are_gone_had_not() -> None:
    gone: list[dict[str, Any]] = [{"means": {"loss": [3.0, 4.0], "other": [1.0, 1.0]}}, {}]
    whole = {**cut(), "ranks": [{}, *gone]}
    assert select_rank_part(whole, 0, 3)["means"] == {"loss": [0.5, 4.0]}
    # 0.5 + 3.0 of the second, and 0.5 of the third, which had the same as the main rank
    assert select_rank_part(whole, 0, 1)["means"] == {"loss": [4.0, 12.0], "other": [1.0, 1.0]}
    assert select_rank_part(whole, 0, 2)["means"] == {"loss": [1.0, 8.0]}


def test_a_cut_of_another_rank_is_its_own() -> None:
    own = {**cut(1), "ranks": []}
    assert select_rank_part(own, 1, 2) == own


def of_this_rank() -> list[dict[str, Any]]:
    engine = DDPEngine(device="cpu")
    mine = cut(engine.rank)
    if engine.is_main:
        mine["plugins"]["on main only"] = {"value": 1}
    else:
        mine["plugins"]["beside"] = {"value": 2}
    with engine.process():
        return gather_rank_parts(engine, mine)


def test_only_what_differs_is_kept_for_each_rank(ranks: Pool) -> None:
    first, second = ranks(2).run(of_this_rank)
    assert first == second
    assert first[0] == {}
    assert first[1] == {
        "plugins": {"own": {"value": torch.tensor(1.0)}, "beside": {"value": 2}, "on main only": None},
        "means": {"loss": [1.5, 4.0]},
    }
