"""The fixture `ranks` itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.tests.ranks_pool import LostRankError, Pool
from torch import distributed


class OwnError(Exception):
    pass


def connect() -> Any:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return distributed.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]


def facts(offset: int) -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE")
    found = {name: os.environ[name] for name in names}
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    store = connect()
    distributed.init_process_group("gloo", store=store, rank=int(found["RANK"]), world_size=int(found["WORLD_SIZE"]))
    total = torch.tensor(offset + distributed.get_rank())
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    return {**found, "total": total, "threads": torch.get_num_threads(), "pid": os.getpid(), "draw": torch.rand(1)}


def left_behind() -> tuple[str | None, Path, int]:
    return os.environ.get("LEFT_BEHIND"), Path.cwd(), os.getpid()


def fail(on: int) -> None:
    if int(os.environ["RANK"]) == on:
        raise OwnError("on purpose")


def die_while_the_other_waits() -> None:
    store = connect()
    if os.environ["RANK"] == "1":
        store.get("the other waits")
        os._exit(7)
    store.set("the other waits", "")
    store.get("never")


def test_functions_run_on_ranks_that_can_form_a_group(ranks: Pool) -> None:
    first, second = ranks(2).run(facts, 10)
    assert [first["RANK"], second["LOCAL_RANK"], first["WORLD_SIZE"]] == ["0", "1", "2"]
    assert first["total"] == second["total"] == 21
    assert first["threads"] == 1
    assert first["draw"] == second["draw"]
    assert [each[:2] for each in ranks(2).run(left_behind)] == [(None, Path.cwd())] * 2


def test_a_ranks_error_is_raised_and_the_processes_live_on(ranks: Pool) -> None:
    before = [pid for _, _, pid in ranks(2).run(left_behind)]
    with pytest.raises(OwnError, match="on purpose") as caught:
        ranks(2).run(fail, 1)
    assert "On rank 1:\nTraceback" in caught.value.__notes__[0]
    assert [pid for _, _, pid in ranks(2).run(left_behind)] == before


@pytest.mark.whole
def test_a_rank_that_dies_costs_the_pool_its_processes() -> None:
    pool = Pool()
    try:
        with pytest.raises(LostRankError, match="rank 1 died") as caught:
            pool(2).run(die_while_the_other_waits)
        assert "in die_while_the_other_waits" in "".join(caught.value.__notes__)
        assert pool(1).run(np.add, 1, 2) == [3]
    finally:
        pool.close()
