"""The timeline of a run in a real browser: what it draws and shows, and that it requests no other file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from heliograph.packages.recorder.tests.browsers import launched_browser
from heliograph.packages.recorder.tests.explain.factory import Script, killed_and_resumed, recording
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder.format.records import Recording
from heliograph_recorder.timeline.page import write_timeline
from playwright.sync_api import Browser, Locator, Page

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"


@dataclass
class Opened:
    """A page with its console messages and requests."""

    page: Page
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def chart(self, name: str) -> Locator:
        return self.page.locator(f'.chart[data-chart="{name}"]')

    def vertices(self, chart: str, metric: str, classes: str = "") -> int:
        paths = self.chart(chart).locator(f'path.curve{classes}[data-metric="{metric}"]').all()
        return sum(len(re.findall("[ML]", path.get_attribute("d") or "")) for path in paths)

    def tip(self) -> str:
        tip = self.page.locator("#tip")
        return re.sub(r"\n+", "\n", tip.inner_text()) if tip.is_visible() else ""

    def rows(self, table: str) -> list[list[str]]:
        found = self.page.locator(f"#{table} tbody tr").all()
        return [[cell.strip() for cell in row.locator("td").all_inner_texts()] for row in found]

    def path(self, chart: str) -> str:
        paths = self.chart(chart).locator("path.curve.train:not(.lost)").all()
        return "".join(path.get_attribute("d") or "" for path in paths)


Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched_browser() as browser:
        yield browser


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens the timeline of a recording; after the test, no page may have had an error."""
    pages: list[Opened] = []

    def open_page(recorded: Recording, **options: str) -> Opened:
        path = tmp_path / f"page_{len(pages)}.html"
        write_timeline(recorded, path)
        context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)  # type: ignore[arg-type]
        one = Opened(context.new_page())
        one.page.on("console", lambda message: one.messages.append(message.text))
        one.page.on("pageerror", lambda error: one.messages.append(str(error)))
        one.page.on("request", lambda request: one.requests.append(request.url))
        one.page.goto(path.as_uri())
        pages.append(one)
        return one

    yield open_page
    for one in pages:
        assert one.messages == []
        assert [url for url in one.requests if not url.startswith("file:")] == []
        assert len(one.requests) == 1  # the page itself
        one.page.context.close()


def test_the_page_says_how_the_run_ended_and_draws_its_curves(opened: Open) -> None:
    one = opened(killed_and_resumed())
    assert_facts(one.page.title(), "digits: stopped", "early_stopping on rank 2")
    assert one.page.locator("h1").inner_text() == "digits"
    assert_facts(one.page.locator("#status").inner_text(), "stopped", "early_stopping on rank 2")
    assert "validation/loss has not improved" in one.page.locator("#why").inner_text()
    assert [each.inner_text() for each in one.page.locator(".chart h3").all()] == ["loss", "accuracy"]
    assert one.vertices("loss", "train/loss", ":not(.lost)") == 3
    assert one.vertices("loss", "train/loss", ".lost") == 2  # and a NaN
    assert one.vertices("loss", "validation/loss", ":not(.lost)") == 3
    assert one.chart("loss").locator(".broken").count() == 1
    assert one.chart("loss").locator(".undone").count() == 2
    assert [[cell for cell in row if cell] for row in one.rows("attempts")][1][:3] == [
        "2",
        "training",
        "2026-01-01 12:00:10 UTC",
    ]
    assert one.page.locator("#totals li").all_inner_texts()[0].split() == ["training", "11.8", "s", "86.8", "%"]
    assert one.page.locator("#strip .slice").count() > 8
    assert one.page.locator("#strip .between").count() == 1
    assert_facts(one.page.locator("#notes").inner_text(), "attempt 2", "rolled back", "step 10")
    assert one.page.locator("#warnings").is_hidden()
    assert [each.strip() for each in one.page.locator("#attempts th").all_inner_texts()] == [
        "", "What", "Started", "After the previous one", "Duration", "Ended", "Position", "Work lost",
    ]  # fmt: skip
    assert_facts(one.rows("attempts")[1][-1], "resumed: 7 steps", "3.60 s", "rolled back: 2 steps", "1.10 s")
    assert [row[3] for row in one.rows("checkpoints")] == ["", "best and last"]


