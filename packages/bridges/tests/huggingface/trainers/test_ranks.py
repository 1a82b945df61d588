"""Two processes: what one rank asks for, both do at the same step; states of both ranks survive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState  # type: ignore[import-untyped]
from heliograph import EMA, BatchEnd, LogSchedule, NaNGuard, Plugin, Run, StepEnd, on
from heliograph.packages.bridges.tests.huggingface.trainers.trainings import Rows, make
from heliograph.tests.ranks_pool import Pool


class AskOnRankOne(Plugin):
    """Asks for something at a step, on one rank only; counts on each what differs."""

    asks = ("stop", "save")

    def __init__(self, step: int, verb: str) -> None:
        self.step, self.verb = step, verb
        self.total = 0

    @on(BatchEnd)
    def ask(self, run: Run, event: BatchEnd) -> None:
        self.total += 10**run.engine.rank
        if run.engine.rank == 1 and run.progress.steps == self.step:
            getattr(run.control, self.verb)("rank 1 says so")

    @on(StepEnd)
    def track(self, run: Run, event: StepEnd) -> None:
        run.track("rank", float(run.engine.rank))

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.total = state["total"]


@contextmanager
def process_group() -> Iterator[None]:
    """Leave neither a process group nor what accelerate remembers of it."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()


def several(folder: Path) -> dict[str, Any]:
    """Train a few times on this rank; return what happened."""
    with process_group():
        stop, stopped = make(folder / "stop", AskOnRankOne(3, "stop"), max_steps=9, ddp_backend="gloo")
        stop.train()
        poison = Rows(16, poison=5)
        guard, guarded = make(folder / "nan", NaNGuard("stop"), train=poison, max_steps=9, ddp_backend="gloo")
        guard.train()
        plugins = AskOnRankOne(3, "request_save"), EMA(0.5), LogSchedule(steps=2)
        save, saved = make(folder / "save", *plugins, max_steps=4, ddp_backend="gloo")
        save.train()
        again = AskOnRankOne(9, "request_save"), EMA(0.5), LogSchedule(steps=2)
        rest, resumed = make(folder / "save", *again, max_steps=5, ddp_backend="gloo")
        rest.train(resume_from_checkpoint=True)
    assert stopped.result is not None
    assert guarded.result is not None
    assert saved.result is not None
    assert resumed.result is not None
    guarded_model: Any = guard.model
    return {
        "stop": (stopped.result.status, stopped.result.stopped_on_rank, stop.state.global_step),
        "samples": stopped.result.progress.samples,
        "nan": (guarded.result.stopped_by, guarded.result.stopped_on_rank, guard.state.global_step),
        "finite": all(torch.isfinite(each).all() for each in guarded_model.parameters()),
        "history": [str(each) for each in saved.result.history if each.verb == "save"],
        "tracked": saved.result.metrics["train/rank"],
        "total": resumed.plugins[AskOnRankOne].total,
        "average": resumed.plugins[EMA].weights["model"]["layer.weight"].tolist(),
        "resumed": resumed.result.notes,
        "warnings": (*stopped.result.warnings, *guarded.result.warnings, *saved.result.warnings),
    }


def test_two_ranks(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks(2).run(several, tmp_path)
    assert first["stop"] == second["stop"] == ("stopped", 1, 3)
    assert first["samples"] == 12
    assert first["nan"] == second["nan"]
    assert first["nan"][0] == "nan_guard"
    assert first["finite"]
    assert second["finite"]
    assert len(first["history"]) == len(second["history"]) == 1
    assert "ask_on_rank_one on rank 1:" in first["history"][0]
    assert (tmp_path / "save" / "checkpoint-3" / "heliograph.pt").exists()
    assert first["tracked"] == second["tracked"] == 0.5
    assert (first["total"], second["total"]) == (5, 50)
    assert first["average"] == second["average"]
    assert "epoch 1, batch 1," in first["resumed"][0]
    state = json.loads((tmp_path / "save" / "checkpoint-3" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["stateful_callbacks"]["HeliographCallback"]["attributes"]["saved"]
    assert first["warnings"] == ()
