"""Reading: what is wrong with a file is said, and nothing in it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import Supervised
from heliograph.core import storage
from heliograph.core.state import SCHEMA
from heliograph.core.storage import Entry
from heliograph.core.storage.manifest import encode
from torch import nn

Make = Callable[..., Any]
ADVICE = r"no manifest a\.json, so nothing tells whether it is whole.*python -m heliograph checkpoint migrate .*a\.pth`"


class Evil:
    """What runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def forge(path: Path, content: Any, **more: Any) -> Entry:
    """Write anything, with a manifest in which everything is right."""
    torch.save(content, path)
    data = path.read_bytes()
    entry = Entry(path, "run", 99, 0.0, len(data), sha256(data).hexdigest(), **more)
    path.with_suffix(".json").write_bytes(encode(entry))
    return entry


def test_a_file_without_a_manifest(tmp_path: Path, opened: Make, state: Make) -> None:
    opened().save("a.pth", state(3))
    (tmp_path / "a.json").unlink()
    for read in (storage.load, storage.verify, storage.read_manifest):
        with pytest.raises(ValueError, match=ADVICE):
            read(tmp_path / "a.pth")

    assert storage.load(tmp_path / "a.pth", verify=False)["progress"]["steps"] == 3


def test_a_manifest_without_its_file(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    store.save("a.pth", state())
    (tmp_path / "a.pth").unlink()
    for read in (storage.load, storage.verify):
        with pytest.raises(FileNotFoundError, match=r"There is no checkpoint .*a\.pth"):
            read(tmp_path / "a.pth")

    assert storage.read_manifest(tmp_path / "a.json").sequence == 1
    assert store.newest()[:2] == (None, None)
    assert store.entries() == ([], [f"The checkpoint {tmp_path / 'a.pth'} is gone: only its manifest a.json is left."])


def test_a_missing_file_lists_its_siblings(tmp_path: Path, opened: Make, state: Make) -> None:
    opened().save("run_epoch_1_iter_2.pth", state())
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'run_epoch_1_iter_2.pth'\? Known: run_epoch_1"):
        storage.load(tmp_path / "run_epoch_1_iter_3.pth")
    with pytest.raises(FileNotFoundError, match=r"Known: none"):
        storage.load(tmp_path / "nowhere" / "run.pth")
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint"):
        storage.read_manifest(tmp_path / "b.json")


@pytest.mark.parametrize("name", ["a.json", "run.last"])
def test_a_path_to_something_else(tmp_path: Path, opened: Make, state: Make, name: str) -> None:
    store = opened()
    store.point("last", store.save("a.pth", state()).path)
    with pytest.raises(ValueError, match=r"is no checkpoint: .* ends in \.pth"):
        storage.load(tmp_path / name)


def test_a_pair_may_be_renamed(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    store.save("a.pth", state(4))
    for suffix in (".pth", ".json"):
        (tmp_path / f"a{suffix}").rename(tmp_path / f"best{suffix}")

    assert storage.load(tmp_path / "best.pth")["progress"]["steps"] == 4
    assert store.newest()[0].path == tmp_path / "best.pth"
    assert store.newest()[2] == []


def test_another_size_or_content_is_told_before_anything_is_unpickled(
    tmp_path: Path, opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened().save("a.pth", state())
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("it was unpickled"))
    content = (tmp_path / "a.pth").read_bytes()
    (tmp_path / "a.pth").write_bytes(content + b"\0")
    with pytest.raises(
        ValueError, match=rf"damaged: it has {len(content) + 1} bytes, its manifest tells {len(content)}"
    ):
        storage.load(tmp_path / "a.pth")
    (tmp_path / "a.pth").write_bytes(content[:-1] + b"\1")
    with pytest.raises(ValueError, match=r"a\.pth is damaged: its SHA-256 is not the one in its manifest"):
        storage.load(tmp_path / "a.pth")


def test_a_malicious_pickle_with_a_forged_manifest_is_refused(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    good = store.save("good.pth", state(1))
    forge(tmp_path / "evil.pth", state(99, evil=Evil(tmp_path / "it ran")))
    storage.verify(tmp_path / "evil.pth")
    for verify in (True, False):
        with pytest.raises(ValueError, match=r"evil\.pth cannot be read: UnpicklingError: Unsupported global"):
            storage.load(tmp_path / "evil.pth", verify=verify)
    found, loaded, passed_over = store.newest()

    assert found == good
    assert loaded["progress"]["steps"] == 1
    assert len(passed_over) == 1
    assert "evil.pth cannot be read" in passed_over[0]
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize("foreign", [{"state_dict": {}}, [1, 2], torch.ones(1), 7])
def test_a_foreign_file_is_named(tmp_path: Path, foreign: Any) -> None:
    forge(tmp_path / "foreign.pth", foreign)
    with pytest.raises(ValueError, match=r"foreign\.pth.*no checkpoint of heliograph: it lacks"):
        storage.load(tmp_path / "foreign.pth")
    read = storage.read(tmp_path / "foreign.pth")
    assert type(read) is type(foreign)


@pytest.mark.parametrize(("schema", "says"), [(SCHEMA + 1, "update heliograph"), (1, "checkpoint migrate")])
def test_another_schema(tmp_path: Path, opened: Make, state: Make, schema: int, says: str) -> None:
    store = opened()
    store.save("good.pth", state(1))
    forge(tmp_path / "other.pth", state(2, schema=schema), schema=schema)
    with pytest.raises(ValueError, match=rf"schema {schema}, this version reads .*{SCHEMA}: .*{says}"):
        storage.load(tmp_path / "other.pth")
    found, _, passed_over = store.newest()

    assert found.path.name == "good.pth"
    assert len(passed_over) == 1
    assert says in passed_over[0]


def test_memory_that_runs_out_is_no_damage(opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older checkpoint must not be taken because the newest did not fit."""
    store = opened()
    store.save("a.pth", state())

    def load(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(MemoryError):
        store.newest()


def test_newest_passes_over_what_is_damaged_and_says_so(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    for steps, name in enumerate(("a.pth", "b.pth", "c.pth", "d.pth", "e.pth")):
        store.save(name, state(steps))
    (tmp_path / "e.pth").write_bytes(b"")
    (tmp_path / "d.json").write_bytes((tmp_path / "d.json").read_bytes()[:-9])
    (tmp_path / "c.json").unlink()
    (tmp_path / "b.pth").unlink()
    entry, loaded, passed_over = store.newest()

    assert entry.path.name == "a.pth"
    assert loaded["progress"]["steps"] == 0
    assert [path for path in "abcde" for line in passed_over if f"{path}.pth" in line] == ["b", "c", "e"]
    assert [line for line in passed_over if f"{tmp_path / 'd.json'} is damaged" in line]
    assert len(passed_over) == 4


def test_other_runs_are_none_of_its_business_unless_there_is_nothing_else(
    tmp_path: Path, opened: Make, state: Make
) -> None:
    for name in ("b", "a"):
        opened(name).save(f"{name}.pth", state(name=name))
    (tmp_path / "a.pth").write_bytes(b"broken")
    (tmp_path / "settings.json").write_text('{"format": "mine"}')
    store = opened()

    assert store.newest() == (None, None, [f"{tmp_path} has no checkpoint of run 'run'; those in it are of 'a', 'b'."])
    store.save("c.pth", state())
    assert store.newest()[2] == []


def test_an_empty_or_missing_folder(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert storage.entries(folder, "run") == ([], [])
        assert storage.newest(folder, "run") == (None, None, [])


def test_a_folder_and_a_link_to_nowhere_with_the_suffix(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    store.save("a.pth", state())
    (tmp_path / "folder.pth").mkdir()
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.pth").symlink_to(tmp_path / "gone.pth")
    entry, _, passed_over = store.newest()

    assert entry.path.name == "a.pth"
    assert len(passed_over) == 1
    assert "link.pth" in passed_over[0]
    store.close()
    assert opened().save("b.pth", state()).sequence == 2


def test_load_weights(opened: Make, state: Make) -> None:
    source, target = (Supervised(nn.Linear(4, 2), nn.functional.mse_loss) for _ in range(2))
    path = opened().save("a.pth", state(modules={"model": source.model.state_dict()})).path
    metrics = storage.load_weights(target, str(path))

    assert metrics == {"validation/loss": 0.5}
    assert torch.equal(source.model.weight, target.model.weight)  # type: ignore[arg-type]


def test_load_weights_of_other_modules(tmp_path: Path, opened: Make, state: Make) -> None:
    opened().save("a.pth", state(modules={"net": {}}))
    with pytest.raises(ValueError, match=r"holds the modules \['net'\], the task has \['model'\]"):
        storage.load_weights(Supervised(nn.Linear(4, 2), nn.functional.mse_loss), tmp_path / "a.pth")
    with pytest.raises(FileNotFoundError):
        storage.load_weights(Supervised(nn.Linear(4, 2), nn.functional.mse_loss), tmp_path / "b.pth")


def test_entries_are_of_the_folder_not_of_what_was_written(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    first = store.save("a.pth", state(1))
    copy = replace(first, path=tmp_path / "z.pth", sequence=50)
    (tmp_path / "z.pth").write_bytes(first.path.read_bytes())
    (tmp_path / "z.json").write_bytes(encode(copy))

    assert store.entries() == ([copy, first], [])


def test_of_many_other_runs_a_few_are_named(opened: Make, state: Make) -> None:
    for name in "abcdefg":
        opened(name).save(f"{name}.pth", state(name=name))

    (sentence,) = opened().newest()[2]
    assert sentence.endswith("those in it are of 'a', 'b', 'c', 'd', 'e' and 2 more.")
