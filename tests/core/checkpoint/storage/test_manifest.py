"""Names of files, and manifests: what they say, and that no byte of them changes unnoticed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.schema import SCHEMA
from heliograph.core.checkpoint.storage import Store
from heliograph.core.checkpoint.storage.manifest import (
    Entry,
    Hidden,
    check_name,
    encode,
    pointer_path,
    run_part,
)
from heliograph.core.checkpoint.storage.untrusted_files import decode

ENTRY = Entry(
    path=Path("/somewhere/a.pth"),
    run_name="Läufe 1",
    asked_name="Läufe 1",
    training="1" * 32,
    sequence=7,
    saved_at=1e-05,
    size=12,
    sha256="ab" * 32,
    progress={"steps": 3, "earlier_seconds": 1.5},
    metrics={"loss": 0.25, "worst": inf, "least": -inf, "count": 3},
    versions={"torch": "2"},
    judged_by=("loss", "min", 0.25),
    name="a.pth",
)
PLACE = Path("/somewhere/a.pth")


def sealed(**changes: Any) -> bytes:
    """Return a manifest with a right digest and anything inside."""
    facts = {**json.loads(encode(ENTRY)), **changes}
    del facts["sha256"]
    facts = {key: value for key, value in facts.items() if value != "leave out"}
    text = json.dumps(facts, sort_keys=True, indent=2) + "\n"
    facts["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return (json.dumps(facts, sort_keys=True, indent=2) + "\n").encode()


def test_what_goes_in_comes_out() -> None:
    assert decode(encode(ENTRY), PLACE) == ENTRY
    assert decode(encode(ENTRY), Path("/elsewhere/b.pth")).path == Path("/elsewhere/b.pth")
    assert hash(ENTRY) == hash(replace(ENTRY, metrics={}))


def test_a_manifest_is_strict_json_for_people() -> None:
    text = encode(ENTRY).decode("ascii")
    facts = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    assert text.endswith("}\n")
    assert facts["format"] == "heliograph checkpoint"
    assert facts["schema"] == SCHEMA
    assert facts["data"] == {"bytes": 12, "sha256": "ab" * 32}
    assert facts["metrics"] == {"loss": 0.25, "worst": "inf", "least": "-inf", "count": 3}
    assert facts["judged_by"] == ["loss", "min", 0.25]


@pytest.mark.parametrize("value", [nan, inf, None, -0.0])
def test_what_json_lacks(value: float | None) -> None:
    metrics = {} if value is None else {"m": value}
    entry = decode(encode(replace(ENTRY, metrics=metrics, judged_by=("m", "max", value))), PLACE)

    assert entry.judged_by is not None
    assert str(entry.judged_by[2]) == str(value)
    assert [str(each) for each in entry.metrics.values()] == [str(each) for each in metrics.values()]
    assert value is None or not isnan(value) or isnan(entry.metrics["m"])
    assert decode(encode(replace(ENTRY, judged_by=None)), PLACE).judged_by is None


def test_every_flipped_bit_is_noticed() -> None:
    content = encode(ENTRY)
    for index in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[index] ^= 1 << bit
            with pytest.raises(ValueError, match=r"a\.pth"):
                decode(bytes(changed), PLACE)


def test_every_truncation_is_noticed() -> None:
    content = encode(ENTRY)
    for size in range(len(content)):
        with pytest.raises(ValueError, match=r"a\.pth"):
            decode(content[:size], PLACE)


@pytest.mark.parametrize("spelling", [b" %s", b"%s\n", b"\xef\xbb\xbf%s", b"[%s]"])
def test_another_spelling_of_the_same_is_damage(spelling: bytes) -> None:
    with pytest.raises(ValueError, match=r"a\.pth.*damaged"):
        decode(spelling % encode(ENTRY), PLACE)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"7", b"null", b'{"format": 1}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_manifest(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"/somewhere/a\.pth.*damaged"):
        decode(content, PLACE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": SCHEMA + 1}, f"schema {SCHEMA + 1}.*{SCHEMA}.*update"),
        ({"schema": SCHEMA - 1}, f"schema {SCHEMA - 1}.*{SCHEMA}.*version that wrote"),
        ({"schema": "9"}, "cannot be used"),
        ({"training_id": "leave out"}, "cannot be used: 'training_id'"),
        ({"data": {}}, "cannot be used: 'bytes'"),
        ({"shards": ["../evil.00000000.shards", ""]}, "folder of shards"),
        ({"metrics": {"a": []}}, "cannot be used"),
        ({"progress": "leave out"}, "cannot be used: 'progress'"),
        ({"format": "another"}, "not a checkpoint"),
    ],
)
def test_a_right_digest_alone_is_not_enough(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode(sealed(**changes), PLACE)


def test_where_it_would_be_too_long_the_metrics_are_left_out() -> None:
    long = replace(ENTRY, metrics={f"validation/of_class_{number}": number / 7 for number in range(3000)})
    content = encode(long)

    assert len(content) < 2000
    assert json.loads(content)["left_out"] == ["metrics"]
    assert decode(content, PLACE) == replace(long, metrics={})


def test_a_manifest_that_is_too_long_without_metrics_names_the_cause(
    opened: Callable[..., Store], state: Callable[..., dict[str, Any]], names: Callable[[], list[str]]
) -> None:
    store = opened()
    with pytest.raises(ValueError, match=r"\d{5} bytes .* 65535"):
        store.save("a.pth", state(1, versions={"x": "y" * 70_000}))

    assert names() == []


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("run", 0, 0), "run_epoch_0_iter_0.pth"),
        (("run", 12, 345, "acc_0.98"), "run_epoch_12_iter_345_acc_0.98.pth"),
        (("a/b c", 1, 2, "x\\y"), "a-b-c-0af99a60_epoch_1_iter_2_x-y.pth"),
        (("epoch_5_iter_6", 1, 2), "epoch_5_iter_6_epoch_1_iter_2.pth"),
        (("...", 1, 2, "--"), "unnamed-ab5df625_epoch_1_iter_2_unnamed.pth"),
    ],
)
def test_checkpoint_name(arguments: Any, name: str) -> None:
    assert storage.checkpoint_name(*arguments) == name


@pytest.mark.parametrize("letter", ["r", "ü", "字", "🙂", "a "])
def test_long_names_fit_a_file_system_with_their_suffixes(
    tmp_path: Path, opened: Callable[..., Store], state: Callable[..., Any], letter: str
) -> None:
    run = letter * 400
    name = storage.checkpoint_name(run, 10**6, 10**9, letter * 400)
    store = opened(run)
    entry = store.save(name, state(name=run))
    store.pin(entry.path)
    store.point("last", entry.path)

    assert "_epoch_1000000_iter_1000000000_" in name
    assert entry.path == tmp_path / name
    assert store.newest()[0] == entry


@pytest.mark.parametrize(
    ("part", "clean"),
    [("a b", "a-b"), ("../x", "x"), ("-rf", "rf"), (".hidden", "hidden"), ("a\0b\n", "a-b"), ("", "unnamed")],
)
def test_clean(part: str, clean: str) -> None:
    assert storage.clean(part) == clean


@pytest.mark.parametrize("name", ["a b", "r" * 91, "a/b", " ", "über 1", "🙂" * 30])
def test_a_name_that_cleaning_changes_gets_a_digest(name: str) -> None:
    part = run_part(name)

    assert re.fullmatch(r".+-[0-9a-f]{8}", part)
    assert len(part.encode()) <= 90
    assert run_part(part) == part
    assert part.startswith(storage.clean(name)[:10])
    assert len({run_part(each) for each in (name, storage.clean(name), f"{name}x", f"{name} ")}) == 4


@pytest.mark.parametrize("name", ["run", "run-2", "r" * 90, "über", "a.b+c=d"])
def test_a_name_that_cleaning_leaves_is_kept(name: str) -> None:
    assert run_part(name) == name


@pytest.mark.parametrize("name", ["a.pt", "a", "", ".a.pth", "../a.pth", "b/a.pth", "/a.pth", ".."])
def test_names_that_a_checkpoint_cannot_have(name: str) -> None:
    with pytest.raises(ValueError, match=r"\.pth, got '"):
        check_name(name)
    assert check_name("a.pth") == "a.pth"


def test_files_of_different_runs_never_meet(tmp_path: Path) -> None:
    hidden = [Hidden.of(tmp_path, name) for name in ("a", "a.data", "a.data.tmp", "b")]
    paths = [getattr(each, slot) for each in hidden for slot in Hidden._fields]

    assert len(set(paths)) == 4 * 4
    assert {path.name[0] for path in paths} == {"."}


def test_pointers_lie_beside_the_checkpoints() -> None:
    assert pointer_path(Path("folder"), "run", "best") == Path("folder/run.best")
    assert pointer_path(Path("folder"), "a run/1", "best") == Path("folder/a-run-1-495b8e4b.best")
