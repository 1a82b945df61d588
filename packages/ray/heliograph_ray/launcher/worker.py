"""A worker of `RayLauncher`: it calls the function and sends the outcome to the caller."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from heliograph.core.distributed.exceptions import Carried
from heliograph.spi import describe_error, hosted_by, require, with_article

from .failures import WorkerFailed, is_secondary
from .mailbox import Ended, Exited, Failed, QueueItem, Started, Value, WorkerCall, WorkerChannel
from .train_session import TrainSession

if TYPE_CHECKING:
    from types import ModuleType

    from heliograph import Plugins, RunResult

    from ..session import Session
    from .mailbox import WorkerChannel


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
    done: str | None = ""
    while done is not None:
        done = _serve_next(mailbox, fit, done)


def _serve_next(mailbox: Any, fit: str, done: str) -> str | None:
    ray = require("ray", "RayLauncher", extra="ray")
    reference = ray.get(mailbox.next_call.remote(fit, done))
    if reference is None:
        return None
    call: WorkerCall = ray.get(reference[0])
    return call.fit if run_worker(call) else None


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
