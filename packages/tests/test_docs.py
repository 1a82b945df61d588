"""The documentation does what it says: its code runs, its commands exist, and it leaves nothing public out."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from types import ModuleType

import heliograph
import pytest
from heliograph.__main__ import GROUP, KERNEL, main
from heliograph.plugins.discovery import VARIABLE
from heliograph.plugins.providers import ENTRY_POINTS
from sphinx.search.en import SearchEnglish

ROOT = Path(__file__).parents[2]
DOCS = sorted(page for page in (ROOT / "docs").rglob("*.md") if not {"_build", "examples"} & {*page.parts})
PAGES = [ROOT / "README.md", *DOCS, *sorted((ROOT / "packages").glob("*/README.md"))]
FENCE = re.compile(r"^(?P<mark>`{3,})(?P<language>\S*)[^\n]*\n(?P<body>.*?)^(?P=mark)[ \t]*$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(
    r"^```python\n(?P<code>(?:(?!^```).)*)^```\n\n^```text\n(?P<output>.*?)^```", re.MULTILINE | re.DOTALL
)
FLOAT = re.compile(r"\d+\.\d+(e-?\d+)?|(?<=per_second )\d+|\d+(?= steps/s)|\b\d\d:\d\d\b")  # differ from run to run
FOR_THE_SITE = re.compile(r"^(?P<instead>[^\n]*)\n<!-- site\n(?P<body>.*?)^-->$", re.MULTILINE | re.DOTALL)
VISION = Path(sys.prefix) / "vision"  # where the development set-up has torchvision and what imports it
WITH_VISION = ("use_timm", "use_torchvision")
SHELL = {"bash", "sh", "shell", "console"}


def fences(page: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (language, body, number of the line before the body) of every fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        yield found["language"], found["body"], text.count("\n", 0, found.start("body"))


def blocks(page: Path) -> list[tuple[str, int]]:
    return [(body, line) for language, body, line in fences(page) if language == "python"]


def commands(page: Path) -> list[str]:
    """Return the command lines of the shell blocks of a page, and what it names in backticks as a command."""
    lines = [line for language, body, _ in fences(page) if language in SHELL for line in body.splitlines()]
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    lines += re.findall(r"`((?:make|python -m heliograph)[^`\n]*)`", prose)
    return [line.split("#")[0].strip().removeprefix("$ ") for line in lines]


def mentioned(pattern: str) -> list[str]:
    """Return the first groups of a pattern in all commands of all pages, each once."""
    return sorted({word for page in PAGES for line in commands(page) for word in re.findall(pattern, line)})


def run(page: Path) -> None:
    """Run the code of a page, as one module, and compare what a block prints with a block of text right after it."""
    module = ModuleType(f"docs_of_{page.stem.lower()}")
    sys.modules[module.__name__] = module
    outputs = {found["code"]: found["output"] for found in OUTPUT.finditer(page.read_text(encoding="utf-8"))}
    try:
        for body, line in blocks(page):
            printed = StringIO()
            with redirect_stdout(printed):
                # Blank lines in front, so that a traceback points at the line of the page.
                exec(compile("\n" * line + body, str(page), "exec", dont_inherit=True), vars(module))
            if body in outputs:
                check_output(printed.getvalue(), outputs[body])
    finally:
        del sys.modules[module.__name__]
        vars(module).clear()


def check_output(printed: str, shown: str) -> None:
    """Compare what was printed with what a page shows, but for fractions; `...` stands for the rest of a line."""
    lines, expected = (FLOAT.sub("#", text).splitlines() for text in (printed, shown))
    assert len(lines) == len(expected), printed
    for line, other in zip(lines, expected, strict=True):
        assert line.startswith(other[:-3]) if other.endswith("...") else line == other


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning")  # of MLflow
@pytest.mark.filterwarnings(r"ignore:.torch\.jit\.(script|interface). is deprecated:DeprecationWarning")  # of Ignite
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.filterwarnings("ignore:unclosed file .*shard-:ResourceWarning")  # webdataset closes none
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page) and page.stem not in WITH_VISION],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("HELIOGRAPH_PLUGIN_PATH", "")  # which a page sets
    run(page)
    gc.collect()  # here, where warnings of what a library leaves open are expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", WITH_VISION)
def test_the_code_of_a_page_with_torchvision_runs(name: str, tmp_path: Path) -> None:
    """In a process of its own: other libraries of the set-up would import torchvision where they see it."""
    assert VISION.is_dir(), f"no {VISION}: run `make test`"
    page = ROOT / "docs" / "howto" / f"{name}.md"
    line = [sys.executable, "-W", "error", "-m", "heliograph.packages.tests.vision", str(page)]
    path = os.pathsep.join([str(VISION), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = os.environ | {"PYTHONPATH": path, VARIABLE: ""}
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["README", "first_training", "first_plugin", "plugins", "own_loop"])
def test_pages_that_teach_have_code(name: str) -> None:
    (page,) = [page for page in PAGES if page.stem == name and "packages" not in page.parts]
    assert blocks(page)


def test_the_first_example_is_short_and_does_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    body, _ = blocks(PAGES[0])[0]
    assert len([line for line in body.splitlines() if line.strip()]) <= 15
    module = ModuleType("the_first_example")
    exec(compile(body, "README.md", "exec", dont_inherit=True), vars(module))
    assert module.result.warnings == ()
    assert module.result.metrics["validation/accuracy"] > 0.9
    assert {"run.best", "run.last"} < {each.name for each in Path("runs/digits").iterdir()}


@pytest.mark.parametrize("page", [PAGES[0], ROOT / "docs/learn/first_training.md"], ids=lambda page: page.name)
def test_pages_for_beginners_begin_with_the_standard_plugins(page: Path) -> None:
    assert re.search(r"h\.standard\(", "".join(body for body, _ in blocks(page)[:2]))


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = mentioned(r"\bmake ([a-z]+)")
    assert {"demo", "test", "docs"} <= set(named)
    assert set(named) <= targets


@pytest.mark.parametrize("command", mentioned(r"python -m heliograph ([a-z][a-z-]*)"))
def test_subcommands_exist(command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0


def test_the_subcommands_are_documented() -> None:
    assert {"demo", "events", "plugins", "verify-resume"} <= set(mentioned(r"python -m heliograph ([a-z-]+)"))
    page = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([a-z][a-z-]*)[^`]*`", "".join(re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE))))
    assert documented == KERNEL.keys() | ENTRY_POINTS[GROUP].keys()


def test_scripts_and_modules_in_commands_exist() -> None:
    for path in mentioned(r"-m pytest (\S+)"):
        assert (ROOT / path).is_file(), path


def test_every_builtin_has_a_section_with_its_options() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs/reference/plugins.md").read_text(encoding="utf-8")
    for target in project["entry-points"]["heliograph.plugins"].values():
        name = target.split(":")[1]
        assert f"### {name}\n" in page
        assert f".. autoclass:: heliograph.{name}\n" in page


def test_every_public_name_is_documented() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    documented = set(re.findall(r"^\.\. auto\w+:: heliograph\.(\w+)(?:\.\w+)?$", text, re.MULTILINE))
    documented |= {event.__name__ for event in heliograph.events.CATALOGUE}  # by the directive `event-table`
    assert "{event-table}" in text
    assert set(dir(heliograph)) <= documented


def test_the_errors_on_the_page_are_texts_of_the_code() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    files = [
        file for room in ("core", "events", "plugins", "builtin_callbacks") for file in (ROOT / room).rglob("*.py")
    ]
    texts = "".join(re.sub(r'"\s+f?"', "", file.read_text(encoding="utf-8")) for file in files)  # joins their lines
    assert len(headings) > 25
    assert [heading for heading in headings if any(part.strip() not in texts for part in heading.split("..."))] == []


@pytest.mark.parametrize("name", ["names", "packages", "pages"])
def test_the_files_for_tools_are_up_to_date(name: str) -> None:
    specification = spec_from_file_location("for_tools", ROOT / "docs/for_tools.py")
    assert specification is not None
    assert specification.loader is not None
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    text = getattr(module, name.upper()).read_text(encoding="utf-8")
    assert text == getattr(module, name)(), "run: .venv/bin/python docs/for_tools.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pictures_have_a_text_and_show_no_machine(page: Path) -> None:
    for text, target in re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        assert len(text.split()) >= 5, target
        picture = page.parent / target
        if picture.suffix == ".svg":
            assert not re.search(r"/(home|root|tmp|work)/", picture.read_text(encoding="utf-8")), target
        else:
            assert picture.stat().st_size < 150_000, target


def build_site(pages: Iterable[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Build a site that has a short page for each name, with the settings of ours."""
    folder.mkdir()
    names = sorted({"index", *pages})
    for name in names:
        (folder / f"{name}.md").write_text(f"# The page {name}\n")
    toctree = "\n".join(["```{toctree}", *(name for name in names if name != "index"), "```"])
    (folder / "index.md").write_text(f"# The page index\n\n{toctree}\n")
    built = folder.with_name("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-c", str(ROOT / "docs")]
    return subprocess.run([*command, str(folder), str(built)], capture_output=True, text=True, timeout=120)


