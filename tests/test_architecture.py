"""The house rules, as tests."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib

import heliograph
import pytest
from heliograph.tests.house import (
    PAGE,
    ROOMS,
    ROOT,
    attributes_of_a_run,
    circles,
    code_lines,
    dialect,
    files,
    folders,
    gerunds,
    imported_modules,
    imported_names,
    loaded_by_a_training,
    modules,
    modules_that_name,
    private_doors,
)

# Every folder, from the bottom to the top: a file imports nothing from a line below its own line. The longest matching
# name counts.
LAYERS = [
    "events",
    "plugins",
    "core.system",
    "core.objects.equality",
    "core.metrics",
    "core.data",
    "core.distributed",
    "core.engines",
    "core.objects",
    "core.checkpoint",
    "core.checkpoint.storage",
    "core.checkpoint.weights",
    "core.stepping",
    "core",
    "core.rehearsal",
    "builtin_callbacks",
    "builtin_callbacks.checkpoint",
    "builtin_callbacks.progress_bar",
    "builtin_callbacks.standard",
    "__main__",
    "tuning",
]
SINGLE_FILES = {
    "__main__",
    "tuning",
    "builtin_callbacks.standard",
    "core.checkpoint.weights",
    "core.objects.equality",
}  # with a layer of their own
PUBLIC = """
    At BackwardEnd BatchEnd BatchStart BatchTransform Between Bus ChangeServed Checkpoint CheckpointLabel
    CheckpointLoaded CheckpointPruned CheckpointSaved Compile Control CutMix DDPEngine DataModule DataParallelEngine
    DeviceEngine DistributedSampler EMA EarlyStopping EpochEnd EpochMeans EpochStart Event Every ExceptionPassThrough
    FSDPEngine FileLog Filter ForwardEnd GradientAccumulation GradientClipping GradientNorm GradientsReady
    HandlerTimes JsonlLog Lane LastBoundary LateResult LearningRate LengthGroupedSampler LoadBest LoaderParams
    Log LogSchedule Mixup NaNGuard NotRecorded Once Periodic PhaseTimes Phases Plugin PluginChanged
    PluginFailed Plugins PredictBatchEnd PredictBatchStart PredictEnd PredictStart PredictionWriter Preemption Progress
    ProgressBar RNGCapture RandomSampler RankFailed Replay Resume ResumeDiffers ResumeReport ResumeVerified RollBack Run
    RunClosed RunFailed RunResult SavePoint SaveSchedule SequentialSampler ShouldStop StepEnd Streams StrictError
    Supervised Task TensorBoard TestBatchEnd TestBatchStart TestEnd TestStart TokenBudgetBatchSampler TrainEnd
    TrainRun TrainStart TrainedOnly Trainer TrainingError ValidationBatchEnd ValidationBatchStart ValidationCut
    ValidationEnd ValidationSchedule ValidationStart Verdict VerifyResume WeightsCheckpoint accuracy launch
    load_weights on read_prediction_batches read_predictions standard summary warmup_cosine warmup_linear
