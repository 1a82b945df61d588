"""Batches on their way to a device: whatever they are made of. The device `meta` is always there to move to."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from heliograph import DeviceEngine
from heliograph.core.engines import movers
from heliograph.core.engines.movers import LARGE, move, register_mover, uses_copy_stream
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

META = torch.device("meta")


class Pair(NamedTuple):
    inputs: Tensor
    name: str


class Edge(NamedTuple):
    origin: Tensor
    to: Tensor  # is not a method


class Words(list[Any]):
    pass


class Fixed(Mapping[str, Any]):
    """A mapping that nothing can be put into."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        self._held = held

    def __getitem__(self, key: str) -> Any:
        return self._held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


@dataclass
class Sample:
    inputs: Tensor
    rest: dict[str, Any]
    length: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.length = self.rest["length"] + 1


@dataclass(frozen=True, slots=True)
class Frozen:
    inputs: Tensor
    name: str


class Own:
    """Knows how to move itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> Own:
        return Own(self.tensor.to(device))


class Graph:
    """Knows nothing of devices."""

    def __init__(self, nodes: Any, name: str) -> None:
        self.nodes, self.name = nodes, name


def on_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device == META


def tensor() -> Tensor:
    return torch.ones(2)


def test_tensors_and_plain_containers_of_them() -> None:
    source = (tensor(), [tensor(), {"deep": (tensor(), "word")}], None, 3)
    first, (second, inner), nothing, number = move(source, META)
    assert all(map(on_meta, (first, second, inner["deep"][0])))
    assert (inner["deep"][1], nothing, number) == ("word", None, 3)
    assert [type(each) for each in (move(source, META), move([], META), move({}, META))] == [tuple, list, dict]
    assert source[0].device.type == "cpu"


def test_parameters_and_empty_containers() -> None:
    assert on_meta(move(nn.Parameter(tensor()), META))
    assert move(((), [], {}), META) == ((), [], {})


def test_named_tuples() -> None:
    moved = move(Pair(tensor(), "name"), META)
    assert type(moved) is Pair
    assert on_meta(moved.inputs)
    assert moved.name == "name"
    assert on_meta(move(Edge(tensor(), tensor()), META).to)


def test_subclasses_of_containers_keep_what_they_know() -> None:
    words = move(Words([tensor()]), META)
    assert (type(words), on_meta(words[0])) == (Words, True)
    lists: defaultdict[str, Any] = defaultdict(list, inputs=tensor())
    moved = move(lists, META)
    assert (type(moved), on_meta(moved["inputs"]), moved["other"]) == (defaultdict, True, [])
    ordered = move(OrderedDict(b=tensor(), a=1), META)
    assert (type(ordered), list(ordered)) == (OrderedDict, ["b", "a"])
    user = UserDict(inputs=tensor())
    assert (type(move(user, META)), on_meta(move(user, META)["inputs"])) == (UserDict, True)
    assert not on_meta(lists["inputs"])
    assert not on_meta(user["inputs"])


@pytest.mark.parametrize("kind", [Fixed, MappingProxyType])
def test_other_mappings_are_made_again(kind: Any) -> None:
    moved = move(kind({"inputs": tensor(), "name": "x"}), META)
    assert type(moved) is kind
    assert (on_meta(moved["inputs"]), moved["name"]) == (True, "x")


def test_dataclasses() -> None:
    sample = Sample(tensor(), {"targets": tensor(), "length": 4})
    sample.length = 7  # no second __init__ takes it back
    moved = move(sample, META)
    assert (type(moved), moved.length) == (Sample, 7)
    assert on_meta(moved.inputs)
    assert on_meta(moved.rest["targets"])
    assert not on_meta(sample.inputs)
    frozen = move(Frozen(tensor(), "name"), META)
    assert (type(frozen), on_meta(frozen.inputs), frozen.name) == (Frozen, True, "name")
    assert move(Sample, META) is Sample


def test_packed_sequences_keep_their_lengths_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False)
    moved = move(packed, META)
    assert isinstance(moved, PackedSequence)
    assert moved.sorted_indices is not None
    assert moved.unsorted_indices is not None
    assert all(map(on_meta, (moved.data, moved.sorted_indices, moved.unsorted_indices)))
    assert moved.batch_sizes.tolist() == [2, 2, 1, 1]
    assert move(pack_sequence([torch.ones(2, 3)]), META).sorted_indices is None


def test_what_can_move_itself_does() -> None:
    assert on_meta(move({"own": Own(tensor())}, META)["own"].tensor)


def test_what_nobody_taught_stays_as_it_is() -> None:
    graph = Graph(tensor(), "g")
    assert move(graph, META) is graph
    assert move("word", META) == "word"
    assert move(Own, META) is Own


def test_a_type_of_ones_own_is_taught_with_its_subclasses() -> None:
    class Tree(Graph):
        pass

    class Leaf(Tree):
        pass

    register_mover(Tree, lambda tree, move: type(tree)(move(tree.nodes), tree.name))
    moved = move([Tree((tensor(), 1), "t"), Leaf(tensor(), "l")], META)
    assert [type(each) for each in moved] == [Tree, Leaf]
    assert on_meta(moved[0].nodes[0])
    assert on_meta(moved[1].nodes)
    register_mover(Leaf, lambda leaf, move: "moved again")
    assert move(Leaf(tensor(), "l"), META) == "moved again"


@pytest.mark.parametrize("kind", [Tensor, list, tuple, dict, object])
def test_what_is_always_moved_alike_cannot_be_taught(kind: type) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} has a fixed"):
        register_mover(kind, lambda value, move: value)


def test_an_engine_moves_batches_to_its_device() -> None:
    engine = DeviceEngine("meta")
    assert on_meta(engine.move({"inputs": tensor()})["inputs"])
    assert [on_meta(batch[0]) for batch in engine.feed(iter([(tensor(), 1), (tensor(), 2)]))] == [True, True]


# Beside the computation of a GPU.


@contextmanager
def noted(seen: list[str], what: str) -> Iterator[None]:
    seen.append(f"{what} {{")
    yield
    seen.append("}")


class Stream:
    """Stands for a stream of a GPU, and writes down what is done with it."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def wait_stream(self, other: Stream) -> None:
        self.seen.append(f"{self.name} waits for {other.name}")


