"""Ray datasets as loaders: in the same order for any number of ranks, and from any position."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from time import sleep
from typing import Any

import pytest
import torch
from heliograph.core.data.loaders import training_loaders
from heliograph.core.data.source import Reading, Source
from heliograph.core.data.source_choice import source_of
from heliograph.packages.ray.tests.on_ray.dataset_runs import (
    BATCH_SIZE,
    COLUMNS,
    RANKS,
    ROWS,
    Batch,
    Trained,
    features,
    in_memory,
    train,
)
from heliograph_ray import RayLauncher
from heliograph_ray.data.stream import find_unseeded

pytestmark = pytest.mark.usefixtures("local_ray")
DATA: Any = import_module("ray.data")


def jumbled(ids: Batch) -> Batch:
    """Take different times, so that later blocks are ready before earlier ones."""
    sleep(Random(int(ids["id"][0])).random() / 10)
    return features(ids)


def numbered(rows: int = ROWS) -> Any:
    return DATA.range(rows, override_num_blocks=8)


def stream() -> Any:
    return numbered().map_batches(jumbled)


def source(dataset: Any) -> Source:
    return source_of(training_loaders(dataset, {"batch_size": BATCH_SIZE})[0])


def read_ids(dataset: Any, epoch: int) -> list[int]:
    def nothing(done: int, batches: int) -> None:
        """Do nothing: no batches are read again."""

    batches = source(dataset).open(Reading(1, epoch, 0, True, nothing))
    return [number for batch in batches for number in batch["id"].tolist()]


def resumed(dataset: Any, folder: Path, **params: Any) -> Trained:
    """Train in this process, with a resume within an epoch."""
    first = train(dataset, folder, steps=6, **params)
    second = train(dataset, folder, **params)
    return Trained(first.batches + second.batches, second.weight, second.metrics, second.position, second.reasons)


@pytest.mark.timeout(90)
def test_a_dataset_is_resumed_in_the_order_of_its_rows(tmp_path: Path) -> None:
    expected = train(in_memory(), tmp_path / "memory")
    streamed = resumed(stream(), tmp_path / "stream", columns=COLUMNS)
    kept = resumed(stream().materialize(), tmp_path / "kept", columns=COLUMNS)

    for each in (streamed, kept):
        assert (each.batches, each.weight, each.metrics) == (expected.batches, expected.weight, expected.metrics)
    assert (streamed.position, streamed.reasons) == ("replayed", ())
    assert (kept.position, kept.reasons) == ("seeked", ())


@pytest.mark.whole
@pytest.mark.timeout(60)
def test_a_shuffled_dataset_is_resumed_in_the_order_of_one_in_memory(tmp_path: Path) -> None:
    shuffled = resumed(stream().materialize(), tmp_path / "shuffled", columns=COLUMNS, shuffle=True)
    alike = train(in_memory(), tmp_path / "alike", shuffle=True)
    assert (shuffled.batches, shuffled.weight) == (alike.batches, alike.weight)


@pytest.mark.whole
@pytest.mark.timeout(120)
def test_workers_read_it_in_the_same_order(tmp_path: Path) -> None:
    """Two workers stop within an epoch, and one process continues; both together equal a dataset in memory."""
    expected = train(in_memory(), tmp_path / "memory")
    launcher = RayLauncher(RANKS, storage_path=tmp_path / "storage", check_interval=0.2)
    workers = launcher.run(train, stream(), tmp_path / "stream", steps=6, columns=COLUMNS)
    rest = train(stream(), tmp_path / "stream", columns=COLUMNS)

    rounds = list(zip(*(each.batches for each in workers), strict=True))
    together = [[row for rows in zip(*batches, strict=True) for row in rows] for batches in rounds]
    assert together + rest.batches == expected.batches
    assert rest.weight == pytest.approx(expected.weight)
    assert rest.metrics == pytest.approx(expected.metrics)
    assert {each.position for each in workers} == {"replayed"}


@pytest.mark.timeout(60)
def test_the_seed_of_a_shuffle_depends_on_the_epoch() -> None:
    reseeding = numbered().random_shuffle(seed=DATA.RandomSeedConfig(3))
    orders = [read_ids(reseeding, epoch) for epoch in range(2)]
    assert orders[0] != orders[1]
    assert read_ids(numbered().random_shuffle(seed=DATA.RandomSeedConfig(3)), 1) == orders[1], "as in new processes"
    assert [sorted(each) for each in orders] == [list(range(ROWS))] * 2
    assert source(reseeding).certainty()[0] == "replayed"


@pytest.mark.timeout(60)
def test_a_changed_order_is_detected(tmp_path: Path) -> None:
    """A shuffle depends on the number of blocks, which may be another on a larger cluster."""
    for blocks, steps, position in ((8, 3, "replayed"), (8, 6, "replayed"), (5, 7, "unknown")):
        rows = DATA.range(ROWS, override_num_blocks=blocks).random_shuffle(seed=1).map_batches(features)
        assert train(rows, tmp_path, steps=steps, columns=COLUMNS).position == position


@pytest.mark.timeout(60)
@pytest.mark.parametrize("operation", ["random_shuffle", "randomize_block_order", "random_sample"])
def test_an_operation_without_a_seed_is_listed(operation: str) -> None:
    arguments = [0.5] if operation == "random_sample" else []
    position, (reason,) = source(getattr(numbered(), operation)(*arguments)).certainty()
    assert position == "unknown"
    assert "dataset has no seed" in reason


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_shuffled_files_without_a_seed_are_found(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n", encoding="utf-8")
    numbered(4).write_parquet(str(tmp_path / "parquet"))
    read, path = getattr(DATA, f"read_{kind}"), tmp_path if kind == "text" else tmp_path / "parquet"
    for shuffle in ("files", DATA.FileShuffleConfig()):
        assert find_unseeded(read(str(path), shuffle=shuffle)) in ("ReadText", "ListFiles")
    assert find_unseeded(read(str(path), shuffle=DATA.FileShuffleConfig(seed=1)).map(dict)) is None


@pytest.mark.timeout(60)
def test_other_rows_are_refused_within_an_epoch(tmp_path: Path) -> None:
    train(numbered().map_batches(features).materialize(), tmp_path, steps=3, columns=COLUMNS)
    others = numbered().map_batches(lambda ids: features({"id": ids["id"][::-1]})).materialize()
    with pytest.raises(ValueError, match=r"different data .*digest"):
        train(others, tmp_path, columns=COLUMNS)


@pytest.mark.timeout(60)
def test_a_batch_is_a_dict_without_named_columns() -> None:
    [batch, *_] = source(numbered().map_batches(features)).open(Reading(1, 0, 0, False, lambda done, batches: None))
    assert {name: tuple(values.shape) for name, values in batch.items()} == {"x": (4, 1), "y": (4, 1)}
    assert batch["x"].dtype is torch.float32


@pytest.mark.timeout(60)
@pytest.mark.parametrize("on_workers", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_errors_of_its_functions_are_raised(tmp_path: Path, *, on_workers: bool) -> None:
    def failing(ids: Batch) -> Batch:
        raise LookupError(f"no row {ids['id'][0]}")

    rows = numbered().map_batches(failing)
    launcher = RayLauncher(RANKS, storage_path=tmp_path / "storage", check_interval=0.2)
    call = partial(launcher.run, train) if on_workers else train
    with pytest.raises(RuntimeError, match=r"executed: [^$]*no row 0"):
        call(rows, tmp_path, columns=COLUMNS)
