"""A worker of `RayLauncher`: its session, and the call of the function, whose outcome it sends to the caller."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from heliograph import Plugins, Progress, RunResult
from heliograph.core.distributed.failure import Carried
from heliograph.spi import describe_error, hosted_by, require, with_article

from ..session import Notice, Session
from ..storage import StoredFolder, list_reports, report_name
from .failures import WorkerFailed, is_secondary
from .mailbox import (
    Ended,
    Exited,
    Failed,
    ProgressUpdate,
    QueueItem,
    Reported,
    Resumed,
    Started,
    Value,
    WorkerCall,
    WorkerChannel,
)

PURPOSE = "RayLauncher"


class TrainSession:
    """Connects a run with Ray Train and with the caller of the launcher.

    Args:
        call: the id of the launcher's call, which is part of the names of its reports; the same in all its attempts.
        channel: sends messages to the caller.
        is_restart: whether an earlier attempt of this call failed, or had another number of workers.
        has_own_storage: whether to ignore the stored reports of other calls.

    Attributes:
        exit_notice: the notice that ended a run of this process.
    """

    def __init__(self, call: str, channel: WorkerChannel, *, is_restart: bool, has_own_storage: bool = False) -> None:
        self._train = require("ray.train", PURPOSE, extra="ray")
        self._context = self._train.get_context()
        self._preemption = _preemption_context()
        self._call, self._channel, self.is_restart = call, channel, is_restart
        self._has_own_storage = has_own_storage
        self.exit_notice: Notice | None = None
        self._is_main = self._context.get_world_rank() == 0
        self._number = 0  # of the next report with a folder, on the main rank; 0 until the storage was read
        self._first = 0  # the number of this process's first report with a folder
        self._orphans: list[StoredFolder] = []
        self._answers: Any = None
        self._resumable: Sequence[StoredFolder] = ()

    def join_search(self, answers: Any, resumable: Sequence[StoredFolder]) -> None:
        """Wait after each report for the search's answer, a queue of Ray, and also resume its reports."""
        self._answers, self._resumable = answers, resumable
        self.is_restart = self.is_restart or bool(resumable)
        if self._is_main:
            answers.get_nowait_batch(answers.qsize())  # of an earlier attempt

    def report(self, metrics: dict[str, float], folder: Path | None) -> Notice | None:
        checkpoint, name = None, None
        if folder is not None:
            checkpoint = self._train.Checkpoint.from_directory(folder.absolute())
            self._list_once()
            name = report_name(self._number, self._call)
            self._number += 1
        try:
            self._train.report(metrics, checkpoint=checkpoint, checkpoint_dir_name=name)
        except OSError as error:
            error.add_note(f"heliograph: raised while storing {name or 'a report'} in {self._storage()[1]}")
            raise
        if not self._is_main:
            return None
        path = None if name is None else self._check_stored(name)
        if path is not None:
            self._remove_orphans()
        self._channel.send(Reported(metrics, path))
        answer: Notice | None = None if self._answers is None else self._answers.get()
        return answer or self._channel.commands.stop

    def stored_reports(self) -> list[StoredFolder]:
        self._list_once()
        reports = list_reports(*self._storage())
        stored = [
            replace(report, is_own=report.call == self._call and report.number < self._first)
            for report in reports
            if report.call == self._call or not self._has_own_storage
        ]
        return [*stored, *self._resumable]

    def notice(self) -> Notice | None:
        info = self._preemption.preemption_info
        if info is None:
            return self._channel.commands.exit
        ranks = ", ".join(map(str, info.preempted_ranks))
        deadline = None if info.deadline_ms is None else info.deadline_ms / 1000
        return Notice("ray", f"the machine of rank {ranks} will be taken away", deadline)

    def update_progress(self, run: str, progress: Progress) -> None:
        if self._is_main:
            self._channel.progress = ProgressUpdate(run, progress.batches, progress.steps, progress.samples)

    def record_start(self, run: str, progress: Progress, path: Path | None) -> None:
        self._channel.send(Resumed(run, progress.batches, progress.steps, path))

    def _storage(self) -> tuple[Any, str]:
        storage = self._context.get_storage()
        return storage.storage_filesystem, storage.experiment_fs_path

    def _list_once(self) -> None:
        if self._number == 0:
            reports = list_reports(*self._storage())
            self._number = self._first = 1 + max((report.number for report in reports), default=0)
            ours = [report for report in reports if report.call == self._call]
            reported = self._train.get_all_reported_checkpoints() if ours else []
            registered = {Path(stored.checkpoint.path).name for stored in reported}
            self._orphans = [report for report in ours if report.name not in registered]

    def _remove_orphans(self) -> None:
        while self._orphans:
            orphan = self._orphans.pop()
            orphan.filesystem.delete_dir(orphan.path)

    def _check_stored(self, name: str) -> str:
        newest = self._train.get_checkpoint()
        path = "" if newest is None else str(newest.path)
        if Path(path).name != name:
            raise RuntimeError(
                f"Ray did not store the reported checkpoint {name!r}; its newest is {path or 'none'}. Search Ray's "
                f"log for 'report' to find the reason."
            )
        return path


