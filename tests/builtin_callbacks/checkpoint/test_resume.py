"""Resume: what a checkpoint is resumed from, and how, as a value."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from heliograph import Checkpoint, Resume


@pytest.mark.parametrize("path", [None, "auto", "runs/x.pth", Path("runs/x.pth")])
def test_a_path_alone_is_short_for_a_resume(path: Any) -> None:
    assert Checkpoint("x", resume=path).resume == Resume(path)
    assert Checkpoint("x", resume=Resume(path)).resume == Resume(path)


def test_by_default_it_is_the_newest() -> None:
    assert Resume() == Resume("auto", batch_change="refuse", on_existing="new_name")
    assert Checkpoint("x").resume == Resume(None)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Resume().path = None  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"path": 3}, TypeError, "resume is 'auto'.*got 3"),
        ({"path": "newest"}, ValueError, r"checkpoint's .pth file, got 'newest'"),
        ({"batch_change": "double"}, ValueError, "batch_change.*linear, sqrt; got 'double'"),
        ({"on_existing": "overwrite"}, ValueError, "on_existing.*refuse, replace; got 'overwrite'"),
    ],
)
def test_what_it_says_is_checked(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Resume(**options)


def test_a_local_folder_resumes_no_url() -> None:
    with pytest.raises(
        ValueError, match=r"s3://bucket/run/a.pth.*folder of this machine.*Checkpoint\('s3://bucket/run'"
    ):
        Checkpoint("x", resume="s3://bucket/run/a.pth")
