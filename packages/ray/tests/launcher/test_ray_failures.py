"""What an error of Ray Train means: what failed, and whether another attempt may follow."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from heliograph.core.distributed.failure import Carried
from heliograph.core.system.errors import RankFailed
from heliograph.packages.tests.facts import assert_facts
from heliograph_ray.launcher.attempts import WorkerGroup
from heliograph_ray.launcher.failures import AttemptFailure, WorkerFailed, classify_failure, is_secondary
from heliograph_ray.launcher.mailbox import Failed, Value
from heliograph_ray.session import Notice
from ray.exceptions import OwnerDiedError, RayActorError
from ray.train import ControllerError, PreemptionError, WorkerGroupError
from torch.distributed import DistBackendError

HUNG = RankFailed(1, "hung", "it trains on", "in train")
DIED = RankFailed(1, "died", "no sign of life for 2 s", "in train")
OTHER = RankFailed(1, "KeyError", "'label'", "in train")
BROKEN = DistBackendError("NCCL error: remote process has exited")


def internal(name: str, *args: Any) -> Exception:
    """Return an error that Ray Train does not export."""
    import ray.train.v2._internal.exceptions as exceptions

    error: Exception = vars(exceptions)[name](*args)
    return error


def raised(error: BaseException) -> Failed:
    """Return the message of a worker about an error."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        is_exit = isinstance(error, SystemExit) and not error.code
        return Failed(Carried.of(caught), is_secondary=is_secondary(caught), is_exit=is_exit)


def group(errors: dict[int, BaseException], **facts: Any) -> WorkerGroup:
    """Return a group of two workers, some of which have failed."""
    return WorkerGroup(2, 0.0, failed={rank: raised(error) for rank, error in errors.items()}, **facts)


def missed(*ranks: int, preempted: bool = False) -> WorkerGroupError:
    """Return Ray's error if some workers are dead and the others have failed."""
    death = RayActorError(error_msg="The actor died:\n\tits node was lost.", preempted=preempted)
    gone = internal("WorkerHealthCheckFailedError", "health check failed", death)
    failures: dict[int, Any] = {rank: gone if rank in ranks else WorkerFailed(rank, "RankFailed") for rank in range(2)}
    return WorkerGroupError("...", failures)


def kinds(failure: AttemptFailure) -> list[str]:
    """Return the types of the errors that a failure would raise."""
    return [type(each.error).__name__ for each in failure.errors]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("label"), False),
        (RuntimeError("a user says NCCL"), False),
        (RankFailed(0, "died", "", ""), True),
        (BROKEN, True),
        (RayActorError(error_msg="actor of a report"), True),
        (RayActorError(error_msg="the user's actor raised", actor_init_failed=True), False),
        (OwnerDiedError("00" * 28, None, ""), True),
        (SystemExit(143), False),
    ],
)
def test_an_error_is_secondary_if_another_process_caused_it(error: BaseException, *, expected: bool) -> None:
    assert raised(error).is_secondary is expected
    wrapped = ValueError("the training is off")
    wrapped.__cause__ = error
    assert raised(wrapped).is_secondary is expected


def test_an_error_of_the_user_comes_before_those_of_ray_and_other_ranks() -> None:
    failed = group({0: RankFailed(1, "KeyError", "'label'", ""), 1: KeyError("label")})
    failure = classify_failure(failed, missed(0))
    assert failure.kind == "failed"
    assert_facts(failure.text, "rank 1", "KeyError: 'label'")
    assert kinds(failure) == ["KeyError", "RankFailed"]
    assert failure.errors[0].rank == 1
    assert "raise error" in failure.errors[0].text


def test_if_the_users_own_error_did_not_arrive_that_of_another_rank_is_raised() -> None:
    failure = classify_failure(group({0: OTHER}), missed(1))
    assert failure.kind == "failed"
    assert str(failure.errors[0].error) == str(OTHER)