@pytest.mark.whole
def test_marks_show_who_and_why_by_mouse_and_by_keyboard(opened: Open) -> None:
    one = opened(killed_and_resumed())
    marks = one.chart("loss").locator(".mark")
    assert [mark.get_attribute("data-kind") for mark in marks.all()] == [
        "return",
        "return",
        "decision",
        "stop",
        "pruned",
        "best",
    ]
    stop = one.chart("loss").locator('.mark[data-kind="stop"]')
    stop.hover()
    assert "2 during validation_end: validation/loss" in one.tip()
    assert "stop postponed, step 12" in one.tip()  # the veto, at the same position
    one.page.mouse.move(1, 1)
    assert one.tip() == ""
    marks.first.focus()
    assert one.tip().splitlines()[:2] == ["attempt 2: resumed", "from ckpt/step_4.pth"]
    one.page.keyboard.press("End")
    assert_facts(one.tip().splitlines()[0], "best and last", "step 8")
    assert "save_schedule: every 4" in one.tip()
    one.page.keyboard.press("ArrowLeft")
    assert "step 8: keep_last=1" in one.tip()
    one.page.keyboard.press("Escape")
    assert one.tip() == ""


@pytest.mark.whole
def test_a_curve_shows_its_values_at_the_pointer(opened: Open) -> None:
    one = opened(killed_and_resumed())
    box = one.chart("loss").locator("> svg").bounding_box()
    assert box is not None
    one.page.mouse.move(box["x"] + 60, box["y"] + 80)
    assert one.tip().split() == ["step", "4", "train/loss", "2", "validation/loss", "1.9"]
    assert one.chart("accuracy").locator(".cross").get_attribute("visibility") == "visible"


@pytest.mark.whole
def test_the_axis_and_the_scale_can_be_changed(opened: Open) -> None:
    one = opened(killed_and_resumed())
    by_step = one.path("loss")
    one.page.get_by_role("radio", name="Time").check(force=True)
    by_time = one.path("loss")
    assert by_time != by_step
    assert one.chart("loss").locator(".gap").count() == 1
    assert "10 s" in one.chart("loss").locator("svg text").all_text_contents()
    one.chart("loss").get_by_role("checkbox").check()
    assert one.path("loss") != by_time
    one.chart("loss").get_by_role("checkbox").uncheck()
    assert one.path("loss") == by_time
    one.page.get_by_role("radio", name="Time").focus()
    one.page.keyboard.press("ArrowLeft")
    assert one.path("loss") == by_step


@pytest.mark.whole
def test_tables_are_sorted_and_filtered(opened: Open) -> None:
    one = opened(killed_and_resumed())
    assert [row[:3] for row in one.rows("costs")] == [
        ["checkpoint", "save_point", "0.40 s"],
        ["checkpoint", "batch_end", "≈ 50.0 ms"],
        ["progress", "batch_end", "20.0 ms"],
    ]
    head = one.page.locator("#costs th", has_text="Plugin")
    head.get_by_role("button").click()
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert [row[0] for row in one.rows("costs")] == ["progress", "checkpoint", "checkpoint"]
    one.page.locator("#costs th", has_text="Time").first.get_by_role("button").focus()
    one.page.keyboard.press("Enter")
    assert [row[2] for row in one.rows("costs")] == ["0.40 s", "≈ 50.0 ms", "20.0 ms"]
    one.page.get_by_label("Filter by request").fill("ROLL")
    assert [row[0] for row in one.rows("requests")] == ["skip_step", "roll_back", "skip_batch"]
    assert one.page.get_by_role("status").filter(has_text="3 of 9").count() == 1


@pytest.mark.whole
def test_the_page_is_dark_if_the_system_is(opened: Open) -> None:
    def ground(one: Opened) -> object:
        return one.page.evaluate("getComputedStyle(document.body).backgroundColor")

    dark, light = opened(killed_and_resumed(), color_scheme="dark"), opened(killed_and_resumed(), color_scheme="light")
    assert (ground(dark), ground(light)) == ("rgb(15, 18, 23)", "rgb(244, 245, 248)")


