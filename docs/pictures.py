"""Make the pictures of the documentation: `.venv/bin/python docs/pictures.py [NAME ...]`, without names all of them.

It needs Chromium, and `pip install pyte nbconvert`. What the programs write stays in `build/pictures`, so a second
start is faster.
"""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from importlib.util import module_from_spec, spec_from_file_location
from io import BytesIO, StringIO
from pathlib import Path
from subprocess import run
from threading import Event, Thread
from types import ModuleType
from typing import Any

import heliograph as h
import matplotlib.pyplot as plt
import torch
from heliograph_recorder import Recorder, Remote, Verdicts
from heliograph_recorder.format.reader import read
from heliograph_recorder.timeline.page import write_timeline
from heliograph_recorder.watch.run_list import RunList
from heliograph_recorder.watch.server import WatchServer
from matplotlib.figure import Figure
from PIL import Image
from playwright.sync_api import Locator, Page, sync_playwright
from sklearn.datasets import load_digits
from terminal import Lines, record, shown, svg, wrapped
from torch import nn

DOCS = Path(__file__).parent.resolve()
IMAGES = DOCS / "images"
WORK = DOCS.parent / "build/pictures"
PAGE, CARD = 100, 60  # columns of a terminal on a page, and on a card of the gallery
PICTURES: dict[str, Callable[[], object]] = {}


def picture(function: Callable[[], object]) -> Callable[[], object]:
    """Register the function that makes the picture of its name."""
    PICTURES[function.__name__] = function
    return function


def main(names: list[str]) -> None:
    """Make the named pictures, or all."""
    WORK.mkdir(parents=True, exist_ok=True)
    (IMAGES / "gallery").mkdir(exist_ok=True)
    if not (WORK / "docs").exists():
        (WORK / "docs").symlink_to(DOCS)
    for name in names or PICTURES:
        print(name)
        PICTURES[name]()


def write(name: str, lines: Lines, columns: int = CARD) -> None:
    """Write the picture of a terminal."""
    (IMAGES / f"{name}.svg").write_text(svg(lines, columns), encoding="utf-8")


