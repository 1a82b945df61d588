"""The checks of the launcher's arguments."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any, Never

import pytest
from heliograph.packages.tests.facts import assert_facts
from heliograph_ray import RayLauncher
from heliograph_ray.launcher import calls


@pytest.mark.parametrize(
    ("options", "error", "facts"),
    [
        ({"num_workers": 2.0}, TypeError, "num_workers is a whole number, or (least, most) of them; got 2.0."),
        ({"num_workers": True}, TypeError, "num_workers is a whole number, or (least, most) of them; got True."),
        ({"num_workers": (1, 2, 3)}, TypeError, "num_workers is a whole number, or (least, most) of them"),
        ({"num_workers": 0}, ValueError, "num_workers is at least 1, and (least, most) are in this order; got 0."),
        ({"num_workers": (4, 2)}, ValueError, "and (least, most) are in this order; got (4, 2)."),
        ({"resources_per_worker": {"CPU": "2"}}, ValueError, "got {'CPU': '2'}"),
        ({"resources_per_worker": {"CPU": -1}}, ValueError, "got {'CPU': -1}"),
        ({"resources_per_worker": {"CPU": float("nan")}}, ValueError, "got {'CPU': nan}"),
        ({"resources_per_worker": {"CPU": 0}}, ValueError, "got {'CPU': 0}"),
        ({"resources_per_worker": {"GPU": 1}}, ValueError, "`use_gpu` is False but `GPU` was found"),
        ({"max_failures": 1.5}, ValueError, "must be a whole number, at least -1; got 1.5."),
        (
            {"max_failures": -2},
            ValueError,
            ("max_failures", "at least -1", "got -2."),
        ),
        ({"backoff": -1}, ValueError, "backoff must be a finite number of seconds, at least 0; got -1."),
        ({"backoff": "1"}, ValueError, "backoff must be a finite number of seconds, at least 0; got '1'."),
        ({"grace": 0}, ValueError, "grace must be a finite number of seconds, more than 0; got 0."),
        ({"grace": float("inf")}, ValueError, "grace must be a finite number of seconds, more than 0; got inf."),
        ({"storage_path": ""}, ValueError, "storage_path is a folder, an address such as 's3://...', or None; got ''."),
        (
            {"name": "a/b"},
            ValueError,
            ("name", "no slashes", "got 'a/b'"),
        ),
        (
            {"name": ".."},
            ValueError,
            ("name", "no slashes", "got '..'"),
        ),
        ({"keep": 0}, ValueError, "keep must be a whole number, at least 1, or None for all; got 0."),
        ({"keep": 2.5}, ValueError, "keep must be a whole number, at least 1, or None for all; got 2.5."),
        ({"address": "ray://host:10001"}, ValueError, "is for Ray's client"),
        *(
            ({"address": address}, ValueError, ("address", "None", f"got {address!r}"))
            for address in ("", "nohost", "http://x:1", ":6379", "x:99999", "x:0", "x:")
        ),
        ({"check_interval": 0}, ValueError, ("check_interval", "more than 0", "got 0.")),
        (
            {"start_timeout": True},
            ValueError,
            ("start_timeout", "more than 0"),
        ),
        (
            {"resize_interval": -1},
            ValueError,
            ("resize_interval", "more than 0"),
        ),
        ({"idle": 0}, ValueError, ("idle", "more than 0", "got 0.")),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], error: type[Exception], facts: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        RayLauncher(**options)
    assert_facts(caught.value, *facts)


def test_valid_options_are_accepted() -> None:
    resources = {"CPU": 0.5, "memory": 1e9}
    made = RayLauncher((1, 1), resources_per_worker=resources, storage_path=Path("there"), keep=None)
    assert made._setup.run_config(name="run").storage_path == str(Path("there").absolute())
    RayLauncher(
        2, use_gpu=True, resources_per_worker={"GPU": 2}, max_failures=-1, backoff=0, name="run", address="auto"
    )
    for address in ("host-1.example:6379", "192.0.2.2:6379", "[::1]:6379"):
        RayLauncher(2, use_gpu=True, resources_per_worker={"CPU": 0}, address=address)


def test_without_ray_the_error_has_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(ImportError, match="RayLauncher needs ray") as caught:
        RayLauncher(2)
    assert str(caught.value).endswith("pip install 'heliograph[ray]'")


@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.")
def test_a_call_that_cannot_be_pickled_is_refused_before_a_cluster_is_started() -> None:
    made, no_function = RayLauncher(1), 3
    with pytest.raises(TypeError, match="got 3 as the"):
        made.run(no_function)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="send <built-in function len>") as caught:
        made.run(len, (each for each in [1]))
    assert "generator" in str(caught.value)


def test_on_message_has_to_be_a_function() -> None:
    with pytest.raises(TypeError, match=r"on_message .*None; got 'x'"):
        RayLauncher(1).run(len, [], on_message="x")  # type: ignore[arg-type]


def test_a_storage_that_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("taken")
    for path in (tmp_path / "file", Path("/proc/nothing")):
        with pytest.raises(OSError, match=re.escape(f"storage_path='{path}' cannot be")):
            RayLauncher(1, storage_path=path).run(len, [])
    with pytest.raises(ValueError, match=re.escape("'nosuch://x/y' cannot be")):
        RayLauncher(1, storage_path="nosuch://x/y").run(len, [])


def test_a_rank_cannot_start_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "child_queue", object)
    with pytest.raises(RuntimeError, match="rank that RayLauncher"):
        RayLauncher(1).run(len, [])


def test_a_value_that_cannot_be_loaded_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"rank 3 .*no model"):
        calls._value(3, pickle.dumps(Unloadable()))


class Unloadable:
    """Can be pickled, but not loaded."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> Never:
    raise LookupError("no model")
