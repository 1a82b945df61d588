"""Checkpoints in shards: every rank writes its part, all of it is one checkpoint or none, any engine reads it."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    CheckpointSaved,
    DDPEngine,
    DeviceEngine,
    Every,
    FSDPEngine,
    Lane,
    LoadBest,
    Plugin,
    RankFailed,
    RNGCapture,
    Run,
    RunClosed,
    RunFailed,
    RunResult,
    SaveSchedule,
    Supervised,
    Trainer,
    ValidationSchedule,
    load_weights,
    on,
)
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.ranks import join_shards
from heliograph.core.checkpoint.storage import reader
from heliograph.core.checkpoint.storage.files import digest_of
from heliograph.core.checkpoint.storage.reader import read_shards, shards_path
from heliograph.tests.kit import checkpoint_names
from heliograph.tests.messages import assert_each, assert_facts
from heliograph.tests.ranks_pool import Pool
from heliograph.tests.stores import seal_as
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.utils.data import DataLoader, TensorDataset

Weights = dict[str, Tensor]
Saved = list[tuple[int, str]]  # the step at which each was reported, and its name
FILES = [".metadata", "__0_0.distcp", "__1_0.distcp"]


def make_task() -> Supervised:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    return Supervised(model, nn.functional.mse_loss)


def train(
    checkpoint: Checkpoint, engine: Any, *plugins: Any, batch_size: int = 4, saved: Saved | None = None, **options: Any
) -> tuple[RunResult, Weights, Saved]:
    task, saved = make_task(), [] if saved is None else saved
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 2, generator=generator))
    trainer = Trainer([RNGCapture(3), SaveSchedule(Every(steps=2), at_end=False), *plugins, checkpoint], engine=engine)
    trainer.bus.on(CheckpointSaved, lambda run, event: saved.append((run.progress.steps, event.path.name)))
    result = trainer.fit(
        task,
        DataLoader(data, batch_size=batch_size, shuffle=True),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        **{"epochs": 2, **options},
    )
    return result, {name: value.clone() for name, value in task.model.state_dict().items()}, saved


def sharding() -> FSDPEngine:
    return FSDPEngine(device="cpu", state="sharded")


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def resume_sharded(folder: Path, background: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"background": background}
    _, whole, _ = train(Checkpoint(folder / "whole"), FSDPEngine(device="cpu"))
    first, _, saved = train(Checkpoint(folder / "parts", **options), sharding(), steps=5)
    again = Checkpoint(folder / "parts", resume="auto", keep_last=None, **options)
    result, weights, _ = train(again, sharding())
    _, gathered, _ = train(Checkpoint(folder / "other", resume=first.last_checkpoint), DDPEngine(device="cpu"))
    return {
        "equal": equal(weights, whole),
        "equal on another engine": equal(gathered, whole),
        "saved": [name for _, name in saved],
        "report": str(result.resume),
        "last": result.last_checkpoint,
        "first": first.last_checkpoint,
    }


@pytest.mark.parametrize("background", [False, True])
def test_a_run_continues_from_shards(ranks: Pool, tmp_path: Path, background: bool) -> None:
    for each in ranks(2).run(resume_sharded, tmp_path, background):
        assert each["equal"]
        assert each["equal on another engine"]
        assert_facts(each["report"], "verified", "1 repeated step ", "identical")
        assert each["saved"] == ["run_epoch_0_iter_2.pth", "run_epoch_0_iter_4.pth"]
        assert each["first"] == tmp_path / "parts" / "run_epoch_0_iter_4.pth"
        assert each["last"] == tmp_path / "parts" / "run_epoch_1_iter_8.pth"
    names = sorted(re.sub(r"\.\w{8}\.", ".", path.name) for path in (tmp_path / "parts").glob("run*"))
    places = ("0_iter_4", "1_iter_6", "1_iter_8")
    assert names == ["run.last", *(f"run_epoch_{place}.{end}" for place in places for end in ("pth", "shards"))]
    last = tmp_path / "parts" / "run_epoch_1_iter_8.pth"
    shards = read_shards(reader.verify(last))
    assert sorted(path.name for path in next(iter(shards)).parent.iterdir()) == [*FILES, "digests.json"]
    assert sorted(path.name for path in shards) == FILES
    state = reader.load(last)
    assert (state["modules"], state["optimizers"]) == ({}, {})


def branch_sharded(folder: Path) -> list[str]:
    train(Checkpoint(folder, keep_last=None), sharding())
    branch = Checkpoint(folder, resume=folder / "run_epoch_0_iter_2.pth")
    return [note for note in train(branch, sharding())[0].notes if "branched" in note]


def test_a_branch_leaves_the_shards_of_its_parent(ranks: Pool, tmp_path: Path) -> None:
    notes = ranks(2).run(branch_sharded, tmp_path)
    assert [len(found) for found in notes] == [1, 1]
    names = [f"run_epoch_{place}.pth" for place in ("0_iter_2", "0_iter_4", "1_iter_6", "1_iter_8")]
    assert checkpoint_names(tmp_path) == ["run-2_epoch_1_iter_8.pth", *names]
    for name in names:
        reader.verify(tmp_path / name)


def write_shards(folder: Path) -> Weights:
    return train(Checkpoint(folder), sharding(), steps=2)[1]


def write_by_the_engines_word(folder: Path) -> list[list[str]]:
    names = []
    for engine, steps in ((sharding(), 2), (FSDPEngine(device="cpu"), 4)):
        train(Checkpoint(folder, resume="auto"), engine, steps=steps)
        names.append(sorted(path.suffix for path in folder.iterdir()))
    return names


def test_the_engine_says_whether_shards_are_written(ranks: Pool, tmp_path: Path) -> None:
    for each in ranks(2).run(write_by_the_engines_word, tmp_path):
        assert each == [[".last", ".pth", ".shards"], [".last", ".pth"]]


def resume_on_one_rank(folder: Path) -> tuple[Weights, tuple[str, ...]]:
    checkpoint = Checkpoint(folder / "alone", resume=folder / "run_epoch_0_iter_2.pth")
    result, weights, _ = train(checkpoint, sharding(), steps=2, batch_size=8)
    assert result.resume is not None
    return weights, result.resume.reasons


def test_another_number_of_ranks_takes_the_shards(ranks: Pool, tmp_path: Path) -> None:
    before = ranks(2).run(write_shards, tmp_path)[0]
    [(weights, reasons)] = ranks(1).run(resume_on_one_rank, tmp_path)
    assert equal(weights, before)
    assert "checkpoint, 1 resumed" in " ".join(reasons)


def load_back(folder: Path) -> tuple[Weights, Weights]:
    losses, best = iter((0.5, 0.1, 0.9)), list[Weights]()

    class Scripted(Supervised):
        def validation_step(self, run: Run, batch: Any) -> dict[str, float]:
            return {"loss": next(losses)}

    task = Scripted(make_task().model, nn.functional.mse_loss)
    savers = [Checkpoint(folder, keep_best=1, monitor="validation/loss"), LoadBest()]
    schedules = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))]
    trainer = Trainer([*schedules, *savers], engine=sharding())
    data = [(torch.full((4, 4), number), torch.ones(4, 2)) for number in (1.0, 2.0)]
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=0.1)
    result = trainer.fit(task, data, validation=data, optimizer=optimizer, epochs=3)
    assert result.best_checkpoint == folder / "run_epoch_2_iter_2.pth"
    read = make_task()
    load_weights(read, result.best_checkpoint)
    best.append({name: value.clone() for name, value in read.model.state_dict().items()})
    return best[0], {name: value.clone() for name, value in task.model.state_dict().items()}


def test_the_best_comes_back_from_shards(ranks: Pool, tmp_path: Path) -> None:
    for best, now in ranks(2).run(load_back, tmp_path):
        assert equal(best, now)


def lack_room(folder: Path, background: bool) -> tuple[str, str, Saved]:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    engine, saved, writes = sharding(), Saved(), 0
    real = FileSystemWriter.write_data

    def write(*arguments: Any) -> Any:
        nonlocal writes
        writes += 1
        if writes > 1:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if engine.rank == 1:
            patch.setattr(FileSystemWriter, "write_data", write)
        checkpoint = Checkpoint(folder, background=background)
        try:
            train(checkpoint, engine, epochs=20, saved=saved)
        except OSError as error:
            return type(error).__name__, str(error), saved
    return "", "", saved


@pytest.mark.parametrize("background", [False, True])
def test_shards_that_fail_on_one_rank_fail_the_save_on_all(ranks: Pool, tmp_path: Path, background: bool) -> None:
    main, other = ranks(2).run(lack_room, tmp_path, background)
    assert main == other
    kind, text, saved = main
    assert kind == "OSError"
    assert_facts(text, ".run.shards.tmp", "rank 1", "OSError: [Errno 28]")
    assert [name for _, name in saved] == ["run_epoch_0_iter_2.pth"]
    store = storage.Store(tmp_path, "run")
    store.open()
    entry, _, passed_over = store.newest()
    store.close()
    assert entry is not None
    assert (entry.path.name, passed_over) == ("run_epoch_0_iter_2.pth", [])
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.name[0] != ".") == [".last", ".pth", ".shards"]


def lose_a_peer(folder: Path) -> dict[str, Any]:
    """Rank 1 fails while the main rank is still writing its shards, which continues when that one knows of it."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    engine, saved, notes, pause = sharding(), Saved(), list[str](), threading.Event()
    real, abandon, beside = FileSystemWriter.write_data, engine.abandon, list[str]()

    def write(*arguments: Any) -> Any:
        while engine.is_main and engine.watch is not None and engine.watch.failure() is None:
            pause.wait(0.01)
        return real(*arguments)

    def leave() -> None:
        beside.extend(thread.name for thread in threading.enumerate() if "ThreadPool" in thread.name)
        abandon()

    class Failing(Plugin):
        @on(BatchEnd)
        def fail(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches == 4 and run.engine.rank == 1:
                raise ArithmeticError("on purpose")

        @on(RunClosed, lane=Lane.REPORT)
        def read(self, run: Any, event: RunClosed) -> None:
            notes.extend(run.report.notes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", write)
        patch.setattr(engine, "abandon", leave)
        error = ""
        try:
            train(Checkpoint(folder, background=True), engine, Failing(), saved=saved)
        except (ArithmeticError, RankFailed) as failure:
            error = type(failure).__name__
    return {"error": error, "saved": saved, "notes": notes, "beside": beside}


def test_shards_that_a_peer_left_unfinished_are_no_checkpoint(ranks: Pool, tmp_path: Path) -> None:
    main, other = ranks(2).run(lose_a_peer, tmp_path)
    assert (main["error"], other["error"]) == ("RankFailed", "ArithmeticError")
    for each in (main, other):
        assert each["saved"] == []
        assert each["beside"] == []  # no thread still uses the group that is left
        assert_each(each["notes"][:1], ("abandoned", "shards", "all ranks"))
    store = storage.Store(tmp_path, "run")
    notes = store.open()
    store.close()
    assert_each(notes, ("interrupted save", ".run.shards.tmp"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run.steps", ".run.steps.1"]


def interrupt(folder: Path, sharded: bool) -> tuple[str, Path | None, tuple[str, ...], Saved]:
    """Rank 1 is interrupted while a save is being written, which continues when all have raised that."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    gate = threading.Event()
    place: tuple[Any, str] = (FileSystemWriter, "write_data") if sharded else (storage.Store, "save")
    real = getattr(*place)

    def write(*arguments: Any, **options: Any) -> Any:
        gate.wait()
        return real(*arguments, **options)

    class Interrupted(Plugin):
        @on(BatchEnd)
        def interrupt(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches == 3 and run.engine.rank == 1:
                os.kill(os.getpid(), signal.SIGINT)

        @on(RunFailed)
        def go_on(self, run: Run, event: RunFailed) -> None:
            gate.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*place, write)
        checkpoint = Checkpoint(folder, background=True)
        engine = sharding() if sharded else FSDPEngine(device="cpu")
        saved = Saved()
        result, _, _ = train(checkpoint, engine, Interrupted(), saved=saved, on_interrupt="return")
    return result.status, result.last_checkpoint, result.notes, saved


@pytest.mark.parametrize("sharded", [False, True])
def test_a_save_is_finished_together_after_an_interrupt(ranks: Pool, tmp_path: Path, sharded: bool) -> None:
    path = tmp_path / "run_epoch_0_iter_2.pth"
    resume = (
        f"the newest checkpoint is {path}, of step 2, 2 steps are lost; to resume it, "
        f"Checkpoint('{tmp_path}', resume='{path}')"
    )
    assert ranks(2).run(interrupt, tmp_path, sharded) == [
        ("interrupted", path, notes, [(4, path.name)]) for notes in ((resume,), ())
    ]
    assert bool(reader.verify(path).shards) == sharded


def test_a_state_without_its_file_has_no_shards(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(write_shards, tmp_path)
    path = tmp_path / "run_epoch_0_iter_2.pth"
    with pytest.raises(ValueError, match="weights of the state"):
        join_shards(reader.load(path), None)
    (shards_path(storage.read_manifest(path)) / "__1_0.distcp").write_bytes(b"")
    with pytest.raises(ValueError, match="read: rank 0:"):
        join_shards(reader.read(path), path)


class Evil:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def forge_index(path: Path, change: Callable[[Metadata], Any]) -> Path:
    """Change the index of shards of a checkpoint, with a manifest in which everything is right; return its path."""
    entry = storage.read_manifest(path)
    assert entry.shards is not None
    index, digests = shards_path(entry) / ".metadata", shards_path(entry) / "digests.json"
    index.write_bytes(pickle.dumps(change(pickle.loads(index.read_bytes()))))
    shards = {file.name: digest_of(file) for file in index.parent.iterdir() if file != digests}
    digests.write_text(json.dumps(shards))
    seal_as(path, replace(entry, shards=(entry.shards[0], digest_of(digests)[1])))
    return index


def test_no_code_in_the_index_of_shards_runs(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(write_shards, tmp_path)
    path, mark = tmp_path / "run_epoch_0_iter_2.pth", tmp_path / "it ran"

    def spoil(index: Metadata) -> Metadata:
        index.planner_data = Evil(mark)
        return index

    forge_index(path, spoil)
    trainer = Trainer(device="cpu")
    data = TensorDataset(torch.zeros(2, 4), torch.zeros(2, 2))
    for refuse in (
        lambda: load_weights(make_task(), path),
        lambda: load_weights(make_task(), tmp_path),
        lambda: trainer.test(make_task(), DataLoader(data), weights=path),
        lambda: reader.load(path),
        lambda: join_shards(reader.read(path), path),
        lambda: train(Checkpoint(tmp_path / "other", resume=path), DeviceEngine(device="cpu")),
    ):
        with pytest.raises(ValueError, match=r"pathlib\.Path\.touch"):
            refuse()
    result, _, _ = train(Checkpoint(tmp_path, resume="auto"), DeviceEngine(device="cpu"), steps=1)
    assert any("pathlib.Path.touch" in note for note in result.notes)
    assert not mark.exists()


def test_what_the_index_of_shards_says_is_checked(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(write_shards, tmp_path)
    path = tmp_path / "run_epoch_0_iter_2.pth"
    reader.verify(path)

    def as_bytes(index: Metadata) -> Metadata:  # torch would unpickle what is in the shards
        index.state_dict_metadata = dict.fromkeys(index.state_dict_metadata, BytesStorageMetadata())
        return index

    def elsewhere(index: Metadata) -> Metadata:
        for info in index.storage_data.values():
            info.relative_path = "../other.distcp"
        return index

    index = shards_path(storage.read_manifest(path)) / ".metadata"
    content = index.read_bytes()
    for change, says in ((as_bytes, "BytesStorageMetadata"), (elsewhere, "other.distcp"), (vars, "a dict")):
        forge_index(path, change)
        with pytest.raises(ValueError, match=says):
            load_weights(make_task(), path)
        index.write_bytes(content)
    forge_index(path, lambda index: index)
    load_weights(make_task(), path)
