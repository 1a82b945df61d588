"""Pages of Weights & Biases, with the real library, offline."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import heliograph as h
import numpy as np
import pytest
import wandb
from heliograph.packages.tests.facts import assert_each
from heliograph.packages.trackers.tests.tracker_runs import (
    end_as,
    in_the_middle,
    places,
    wandb_files,
    wandb_losses,
    wandb_records,
)
from heliograph.spi import Place
from heliograph.tests.kit import class_batches, fit
from heliograph_testing import check_tracker
from heliograph_trackers import WandB
from heliograph_trackers.wandb import rows
from wandb.errors import CommError

LOG = h.LogSchedule(h.Every(steps=1))


@pytest.fixture(scope="module", autouse=True)
def _service() -> Iterator[None]:
    yield
    wandb.teardown()


def wait_for_end(path: Path) -> None:
    """Wait until W&B's process has written the end of a run, which it does in its own time."""
    while not any(each.HasField("exit") for each in wandb_records(path)):
        Event().wait(0.02)


def of_kind(folder: Path, kind: str) -> list[Any]:
    """Return the records of a kind in the only file of a folder, once W&B's process has closed it."""
    (path,) = wandb_files(folder)
    wait_for_end(path)
    return [getattr(each, kind) for each in wandb_records(path) if each.WhichOneof("record_type") == kind]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows in the only file of a folder."""
    of_kind(folder, "exit")
    return list(rows(wandb_files(folder)[0]))


def values_of(folder: Path, kind: str) -> dict[str, Any]:
    """Return what the records of the config or the summary set in the end."""
    updates = [update for record in of_kind(folder, kind) for update in record.update]
    return {each.key or each.nested_key[0]: json.loads(each.value_json) for each in updates}


def test_it_keeps_what_trackers_promise() -> None:
    def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
        points: dict[str, list[tuple[int, float]]] = {}
        for path in wandb_files(folder):
            wait_for_end(path)
            for row in rows(path):
                for name in row.keys() - {"step"}:
                    points.setdefault(name, []).append((row["step"], row[name]))
        (_,) = {path.name for path in wandb_files(folder)}  # one page
        return points

    def read_status(folder: Path) -> str:
        return str(values_of(folder, "summary")["status"])

    check_tracker(lambda folder: WandB(mode="offline", folder=folder), read, read_status=read_status)


def test_a_run_on_its_page(tmp_path: Path) -> None:
    result = fit(
        LOG,
        WandB("digits", group="first", tags=["small"], mode="offline", folder=tmp_path / "new"),
        train=class_batches(3),
        hyper_parameters={"rate": 0.1, "layers": [3, 4]},
        name="mine",
    )

    (page,) = of_kind(tmp_path / "new", "run")
    assert (page.project, page.display_name, page.run_group, list(page.tags)) == ("digits", "mine", "first", ["small"])
    found = rows_of(tmp_path / "new")
    axes = ("step", "epoch", "samples", "attempt", "rollbacks")
    assert [[row[name] for name in axes] for row in found] == [
        [1, 0.333333, 3, 1, 0],
        [2, 0.666667, 6, 1, 0],
        [3, 1.0, 9, 1, 0],
    ]
    assert found[-1]["train/loss"] == pytest.approx(result.metrics["train/loss"])
    assert values_of(tmp_path / "new", "config").items() >= {"rate": 0.1, "layers": "[3, 4]"}.items()
    charts = {
        each.name or each.glob_name: (each.step_metric, each.options.hidden)
        for each in of_kind(tmp_path / "new", "metric")
    }
    assert charts["*"] == ("step", False)
    assert charts["step"] == charts["rollbacks"] == ("", True)
    assert (result.warnings, result.notes, wandb.run) == ((), (), None)


def test_a_relative_folder_is_of_the_program_not_of_the_process_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process starts with the first page, and does not see that the program changes its folder."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert fit(LOG, WandB(mode="offline", folder="pages")).warnings == ()
        assert len(list((tmp_path / name / "pages/wandb").glob("offline-run-*/*.wandb"))) == 1


def test_a_run_that_goes_back_shows_both_passes(tmp_path: Path) -> None:
    batches = class_batches(8)
    batches[6][0].fill_(float("nan"))
    result = fit(
        h.RNGCapture(),
        LOG,
        h.SaveSchedule(h.Every(steps=5), at_end=False),
        h.Checkpoint(tmp_path / "saved"),
        h.RollBack(max_times=1),
        WandB(mode="offline", folder=tmp_path),
        train=batches,
    )

    assert result.status == "completed"
    of_kind(tmp_path, "exit")
    assert places(wandb_losses(tmp_path)) == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (6, 1), (7, 1)]


@pytest.mark.parametrize(
    ("status", "exit_code"), [("completed", 0), ("stopped", 0), ("preempted", 1), ("failed", 1), ("interrupted", 255)]
)
def test_the_status_is_the_true_one(status: str, exit_code: int, tmp_path: Path) -> None:
    plugins = [LOG, WandB(mode="offline", folder=tmp_path), end_as(status)]
    if status in ("failed", "interrupted"):
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            fit(*plugins)
    else:
        fit(*plugins)

    (ending,) = of_kind(tmp_path, "exit")
    assert (ending.exit_code, values_of(tmp_path, "summary")["status"]) == (exit_code, status)
    assert len(of_kind(tmp_path, "preempting")) == (status == "preempted")


def test_images_texts_histograms_curves_and_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")

    def show(run: h.Run) -> None:
        run.log_image("drawing", np.full((2, 3, 3), 7, np.uint8))
        run.log_text("answer", "1 < 2")
        run.log_histogram("weights", np.array([0.0, 1.0, 1.0, np.inf]))
        run.log_curve("hits", np.array([0, 1, 1]), np.array([0.1, 0.9, 0.5]))
        run.log_file("the notes", tmp_path / "notes.txt")

    result = fit(LOG, WandB(mode="offline", folder=tmp_path), in_the_middle(show))

    (path,) = wandb_files(tmp_path)
    shown = {
        name: row[name]
        for row in rows_of(tmp_path)
        for name in row
        if name in ("drawing", "answer", "weights", "hits_table")
    }
    assert (shown["drawing"]["width"], shown["drawing"]["height"]) == (3, 2)
    files = path.parent / "files"
    assert (files / shown["answer"]["path"]).read_text() == "<pre>1 &lt; 2</pre>"
    assert sum(shown["weights"]["values"]) == 3
    table = json.loads((files / shown["hits_table"]["path"]).read_text())
    assert (table["columns"], table["data"]) == (["recall", "precision"], [[0.5, 1.0], [1.0, 1.0], [1.0, 2 / 3]])
    kept = [each for each in of_kind(tmp_path, "artifact") if each.type == "file"]
    assert [each.name for each in kept] == [f"run-{path.stem.removeprefix('run-')}-the-notes"]
    assert (result.warnings, result.notes) == ((), ())


def test_without_a_key_the_page_stays_here(tmp_path: Path) -> None:
    wandb.teardown()  # which forgets the mode that an earlier test has set
    result = fit(LOG, WandB(folder=tmp_path))

    assert len(wandb_files(tmp_path)) == 1
    assert_each(result.notes, ("no API key", "`wandb sync`", "WANDB_API_KEY"))


def test_offline_by_the_environment_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    result = fit(LOG, WandB(folder=tmp_path))
    assert_each(result.notes, ("WANDB_MODE", "`wandb sync`"))


def test_online_without_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="W&B: run `wandb login`,"):
        WandB(mode="online")


def test_a_key_is_all_that_online_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert WandB(mode="online").describe(None) == "logs to W&B, online"  # type: ignore[arg-type]  # it does not look


def test_a_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    real = wandb.init

    def init(**options: Any) -> Any:
        if options["mode"] == "online":
            raise CommError("no answer\nConsider more")
        return real(**options)

    monkeypatch.setattr(wandb, "init", init)
    result = fit(LOG, WandB(mode="online", folder=tmp_path))

    (path,) = wandb_files(tmp_path)
    name = path.stem.removeprefix("run-").removesuffix("-offline")
    assert_each(result.warnings, (f"`wandb sync --id {name} {path.parent}`", "(no answer)"))
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]


def test_disabled_by_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    result = fit(LOG, WandB(folder=tmp_path))

    assert result.warnings == ()
    assert_each(result.notes, ("nothing is logged", "disabled"))
    assert wandb_files(tmp_path) == []


def test_what_is_no_mode_and_no_list_of_tags() -> None:
    with pytest.raises(ValueError, match="'online', 'offline', 'disabled'"):
        WandB(mode="off")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"strings, for example \['small'\]"):
        WandB(tags="small")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="WandB needs wandb,"):
        WandB()


def test_a_resumed_page_on_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server knows its last row only."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    tracker = WandB(mode="online")
    tracker._page = type("Page", (), {"offline": False, "summary": {"step": 7, "rollbacks": 1, "train/loss": 0.5}})()
    tracker._shown = tracker._find_shown("page")

    held = [
        (step, back)
        for back in (0, 1, 2)
        for step in (7, 8)
        if tracker.holds(Place(step, 0, 0, 0.0, 1, back), "train/loss")
    ]
    assert held == [(7, 0), (8, 0), (7, 1)]
