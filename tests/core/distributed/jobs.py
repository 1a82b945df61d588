"""What the tests launch. New processes import it from here; only what needs torch imports that."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import select
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Never

import heliograph
from heliograph.core.distributed.launcher import child_queue

RANK = os.environ.get("RANK")
kept: list[Any] = []


class OwnError(Exception):
    """Its constructor fits neither pickle nor what it gives its base."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}", "more")
        self.code = code
        self.lock = threading.Lock()


class Unloadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, ()


class Unpicklable:
    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("kept at home")


def refuse() -> None:
    raise ValueError("refused")


def put(value: Any) -> None:
    queue = child_queue()
    assert queue is not None
    queue.put(value)


def pid_and_sum(number: int) -> tuple[int, float]:
    """Return the number of this process, and the sum over the ranks of rank times the number."""
    from heliograph.core.engines.engine_choice import choose_engine

    engine = choose_engine(device="cpu")
    with engine.process():
        return os.getpid(), float(engine.reduce(float(number * (engine.rank + 1)), "sum"))


def hang() -> None:
    while True:  # a signal that comes just before a wait begins does not interrupt that
        threading.Event().wait(0.05)


def wait_for_end(pid: int) -> None:
    select.select([os.pidfd_open(pid)], [], [])


def place(*args: Any, **kwargs: Any) -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return {name: os.environ.get(name) for name in names} | {"args": args, "kwargs": kwargs}


def leads_its_group() -> bool:
    return os.getpgrp() == os.getpid()


def has_torch() -> bool:
    return "torch" in sys.modules


def start_method() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


def read_with_a_worker() -> float:
    """Read a dataset that a spawned worker could not load: its class is within a function."""
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset[float]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> float:
            return float(index)

    return sum(float(batch.sum()) for batch in DataLoader(Numbers(), batch_size=2, num_workers=1))


def large(size: int) -> bytes:
    return str(RANK).encode() * size


def train_together() -> float:
    """Leave a wrapped model alive when the group is destroyed: gloo may abort such a process at its exit."""
    import torch
    from torch import distributed, nn

    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    kept.append(model)
    (model(torch.ones(1, 1)) * (distributed.get_rank() + 1)).sum().backward()
    distributed.destroy_process_group()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return parameter.grad.item()


def converse(fifo: Path) -> str:
    put({"rank": RANK})
    return fifo.read_text()


def put_all(values: list[Any]) -> None:
    for value in values:
        put(value)


def put_a_lambda() -> None:
    put(lambda: None)


def put_the_unloadable() -> None:
    put(Unloadable())


def raise_own() -> Never:
    try:
        raise KeyError("missing")
    except KeyError as error:
        raise OwnError(code=3) from error


def fail_in_turn(fifo: Path, errors: list[BaseException], order: list[int]) -> None:
    """Raise an error per rank; the second in `order` does so when the process of the first is gone."""
    if int(RANK or 0) == order[0]:
        fifo.write_text(str(os.getpid()))
    else:
        wait_for_end(int(fifo.read_text()))
    raise errors[int(RANK or 0)]


def fail_wrapped_in_turn(fifo: Path) -> None:
    wrapped = heliograph.TrainingError("train failed")
    wrapped.__cause__ = heliograph.RankFailed(1, "KeyError", "'b'", "")
    fail_in_turn(fifo, [wrapped, KeyError("b")], [0, 1])


def fail_or_hang() -> None:
    if RANK == "0":
        hang()
    raise OSError(2, "No such file", "data.bin")


def die(how: int) -> str:
    if RANK == "1" and how < 0:
        os.kill(os.getpid(), -how)
    if RANK == "1":
        os._exit(how)
    return "well"


def die_with_a_helper() -> None:
    helper = multiprocessing.get_context("fork").Process(target=hang, daemon=True)
    helper.start()
    put(helper.pid)
    hang()


def leave_a_helper() -> int | None:
    helper = multiprocessing.get_context("fork").Process(target=hang, daemon=True)
    helper.start()
    return helper.pid


def leave_status(status: int, fifo: Path) -> str:
    """Exit on rank 0; rank 1 returns when that process is gone."""
    if RANK == "0":
        fifo.write_text(str(os.getpid()))
        sys.exit(status)
    wait_for_end(int(fifo.read_text()))
    return "continued"


def register(path: Path) -> None:
    atexit.register(path.write_text, "left properly")


def linger() -> str:
    atexit.register(hang)
    return "done"


def nest() -> None:
    heliograph.launch(place, nprocs=1)


def close_upon_interrupt() -> None:
    put("ready")
    try:
        hang()
    except KeyboardInterrupt:
        put("closing")
        raise


def ignore_interrupts() -> None:
    put("ready")
    try:
        hang()
    except KeyboardInterrupt:
        put("ready")
        hang()


def close_upon_termination() -> None:
    def leave(signum: int, frame: FrameType | None) -> None:
        put("saved")
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, leave)
    put("ready")
    hang()


def wait_for_termination() -> None:
    put("ready")
    hang()


def outlive_the_parent() -> None:
    """Of the two ranks, one closes upon SIGTERM, the other heeds nothing; both have inherited the output."""

    def leave(signum: int, frame: FrameType | None) -> None:
        print("saved", flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave if RANK == "0" else signal.SIG_IGN)
    print("ready", flush=True)
    hang()


def fit() -> None:
    import torch
    from torch import Tensor, nn

    class Failing(heliograph.Task):
        def __init__(self) -> None:
            self.model = nn.Linear(1, 1)

        def training_step(self, run: heliograph.Run, batch: Any) -> Tensor:
            raise OwnError(code=4)

    task = Failing()
    trainer = heliograph.Trainer(plugins=[heliograph.ExceptionPassThrough(train=[KeyError])])
    trainer.fit(task, [0], optimizer=torch.optim.SGD(task.model.parameters(), lr=0.1), epochs=1)


def train_and_die(folder: str, times: int) -> tuple[int, float]:
    """Train; as often as said, rank 1 is killed at step 5. Return the steps, and a sum over the weights."""
    from heliograph import BatchEnd, Every, Plugin, Run, on
    from heliograph.tests import kit

    class Kill(Plugin):
        @on(BatchEnd)
        def act(self, run: Run, event: BatchEnd) -> None:
            killed = Path(folder) / "killed"
            if run.engine.rank == 1 and run.progress.steps == 5 and len(list(killed.parent.glob("killed*"))) < times:
                killed.with_name(f"killed {os.getpid()}").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    task = kit.linear_classifier()
    result = kit.fit(
        *kit.saving(Path(folder), Every(steps=2), resume="auto"),
        Kill(),
        task=task,
        train=kit.class_batches(16),
        steps=8,
    )
    return result.progress.steps, sum(each.double().sum().item() for each in task.model.parameters())
