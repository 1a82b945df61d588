"""What a worker of `RayLauncher` does: call the function and send the caller how it ended."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from heliograph.core.distributed.exceptions import Carried
from heliograph.spi import describe_error, hosted_by, require, with_article

from .failures import WorkerFailed, is_secondary
from .host import RayHost
from .mailbox import Call, Exited, Failed, QueueItem, Started, Value
from .train_session import TrainSession
from .worker_channel import WorkerChannel

if TYPE_CHECKING:
    from types import ModuleType


def serve_calls(mailbox: Any, fit: str) -> None:
    """Run one call after another, in a thread that Ray Train has started, until none follows.

    Args:
        mailbox: the handle of the actor that gives the calls.
        fit: the id of this call of Ray's `fit`.

    Raises:
        WorkerFailed: a function raised; the caller has the error.
    """
    done: str | None = ""
    while done is not None:
        done = _serve_next(mailbox, fit, done)


def _serve_next(mailbox: Any, fit: str, done: str) -> str | None:
    """Run the call that follows another one; return its id, None if this worker has to end."""
    ray = require("ray", "RayLauncher", extra="ray")
    reference = ray.get(mailbox.next_call.remote(fit, done))
    if reference is None:
        return None
    call: Call = ray.get(reference[0])
    return call.fit if run_worker(call) else None


def run_worker(call: Call) -> bool:
    """Run a call as one of its ranks, in a thread that Ray Train has started; return whether it ended by itself.

    Raises:
        WorkerFailed: the function raised; the caller has the error.
    """
    ray = require("ray", "RayLauncher", extra="ray")
    context = require("ray.train", "RayLauncher", extra="ray").get_context()
    rank = context.get_world_rank()
    group = ray.util.get_current_placement_group().id.hex()  # every worker group has one of its own
    number = ray.get(call.mailbox.register_group.remote(group))
    channel = WorkerChannel(call.mailbox, call.fit, group, rank)
    try:
        channel.send(Started(context.get_world_size(), ray.get_runtime_context().get_node_id()))
        messages = _call_function(call, channel, rank, ray, is_restart=number > 1)
        for each in messages:
            channel.send(each)
        channel.flush()
        outcome = messages[-1]
        if isinstance(outcome, Failed) and not outcome.is_exit:
            channel.wait_for_release(call.grace)  # when this worker fails, Ray ends the others at once
            raise WorkerFailed(rank, outcome.error.kinds[0][1])
        return [type(each) for each in messages] == [Value]
    finally:
        channel.close()


def _call_function(
    call: Call, channel: WorkerChannel, rank: int, ray: ModuleType, *, is_restart: bool
) -> list[Exited | Value | Failed]:
    """Call the function; return the messages about its end: whether it exited on a notice, its value or its error.

    An error before the function is called ends the run as well, because it would occur again in another attempt.
    """
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
    """Return an error as data; the error of a Ray task without Ray's wrapper."""
    carried, task_error = Carried.of(error), ray.exceptions.RayTaskError
    return replace(Carried.of(error.cause), text=carried.text) if isinstance(error, task_error) else carried


def _load(payload: bytes, ray: ModuleType) -> Any:
    try:
        return ray.cloudpickle.loads(payload)
    except Exception as error:
        raise TypeError(
            f"A worker could not load the function or its arguments: {describe_error(error)}. Install the modules that "
            f"they use on every machine of the cluster, or define them in the script itself."
        ) from error


def _dump(value: Any, rank: int, ray: ModuleType) -> bytes:
    try:
        pickled: bytes = ray.cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"Rank {rank} returned {with_article(type(value).__name__)} that cannot be pickled, and so cannot be sent "
            f"to the process that called RayLauncher.run: {error}. Return plain data, or None."
        ) from error
    return pickled
