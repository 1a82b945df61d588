"""Workers of loaders: they leave signals to their main process, and end when it has ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from heliograph.core.data.dataloader import copy_loader, prepare_worker, shield_workers
from heliograph.core.data.loaders import evaluation_loader
from torch.utils.data import DataLoader

FORK = multiprocessing.get_context("fork")


def me(signum: int) -> None:
    os.kill(os.getpid(), signum)


# Signals.


def work(answers: Any, go_on: Any) -> None:
    begun: list[int] = []
    prepare_worker(3, then=begun.append)
    for _ in range(3):
        me(signal.SIGUSR1)
        me(signal.SIGTERM)
    while signal.SIGTERM in signal.sigpending():  # a further one would be the same one
        os.sched_yield()
    answers.put(begun)
    go_on.wait(60)


def test_a_worker_obeys_the_main_process_and_nobody_else() -> None:
    answers, go_on = FORK.SimpleQueue(), FORK.Event()
    worker = FORK.Process(target=work, args=(answers, go_on), daemon=True)
    worker.start()
    assert answers.get() == [3]  # it has outlived signals that were not of this process
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 0


ELSEWHERE = """
import signal
for name in ("SIGUSR1", "sigwaitinfo"):
    delattr(signal, name)
from heliograph.core.data.dataloader import prepare_worker
prepare_worker(2, then=print)
"""


def test_where_some_signals_and_calls_are_missing_it_works_with_the_others() -> None:
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr


# The end of the main process.

TRAINING = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader
import heliograph as h


def begin(worker_id):
    print("begins", flush=True)
    time.sleep(3600)  # torch's watchdog comes after this


if __name__ == "__main__":
    data = [(torch.ones(4), 0)] * 8
    params = {"num_workers": 1, "worker_init_fn": begin, "multiprocessing_context": sys.argv[1]}
    validation = DataLoader(data, **params) if sys.argv[2] == "validation" else None
    trainer = h.Trainer([h.ValidationSchedule(h.Every(steps=1))] if validation else [], device="cpu")
    trainer.fit(
        h.Supervised(nn.Linear(4, 2), nn.functional.cross_entropy),
        DataLoader(data, **({} if validation else params)),
        validation=validation,
        optimizer=torch.optim.SGD,
        epochs=1,
    )
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("context", "loader"), [("fork", "train"), ("fork", "validation"), ("spawn", "train"), ("forkserver", "train")]
)
def test_a_worker_that_starts_ends_with_its_killed_main_process(context: str, loader: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINING)
    command = [sys.executable, str(script), context, loader]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as main:
        assert main.stdout is not None
        try:
            assert main.stdout.readline() == "begins\n"
            main.kill()
            assert main.communicate(timeout=30)[0] == ""  # not before every process has closed its end
        finally:
            for signum in (signal.SIGTERM, signal.SIGKILL):  # what is left, where the test fails
                with suppress(ProcessLookupError):
                    os.killpg(main.pid, signum)


# Loaders.


def test_loaders_are_shielded_once_and_the_user_s_own_stays_as_it_is() -> None:
    def init(worker_id: int) -> None:
        """Stand for the user's."""

    data: Any = [1, 2]
    loader: DataLoader[Any] = DataLoader(data, num_workers=1, worker_init_fn=init)
    for own in (
        shield_workers(loader),
        copy_loader(shield_workers(loader)),
        copy_loader(evaluation_loader(loader, None, "validation")),
    ):
        assert isinstance(own.worker_init_fn, partial)
        assert (own.worker_init_fn.func, own.worker_init_fn.keywords) == (prepare_worker, {"then": init})
    assert loader.worker_init_fn is init
