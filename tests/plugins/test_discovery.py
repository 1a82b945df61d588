from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import heliograph
import pytest
from heliograph.plugins import Discovered, discover
from heliograph.plugins.discovery import find
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph.tests.messages import assert_facts

BUILT_IN = {
    "batch_transform": "batch_transforms:BatchTransform",
    "checkpoint": "checkpoint.plugin:Checkpoint",
    "compile": "compile:Compile",
    "cut_mix": "batch_transforms:CutMix",
    "early_stopping": "early_stopping:EarlyStopping",
    "ema": "ema:EMA",
    "epoch_means": "epoch_means:EpochMeans",
    "exception_pass_through": "exception_pass_through:ExceptionPassThrough",
    "file_log": "file_log:FileLog",
    "gradient_accumulation": "gradient_accumulation:GradientAccumulation",
    "gradient_clipping": "gradients:GradientClipping",
    "gradient_norm": "gradients:GradientNorm",
    "handler_times": "times:HandlerTimes",
    "jsonl_log": "jsonl_log:JsonlLog",
    "learning_rate": "learning_rate:LearningRate",
    "log_schedule": "schedules:LogSchedule",
    "mixup": "batch_transforms:Mixup",
    "nan_guard": "non_finite_losses:NaNGuard",
    "phase_times": "times:PhaseTimes",
    "prediction_writer": "prediction_writer:PredictionWriter",
    "preemption": "preemption:Preemption",
    "progress": "progress_bar:ProgressBar",
    "rng_capture": "rng_capture:RNGCapture",
    "roll_back": "non_finite_losses:RollBack",
    "save_schedule": "schedules:SaveSchedule",
    "tensorboard": "trackers:TensorBoard",
    "validation_schedule": "schedules:ValidationSchedule",
    "verify_resume": "checkpoint.verify_resume:VerifyResume",
    "checkpoint_label": "checkpoint.contents:CheckpointLabel",
    "load_best": "checkpoint.load_best:LoadBest",
    "trained_only": "checkpoint.contents:TrainedOnly",
    "weights_checkpoint": "checkpoint.plugin:WeightsCheckpoint",
}
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that lays a distribution with entry points on the path, as an installer would."""
    monkeypatch.syspath_prepend(tmp_path)

    def lay(package: str, version: str, modules: dict[str, str], **points: str) -> None:
        info = tmp_path / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        lines = [f"{name} = {target}" for name, target in points.items()]
        (info / "entry_points.txt").write_text("[heliograph.plugins]\n" + "\n".join(lines) + "\n")
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(source)
        importlib.invalidate_caches()

    return lay


def by_name(name: str) -> list[Discovered]:
    return [each for each in discover() if each.name == name]


def test_the_built_ins_are_listed_sorted_by_name() -> None:
    ours = [each for each in discover() if each.package == "heliograph"]
    assert {each.name: each.target for each in ours} == {
        name: f"heliograph.builtin_callbacks.{target}" for name, target in BUILT_IN.items()
    }
    assert [each.name for each in discover()] == sorted(each.name for each in discover())
    assert {each.version for each in ours} == {metadata.distribution("heliograph").version}
    assert not any(each.switched_off for each in ours)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_can_be_loaded(name: str) -> None:
    assert find(name).load().__name__ == BUILT_IN[name].partition(":")[2]


def test_finding_imports_nothing(install: Install) -> None:
    install(
        "loud-plugins",
        "1.2",
        {"loud_plugins_of_a_test": "raise RuntimeError('I was imported')"},
        loud="loud_plugins_of_a_test:Loud",
    )
    (found,) = by_name("loud")
    assert (found.package, found.version, found.target) == ("loud-plugins", "1.2", "loud_plugins_of_a_test:Loud")
    assert find("loud") == found
    assert "loud_plugins_of_a_test" not in sys.modules
    assert "EntryPoint" not in repr(found)


def test_finding_in_a_fresh_process_imports_no_built_in_and_no_torch() -> None:
    code = (
        "import sys; from heliograph.plugins import discover; assert len(discover()) >= 16; "
        "print([name for name in sys.modules if name.startswith('heliograph.builtin') or name == 'torch'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("import a_module_that_is_not_there", "ModuleNotFoundError: .*'a_module_that_is_not_there'"),
        ("x = 1", "AttributeError: .*no attribute 'Broken'"),
    ],
    ids=["raises", "needs something", "lacks the class"],
)
def test_a_broken_plugin_harms_only_who_asks_for_it(install: Install, source: str, sentence: str) -> None:
    module = f"broken_plugin_of_a_test_{abs(hash(source))}"
    install("broken-plugins", "0.3", {module: source}, broken=f"{module}:Broken")
    assert {each.name for each in discover()} >= {"broken", *BUILT_IN}
    what = rf"'broken'.*broken-plugins 0\.3 \({module}:Broken\).*{sentence}"
    with pytest.raises(ImportError, match=what) as caught:
        find("broken").load()
    assert caught.value.__cause__ is not None
    assert find("early_stopping").load().__name__ == "EarlyStopping"


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    sentence = r"'early_stoping'.*mean 'early_stopping'\? Known: batch_transform,"
    with pytest.raises(LookupError, match=sentence):
        find("early_stoping")


def test_where_two_packages_use_one_name_the_package_says_which(install: Install) -> None:
    install("other-plugins", "2.0", {}, early_stopping="other_plugins_of_a_test:EarlyStopping")
    assert [each.package for each in by_name("early_stopping")] == ["heliograph", "other-plugins"]
    sentence = "'early_stopping'.*heliograph:early_stopping, other-"
    with pytest.raises(LookupError, match=sentence):
        find("early_stopping")
    assert find("other-plugins:early_stopping").package == "other-plugins"
    assert find("heliograph:early_stopping").package == "heliograph"
    with pytest.raises(LookupError, match="plugin is named 'nobody:early_stopping'"):
        find("nobody:early_stopping")


@pytest.mark.parametrize(
    ("value", "off"),
    [
        ("", set()),
        ("-early_stopping", {"early_stopping"}),
        ("-early_stopping, -foreign", {"early_stopping", "foreign"}),
        ("-all", {"foreign"}),
        ("-1", {"foreign"}),
        ("-checkpoint,-all", {"checkpoint", "foreign"}),
        ("-nobody,+checkpoint", set()),
    ],
)
def test_the_kill_switch(install: Install, monkeypatch: pytest.MonkeyPatch, value: str, off: set[str]) -> None:
    install("foreign-plugins", "1.0", {}, foreign="foreign_plugins_of_a_test:Foreign")
    monkeypatch.setenv("HELIOGRAPH_PLUGINS", value)
    assert {each.name for each in discover() if each.switched_off} == off


def test_without_the_kill_switch_nothing_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HELIOGRAPH_PLUGINS", raising=False)
    assert not any(each.switched_off for each in discover())


def test_a_package_is_known_by_its_normal_name(install: Install) -> None:
    install("Odd_Plugins.Of", "1.0", {}, odd="odd_plugins_of_a_test:Odd")
    (found,) = by_name("odd")
    assert found.package == "odd-plugins-of"
    assert find("odd-plugins-of:odd") == find("Odd_Plugins.Of:odd") == found


def test_what_cannot_be_called_is_no_plugin(install: Install) -> None:
    install("constant-plugins", "1.0", {"constant_plugin_of_a_test": "Constant = 3"}, constant="constant_plugin_of_a_test:Constant")  # fmt: skip  # noqa: E501
    sentence = r"'constant'.*constant-plugins.*class or factory: 3\.$"
    with pytest.raises(ImportError, match=sentence):
        find("constant").load()


def test_metadata_without_a_name_is_listed_all_the_same(tmp_path: Path, install: Install) -> None:
    install("nameless", "1.0", {}, stray="stray_module_of_a_test:Stray")
    (tmp_path / "nameless-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\n")
    (found,) = by_name("stray")
    assert (found.name, found.package, found.version) == ("stray", "unknown", "unknown")


def test_entry_points_that_cannot_be_read_harm_no_other_package(tmp_path: Path, install: Install) -> None:
    install("garbled-plugins", "1.0", {}, garbled="garbled_module_of_a_test:Garbled")
    (tmp_path / "garbled-plugins-1.0.dist-info" / "entry_points.txt").write_text("[heliograph.plugins]\nno equals sign")
    with pytest.warns(RuntimeWarning, match="garbled-plugins cannot be read:"):
        found = discover()
    assert {each.name for each in found} >= set(BUILT_IN)
    assert "garbled-plugins" not in {each.package for each in found}


SLOW = """
import time

