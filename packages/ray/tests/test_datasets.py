"""Ray datasets as loaders, without a cluster: distribution, batches, materialized rows, errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import heliograph as h
import numpy as np
import pytest
import ray
import torch
from heliograph.core.data.dataloader import MapSource
from heliograph.core.data.loaders import LoaderParams, training_loaders
from heliograph.core.data.sizes import Share
from heliograph.core.data.source import Reading
from heliograph.core.data.source_choice import source_of
from heliograph.packages.tests.facts import assert_each
from heliograph_ray.data import loaders
from heliograph_ray.data import stream as streaming
from heliograph_ray.data.loaders import RayRows, make_loader
from heliograph_ray.data.stream import (
    DatasetPass,
    RayStream,
    RowDistributor,
    digest,
    make_batcher,
    start_shared_distributor,
    warn_if_full,
)
from heliograph_ray.launcher.failures import is_secondary
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ray.exceptions import RayActorError, RayError, WorkerCrashedError
from torch.utils.data import DataLoader, TensorDataset

ARROW: Any = import_module("pyarrow")  # without types


class Executor:
    """Records whether it was shut down."""

    is_shut_down = False

    def shutdown(self, *, force: bool) -> None:
        self.is_shut_down = force


class Executed:
    """A fake Ray dataset: blocks of numbered rows."""

    def __init__(self, *rows: int) -> None:
        self.context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False), _execution_idx=0)
        self._logical_plan = SimpleNamespace(dag=SimpleNamespace(post_order_iter=list))
        self.blocks = [
            ARROW.table({"id": range(end - size, end)}) for size, end in zip(rows, accumulate(rows), strict=True)
        ]
        self.executors: list[Executor] = []

    def iterator(self) -> Executed:
        return self

    def _to_ref_bundle_iterator(self) -> tuple[Iterator[Any], None, Executor]:
        self.executors.append(Executor())
        return self.iter_internal_ref_bundles(), None, self.executors[-1]

    def iter_internal_ref_bundles(self) -> Iterator[Any]:
        for block in self.blocks:
            entry = SimpleNamespace(ref=block, metadata=SimpleNamespace(num_rows=len(block)))
            yield SimpleNamespace(blocks=[entry])


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda references: references)
    for module in (streaming, loaders):
        monkeypatch.setattr(module, "copy_dataset", lambda dataset: dataset)


def nothing(done: int, batches: int) -> None:
    """Ignore the progress of a replay."""


def reading(batch: int = 0, epoch: int = 0) -> Reading:
    return Reading(seed=1, epoch=epoch, batch=batch, isolated=True, report=nothing)


def stream(dataset: Executed, batch_size: int, *, drop_last: bool = False, **options: Any) -> RayStream:
    return RayStream(dataset, batch_size, drop_last=drop_last, **{"columns": None, "collate_fn": None} | options)


def read_on(rank: int, ranks: int, loader: RayStream, position: int = 0, epoch: int = 0) -> list[Any]:
    """Return the batches of a rank, whose requests go to a distributor in this process."""

    def start(dataset: Any, engine: Any) -> Any:
        made = RowDistributor(dataset, 1)
        methods = {"read_piece": made.read_piece, "digest_first_row": made.digest_first_row}
        return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})

    engine: Any = SimpleNamespace(is_main=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "start_shared_distributor", start)
        source = source_of(loader, Share(rank, ranks), engine=engine)
        return list(source.open(reading(position, epoch)))


def ids(batches: Iterable[Any]) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sizes=SIZES, batch_size=st.integers(1, 5), ranks=st.integers(1, 4), drop_last=st.booleans(), data=st.data())
def test_a_stream_is_distributed_as_a_map_style_dataset_is(
    sizes: list[int], batch_size: int, ranks: int, *, drop_last: bool, data: st.DataObject
) -> None:
    """From any position on; the blocks that the rows came in show nowhere."""
    rows = sum(sizes)
    assume(drop_last or rows >= ranks)  # a map-style dataset of fewer samples than ranks is another matter
    orders: list[list[list[int]]] = [[]] * ranks
    if not drop_last or rows // ranks >= batch_size:
        loader = DataLoader(TensorDataset(torch.arange(rows)), batch_size, drop_last=drop_last)
        sources = [source_of(loader, Share(rank, ranks)) for rank in range(ranks)]
        orders = [[numbers.tolist() for (numbers,) in source.open(reading())] for source in sources]
    streams = [stream(Executed(*sizes), batch_size, drop_last=drop_last) for _ in range(ranks)]
    position = data.draw(st.integers(0, len(orders[0])))

    def read(position: int, epoch: int) -> list[list[list[int]]]:
        """Return whole batches only."""
        found = [ids(read_on(rank, ranks, own, position, epoch)) for rank, own in enumerate(streams)]
        return [batches[: min(map(len, found))] for batches in found]

    assert read(0, epoch=0) == orders
    assert read(position, epoch=1) == [order[position:] for order in orders]


def test_fewer_rows_than_ranks_are_read_again() -> None:
    assert [ids(read_on(rank, 5, stream(Executed(2), 4))) for rank in range(5)] == [[[0]], [[1]], [[0]], [[1]], [[0]]]


def test_an_evaluation_distributes_whole_batches() -> None:
    order = DatasetPass(0, 0, 0, 0, 3, 2, fills_up=False)
    assert [part.tolist() for part in order.parts(first=3, rows=8)] == [[3, 4], [0, 5, 6], [1, 2, 7]]
    assert [part.tolist() for part in order.parts(first=0, rows=1)] == [[0], [], []]


def test_an_abandoned_execution_is_shut_down() -> None:
    dataset = Executed(4, 4, 4)
    source = source_of(stream(dataset, 2))
    assert dataset.context.execution_options.preserve_order is False
    first = source.open(reading(epoch=3))
    next(first)
    assert dataset.context.execution_options.preserve_order is True
    assert dataset.context._execution_idx == 3
    assert [executor.is_shut_down for executor in dataset.executors] == [False]

    next(source.open(reading(epoch=4)))
    assert [executor.is_shut_down for executor in dataset.executors] == [True, False]
    assert len(list(first)) == 1, "what was there already"

    source.close()
    assert [executor.is_shut_down for executor in dataset.executors] == [True, True]


def test_a_dataset_that_has_shrunk_is_refused() -> None:
    source = source_of(stream(Executed(5), 2))
    assert list(source.open(reading(batch=3))) == []
    with pytest.raises(ValueError, match="5 rows, but 8"):
        source.open(reading(batch=4))


def test_an_execution_that_failed_is_not_at_its_end() -> None:
    """Requests overtake one another, so a piece may be requested after a later one has failed."""
    dataset = Executed(2, 2)
    dataset.blocks[1:] = [None]
    distributor, order = RowDistributor(dataset, 1), DatasetPass(1, 0, 0, 0, 1, 1, fills_up=True)
    assert distributor.read_piece(order, 0, 0) is not None
    for number in (2, 1):
        with pytest.raises(TypeError, match="NoneType"):
            distributor.read_piece(order, number, 0)
    assert distributor.read_piece(replace(order, number=2), 0, 0) is not None


@pytest.mark.parametrize(
    ("error", "is_lost"), [(RayActorError(error_msg="the node died"), True), (WorkerCrashedError(), False)]
)
def test_a_process_loss_in_an_execution_is_a_secondary_error(
    error: RayError, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(reference: Any) -> Any:
        raise error

    monkeypatch.setattr(ray, "get", lose)
    with pytest.raises(RayActorError if is_lost else RuntimeError) as caught:
        list(source_of(stream(Executed(4), 2)).open(reading()))
    assert is_secondary(caught.value) == is_lost
    assert is_lost or "Ray dataset could not" in str(caught.value)


def test_a_resume_compares_the_first_row_of_the_epoch() -> None:
    def resumed(before: Executed, again: Executed) -> tuple[str, dict[str, Any]]:
        first, second = source_of(stream(before, 2)), source_of(stream(again, 2))
        next(first.open(reading()))
        second.load_state_dict(first.state_dict(1))
        list(second.open(reading(batch=1)))
        third = source_of(stream(again, 2))
        third.load_state_dict(second.state_dict(1))
        assert third.certainty() == second.certainty()
        return second.certainty()[0], second.state_dict(0)

    reversed_ = Executed(6)
    reversed_.blocks = [ARROW.table({"id": range(5, -1, -1)})]
    assert resumed(Executed(6), Executed(2, 4)) == ("replayed", {"head": None, "has_changed": False})
    assert resumed(Executed(6), reversed_) == ("unknown", {"head": None, "has_changed": True})


def test_the_progress_of_a_replay_is_reported() -> None:
    calls: list[tuple[int, int]] = []
    source = source_of(stream(Executed(6), 2))
    list(source.open(Reading(1, 0, 2, True, lambda done, batches: calls.append((done, batches)))))
    assert calls == [(0, 2), (2, 2)]


def test_an_epoch_that_other_ranks_have_ended_is_not_read() -> None:
    dataset = Executed(6)
    assert list(source_of(stream(dataset, 2)).open(Reading(1, 0, 2, True, nothing, is_over=True))) == []
    assert dataset.executors == []


def test_what_a_collate_function_draws_is_keyed_by_batch_and_rank() -> None:
    def drawing(columns: dict[str, Any]) -> tuple[list[int], float]:
        return columns["id"].tolist(), float(torch.rand(()))

    whole = [read_on(rank, 2, stream(Executed(5, 7), 2, collate_fn=drawing)) for rank in range(2)]
    state = torch.get_rng_state().tolist()
    rest = [read_on(rank, 2, stream(Executed(12), 2, collate_fn=drawing), position=1) for rank in range(2)]

    assert rest == [batches[1:] for batches in whole]
    assert len({draw for batches in whole for _, draw in batches}) == 6
    assert torch.get_rng_state().tolist() == state


def rows_of(*sizes: int, names: list[str] | None = None) -> RayRows:
    return RayRows(Executed(*sizes), names, None)


def test_materialized_rows_are_a_map_style_dataset() -> None:
    rows = rows_of(3, 0, 4, 1)
    assert len(rows) == 8
    assert rows.__getitems__([6, 0, 3, 6])["id"].tolist() == [6, 0, 3, 6]
    assert rows.__getitems__([1, 2])["id"].tolist() == [1, 2]
    assert len(rows_of(0)) == 0


def test_blocks_do_not_change_the_digest_of_rows() -> None:
    assert rows_of(3, 5).facts == rows_of(8).facts
    assert rows_of(9).facts != rows_of(8).facts


def test_a_shuffle_of_materialized_rows_starts_at_any_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.data.dataset.MaterializedDataset", Executed)

    def source(**options: Any) -> MapSource:
        params = LoaderParams(batch_size=3, shuffle=True)
        found = source_of(make_loader(Executed(5, 9), {**params, **options}, "train"))
        assert isinstance(found, MapSource)
        return found

    whole = ids(source().open(reading()))
    assert sorted(each for batch in whole for each in batch) == list(range(14))
    assert ids(source().open(reading(2))) == whole[2:]
    assert source().certainty() == ("seeked", ())
    assert source().kind["digest"] == rows_of(14).facts["digest"]
    probed = source()
    list(probed.open(replace(reading(), probes=True)))
    assert probed.hidden() == []
    [batch, *_] = source(columns=("id", "id"), drop_last=True).open(reading())
    assert [part.tolist() for part in batch] == [whole[0], whole[0]]


def test_columns_become_tensors() -> None:
    columns = {"x": np.ones((2, 3), np.float32), "y": np.array([True, False])}
    assert make_batcher(None, None)(columns)["x"].dtype is torch.float32
    assert [part.shape for part in make_batcher(["y", "x"], None)(columns)] == [(2,), (2, 3)]

    columns["x"].flags.writeable = False
    make_batcher(None, None)(columns)["x"].add_(1)
    assert columns["x"].max() == 1


def test_a_dtype_that_no_tensor_has_is_refused() -> None:
    with pytest.raises(TypeError, match="'name' of the Ray"):
        make_batcher(None, None)({"name": np.array(["a", None], dtype=object)})
    assert make_batcher(None, lambda columns: list(columns))({"name": np.array(["a"], dtype=object)}) == ["name"]


def test_objects_have_a_digest_too() -> None:
    one, other = ({"name": np.array([name, None], dtype=object)} for name in ("a", "b"))
    assert digest(one) == digest(dict(one)) != digest(other)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"num_workers": 2}, r"loader_params\['num_workers'\] is not supported"),
        ({"pin_memory": True}, "Ray prefetches it"),
        ({"shuffle": True}, "shuffle with Ray"),
        ({"sampler": [1]}, "shuffle with Ray"),
        ({"batch_size": 0}, "least 1; got 0"),
        ({"batch_size": None}, "least 1; got None"),
        ({"columns": "x"}, r"'label'\), got 'x'"),
        ({"draws_per": "sample"}, "only its collate_fn draws"),
    ],
)
def test_parameters_that_are_not_for_ray_datasets_are_refused(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_loader(Executed(4), params, "train")


def test_a_loader_needs_a_batch_size() -> None:
    with pytest.raises(TypeError, match=r"Ray dataset.*loader_params="):
        make_loader(Executed(4), None, "train")


def test_unknown_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="'label'; the Ray dataset"):
        rows_of(3, names=["label"])


def test_columns_are_for_ray_datasets_only() -> None:
    with pytest.raises(ValueError, match="is for Ray datasets"):
        training_loaders(TensorDataset(torch.ones(2)), {"columns": ["x"]})


def test_a_stream_is_iterable() -> None:
    assert ids(iter(stream(Executed(3, 2), 2))) == [[0, 1], [2, 3], [4]]


def test_a_rank_must_be_connected_to_ray() -> None:
    with pytest.raises(RuntimeError, match="not connected to Ray"):
        start_shared_distributor(Executed(4), h.DeviceEngine("cpu"))


@pytest.mark.parametrize("free", [{}, {"CPU": 0.0}, {"CPU": 1.0}])
def test_a_cluster_without_a_free_cpu_causes_a_warning(
    free: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray, "available_resources", lambda: free)
    warn_if_full()
    assert_each(caplog.messages, *([] if free.get("CPU") else [("No CPU", "Ray cluster")]))


def test_the_main_rank_kills_the_shared_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(streaming, "start_shared_distributor", lambda dataset, engine: f"of {engine.rank}")
    for rank in range(2):
        engine: Any = SimpleNamespace(is_main=rank == 0, rank=rank)
        source = stream(Executed(8), 2).source(Share(rank, 2), engine, fills_up=True)
        source.close()
        source._connect()
        source.close()
        source.close()
    assert killed == ["of 0"]
