"""The YAML of rule files: safe, with lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from heliograph.packages.rules.tests.scripted import written
from heliograph_rules.errors import RuleError
from heliograph_rules.files.document import read_document


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


def test_a_small_file_that_would_be_a_giant_stays_small(tmp_path: Path) -> None:
    """Ten times ten times ... of the same list is the same list each time."""
    levels = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 60)]
    document = read_document(written(tmp_path, "\n".join(levels)))
    assert document.content["a1"][0] is document.content["a1"][9] is document.content["a0"]


def test_of_mappings_that_are_merged_the_first_counts_and_its_lines_are_reported(tmp_path: Path) -> None:
    text = "one: &one\n  a: 1\ntwo: &two {a: 2, b: 2}\nboth:\n  c: 3\n  <<: [*one, *two]\n"
    document = read_document(written(tmp_path, text))
    both = document.content["both"]
    assert both == {"a": 1, "b": 2, "c": 3}
    assert [document.line(both, key) for key in "abc"] == [2, 3, 5]


def test_merges_of_merges_stay_small(tmp_path: Path) -> None:
    """Nine times nine times ... of one key is one key."""
    levels = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 60)]
    assert read_document(written(tmp_path, "\n".join(levels))).content["a59"] == {"x": 1}


def test_many_merges_of_much_are_refused(tmp_path: Path) -> None:
    much = ", ".join(f"k{n}: {n}" for n in range(200))
    text = f"much: &much {{{much}}}\n" + "".join(f"a{n}:\n  <<: *much\n" for n in range(60))
    with pytest.raises(RuleError, match=r"line 103: .*10000 keys"):
        read_document(written(tmp_path, text))


def test_a_file_that_is_too_large_is_not_parsed(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="1048576 bytes"):
        read_document(written(tmp_path, "#" * (2**20 + 1)))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: [1, 2\n", 3, "expected ',' or ']'"),
        ("a: 1\n\tb: 2\n", 2, "cannot start any token"),
        ("a: 1\nb: 2\na: 3\n", 3, "key 'a'"),
        ("a: &a\n b: *a\n", 1, "This part contains itself."),
        ("? [1, 2]\n: x\n", 1, "must be plain text"),
        ("a: 1\nb: !!python/object/apply:os.system ['true']\n", 2, "tag:yaml.org,2002:python/object/apply"),
        (
            "a: 1\nb: !!set {x}\n",
            2,
            "tag:yaml.org,2002:set.",
        ),
        ("a: 1\nb: !!python/name:os.system\n", 2, "determine a constructor"),
        ("a: 1\n---\nb: 2\n", 2, "but found another document"),
        ("a: *nobody\n", 1, "found undefined alias"),
        ("a: 1\nb: 1" + ":0" * 500_000, 2, "at most 400 characters"),
        ("a: 1\nb: 1" + ":0" * 190 + ":0.5", 2, "a valid float"),
        ("a: 1\nb: 2026-13-01\n", 2, "a valid timestamp"),
        ("a: 1\nb: !!int x\n", 2, "a valid int"),
        ("a: 1\n!!bool x: 2\n", 2, "a valid bool"),
        (f"a: 1\nb: {'9' * 5000}\n", 2, "at most 400 characters"),
        ("a: &a\n <<: *a\n", 1, "This part contains itself."),
        ("a: 1\nb:\n <<: 3\n", 3, "<<"),
    ],
    ids=[
        *("bracket", "tab", "twice", "itself", "key", "call", "set", "name", "documents", "alias"),
        *(
            "sixties",
            "sixties with a point",
            "date",
            "whole",
            "boolean",
            "digits",
            "itself_merged",
            "merged",
        ),
    ],
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
    with pytest.raises(RuleError, match=r"text: .* \(invalid"):
        read_document(path)


def test_what_is_nested_too_deeply_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="nested too deeply"):
        read_document(written(tmp_path, "a: " + "[" * 1000))


@pytest.mark.parametrize(
    ("text", "kind"), [("", "empty"), ("- a\n", "a list"), ("words", "a str")], ids=["empty", "list", "text"]
)
def test_a_file_is_a_mapping(tmp_path: Path, text: str, kind: str) -> None:
    with pytest.raises(TypeError, match=f"key 'controllers', got {kind}"):
        read_document(written(tmp_path, text))


def test_without_the_extra_the_command_to_install_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"yaml.*: pip install 'heliograph\[rules\]'"):
        read_document(written(tmp_path, "controllers: []"))


@pytest.mark.parametrize("path", [".", ""])
def test_a_folder_is_said_to_be_one(path: str) -> None:
    with pytest.raises(IsADirectoryError, match=r"'\.' is a folder:"):
        read_document(Path(path))


def test_a_missing_file_is_reported_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"'.*nowhere\.yaml'"):
        read_document(tmp_path / "nowhere.yaml")
