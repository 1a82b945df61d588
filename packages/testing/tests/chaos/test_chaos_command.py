"""`python -m heliograph chaos`: a script of a user's, from the README and smaller ones, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
from heliograph.__main__ import main
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.tests.kit import kept_generators

README = Path(__file__).parents[4] / "README.md"
SMALL = """
import sys, heliograph as h, torch
torch.manual_seed(0)
batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(6)]
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
task = h.Supervised(model, torch.nn.functional.mse_loss)
save = [h.RNGCapture(), h.SaveSchedule(steps=2), h.Checkpoint(sys.argv[1], resume="auto"), h.Preemption()]
print(h.Trainer(save, device="cpu").fit(task, batches, optimizer=torch.optim.Adam, epochs=2))
"""
KEEPS = 'type("Keeps", (h.Plugin,), {"keep": h.on(h.SavePoint)(lambda self, run, event: None)})()'  # writes no file


INTERRUPTS = """
import os, signal, sys
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
os.kill(os.getppid(), int(sys.argv[2]))
signal.pause()
"""


def chaos(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "heliograph", "chaos", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HELIOGRAPH_PLUGINS": "", **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "train.py").write_text(SMALL)
    (folder / "data").write_text("of no use")
    (folder / "fails.py").write_text("raise SystemExit('no data')")
    return folder


def test_a_script_survives_and_its_folder_stays_as_it_was(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(small)
    arguments = ["--faults", "1", "--kinds", "kill", "--folder", str(tmp_path / "there")]
    status = main(["chaos", "train.py", *arguments, "--leave-out", "data", "--", "runs/x"])
    done = capsys.readouterr()
    assert status == 0, done.out + done.err
    first, *_, last = done.out.splitlines()
    assert_facts(first, "1 fault acted", "seed 0")
    assert last.startswith("equal, bit for bit")
    lines = done.err.splitlines()
    assert_each(
        lines[:2],
        ("reference, attempt 1", "from the start", "completed"),
        ("again, attempt 1", "from the start", "completed"),
    )
    assert [line.partition(": ")[0] for line in lines[2:]] == [f"chaos, attempt {number}" for number in (1, 2)]
    assert re.search(r"1: .*batch \d, .*ended", lines[2])
    assert "; completed after" in lines[-1]
    assert sorted(path.name for path in small.iterdir()) == ["data", "fails.py", "train.py"]
    assert sorted(path.name for path in (tmp_path / "there/chaos").iterdir()) == ["fails.py", "runs", "train.py"]


@pytest.mark.whole
def test_the_script_of_the_readme_survives_fifty_faults(tmp_path: Path) -> None:
    code = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    assert 'resume="auto"' in code
    (tmp_path / "train.py").write_text(code)
    done = chaos(tmp_path, "train.py", "--seed", "0", "--faults", "50")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 45, done.stdout  # a few do not act


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing.py"], "nothing.py is not a"),
        (["train.py", "--kinds", "kil"], "Did you mean 'kill'?"),
        (["train.py", "--faults", "0"], "faults must be"),
        (["train.py", "--faults", "-1"], "faults must be"),
        (["fails.py"], "fails without faults: attempt"),
        (["train.py", "--folder", "."], "choose a new folder"),
        (["train.py", "--leave-out", "runs"], "--leave-out runs"),
    ],
)
def test_what_is_wrong_is_refused(
    small: Path,
    arguments: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(small)
    assert main(["chaos", *arguments]) == 2
    done = capsys.readouterr()
    assert done.out == ""
    *attempts, said = done.err.splitlines()
    assert [each.partition(": ")[0] for each in attempts] in ([], ["reference, attempt 1", "again, attempt 1"])
    assert said.startswith("heliograph chaos: ")
    assert text in said


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("signum", "folder"), [(signal.SIGINT, ()), (signal.SIGINT, ("--folder", "kept")), (signal.SIGTERM, ())]
)
def test_a_ctrl_c_or_a_notice_ends_the_processes(tmp_path: Path, signum: int, folder: tuple[str, ...]) -> None:
    (tmp_path / "tmp").mkdir()
    pid = tmp_path / "pid"
    (tmp_path / "here").mkdir()
    (tmp_path / "here/train.py").write_text(INTERRUPTS)
    done = chaos(tmp_path / "here", "train.py", *folder, "--", str(pid), str(int(signum)), TMPDIR=str(tmp_path / "tmp"))
    files = "kept" if folder else "removed"
    assert_facts(done.stderr, "heliograph chaos: interrupted", files)
    assert (done.returncode, done.stdout) == (130, "")
    assert not list((tmp_path / "tmp").iterdir())
    assert (tmp_path / "here/kept/reference/train.py").exists() == bool(folder)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.whole
def test_where_no_fault_can_act_nothing_was_tested(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(small)
    (small / "memory.py").write_text(SMALL.replace('h.Checkpoint(sys.argv[1], resume="auto")', KEEPS))
    assert main(["chaos", "memory.py", "--faults", "1", "--kinds", "full-disk"]) == 2
    assert_facts(capsys.readouterr().out, "0 faults acted", "seed 0", "1 did not")


@pytest.mark.whole
def test_a_checkpoint_of_before_is_refused(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(small)
    with kept_generators(), monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "runs/x"])
        run_path("train.py")
    capsys.readouterr()
    assert main(["chaos", "train.py", "--", "runs/x"]) == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert_facts(done.err, "resumed from a checkpoint", "existed before")