"""


def layer_of(name: str) -> int:
    """Return the number of the layer of a module, given by its name without `heliograph.`."""
    fitting = [each for each in LAYERS if name == each or name.startswith(f"{each}.")]
    return LAYERS.index(max(fitting, key=len))


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_one_way(name: str) -> None:
    """Imports in functions and for type checkers included."""
    if name == "heliograph":
        return
    above = [
        each
        for each in imported_modules(name)
        if layer_of(each.removeprefix("heliograph.")) > layer_of(name.removeprefix("heliograph."))
    ]
    assert not above


def test_every_folder_has_its_layer() -> None:
    found = {folder.replace("/", ".") for folder in folders()} - {"."}
    assert found == set(LAYERS) - SINGLE_FILES


def test_the_page_on_architecture_has_the_folders_of_core_in_this_order() -> None:
    rows = re.findall(r"^\| `(core/.*)/` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [row.replace("/", ".") for row in rows] == [
        each for each in LAYERS if each.startswith("core.") and each not in SINGLE_FILES
    ]


def test_no_circle_of_imports() -> None:
    """The bus carries runs, a run holds its control and the bus, and the control asks the bus whose handler runs."""
    found = circles({name: imported_modules(name) for name in modules()})
    assert found == [["heliograph.events.bus", "heliograph.events.control", "heliograph.events.run"]]


@pytest.mark.parametrize(
    ("plugins", "lines", "count"), [("[]", 3940, 36), ("h.standard(tempfile.mkdtemp())", 10640, 88)]
)
def test_what_a_training_loads(plugins: str, lines: int, count: int) -> None:
    loaded = loaded_by_a_training(plugins)
    assert sum(loaded.values()) <= lines
    assert len(loaded) <= count


def test_tests_mirror_the_rooms() -> None:
    """Every folder of the package has tests in one of the same path."""
    with_tests = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders() - with_tests == set()
    assert with_tests - folders() == set()


def test_the_page_on_architecture_names_every_folder() -> None:
    page = PAGE.read_text(encoding="utf-8")
    named = folders() - {"."}
    assert {folder for folder in named if f"`{folder}/`" not in page} == set()


def test_a_verb_of_the_control_is_named_where_it_is_declared_described_and_used() -> None:
    assert modules_that_name("cut_validation") == {
        "heliograph.events.control",
        "heliograph.core.evaluation",
        "heliograph.core.host",
        "heliograph.core.evaluation_run",
        "heliograph.builtin_callbacks.preemption",
    }


def test_files_are_named_by_nouns() -> None:
    assert gerunds() == {"early_stopping.py"}


def test_the_sources_use_the_words_of_pytorch_users() -> None:
    """Say `report`, `announce`, `receive`, `during`, `after`, `continue`, `skip`."""
    assert dialect() == []


def test_plugins_use_no_private_door() -> None:
    """What a plugin needs of the run is on the public `Run`: a third party could have written each."""
    assert private_doors() == []


def test_all_of_a_run_is_documented() -> None:
    """Attributes in the docstring of the protocol, methods and properties in their own, on the page of the API."""
    described = set(re.findall(r"^ +(\w+): ", heliograph.Run.__doc__ or "", re.MULTILINE))
    assert set(heliograph.Run.__annotations__) <= described
    assert [name for name in dir(heliograph.Run) if name[0] != "_" and not getattr(heliograph.Run, name).__doc__] == []
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    assert re.search(r"^\.\. autoclass:: heliograph\.Run\n +:members:$", page, re.MULTILINE)


def test_a_run_has_few_attributes() -> None:
    assert len(attributes_of_a_run()) <= 18


def test_built_ins_do_not_import_each_other() -> None:
    """The files of one folder are one built-in."""
    for path in files("builtin_callbacks"):
        folder = path.relative_to(ROOT).parts[1]
        if folder == "standard.py":
            continue  # a list of them
        others = [name for name in imported_names(path) if name.startswith("heliograph.builtin_callbacks.")]
        assert not [name for name in others if not name.startswith(f"heliograph.builtin_callbacks.{folder}.")], path


def test_nothing_in_core_knows_a_plugins_module() -> None:
    for room in ("events", "plugins", "core"):
        for path in files(room):
            assert "builtin_callbacks" not in "".join(imported_names(path)), path.name


def test_the_kernel_imports_no_package_and_no_room_imports_spi() -> None:
    names = {name for path in modules().values() for name in imported_names(path)}
    assert {name for name in names if re.match(r"heliograph_\w+", name)} == set()
    rooms = {name for room in ROOMS for path in files(room) for name in imported_names(path)}
    assert {name for name in rooms if name.startswith("heliograph.spi")} == set()


def test_blinker_is_imported_in_one_file() -> None:
    importing = [
        path for room in ROOMS for path in files(room) if any(n.startswith("blinker") for n in imported_names(path))
    ]
    assert [path.relative_to(ROOT).as_posix() for path in importing] == ["events/bus.py"]


@pytest.mark.parametrize("room", ["events", "plugins"])
def test_events_and_plugins_import_no_torch(room: str) -> None:
    for path in files(room):
        assert not [name for name in imported_names(path) if name.split(".")[0] in ("torch", "numpy", "tqdm")], (
            path.name
        )


def test_importing_events_leaves_torch_alone() -> None:
    code = "import sys, heliograph.events, heliograph.plugins, heliograph; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_heavy_packages_wait_until_they_are_used() -> None:
    code = (
        "import sys, heliograph; heliograph.Trainer; heliograph.TensorBoard; heliograph.ProgressBar; "
        "print([m for m in ('tensorboard', 'tqdm.auto', 'matplotlib', 'sklearn', 'ray', 'optuna') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("word", ["patience", "frequency", "tqdm", ".pth", "rng", "every(", "seed", "checkpoint_"])
def test_the_loop_knows_nothing_of(word: str) -> None:
    assert word not in (ROOT / "core/loop.py").read_text(encoding="utf-8").lower()


def test_the_loops_events_are_emitted_in_the_loop_only() -> None:
    loop = {event.__name__ for event in heliograph.events.CATALOGUE}
    loop -= {"CheckpointSaved", "CheckpointPruned", "ResumeVerified"}  # who stores
    loop -= {"Verdict", "LateResult"}  # who measures
    loop -= {"PluginChanged", "PluginFailed"}  # the plugin manager
    for room in ("events", "plugins", "core", "builtin_callbacks"):
        for path in files(room):
            if path == ROOT / "core/loop.py":
                continue
            calls = [
                node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
            ]
            made = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
            made |= {node.func.attr for node in calls if isinstance(node.func, ast.Attribute)}
            assert not made & loop, f"{path.relative_to(ROOT)} makes {made & loop}"


def test_the_loop_is_short() -> None:
    """The aim is 200 lines of code for a training, and what predictions and the events within a batch need."""
    assert code_lines(ROOT / "core/loop.py") <= 235


def test_the_public_names() -> None:
    assert sorted(dir(heliograph)) == sorted(PUBLIC.split())
    for name in PUBLIC.split():
        assert getattr(heliograph, name).__name__.rpartition(".")[2] == name


def test_type_checkers_see_every_public_name() -> None:
    stub = ast.parse((ROOT / "__init__.pyi").read_text(encoding="utf-8"))
    named = {alias.asname for node in ast.walk(stub) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(dir(heliograph)) - named == {event.__name__ for event in heliograph.events.CATALOGUE} | {"Event"}


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"'EarlyStoping'\. Did you"):
        _ = heliograph.EarlyStoping  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "module"), [("Request", "events"), ("rehearse", "tuning"), ("Tracker", "spi")])
def test_a_name_of_another_public_module_says_where_it_is(name: str, module: str) -> None:
    with pytest.raises(AttributeError, match=f"from heliograph.{module} import {name}$"):
        getattr(heliograph, name)


def test_the_front_door_refuses_another_name() -> None:
    code = "import importlib.util as u; s = u.spec_from_file_location('other', 'ROOT/__init__.py'); "
    code += "m = u.module_from_spec(s); s.loader.exec_module(m)"
    done = subprocess.run([sys.executable, "-c", code.replace("ROOT", str(ROOT))], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: The package" in done.stderr


def test_packages_are_listed_by_hand_and_completely() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    found = {path.parent.relative_to(ROOT) for path in ROOT.glob("[!.]*/**/__init__.py")}
    outside = {"docs", "tests", "build", "packages"}
    packages = {".".join(["heliograph", *path.parts]) for path in found if path.parts[0] not in outside}
    assert sorted(listed) == sorted(packages | {"heliograph"})


def test_no_other_module_lies_in_the_root() -> None:
    assert sorted(path.name for path in ROOT.glob("*.py")) == ["__init__.py", "__main__.py", "spi.py", "tuning.py"]
    assert not list((ROOT / "tests").glob("**/__init__.py"))


@pytest.mark.parametrize("name", PUBLIC.split())
def test_public_names_have_docstrings(name: str) -> None:
    public = getattr(heliograph, name)
    own = [value for key, value in vars(public).items() if key[0] != "_"] if isinstance(public, type) else []
    undocumented = [value for value in [public, *own] if callable(value) and not inspect.getdoc(value)]
    assert not undocumented
