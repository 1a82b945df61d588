"""A plugin of another package: installed for real, broken, switched off, ambiguous; and the example's own numbers."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    Event,
    Every,
    Lane,
    Run,
    RunFailed,
    SaveSchedule,
    Supervised,
    Trainer,
    ValidationEnd,
    ValidationSchedule,
    ValidationStart,
)
from heliograph.core.checkpoint import storage
from heliograph.tests.kit import sgd
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "heliograph-weight-averaging"
NAME, PACKAGE, MODULE = "weight_averaging", "heliograph-weight-averaging", "heliograph_weight_averaging"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example: building it, and importing from it, leave files in its folder."""
    copy = tmp_path_factory.mktemp("example") / EXAMPLE.name
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    return copy


# (a) In an environment of its own.


@dataclass(frozen=True)
class Environment:
    folder: Path

    def run(self, *arguments: str) -> str:
        ours = ("PYTHON", "PIP_", "COV", "HELIOGRAPH_")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        done = subprocess.run(
            [str(self.folder / "bin" / "python"), *arguments],
            cwd=self.folder,
            env=clean | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ask(self, program: str) -> Any:
        """Run a program that fills `seen`; a warning fails it."""
        return json.loads(self.run("-c", f"{BEGIN}{program}\nprint(json.dumps(seen))").splitlines()[-1])


BEGIN = """
import json, sys, warnings
warnings.simplefilter("error")
import torch
from heliograph import BatchEnd, Supervised, Trainer

seen = {}

def names():
    return [each.name for each in Trainer().plugins.available()]

def fit(trainer, steps):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 8.0)
    task, optimizer = Supervised(model, lambda outputs, _: outputs.mean()), torch.optim.SGD(model.parameters(), lr=1.0)
    trainer.fit(task, [(torch.ones(1, 1), None)] * 8, optimizer=optimizer, steps=steps)
    return model
"""

IN_USE = """
trainer = Trainer(device="cpu")
[found] = [each for each in trainer.plugins.available() if each.name == "weight_averaging"]
seen["found"] = [found.package, found.version, found.target, found.switched_off]
seen["imported by finding"] = "heliograph_weight_averaging" in sys.modules

plugin = trainer.plugins.load("weight_averaging", decay=0.5, start_step=2)
seen["class"] = [type(plugin).__module__, type(plugin).__name__]
seen["file"] = sys.modules["heliograph_weight_averaging"].__file__
seen["options"] = [plugin.decay, plugin.start_step]
seen["registered"] = trainer.plugins.names()

model = fit(trainer, steps=5)
seen["trained"] = [plugin.updates, model.weight.item()]
plugin.copy_to(model)
seen["averaged"] = model.weight.item()

trainer.plugins.disable("weight_averaging")
fit(trainer, steps=3)
seen["disabled"] = [plugin.updates, trainer.plugins.is_enabled(plugin)]
trainer.plugins.enable("weight_averaging")
fit(trainer, steps=3)
seen["enabled"] = [plugin.updates, trainer.plugins.is_enabled(plugin)]
with trainer.plugins.disabled("weight_averaging"):
    fit(trainer, steps=7)
seen["with disabled"] = [plugin.updates, trainer.plugins.is_enabled(plugin)]

def toggle(run, event):
    if run.progress.steps == 3:
        trainer.plugins.disable(plugin)
    if run.progress.steps == 6:
        trainer.plugins.enable(plugin)

with trainer.bus.on(BatchEnd, toggle):
    fit(trainer, steps=7)
seen["toggled within a run"] = plugin.updates

seen["unregistered"] = trainer.plugins.unregister("weight_averaging") is plugin
fit(trainer, steps=8)
seen["after"] = [plugin.updates, trainer.plugins.names(), "weight_averaging" in trainer.plan()]
seen["still found"] = "weight_averaging" in names()
"""

GONE = """
seen["names"] = names()
try:
    Trainer().plugins.load("weight_averaging")
except LookupError as error:
    seen["error"] = [type(error).__name__, str(error)]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A new virtual environment that sees the packages of ours, its pip among them; installs go into the new one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    # Not a bare path: the .pth files there, such as that of our editable install, must be read as well.
    ours = sysconfig.get_path("purelib")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")
    return Environment(folder)


@pytest.fixture(scope="module")
def in_use(environment: Environment, example: Path) -> dict[str, Any]:
    """What a program saw that used the installed example."""
    environment.run("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", str(example))
    seen: dict[str, Any] = environment.ask(IN_USE)
    return seen


@pytest.fixture(scope="module")
def gone(environment: Environment, in_use: dict[str, Any]) -> dict[str, Any]:
    """What a program saw after the example was used and uninstalled."""
    environment.run("-m", "pip", "uninstall", "--quiet", "-y", PACKAGE)
    seen: dict[str, Any] = environment.ask(GONE)
    return seen


def test_installed_plugin_is_found_without_being_imported(in_use: dict[str, Any]) -> None:
    assert in_use["found"] == [PACKAGE, "0.1.0", f"{MODULE}:WeightAveraging", False]
    assert in_use["imported by finding"] is False


def test_installed_plugin_is_loaded_with_options_and_used(in_use: dict[str, Any], environment: Environment) -> None:
    assert in_use["class"] == [MODULE, "WeightAveraging"]
    assert Path(in_use["file"]).is_relative_to(environment.folder)
    assert in_use["options"] == [0.5, 2]
    assert in_use["registered"] == [NAME]
    assert in_use["trained"] == [4, 3.0]
    assert in_use["averaged"] == 3.875  # of 6, 5, 4 and 3, as they are after the steps 2 to 5


def test_installed_plugin_is_toggled_and_unregistered(in_use: dict[str, Any]) -> None:
    assert in_use["disabled"] == [4, False]
    assert in_use["enabled"] == [2, True]
    assert in_use["with disabled"] == [2, True]
    assert in_use["toggled within a run"] == 3  # the steps 2, 3 and 7
    assert in_use["unregistered"] is True
    assert in_use["after"] == [3, [], False]
    assert in_use["still found"] is True


def test_uninstalled_plugin_is_gone(gone: dict[str, Any]) -> None:
    assert NAME not in gone["names"]
    assert "early_stopping" in gone["names"]
    kind, sentence = gone["error"]
    assert kind == "LookupError"
    assert_facts(sentence, "No installed plugin", "'weight_averaging'")
    assert sentence.endswith(f"Known: {', '.join(gone['names'])}.")


def test_environment_of_its_own_leaves_ours_alone(in_use: dict[str, Any]) -> None:
    assert in_use["still found"] is True
    assert NAME not in [each.name for each in Trainer().plugins.available()]
    assert importlib.util.find_spec(MODULE) is None


# (b) Packages that are broken, switched off, or of one name.

WORKING = """
from heliograph import EpochEnd, Plugin, on

class Working(Plugin):
    def __init__(self, size=1):
        self.size, self.epochs = size, 0

    @on(EpochEnd)
    def count(self, run, event):
        self.epochs += self.size
"""

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Make packages that look installed: `install(package, plugin, source)`."""
    made: list[str] = []

    def write(package: str, plugin: str, source: str) -> None:
        module = package.replace("-", "_")
        target = f"{module}:{plugin.title()}"
        metadata = tmp_path / f"{module}-1.2.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (metadata / "entry_points.txt").write_text(f"[heliograph.plugins]\n{plugin} = {target}\n")
        (tmp_path / f"{module}.py").write_text(source)
        made.append(module)
        monkeypatch.syspath_prepend(tmp_path)

    monkeypatch.delenv("HELIOGRAPH_PLUGINS", raising=False)
    yield write
    for module in made:
        sys.modules.pop(module, None)


def found(trainer: Trainer) -> dict[str, tuple[str, bool]]:
    return {f"{each.package}:{each.name}": (each.version, each.switched_off) for each in trainer.plugins.available()}


def one_epoch(trainer: Trainer) -> None:
    task = Supervised(nn.Linear(1, 1), nn.functional.mse_loss)
    batch = (torch.ones(2, 1), torch.zeros(2, 1))
    trainer.fit(task, [batch], optimizer=sgd(), epochs=1)


def test_broken_package_harms_only_who_asks_for_it(install: Install) -> None:
    install("acme-broken", "broken", "import no_such_module_of_acme\n")
    install("acme-working", "working", WORKING)
    trainer = Trainer(device="cpu")
    listed = found(trainer)
    assert listed["acme-broken:broken"] == listed["acme-working:working"] == ("1.2", False)
    assert not {"acme_broken", "acme_working"} & sys.modules.keys()

    with pytest.raises(ImportError) as caught:
        trainer.plugins.load("broken")
    sentence = str(caught.value)
    assert "package acme-broken 1.2 (acme_broken:Broken)" in sentence
    assert "ModuleNotFoundError: No module named" in sentence
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert trainer.plugins.names() == []

    working = trainer.plugins.load("working", size=3)
    one_epoch(trainer)
    assert trainer.plugins.names() == ["working"]
    assert working.epochs == 3


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise RuntimeError('no licence')\n", "RuntimeError: no licence"),
        ("def broken(:\n", "SyntaxError"),
        ("other = 1\n", "no attribute 'Broken'"),
    ],
)
def test_every_kind_of_broken_module_is_named(install: Install, source: str, cause: str) -> None:
    install("acme-broken", "broken", source)
    with pytest.raises(ImportError) as caught:
        Trainer(device="cpu").plugins.load("broken")
    assert "package acme-broken 1.2" in str(caught.value)
    assert cause in str(caught.value)