def test_sphinx_overwrites_none_of_our_pages(tmp_path: Path) -> None:
    """It writes pages of its own, such as search.html, after ours."""
    ours = [page.stem for page in DOCS if page.parent.name == "docs"]
    done = build_site(ours, tmp_path / "pages")
    assert done.returncode == 0, done.stderr
    for name in ours:
        assert f"The page {name}" in (tmp_path / f"site/{name}.html").read_text(encoding="utf-8")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["search", "genindex"])
def test_a_page_that_sphinx_would_overwrite_is_refused(name: str, tmp_path: Path) -> None:
    done = build_site([name], tmp_path / "pages")
    assert done.returncode == 2
    assert f"overwritten by Sphinx's {name}.html:" in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_github_shows_no_directives(page: Path) -> None:
    """They stand in comments, which the build of the site uncovers; a line above says what GitHub shows instead."""
    shown = FOR_THE_SITE.sub("", page.read_text(encoding="utf-8"))
    assert re.findall(r"^```\{(?!code-block\}).*$", shown, re.MULTILINE) == []
    assert re.findall(r"\[\]\([^)]*\)", shown) == []  # a link without words


def test_the_links_to_sources_lead_to_what_is_documented() -> None:
    blocks = [found for page in PAGES for found in FOR_THE_SITE.finditer(page.read_text(encoding="utf-8"))]
    checked = 0
    for block in blocks:
        names = re.findall(r"^\.\. auto\w+:: (heliograph[\w.]*\.\w+)$", block["body"], re.MULTILINE)
        shorts = [name.rpartition(".")[2] for name in names]
        linked = re.findall(r"\[`(\w+)`\]\((?:\.\./)+([\w/]+\.py)\)", block["instead"])
        assert [short for short, _ in linked] == shorts, block["instead"]
        for short, file in linked:
            source = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"^(?:class|def) {short}\b|^{short}\b.*= ", source, re.MULTILINE), (short, file)
            checked += 1
    assert checked > 80


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_drawings_fit_the_width_of_the_site(page: Path) -> None:
    """A longer line is cut off until one scrolls."""
    shown = [body for language, body, _ in fences(page) if language in {*SHELL, "text"}]
    assert [line for body in shown for line in body.splitlines() if len(line) > 92] == []


