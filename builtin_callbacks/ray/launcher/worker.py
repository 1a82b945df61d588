"""A worker's own side of `RayLauncher`: call the function, tell the caller how it ended, and leave."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ....core.distributed.launch.exceptions import Carried, carry
from ....core.distributed.launch.queue import open_queue
from ....core.host import hosted_by
from ....core.system.extras import require
from ....events.errors import describe_error
from ..session import LAUNCHER, Notice
from .failures import WorkerFailed, follows
from .host import RayHost
from .mailbox import Failed, Left, Started, Told, Value
from .train_session import TrainSession
from .worker_channel import Post

if TYPE_CHECKING:
    from types import ModuleType


@dataclass(frozen=True)
class Call:
    """What the workers are to do.

    Attributes:
        name: tells this call of the launcher apart from others; the same in all its attempts.
        fit: tells one of Ray's runs for it apart from the others.
        mailbox: the actor between the workers and the caller.
        payload: the function and its arguments, pickled.
        grace: seconds that the other workers have to end when one has failed.
        sizes: the numbers of workers that will do.
    """

    name: str
    fit: str
    mailbox: Any
    payload: bytes
    grace: float
    sizes: tuple[int, ...]


def enter(call: Call) -> None:
    """Be a rank, in a thread that Ray Train has started for it.

    Raises:
        WorkerFailed: the function raised, which the caller has been told of.
    """
    ray = require("ray", "RayLauncher", extra="ray")
    context = require("ray.train", "RayLauncher", extra="ray").get_context()
    rank = context.get_world_rank()
    group = ray.util.get_current_placement_group().id.hex()  # every worker group has one of its own
    number = ray.get(call.mailbox.begin.remote(group))
    post = Post(call.mailbox, call.fit, group, rank)
    try:
        size = context.get_world_size()
        post.send(Started(size, ray.get_runtime_context().get_node_id()))
        if size not in call.sizes:
            post.send(Left(Notice(LAUNCHER, f"there was room for {size} workers, which do not divide as_ranks")))
            post.flush()
            return
        ending = _run(call, post, rank, ray, is_restart=number > 1)
        for each in ending:
            post.send(each)
        post.flush()
        outcome = ending[-1]
        if isinstance(outcome, Failed) and not outcome.is_exit:
            post.wait_for_release(call.grace)  # when this worker fails, Ray ends the others at once
            raise WorkerFailed(rank, outcome.error.kinds[0][1])
    finally:
        post.close()


def _run(call: Call, post: Post, rank: int, ray: ModuleType, *, is_restart: bool) -> list[Left | Value | Failed]:
    """Call the function; return what there is to tell of its end: whether it left as it was asked to, what came of it.

    What fails before the function is called ends the run as well: it would fail again in another attempt.
    """
    session: TrainSession | None = None
    outcome: list[Left | Value | Failed] = []
    try:
        session = TrainSession(call.name, post, is_restart=is_restart)
        open_queue(lambda message: post.send(Told(message)))
        with hosted_by(RayHost(session, post, is_main=rank == 0)):
            function, args, kwargs = _load(call.payload, ray)
            outcome.append(Value(_dump(function(*args, **kwargs), rank, ray)))
    except BaseException as error:  # noqa: BLE001  # raised at the caller
        was_asked = session is not None and session.left is not None
        if not (was_asked and isinstance(error, SystemExit)):
            is_exit = isinstance(error, SystemExit) and not error.code
            outcome.append(Failed(_carried(error, ray), follows=follows(error), is_exit=is_exit))
    return outcome if session is None or session.left is None else [Left(session.left), *outcome]


def _carried(error: BaseException, ray: ModuleType) -> Carried:
    """Return an error as data; one that a task of the user's raised without what Ray made of it."""
    carried, task_error = carry(error), ray.exceptions.RayTaskError
    return replace(carry(error.cause), text=carried.text) if isinstance(error, task_error) else carried


def _load(payload: bytes, ray: ModuleType) -> Any:
    try:
        return ray.cloudpickle.loads(payload)
    except Exception as error:
        raise TypeError(
            f"A worker could not load the function or its arguments: {describe_error(error)}. What they are "
            f"made of must be installed on every machine of the cluster, or be defined in the script itself."
        ) from error


def _dump(value: Any, rank: int, ray: ModuleType) -> bytes:
    try:
        pickled: bytes = ray.cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"Rank {rank} returned a {type(value).__qualname__} that cannot be pickled, and so cannot be sent to the "
            f"process that called RayLauncher.run: {error}. Return plain data, or nothing."
        ) from error
    return pickled