def _preemption_context() -> Any:
    context = require("ray.train.v2._internal.execution.context", PURPOSE, extra="ray").get_train_context()
    preemption = getattr(context, "preemption_context", None)
    if not hasattr(preemption, "preemption_info"):
        version = require("ray", PURPOSE, extra="ray").__version__
        raise ImportError(
            f"RayLauncher cannot read preemption notices from Ray {version}: pip install 'ray[train]>=2.60,<2.61'"
        )
    return preemption


class RayHost:
    """The host of trainings in a worker; see `heliograph.core.host.Host`."""

    def __init__(self, session: Session, channel: WorkerChannel, *, is_main: bool) -> None:
        self.session = session
        self._channel, self._is_main = channel, is_main

    def prepare(self, plugins: Plugins) -> None:
        if not any("ray_report" in getattr(plugin, "exclusive", ()) for plugin in plugins):
            plugins.load("ray_report")

    def ended(self, result: RunResult) -> None:
        if self._is_main:
            self._channel.send(Ended(pickle.dumps(result)))


def serve_calls(mailbox: Any, fit: str) -> None:
    ray = require("ray", "RayLauncher", extra="ray")
    done = ""
    while (reference := ray.get(mailbox.next_call.remote(fit, done))) is not None:
        call: WorkerCall = ray.get(reference[0])
        if not run_worker(call):
            return
        done = call.fit
        del call, reference  # release the memory of the arguments


def run_worker(call: WorkerCall) -> bool:
    """Run a call as one of its ranks; return whether it ended without a notice or an error."""
    ray = require("ray", "RayLauncher", extra="ray")
    context = require("ray.train", "RayLauncher", extra="ray").get_context()
    rank = context.get_world_rank()
    group = ray.util.get_current_placement_group().id.hex()  # unique for each worker group
    number = ray.get(call.mailbox.register_group.remote(group))
    channel = WorkerChannel(call.mailbox, call.fit, group, rank)
    try:
        channel.send(Started(context.get_world_size(), ray.get_runtime_context().get_node_id()))
        messages = _call_function(call, channel, rank, ray, is_restart=number > 1)
        for message in messages:
            channel.send(message)
        channel.flush()
        outcome = messages[-1]
        if isinstance(outcome, Failed) and not outcome.is_exit:
            channel.wait_for_release(call.grace)  # when this worker fails, Ray ends the others at once
            raise WorkerFailed(rank, type(outcome.error.rebuild()).__qualname__)
        return [type(message) for message in messages] == [Value]
    finally:
        channel.close()


def _call_function(
    call: WorkerCall, channel: WorkerChannel, rank: int, ray: ModuleType, *, is_restart: bool
) -> list[Exited | Value | Failed]:
    session: TrainSession | None = None
    outcome: list[Exited | Value | Failed] = []
    try:
        session = TrainSession(call.name, channel, is_restart=is_restart, has_own_storage=call.has_own_storage)
        host = RayHost(session, channel, is_main=rank == 0)
        with hosted_by(host, lambda message: channel.send(QueueItem(message))):
            function, args, kwargs = _load(call.payload, ray)
            outcome.append(Value(_dump(function(*args, **kwargs), rank, ray)))
    except BaseException as error:  # noqa: BLE001  # raised at the caller
        has_notice = session is not None and session.exit_notice is not None
        if not (has_notice and isinstance(error, SystemExit)):
            is_exit = isinstance(error, SystemExit) and not error.code
            outcome.append(Failed(_carry_error(error, ray), is_secondary=is_secondary(error), is_exit=is_exit))
    return outcome if session is None or session.exit_notice is None else [Exited(session.exit_notice), *outcome]


def _carry_error(error: BaseException, ray: ModuleType) -> Carried:
    carried, task_error = Carried.of(error), ray.exceptions.RayTaskError
    return replace(Carried.of(error.cause), text=carried.text) if isinstance(error, task_error) else carried


def _load(payload: bytes, ray: ModuleType) -> Any:
    try:
        return ray.cloudpickle.loads(payload)
    except Exception as error:
        raise TypeError(
            f"A worker could not load the function or its arguments: {describe_error(error)}. Install their modules "
            f"on every machine of the cluster, or define them in the script."
        ) from error


def _dump(value: Any, rank: int, ray: ModuleType) -> bytes:
    try:
        pickled: bytes = ray.cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"Rank {rank} returned {with_article(type(value).__name__)} that cannot be pickled: {error}. Return plain "
            f"data, or None."
        ) from error
    return pickled