def blocks(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def folder_with(name: str, code: str) -> Path:
    """Return a new folder that has the code as `train.py`."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "train.py").write_text(code, encoding="utf-8")
    return folder


def demo() -> Lines:
    """Return the screen of the demo, whose run is in `runs/digits`."""
    screen = WORK / "demo.txt"
    if not screen.exists():
        screen.write_text("\n".join(record("python -m heliograph demo", WORK, 400)), encoding="utf-8")
    return screen.read_text(encoding="utf-8").splitlines()


# Terminals on pages


@picture
def resume() -> None:
    """Kill the quickstart of the README, and start it again."""
    folder = folder_with("resume", blocks("../README.md")[0])

    killed = record("python train.py", folder, 86, lambda lines: epochs(lines, 20) >= 7)
    resumed = record("python train.py", folder, 86)
    start = next(number for number, line in enumerate(resumed) if line.startswith("completed"))
    bars = [line for line in killed if "|" in line]
    write("resume", ["$ python train.py", *bars, "Killed", "", "$ python train.py", *resumed[start:]], 86)


@picture
def demo_end() -> None:
    """Show the summary of the demo."""
    lines = demo()
    start = next(number for number, line in enumerate(lines) if line.startswith("stopped by"))
    summary = [line.partition("; changed by")[0] for line in lines[start:]]
    write("demo", ["$ python -m heliograph demo", "...", *wrapped(summary, PAGE)])


@picture
def explain() -> None:
    """Explain the run of the demo."""
    demo()
    lines = shown("python -m heliograph explain runs/digits", folder=WORK)
    write("explain", [*lines[: lines.index("decisions")], "..."])


@picture
def plugins() -> None:
    """Show the options of a plugin."""
    write("plugins", shown("python -m heliograph plugins early_stopping", folder=WORK))


@picture
def inspect() -> None:
    """Inspect the best checkpoint of the demo."""
    demo()
    (WORK / "best.pth").unlink(missing_ok=True)
    name = (WORK / "runs/digits/checkpoints/digits.best").read_text(encoding="utf-8").strip()
    command = f"python -m heliograph checkpoint inspect {name}"
    write("inspect", shown(command, folder=WORK / "runs/digits/checkpoints"))


@picture
def diverge() -> None:
    """Compare the two runs of the page down to the operator."""
    program, _, comparison = blocks("packages/diverge.md")[0].partition("# another script, with: ")
    folder = folder_with("diverge", program)
    (folder / "both.py").write_text(f"from pathlib import Path\n{comparison}", encoding="utf-8")
    record("python both.py", folder)
    drill = "--drill train:make_trainer --drill train:make_other"
    lines = wrapped(record(f"python -m heliograph diverge runs/a runs/b {drill}", folder, 400), PAGE)
    write("diverge", ["$ python -m heliograph diverge runs/a runs/b \\", f"    {drill}", *lines])


@picture
def verify_resume() -> None:
    """Check that the training of the page resumes."""
    folder = folder_with("verify_resume", blocks("howto/check_that_a_run_resumes.md")[0].partition("\n\nprint(")[0])
    command = "python -m heliograph verify-resume train:make --kill-at 5 --kill-at epoch_start:2"
    write("verify_resume", shown(command, folder=folder))


@picture
def rehearse() -> None:
    """Show the report of a rehearsal."""
    code = blocks("howto/check_a_training_first.md")[0]
    folder = folder_with("rehearse", f"{code.partition('print(')[0]}print(rehearsal)\n")
    write("rehearse", shown("python train.py", folder=folder))


@picture
def error() -> None:
    """Show what a typing error and a wrong option cause."""
    folder = WORK / "error"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS / "examples/configuration", folder)
    commands = ("explian runs/digits", "fit digits.yaml --optimizer.lrr=0.1", "explain runs/none")
    write("error", shown(*[f"python -m heliograph {command}" for command in commands], folder=folder))


@picture
def chaos() -> None:
    """Run a training with faults."""
    code = blocks("howto/resume_a_run.md")[0]
    folder = folder_with("chaos", f'{code.partition("fit(epochs=2)")[0]}fit(epochs=4, resume="auto")\n')
    write("chaos", shown("python -m heliograph chaos train.py --seed 3 --faults 6", folder=folder))


@picture
def ask() -> None:
    """Ask a running training for a log, another learning rate and its end."""
    verbs = ("log", 'set-lr 0.01 --reason "the loss jumps" --wait', 'stop --reason "seen enough" --wait')
    with training(WORK / "runs/x"):
        write("ask", shown(*[f"python -m heliograph ask runs/x {verb}" for verb in verbs], folder=WORK))


@picture
def progress() -> None:
    """Kill the example of the terminal, and start it again."""
    shutil.rmtree(WORK / "runs/terminal", ignore_errors=True)
    write("progress", terminal_example(PAGE))


def terminal_example(columns: int) -> Lines:
    """Return the screens of a killed training, and of its second start."""
    command = "python docs/examples/terminal.py"
    bars = [line for line in record(command, WORK, columns, lambda lines: epochs(lines, 30) >= 7) if "|" in line]
    resumed = record(command, WORK, columns)
    start = next(number for number, line in enumerate(resumed) if "verified" in line)
    return [f"$ {command}", "...", *bars, "Killed", "", f"$ {command}", "...", *resumed[start:]]


def epochs(lines: Lines, length: int) -> int:
    """Return the number of epochs that a bar shows, once it shows batches of the next."""
    found = [re.search(rf"\| (\d+)/{length} .*", line) for line in lines if line.startswith("epochs")]
    batches = [line for line in lines if line.startswith("batches") and re.search(r"\| 1\d/", line)]
    return max((int(each[1]) for each in found if each), default=0) if batches else 0


# Screenshots


@contextmanager
def browser(width: int, height: int = 900) -> Iterator[Page]:
    """Open an empty page."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        opened.close()


def save(page: Page, name: str, height: float) -> None:
    """Write the upper part of a page, in 256 colors."""
    assert page.viewport_size is not None
    clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": height}
    reduced(Image.open(BytesIO(page.screenshot(full_page=True, clip=clip)))).save(IMAGES / name, optimize=True)  # type: ignore[arg-type]


def reduced(image: Image.Image) -> Image.Image:
    """Return the image with at most 256 colors."""
    return image.convert("RGB").quantize(256, dither=Image.Dither.NONE)


def end(element: Locator) -> float:
    """Return where an element ends, with a margin."""
    box = element.bounding_box()
    assert box is not None
    return box["y"] + box["height"] + 14


def phases(page: Page) -> float:
    """Return where the section of the phases ends."""
    return end(page.locator("section", has=page.locator("#strip")))


@picture
def timeline() -> None:
    """Show the timeline of the demo."""
    demo()
    path = WORK / "timeline.html"
    write_timeline(read(WORK / "runs/digits"), path)
    with browser(1120) as page:
        page.goto(path.as_uri())
        page.locator('.chart[data-chart="loss"]').get_by_role("checkbox").check()
        page.locator('.chart[data-chart="loss"] .mark[data-kind="stop"]').hover()
        save(page, "timeline.png", phases(page))


@picture
def curves() -> None:
    """Show the first two charts that `result.plot()` draws."""
    demo()
    image = Image.open(WORK / "runs/digits/curves.png")
    reduced(image.crop((0, 0, image.width, image.height // 2))).save(IMAGES / "digits.png", optimize=True)


@picture
def watch() -> None:
    """Show two runs that train."""
    with training(WORK / "careful", 0.03) as careful, training(WORK / "bold", 0.3) as bold, browser(1120) as page:
        page.wait_for_timeout(9_000)
        with WatchServer(RunList([careful, bold])) as server:
            Thread(target=server.serve_forever).start()
            page.goto(server.url)
            page.locator("path.curve.run-1").first.wait_for()
            page.get_by_label("Reason", exact=True).fill("it overfits")
            save(page, "watch.png", phases(page))
            server.shutdown()


class Slow(h.Plugin):
    """Lets each batch take a while, and stops the run with the picture."""

    asks = ("stop",)

    def __init__(self, begun: Event, ends: Event) -> None:
        self.begun, self.ends = begun, ends

    @h.on(h.BatchStart)
    def wait(self, run: h.Run, event: h.BatchStart) -> None:
        """Wait."""
        if run.progress.epoch == 3:
            self.begun.set()
        if self.ends.wait(0.015):
            run.control.stop("the picture is made")


@contextmanager
def training(folder: Path, rate: float = 0.03) -> Iterator[Path]:
    """Train in a thread, until the picture is made."""
    shutil.rmtree(folder, ignore_errors=True)
    ends, begun = Event(), Event()
    thread = Thread(target=train, args=(folder, rate, begun, ends))
    thread.start()
    begun.wait(60)
    yield folder
    ends.set()
    thread.join()


def train(folder: Path, rate: float, begun: Event, ends: Event) -> None:
    """Train on handwritten digits."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    batches = list(zip(torch.split(images, 64), torch.split(labels, 64), strict=True))
    plugins: list[Any] = [
        h.LogSchedule(h.Every(steps=5)),
        h.ValidationSchedule(h.Every(epochs=1)),
        h.SaveSchedule(h.Every(epochs=2)),
        h.Checkpoint(folder, keep_last=2, keep_best=1, monitor="validation/loss"),
        Verdicts(every=3),
        Remote(folder),
        Recorder(folder),
        Slow(begun, ends),
    ]
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    task = h.Supervised(model, nn.functional.cross_entropy, metrics={"accuracy": h.accuracy})
    h.Trainer(plugins, device="cpu").fit(
        task,
        batches[:22],
        validation=batches[22:],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        epochs=1_000,
        name=folder.name,
    )


# Charts


@contextmanager
def chart(name: str, width: float = 5.5, height: float = 3.2) -> Iterator[Any]:
    """Draw on dark axes, in the size of a card, and write the picture."""
    with plt.style.context(["dark_background", {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10}]):
        figure, axes = plt.subplots(figsize=(width, height), facecolor="#0d1117")
        axes.set_facecolor("#0d1117")
        axes.spines[["top", "right"]].set_visible(False)
        yield axes
        write_figure(figure, f"{name}.svg")


def write_figure(figure: Figure, name: str) -> None:
    """Write a figure without the date."""
    figure.tight_layout()
    figure.savefig(IMAGES / name, metadata={"Date": None})
    plt.close(figure)


@picture
def rates() -> None:
    """Draw the losses of a range test."""
    folder = folder_with("rates", blocks("howto/find_the_learning_rate.md")[0])
    values = runpy.run_path(str(folder / "train.py"))
    figure = values["found"].plot()
    figure.set_size_inches(7, 3.6)
    figure.savefig(WORK / "rates.png", dpi=120, bbox_inches="tight")
    reduced(Image.open(WORK / "rates.png")).save(IMAGES / "rates.png", optimize=True)


# The gallery: what the examples print, draw and measure


def example(name: str) -> tuple[ModuleType, list[h.RunResult], Callable[[], str]]:
    """Return an example as a module, the results of its calls of `fit`, and a function that runs it."""
    shutil.rmtree(WORK / "runs" / name, ignore_errors=True)
    specification = spec_from_file_location(name, DOCS / f"examples/{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    results: list[h.RunResult] = []

    class Trainer(h.Trainer):
        def fit(self, *arguments: Any, **options: Any) -> h.RunResult:
            results.append(super().fit(*arguments, **options))
            return results[-1]

    def start() -> str:
        printed, original = StringIO(), h.Trainer
        h.Trainer = Trainer  # type: ignore[misc]
        try:
            with chdir(WORK), redirect_stdout(printed):
                module.main()
        finally:
            h.Trainer = original  # type: ignore[misc]
        return printed.getvalue()

    return module, results, start


@picture
def gan() -> None:
    """Show the drawn digits."""
    _, _, start = example("gan")
    title = start().splitlines()[0]
    with chart("gallery/gan") as axes:
        drawn = torch.tensor(plt.imread(WORK / "runs/gan/digits.png")[:32, :, 0])
        tiles = drawn.reshape(4, 8, 8, 8).transpose(1, 2)  # 4 rows of 8 images
        spaced = nn.functional.pad(tiles, (2, 2, 2, 2)).transpose(1, 2).reshape(4 * 12, 8 * 12)
        axes.imshow(spaced, cmap="gray", interpolation="bilinear")
        axes.set_title(title, fontsize=9)
        axes.axis("off")


@picture
def multi_task() -> None:
    """Draw the accuracies of both heads."""
    _, results, start = example("multi_task")
    start()
    with chart("gallery/multi_task") as axes:
        for name in ("digit", "parity"):
            metric = f"validation/{name}_accuracy"
            rows = [row for row in results[0].log_history if metric in row]
            axes.plot([row["epoch"] for row in rows], [row[metric] for row in rows], ".-", label=metric)
        axes.set(xlabel="epoch", ylabel="accuracy")
        axes.legend(frameon=False)


@picture
def ppo() -> None:
    """Draw how long the pole stays up."""
    module, _, start = example("ppo")
    lengths: list[float] = []
    play = module.Actor.play

    def played(actor: Any) -> Any:
        samples, length = play(actor)
        lengths.append(length)
        return samples, length

    module.Actor.play = played
    start()
    with chart("gallery/ppo") as axes:
        axes.plot(lengths, ".-")
        axes.set(xlabel="round", ylabel="steps until the pole falls", ylim=(0, None))


@picture
def byol() -> None:
    """Draw the accuracies of the three classifiers."""
    _, _, start = example("byol")
    values = dict(re.findall(r"(\w+): accuracy ([\d.]+)", start()))
    with chart("gallery/byol") as axes:
        bars = axes.barh(list(values), [float(value) for value in values.values()])
        axes.bar_label(bars, list(values.values()), padding=4)
        axes.set(xlabel="accuracy of a linear classifier with 50 labels", xlim=(0, 1))
        axes.invert_yaxis()


def card(name: str, command: str, last: int) -> None:
    """Show a command and the last lines of its output."""
    lines = record(command, WORK, 400)
    write(f"gallery/{name}", [f"$ {command}", *["..."][: len(lines) > last], *wrapped(lines[-last:], CARD)])


@picture
def gpt() -> None:
    """Show what the model writes."""
    card("gpt", "python docs/examples/gpt.py", 9)


@picture
def distilbert() -> None:
    """Show the accuracy, and the modules of five lines."""
    card("distilbert", "python docs/examples/distilbert.py", 6)


@picture
def two_ranks() -> None:
    """Show the stop of two ranks, and the rest on one."""
    shutil.rmtree(WORK / "runs/two_ranks", ignore_errors=True)
    card("two_ranks", "python docs/examples/two_ranks.py", 3)


@picture
def ray_digits() -> None:
    """Show what a lost worker costs."""
    command = "python docs/examples/ray_digits.py --lose-a-worker"
    lines = record(command, WORK, 400)
    start = next(number for number, line in enumerate(lines) if line.startswith("test accuracy"))
    shortened = [line.partition(": The actor")[0] for line in lines[start:]]
    write("gallery/ray_digits", [f"$ {command}", "...", *wrapped(shortened, CARD)])


@picture
def terminal() -> None:
    """Show a killed training and its second start."""
    shutil.rmtree(WORK / "runs/terminal", ignore_errors=True)
    write("gallery/terminal", terminal_example(CARD))


@picture
def configuration() -> None:
    """Train from a file."""
    folder = WORK / "configuration"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS / "examples/configuration", folder)
    command = "python -m heliograph fit digits.yaml"
    lines = record(command, folder, CARD)
    start = next(number for number, line in enumerate(lines) if line.startswith("completed"))
    write("gallery/configuration", [f"$ {command}", "...", *lines[start : start + 9]])


@picture
def commands() -> None:
    """Explain the run of the commands."""
    folder = WORK / "commands"
    folder.mkdir(exist_ok=True)
    record(f"python {DOCS}/examples/commands/digits.py", folder, CARD)
    lines = shown("python -m heliograph explain runs/digits", folder=folder, columns=CARD)
    write("gallery/commands", [*lines[:14], "..."])


@picture
def weight_averaging() -> None:
    """Show the plugin of the package as its users see it."""
    target = WORK / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(target)]
    copy = WORK / "heliograph-weight-averaging"  # pip leaves its build in the folder
    shutil.copytree(DOCS / "examples/heliograph-weight-averaging", copy, dirs_exist_ok=True)
    run([*pip, str(copy)], check=True)  # noqa: S603 (fixed arguments)
    command = "python -m heliograph plugins weight_averaging"
    lines = record(f"env PYTHONPATH={target} {sys.executable} -m heliograph plugins weight_averaging", WORK, 400)
    write("gallery/weight_averaging", [f"$ {command}", *wrapped(lines, CARD)[:15], "..."])


@picture
def notebook() -> None:
    """Run the notebook, and show the cells with the result and the curves."""
    convert = [sys.executable, "-m", "nbconvert", "--execute", "--to", "html", "--output-dir", str(WORK)]
    run([*convert, str(DOCS / "examples/notebook.ipynb")], check=True, cwd=WORK)  # noqa: S603 (fixed arguments)
    with browser(900) as page:
        page.goto((WORK / "notebook.html").as_uri())
        page.wait_for_timeout(1_000)
        page.evaluate(
            "document.querySelectorAll('.jp-Cell').forEach((cell, number) => [5, 6].includes(number) || cell.remove())"
        )
        save(page, "gallery/notebook.png", end(page.locator(".jp-Cell").last))


if __name__ == "__main__":
    main(sys.argv[1:])