def test_bad_options_leave_nothing_behind(install: Install) -> None:
    install("acme-working", "working", WORKING)
    trainer = Trainer(device="cpu")
    with pytest.raises(TypeError, match="option 'colour'"):
        trainer.plugins.load("working", colour="red")
    assert trainer.plugins.names() == []


@pytest.mark.parametrize(
    ("switch", "working", "builtin"),
    [
        ("-all", True, False),
        ("-working", True, False),
        ("-early_stopping, -working", True, True),
        ("-other", False, False),
    ],
)
def test_kill_switch(
    install: Install, monkeypatch: pytest.MonkeyPatch, switch: str, working: bool, builtin: bool
) -> None:
    install("acme-working", "working", WORKING)
    monkeypatch.setenv("HELIOGRAPH_PLUGINS", switch)
    trainer = Trainer(device="cpu")
    assert found(trainer)["acme-working:working"] == ("1.2", working)
    assert found(trainer)["heliograph:early_stopping"][1] is builtin
    if working:
        with pytest.warns(RuntimeWarning, match="'working' is disabled"):
            trainer.plugins.load("working")
        assert "acme_working" not in sys.modules
        assert not trainer.plugins.is_enabled("working")
    else:
        assert trainer.plugins.load("working").size == 1
        assert trainer.plugins.names() == ["working"]