@pytest.mark.parametrize(
    ("errors", "ray_says", "kind", "facts"),
    [
        ({0: DIED}, missed(1), "lost", (str(DIED),)),
        ({0: HUNG}, missed(1), "hung", (str(HUNG),)),
        ({0: HUNG}, missed(), "hung", (str(HUNG),)),
        ({0: BROKEN}, missed(1), "lost", ("rank 1 died", "node was lost")),
        ({}, missed(0, 1), "lost", ("rank 0 died", "node was lost")),
        ({0: BROKEN, 1: BROKEN}, missed(), "lost", ("rank 0 left", f"DistBackendError: {BROKEN}")),
        ({0: RayActorError(error_msg="gone")}, missed(), "lost", ("rank 0 left", "RayActorError: gone")),
    ],
)
def test_a_dead_worker_is_lost(
    errors: dict[int, BaseException], ray_says: BaseException, kind: str, facts: tuple[str, ...]
) -> None:
    failure = classify_failure(group(errors), ray_says)
    assert failure.kind == kind
    assert_facts(failure.text, *facts)
    assert kinds(failure)[0] == "RankFailed"
    assert failure.cause is ray_says


def test_a_worker_that_died_before_its_start_is_lost() -> None:
    early: list[Exception] = [RayActorError(), internal("WorkerGroupStartupFailedError", "it died")]
    for inner in early:
        error = ControllerError(inner)
        failure = classify_failure(None, error)
        assert failure.kind == "lost"
        assert failure.errors[0].error is error
    assert classify_failure(None, RayActorError()).kind == "lost"


# The text of Ray's error for an actor whose process died.
DEATH = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: RayTrainWorker\n\tactor_id: d7\n"
    "\tpid: 591\n\tnamespace: 3f\n\tip: 192.0.2.2\nThe actor is dead because its worker process has died. Worker "
    "exit type: SYSTEM_ERROR Worker exit detail: End of file. Some common causes include: (1) the OOM killer."
)


def test_the_text_of_a_death_has_the_reason_the_pid_and_the_ip() -> None:
    gone = internal("WorkerHealthCheckFailedError", "health check failed", RayActorError(error_msg=DEATH))
    error = WorkerGroupError("...", {1: gone})
    failure = classify_failure(group({}), error)
    assert failure.kind == "lost"
    assert_facts(failure.text, "rank 1 died", "worker process has died", "pid 591", "ip 192.0.2.2")
    assert str(failure.errors[0].error) == failure.text
    assert failure.cause is error


def test_an_actor_whose_constructor_raised_is_not_lost() -> None:
    error = RayActorError(error_msg="the controller raised", actor_init_failed=True)
    assert classify_failure(None, error).kind == "failed"
    assert classify_failure(None, ControllerError(error)).kind == "failed"


def test_a_start_timeout_is_a_failure() -> None:
    error = ControllerError(internal("WorkerGroupStartupTimeoutError", 8))
    failure = classify_failure(None, error)
    assert failure.kind == "failed"
    assert failure.errors[0].error is error
    assert "waiting for 8 workers" in failure.text


def test_an_exit_on_a_notice_is_a_preemption() -> None:
    notice = Notice("ray", "rank 1 is preempted")
    left = group({}, exit_notices={0: notice, 1: notice})
    failure = classify_failure(left, None)
    assert (failure.kind, failure.text, failure.errors) == ("preempted", notice.reason, ())
    assert classify_failure(group({}), missed(1, preempted=True)).kind == "preempted"
    info: Any = type("Info", (), {"preempted_ranks": [1]})()
    assert classify_failure(group({}), PreemptionError(info)).kind == "preempted"


def test_an_error_of_the_user_comes_before_a_notice() -> None:
    failed = group({0: KeyError("label")}, exit_notices={0: Notice("ray", "away")})
    assert classify_failure(failed, None).kind == "failed"


def test_an_exit_that_the_caller_requested_is_not_a_preemption() -> None:
    failure = classify_failure(group({}, exit_notices={0: Notice("tune", "it is no good")}), None, is_stopping=True)
    assert (failure.kind, failure.text, kinds(failure)) == ("failed", "it is no good", ["SystemExit"])


@pytest.mark.parametrize("code", [0, 3])
def test_a_system_exit_of_the_user_is_raised(code: int) -> None:
    failed = group({1: SystemExit(code)}, values={0: b""})
    failure = classify_failure(failed, None)
    assert failure.kind == "failed"
    assert kinds(failure) == ["SystemExit"]
    assert failure.errors[0].error.args == (code,)


def test_a_rank_that_reported_no_end_is_an_error() -> None:
    failure = classify_failure(WorkerGroup(2, 0.0, values={0: Value(b"").payload}), None)
    assert failure.kind == "failed"
    assert "every worker has reported" in failure.text


def test_worker_failed_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(WorkerFailed(3, "KeyError")))
    assert_facts(str(error), "rank 3", "KeyError")
