"""The YAML of rule files: safe, with lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from heliograph.packages.rules.tests.scripted import written
from heliograph_rules.errors import RuleError
from heliograph_rules.files.config import read_document


def test_the_content_is_plain_and_every_part_has_its_line(tmp_path: Path) -> None:
    document = read_document(written(tmp_path, "# rules\ncontrollers:\n  - name: a\n    triggers: [x,\n      y]\n"))
    assert document.content == {"controllers": [{"name": "a", "triggers": ["x", "y"]}]}
    first = document.content["controllers"][0]
    assert document.line(document.content, "controllers") == 2
    assert document.line(first) == document.line(first, "name") == 3
    assert [document.line(first["triggers"], index) for index in (0, 1)] == [4, 5]
    assert document.line(first, "rule") is None


def test_anchors_and_merges_are_read_as_usual(tmp_path: Path) -> None:
    text = "base: &base {a: 1, b: 2}\nown:\n  <<: *base\n  b: 3\nagain: *base\n"
    document = read_document(written(tmp_path, text))
    assert document.content == {"base": {"a": 1, "b": 2}, "own": {"a": 1, "b": 3}, "again": {"a": 1, "b": 2}}


def test_of_mappings_that_are_merged_the_first_counts_and_its_lines_are_reported(tmp_path: Path) -> None:
    text = "one: &one\n  a: 1\ntwo: &two {a: 2, b: 2}\nboth:\n  c: 3\n  <<: [*one, *two]\n"
    document = read_document(written(tmp_path, text))
    both = document.content["both"]
    assert both == {"a": 1, "b": 2, "c": 3}
    assert [document.line(both, key) for key in "abc"] == [2, 3, 5]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: [1, 2\n", 3, "expected ',' or ']'"),
        ("a: 1\n\tb: 2\n", 2, "cannot start any token"),
        ("a: 1\nb: 2\na: 3\n", 3, "key 'a'"),
        ("a: 1\nb: !!python/object/apply:os.system ['true']\n", 2, "tag:yaml.org,2002:python/object/apply"),
        ("a: 1\nb: !!python/name:os.system\n", 2, "could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", 2, "but found another document"),
        ("a: *nobody\n", 1, "found undefined alias"),
    ],
    ids=["bracket", "tab", "twice", "call", "name", "documents", "alias"],
)
def test_what_cannot_be_read_is_reported_with_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(RuleError, match="line") as caught:
        read_document(path)
    assert (caught.value.file, caught.value.line) == (str(path), line)
    assert message in str(caught.value)


def test_bytes_that_are_no_text_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_bytes(b"a: \xff\xfe\x00")
    with pytest.raises(RuleError, match="not YAML that can be read"):
        read_document(path)


@pytest.mark.parametrize(
    ("text", "kind"), [("", "empty"), ("- a\n", "a list"), ("words", "a str")], ids=["empty", "list", "text"]
)
def test_a_file_is_a_mapping(tmp_path: Path, text: str, kind: str) -> None:
    with pytest.raises(TypeError, match=f"key 'controllers', got {kind}"):
        read_document(written(tmp_path, text))


def test_a_missing_file_is_reported_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"'.*nowhere\.yaml'"):
        read_document(tmp_path / "nowhere.yaml")