def test_recorded_texts_appear_as_text(opened: Open) -> None:
    script = Script(run=HOSTILE)
    script.start()
    script.batches(2)
    script.emit("log", metrics={f"train/{HOSTILE}": 1.0, "train/loss": 2.0}, asked=[])
    script.request("end_epoch", HOSTILE, HOSTILE)
    script.save(f"{HOSTILE}.pth")
    script.add_time(HOSTILE, "log", 0.1)
    script.close("failed", HOSTILE, notes=[HOSTILE], warnings=[HOSTILE])
    one = opened(recording(script))
    assert one.page.title() == f"{HOSTILE}: failed"
    assert one.page.locator("h1").inner_text() == HOSTILE
    assert HOSTILE in one.page.locator("#why").inner_text()
    assert HOSTILE in one.page.locator(".chart h3").all_inner_texts()
    assert HOSTILE in [row[2] for row in one.rows("requests")]
    assert one.rows("costs")[0][0] == HOSTILE
    assert one.page.locator("#notes li").inner_text() == HOSTILE
    assert one.page.locator("#warnings li").inner_text() == HOSTILE
    one.chart("loss").locator('.mark[data-kind="decision"]').hover()
    assert HOSTILE in one.tip()
    assert one.page.locator("img").count() == 0
    assert one.page.locator("script").count() == 2


def empty() -> Script:
    return Script()


def killed_at_once() -> Script:
    script = Script()
    script.emit("train_start")
    return script


def one_point() -> Script:
    script = Script()
    script.start()
    script.batches(1)
    script.emit("log", metrics={"train/loss": 0.5}, asked=[])
    return script


def nothing_but_nan() -> Script:
    script = Script(losses=True)
    script.start()
    script.batches(3, losses=(float("nan"),) * 3)
    script.emit("log", metrics={"train/loss": float("nan"), "validation/loss": float("-inf")}, asked=[])
    return script


@pytest.mark.whole
@pytest.mark.parametrize(
    ("make", "points", "broken"), [(empty, 0, 0), (killed_at_once, 0, 0), (one_point, 1, 0), (nothing_but_nan, 0, 5)]
)
def test_runs_that_recorded_little(opened: Open, make: Callable[[], Script], points: int, broken: int) -> None:
    one = opened(recording(make()))
    assert one.page.locator("#status").inner_text() == "killed, or still running"
    assert one.page.locator(".dot").count() == points
    assert one.page.locator(".broken").count() == broken
    one.page.get_by_role("radio", name="Time").check(force=True)
    assert "NaN" not in one.page.locator("#charts").evaluate("node => node.innerHTML.replace(/train[^\"]*/g, '')")
    assert one.rows("attempts")[0][1] == "training"


@pytest.mark.whole
def test_long_curves_and_many_marks_are_downsampled(opened: Open) -> None:
    script = Script()
    script.start()
    for step in range(12_000):
        script.emit("log", 0.01, metrics={"train/loss": 1.0 / (1 + step)}, asked=[])
        if step % 4 == 0:
            script.batches(1)
            script.request("skip_batch", "nan_guard", "the loss is nan", "batch_start")
    one = opened(recording(script))
    assert 1_000 <= one.vertices("loss", "train/loss") <= 2_000
    assert "of 12,000 points" in one.chart("loss").inner_text()
    assert one.chart("loss").locator(".mark").count() < 130
    one.chart("loss").locator(".mark").first.focus()
    assert re.search(r"and \d+ more here$", one.tip())


@pytest.mark.whole
def test_ranks_and_findings_are_shown_where_they_were_measured(opened: Open) -> None:
    script = Script(world_size=2)
    script.start()
    script.batches(20)
    by_rank = {
        "batch": [0.5, 0.5],
        "load": [0.2, 0.01],
        "forward": [0.1, 0.1],
        "memory": [2**20, 0],
        "device_memory": [0, 0],
    }
    counts = {"seconds": 10.0, "batches": 20, "sampled": 20, "validations": 0, "saves": 0}
    script.emit("measured", **counts, **by_rank, validation=0.0, save=0.0)
    one = opened(recording(script))
    assert one.rows("ranks") == [
        ["0", "0.50 s", "0.20 s", "0.10 s", "1 MiB", ""],
        ["1", "0.50 s", "10.0 ms", "0.10 s", "", ""],
    ]
    assert one.page.locator("#goodput").inner_text() == "goodput 59.4 %"
    assert_facts(one.page.locator("#findings li").first.inner_text(), "input_bound", "waits for data")
    other = opened(killed_and_resumed())
    assert other.page.locator("#by-rank").is_hidden()
    assert other.page.locator("#findings").is_hidden()