def test_a_copy_aside_is_waited_for_by_the_computation_which_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copies", seen))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("computation", seen))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: noted(seen, stream.name))
    monkeypatch.setattr(Tensor, "record_stream", lambda moved, stream: seen.append(f"{moved.device} for {stream.name}"))
    moved = movers.CopyStream(META).copy(Noting.of(tensor(), seen))
    assert on_meta(moved)
    assert seen == ["copies {", "copy", "}", "computation waits for copies", "meta for computation"]


class Noting(Tensor):
    """Writes down that it is copied."""

    seen: list[str]

    @classmethod
    def of(cls, values: Tensor, seen: list[str]) -> Noting:
        made = values.as_subclass(cls)
        made.seen = seen
        return made

    def to(self, *args: Any, **options: Any) -> Tensor:
        assert options == {"non_blocking": True}
        self.seen.append("copy")
        return self.as_subclass(Tensor).to(*args, **options)


def test_only_large_tensors_of_the_host_go_to_a_gpu_aside() -> None:
    gpu, large = torch.device("cuda", 0), torch.empty(LARGE, dtype=torch.uint8)
    assert uses_copy_stream(large, gpu)
    assert not uses_copy_stream(large[1:], gpu)
    assert not uses_copy_stream(large, torch.device("cpu"))
    assert not uses_copy_stream(large, META)
    assert not uses_copy_stream(torch.empty(LARGE, device="meta"), gpu)
    assert not uses_copy_stream(torch.eye(3).to_sparse(), gpu)


def test_large_tensors_within_a_batch_go_aside_and_the_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    went: list[tuple[int, int]] = []

    class Copies:
        def __init__(self, index: int) -> None:
            self.index = index

        def copy(self, moved: Tensor) -> Tensor:
            went.append((self.index, moved.nbytes))
            return moved.to(META)

    monkeypatch.setattr(movers, "copy_stream", Copies)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    large = torch.empty(LARGE, dtype=torch.uint8)
    moved = move({"images": large, "names": ("a", large)}, torch.device("cuda", 2))
    assert (on_meta(moved["images"]), moved["names"][0], on_meta(moved["names"][1])) == (True, "a", True)
    move(large, torch.device("cuda"))
    assert went == [(2, LARGE), (2, LARGE), (5, LARGE)]