import heliograph as h


class Slow(h.Plugin):
    def __init__(self, seconds=0.0):
        self.seconds, self.steps = seconds, 0

    @h.on(h.StepEnd)
    def wait(self, run, event):
        self.steps += 1
        time.sleep(self.seconds)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for plugins in single files."""
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.setenv("HELIOGRAPH_PLUGIN_PATH", str(folder))
    for name in [name for name in sys.modules if name.startswith("heliograph_plugins.")]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def test_a_file_is_a_plugin_that_is_off_until_it_is_loaded(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW, encoding="utf-8")
    (folder / "_shared.py").write_text("raise OSError('not a plugin')", encoding="utf-8")
    trainer = heliograph.Trainer(device="cpu")
    (found,) = [plugin for plugin in discover() if plugin.package == "heliograph-plugins"]
    assert (found.name, found.target) == ("slow", str(folder / "slow.py"))
    assert "slow" not in trainer.plugins.names()
    plugin = trainer.plugins.load("slow", seconds=0.001)
    trainer.fit(linear_classifier(), class_batches(3), optimizer=sgd(), epochs=1)
    assert (plugin.seconds, plugin.steps) == (0.001, 3)
    assert find("slow").load() is type(plugin)


def test_the_environment_adds_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "slow.py").write_text(SLOW, encoding="utf-8")
    monkeypatch.setenv("HELIOGRAPH_PLUGINS", "+slow")
    trainer = heliograph.Trainer(device="cpu")
    trainer.fit(linear_classifier(), class_batches(3), optimizer=sgd(), epochs=1)
    assert trainer.plugins["slow"].steps == 3


def test_the_folder_beside_the_program_is_read(tmp_path: Path) -> None:
    (tmp_path / "heliograph_plugins").mkdir()
    (tmp_path / "heliograph_plugins" / "slow.py").write_text(SLOW, encoding="utf-8")
    program = tmp_path / "train.py"
    program.write_text("from heliograph.plugins.discovery import find\nprint(find('slow').load().__name__)\n")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == ["Slow"]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("import heliograph", ("slow.py", "one subclass", "none")),
        (f"{SLOW}\n\nclass Other(Slow):\n    pass\n", ("slow.py", "one subclass", "Slow, Other")),
        ("raise OSError('no')", ("slow", "OSError", "no")),
    ],
)
def test_a_file_that_is_no_plugin_is_an_error(folder: Path, text: str, facts: tuple[str, ...]) -> None:
    (folder / "slow.py").write_text(text, encoding="utf-8")
    with pytest.raises(ImportError) as error:
        find("slow").load()
    assert_facts(error.value, *facts)


def test_a_missing_folder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIOGRAPH_PLUGIN_PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"HELIOGRAPH_PLUGIN_PATH.*/nowhere"):
        discover()