def test_package_decides_between_plugins_of_one_name(install: Install) -> None:
    install("acme-working", "working", WORKING)
    install("bolt-working", "working", WORKING.replace("size=1", "size=10"))
    trainer = Trainer(device="cpu")
    assert {"acme-working:working", "bolt-working:working"} <= found(trainer).keys()
    with pytest.raises(LookupError, match="one of acme-working:working, bolt-working:working"):
        trainer.plugins.load("working")
    assert trainer.plugins.names() == []
    assert trainer.plugins.load("bolt-working:working").size == 10
    trainer.plugins.unregister("working")
    assert trainer.plugins.load("acme-working:working").size == 1
    with pytest.raises(LookupError, match="plugin is named 'carl-working:working'"):
        trainer.plugins.load("carl-working:working")


# (c) The example's numbers.


@pytest.fixture(scope="module")
def plugin_class(example: Path) -> Any:
    """The example's class, imported from its file: it is not installed here."""
    spec = importlib.util.spec_from_file_location(MODULE, example / "src" / MODULE / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WeightAveraging


class Slope(nn.Module):
    """`w * x`; with its mean as the loss and a rate of 1, every step takes x from w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def mean_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


ONE = (torch.ones(1), torch.zeros(1))


def descend(trainer: Trainer, model: nn.Module, *, steps: int, **options: Any) -> dict[str, float]:
    """Take 1 from w at every step: 7, 6, 5, ...; return the metrics."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = trainer.fit(Supervised(model, mean_of), [ONE] * 4, optimizer=optimizer, steps=steps, **options)
    return dict(result.metrics)


def averaged(plugin: Any) -> float:
    other = Slope()
    plugin.copy_to(other)
    return other.w.item()


@pytest.mark.parametrize(
    ("decay", "start_step", "updates", "expected"),
    [
        (0.5, 0, 3, 0.25 * 7 + 0.25 * 6 + 0.5 * 5),
        (0.5, 1, 3, 0.25 * 7 + 0.25 * 6 + 0.5 * 5),
        (0.5, 2, 2, 0.5 * 6 + 0.5 * 5),
        (0.75, 0, 3, 0.5625 * 7 + 0.1875 * 6 + 0.25 * 5),
        (0, 0, 3, 5.0),
    ],
)
def test_average_is_the_one_computed_by_hand(
    plugin_class: Any, decay: float, start_step: int, updates: int, expected: float
) -> None:
    plugin, model = plugin_class(decay, start_step=start_step), Slope()
    descend(Trainer([plugin], device="cpu"), model, steps=3)
    assert model.w.item() == 5.0
    assert averaged(plugin) == expected
    assert plugin.updates == updates
    plugin.copy_to(model, "model")
    assert model.w.item() == expected
    assert model.w.requires_grad


def test_every_fit_begins_a_new_average(plugin_class: Any) -> None:
    plugin = plugin_class(0.5)
    trainer = Trainer([plugin], device="cpu")
    descend(trainer, Slope(), steps=3)
    descend(trainer, Slope(), steps=2)
    assert (plugin.updates, averaged(plugin)) == (2, 6.5)


def test_average_stands_still_while_disabled(plugin_class: Any) -> None:
    plugin = plugin_class(0.5)
    trainer = Trainer([plugin], device="cpu")

    def toggle(run: Run, event: BatchEnd) -> None:
        if run.progress.steps == 2:
            trainer.plugins.disable(plugin)
        if run.progress.steps == 5:
            trainer.plugins.enable(plugin)

    trainer.bus.on(BatchEnd, toggle)
    descend(trainer, Slope(), steps=6)
    assert (plugin.updates, averaged(plugin)) == (3, 0.5 * 6.5 + 0.5 * 2)  # of 7, 6 and 2


class Normed(nn.Module):
    """A batch normalization, a mask of -inf and weights of 16 bits."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, momentum=1.0)
        self.fine = nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.norm(x) + self.fine.to(x.dtype)
        return outputs


def test_integer_buffers_are_copied_and_others_averaged(plugin_class: Any) -> None:
    plugin, model = plugin_class(0.75), Normed()
    batches = [(torch.tensor([[mean - 1.0], [mean + 1.0]]), torch.zeros(2, 1)) for mean in (4.0, 8.0, 16.0)]
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-8)
    Trainer([plugin], device="cpu").fit(Supervised(model, mean_of), batches, optimizer=optimizer, epochs=1)
    average = plugin.state_dict()["average"]
    assert model.norm.num_batches_tracked is not None
    assert model.norm.num_batches_tracked.item() == 3
    assert average["model.norm.num_batches_tracked"].dtype == torch.int64
    assert average["model.norm.num_batches_tracked"].item() == 3
    assert average["model.norm.running_mean"].tolist() == [0.5625 * 4 + 0.1875 * 8 + 0.25 * 16]
    assert average["model.norm.running_var"].tolist() == [2.0]
    assert average["model.mask"].tolist() == [0.0, -torch.inf]
    # In bfloat16 these would not differ: 1 - 1/256 and the like have 8 bits, their average has more.
    steps = [1 - 2**-8, 1 - 2 * 2**-8, 1 - 3 * 2**-8]
    assert model.fine.item() == steps[-1]
    assert average["model.fine"].dtype == torch.float32
    assert average["model.fine"].item() == 0.5625 * steps[0] + 0.1875 * steps[1] + 0.25 * steps[2]


def validating(plugin: Any, *others: Any) -> Trainer:
    return Trainer([plugin, ValidationSchedule(Every(steps=2)), *others], device="cpu")


def test_validation_uses_the_average_and_gives_the_trained_weights_back(plugin_class: Any, tmp_path: Path) -> None:
    plugin, model = plugin_class(0.5), Slope()
    saver = SaveSchedule(Every(steps=2)), Checkpoint(tmp_path)
    trainer = validating(plugin, *saver)
    during: list[tuple[str, float, float]] = []

    def look(run: Run, event: ValidationStart | ValidationEnd) -> None:
        during.append((event.name, run.modules["model"].w.item(), plugin.state_dict()["average"]["model.w"].item()))

    trainer.bus.on(ValidationStart, look, lane=Lane.MEASURE)
    trainer.bus.on(ValidationEnd, look, lane=Lane.PERSIST)
    metrics = descend(trainer, model, steps=4, validation=[ONE])
    # After two steps the average of 7 and 6, after four that of it, 5 and 4.
    assert during == [(name, value, value) for value in (6.5, 4.875) for name in ("validation_start", "validation_end")]
    assert metrics["validation/loss"] == 4.875
    assert model.w.item() == 4.0
    [file] = tmp_path.glob("*.pth")
    saved = torch.load(file, weights_only=True)
    assert saved["modules"]["model"]["w"].item() == 4.0
    assert saved["plugins"][NAME]["updates"] == 4
    assert saved["plugins"][NAME]["average"]["model.w"].item() == 4.875


def test_validation_with_the_trained_weights_where_that_is_asked_for(plugin_class: Any) -> None:
    plugin = plugin_class(0.5, validate_with_average=False)
    metrics = descend(validating(plugin), Slope(), steps=4, validation=[ONE])
    assert metrics["validation/loss"] == 4.0
    assert averaged(plugin) == 4.875


def test_validation_outside_of_training_uses_the_weights_that_are_there(plugin_class: Any) -> None:
    plugin, model = plugin_class(0.5), Slope()
    trainer = validating(plugin)
    descend(trainer, model, steps=2, validation=[ONE])
    task = Supervised(model, mean_of)
    assert trainer.validate(task, [ONE]).metrics["validation/loss"] == 6.0
    plugin.copy_to(model)
    assert trainer.validate(task, [ONE]).metrics["validation/loss"] == 6.5


@pytest.mark.parametrize("event", [ValidationStart, ValidationEnd])
def test_trained_weights_come_back_when_a_validation_fails(plugin_class: Any, event: type[Event]) -> None:
    plugin, model = plugin_class(0.5), Slope()
    trainer = validating(plugin)
    seen: list[float] = []

    def fail(run: Run, event: Event) -> None:
        seen.append(run.modules["model"].w.item())
        raise OSError("no space left")

    def look(run: Run, event: RunFailed) -> None:
        seen.append(run.modules["model"].w.item())

    trainer.bus.on(event, fail)
    trainer.bus.on(RunFailed, look)
    with pytest.raises(OSError, match="no space left"):
        descend(trainer, model, steps=4, validation=[ONE])
    assert seen == [6.5, 6.0]
    assert model.w.item() == 6.0


@pytest.mark.parametrize("how", ["disable", "unregister"])
def test_trained_weights_come_back_when_it_leaves_during_a_validation(plugin_class: Any, how: str) -> None:
    plugin, model = plugin_class(0.5), Slope()
    trainer = validating(plugin)

    def leave(run: Run, event: ValidationStart) -> None:
        if run.progress.steps == 2:
            getattr(trainer.plugins, how)(plugin)

    trainer.bus.on(ValidationStart, leave)
    metrics = descend(trainer, model, steps=4, validation=[ONE])
    assert metrics["validation/loss"] == 4.0
    assert model.w.item() == 4.0
    assert averaged(plugin) == 6.5


def test_resumed_average_equals_the_uninterrupted_one(plugin_class: Any, tmp_path: Path) -> None:
    def trainer(plugin: Any, **options: Any) -> Trainer:
        return Trainer([plugin, SaveSchedule(Every(steps=3)), Checkpoint(tmp_path, **options)], device="cpu")

    whole = plugin_class(0.5)
    descend(Trainer([whole], device="cpu"), Slope(), steps=7)

    descend(trainer(plugin_class(0.5)), Slope(), steps=3)
    resumed, model = plugin_class(0.5), Slope()
    descend(trainer(resumed, resume="auto"), model, steps=7)
    assert model.w.item() == 1.0
    assert resumed.updates == whole.updates == 7
    assert averaged(resumed) == averaged(whole) == 1.984375  # of 7, 6, ..., 1


def test_saved_average_of_other_modules_is_refused(plugin_class: Any, tmp_path: Path) -> None:
    savers = SaveSchedule(Every(steps=2)), Checkpoint(tmp_path)
    descend(Trainer([plugin_class(0.5), *savers], device="cpu"), Slope(), steps=2)
    [file] = tmp_path.glob("*.pth")
    saved = torch.load(file, weights_only=True)
    saved["plugins"][NAME]["average"]["model.w"] = torch.ones(3)
    saved["objects"] = {}  # the attributes of the plugin hold the average, too
    store = storage.Store(tmp_path, "run")
    store.open()
    store.save(file.name, saved)
    store.close()
    trainer = Trainer(
        [plugin_class(0.5), SaveSchedule(Every(steps=2)), Checkpoint(tmp_path, resume=file)], device="cpu"
    )
    with pytest.raises(ValueError, match="run's modules:"):
        descend(trainer, Slope(), steps=4)


def test_state_is_a_copy_and_makes_a_round_trip(plugin_class: Any) -> None:
    plugin, other = plugin_class(0.5), plugin_class(0.5)
    trainer = Trainer([plugin], device="cpu")
    descend(trainer, Slope(), steps=2)
    state = trainer.plugins.state_dict()
    other.load_state_dict(state[NAME])
    descend(trainer, Slope(), steps=4)
    assert state[NAME]["average"]["model.w"].item() == 6.5
    assert (other.updates, averaged(other)) == (2, 6.5)


def test_average_of_another_model_is_refused(plugin_class: Any) -> None:
    plugin = plugin_class(0.5)
    with pytest.raises(LookupError, match="No weights were averaged"):
        plugin.copy_to(Slope())
    descend(Trainer([plugin], device="cpu"), Slope(), steps=2)
    with pytest.raises(ValueError, match="Linear given:"):
        plugin.copy_to(nn.Linear(1, 1))
    with pytest.raises(LookupError, match=r"'head' was averaged\. Known:"):
        plugin.copy_to(Slope(), "head")


def test_one_of_several_modules_is_named(plugin_class: Any) -> None:
    plugin = plugin_class(0.5)
    weighted = nn.CrossEntropyLoss(weight=torch.ones(2))  # its buffer makes it a second module of the task
    model = nn.Linear(1, 2)
    task, batch = Supervised(model, weighted), (torch.ones(2, 1), torch.tensor([0, 1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer([plugin], device="cpu").fit(task, [batch], optimizer=optimizer, steps=1)
    with pytest.raises(LookupError, match="name=, one of loss_fn,"):
        plugin.copy_to(nn.Linear(1, 2))
    other = nn.Linear(1, 2)
    plugin.copy_to(other, "model")
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"decay": 1.0}, r"decay.*below 1, got 1\.0\."),
        ({"decay": -0.1}, r"decay must.*got -0\.1\."),
        ({"decay": float("nan")}, r"decay must.*got nan\."),
        ({"decay": "0.9"}, r"decay must.*got '0\.9'\."),
        ({"start_step": -1}, r"start_step.*least 0, got -1\."),
        ({"start_step": 1.5}, r"start_step must.*got 1\.5\."),
        ({"validate_with_average": "yes"}, r"validate_with_average.*or False, got 'yes'\."),
    ],
)
def test_bad_arguments_are_refused(plugin_class: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plugin_class(**options)


def test_two_that_lend_weights_are_refused(plugin_class: Any) -> None:
    with pytest.raises(ValueError, match="validation_weights"):
        Trainer([plugin_class(0.9), plugin_class(0.99).named("slow")], device="cpu")