SEARCHES = {
    "accumulate_gradients.md": ("gradient accumulation", "GradientAccumulationScheduler", "accumulate_grad_batches"),
    "average_weights.md": ("average weights", "EMA", "StochasticWeightAveraging", "EMAHandler"),
    "clip_gradients.md": ("gradient clipping", "gradient_clip_val", "max_grad_norm"),
    "configure_in_a_file.md": ("configuration file yaml", "LightningCLI"),
    "check_a_training_first.md": ("rehearse", "CheckRunCallback"),
    "find_the_batch_size.md": ("BatchSizeFinder", "auto_find_batch_size"),
    "find_the_learning_rate.md": ("find learning rate", "LearningRateFinder", "LRFinder"),
    "freeze_layers.md": ("freeze layers", "BackboneFinetuning"),
    "handle_nan.md": ("NaN loss", "TerminateOnNan", "detect_anomaly"),
    "keep_the_best_weights.md": ("best weights", "ModelCheckpoint", "load_best_model_at_end"),
    "measure_the_time.md": ("what is slow", "profiler", "HandlersTimeProfiler", "DeviceStatsMonitor"),
    "predict.md": ("predictions", "BasePredictionWriter"),
    "resume_a_run.md": ("resume training", "resume_from_checkpoint", "ckpt_path"),
    "schedule_the_learning_rate.md": ("learning rate schedule", "learning rate warm-up", "SchedulerCallback"),
    "save_checkpoints.md": ("save checkpoints", "save_total_limit"),
    "search_hyperparameters.md": ("hyper-parameters", "Optuna", "OptunaPruningCallback"),
    "show_progress.md": ("progress bar", "RichProgressBar", "ProgressCallback"),
    "stop_early.md": ("early stopping", "EarlyStoppingCallback", "Timer"),
    "summarize_a_model.md": ("model summary", "ModelSummary", "count the parameters"),
    "test_a_training_in_ci.md": ("golden run", "regression test of a training"),
    "test_overfit_one_batch.md": ("overfit", "overfit_batches", "fast_dev_run"),
    "train_a_gan.md": ("GAN", "several models"),
    "use_a_tracker.md": ("TensorBoard", "MLflow", "LearningRateMonitor", "CSVLogger"),
    "use_transformers.md": ("LoRA", "Hugging Face transformers"),
    "use_wandb.md": ("Weights & Biases", "WandbLogger"),
    "validate_often.md": ("validate several sets", "val_check_interval", "eval_steps"),
}


STEMMER = SearchEnglish({})  # as the search of the site


@cache
def stem(word: str) -> str:
    return STEMMER.stem(word)


def words(text: str) -> Counter[str]:
    return Counter(stem(word) for word in re.findall(r"\w{3,}", text.lower()))


@cache
def searched(page: Path) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Return the words of a page's title, of its headings and of all its text."""
    text = page.read_text(encoding="utf-8")
    title, *headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE) or [""]
    return words(title), words(" ".join(headings)), words(text)


def rank(term: str) -> list[str]:
    """Return the names of the pages that match best: a title counts more than a heading, and that more than text."""
    scores = dict[Path, float]()
    for page in DOCS:
        title, headings, text = searched(page)
        scores[page] = sum(
            10 * (word in title) + 4 * (word in headings) + text[word] / (text[word] + 1) for word in words(term)
        )
    return [page.name for page in sorted(DOCS, key=lambda page: (-scores[page], searched(page)[2].total()))]


@pytest.mark.parametrize(("term", "name"), [(term, name) for name, terms in SEARCHES.items() for term in terms])
def test_a_search_finds_the_page(term: str, name: str) -> None:
    """The words of a task, and the names that other libraries have for it."""
    assert name in rank(term)[:3]
