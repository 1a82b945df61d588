"""What an error of Ray Train's means: whose fault it was, and whether it is worth another try."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from heliograph.builtin_callbacks.ray.launcher.attempts import WorkerGroup
from heliograph.builtin_callbacks.ray.launcher.failures import (
    AttemptFailure,
    WorkerFailed,
    classify_failure,
    is_secondary,
)
from heliograph.builtin_callbacks.ray.launcher.mailbox import Failed, Value
from heliograph.builtin_callbacks.ray.session import Notice
from heliograph.core.distributed.launch.exceptions import carry
from heliograph.core.errors import RankFailed
from ray.exceptions import OwnerDiedError, RayActorError
from ray.train import ControllerError, PreemptionError, WorkerGroupError
from torch.distributed import DistBackendError

HUNG = RankFailed(1, "hung", "it trains on", "in train")
DIED = RankFailed(1, "died", "no sign of life for 2 s", "in train")
TOLD = RankFailed(1, "KeyError", "'label'", "in train")
BROKEN = DistBackendError("NCCL error: remote process has exited")


def internal(name: str, *args: Any) -> Exception:
    """Return an error of Ray Train's that it does not export."""
    import ray.train.v2._internal.exceptions as exceptions

    error: Exception = vars(exceptions)[name](*args)
    return error


def raised(error: BaseException) -> Failed:
    """Return what a worker tells of an error."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        is_exit = isinstance(error, SystemExit) and not error.code
        return Failed(carry(caught), is_secondary=is_secondary(caught), is_exit=is_exit)


def group(errors: dict[int, BaseException], **told: Any) -> WorkerGroup:
    """Return two workers of which some told that they failed."""
    return WorkerGroup(2, 0.0, failed={rank: raised(error) for rank, error in errors.items()}, **told)


def missed(*ranks: int, preempted: bool = False) -> WorkerGroupError:
    """Return what Ray says of workers that are gone, the others having failed by themselves."""
    death = RayActorError(error_msg="The actor died:\n\tits node was lost.", preempted=preempted)
    gone = internal("WorkerHealthCheckFailedError", "health check failed", death)
    failures: dict[int, Any] = {rank: gone if rank in ranks else WorkerFailed(rank, "RankFailed") for rank in range(2)}
    return WorkerGroupError("...", failures)


def kinds(verdict: AttemptFailure) -> list[str]:
    """Return the types of the errors that a verdict would raise."""
    return [type(each.error).__name__ for each in verdict.errors]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("label"), False),
        (RuntimeError("I, a user, say NCCL"), False),
        (RankFailed(0, "died", "", ""), True),
        (BROKEN, True),
        (RayActorError(error_msg="the actor of a report"), True),
        (RayActorError(error_msg="the user's actor raised", actor_init_failed=True), False),
        (OwnerDiedError("00" * 28, None, ""), True),
        (SystemExit(143), False),
    ],
)
def test_an_error_follows_where_another_process_caused_it(error: BaseException, *, expected: bool) -> None:
    assert raised(error).is_secondary is expected
    wrapped = ValueError("the training is off")
    wrapped.__cause__ = error
    assert raised(wrapped).is_secondary is expected


def test_an_error_of_the_users_is_it_whatever_ray_and_the_others_say() -> None:
    told = group({0: RankFailed(1, "KeyError", "'label'", ""), 1: KeyError("label")})
    verdict = classify_failure(told, missed(0))
    assert (verdict.kind, verdict.text) == ("failed", "rank 1 failed with KeyError: 'label'")
    assert kinds(verdict) == ["KeyError", "RankFailed"]
    assert verdict.errors[0].rank == 1
    assert "raise error" in verdict.errors[0].text


def test_where_the_users_own_error_did_not_arrive_what_it_told_the_others_is_raised() -> None:
    verdict = classify_failure(group({0: TOLD}), missed(1))
    assert verdict.kind == "failed"
    assert str(verdict.errors[0].error) == str(TOLD)


@pytest.mark.parametrize(
    ("errors", "ray_says", "kind", "text"),
    [
        ({0: DIED}, missed(1), "lost", str(DIED)),
        ({0: HUNG}, missed(1), "hung", str(HUNG)),
        ({0: HUNG}, missed(), "hung", str(HUNG)),
        ({0: BROKEN}, missed(1), "lost", "rank 1 died: The actor died: its node was lost."),
        ({}, missed(0, 1), "lost", "rank 0 died: The actor died: its node was lost."),
        ({0: BROKEN, 1: BROKEN}, missed(), "lost", f"rank 0 left the group: DistBackendError: {BROKEN}"),
        ({0: RayActorError(error_msg="gone")}, missed(), "lost", "rank 0 left the group: RayActorError: gone"),
    ],
)
def test_a_worker_that_is_gone_is_worth_another_try(
    errors: dict[int, BaseException], ray_says: BaseException, kind: str, text: str
) -> None:
    verdict = classify_failure(group(errors), ray_says)
    assert (verdict.kind, verdict.text) == (kind, text)
    assert kinds(verdict)[0] == "RankFailed"
    assert verdict.cause is ray_says


def test_a_worker_that_is_gone_before_it_could_begin_is_lost_too() -> None:
    early: list[Exception] = [RayActorError(), internal("WorkerGroupStartupFailedError", "it died")]
    for inner in early:
        error = ControllerError(inner)
        verdict = classify_failure(None, error)
        assert verdict.kind == "lost"
        assert verdict.errors[0].error is error
    assert classify_failure(None, RayActorError()).kind == "lost"


def test_of_what_ray_says_of_a_death_the_reason_is_told_with_process_and_machine() -> None:
    said = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: RayTrainWorker\n\tactor_id: d7\n"
        "\tpid: 591\n\tnamespace: 3f\n\tip: 192.0.2.2\nThe actor is dead because its worker process has died. Worker "
        "exit type: SYSTEM_ERROR Worker exit detail: End of file. Some common causes include: (1) the OOM killer."
    )
    gone = internal("WorkerHealthCheckFailedError", "health check failed", RayActorError(error_msg=said))
    error = WorkerGroupError("...", {1: gone})
    verdict = classify_failure(group({}), error)
    text = "rank 1 died: The actor is dead because its worker process has died (pid 591, ip 192.0.2.2)"
    assert (verdict.kind, verdict.text, str(verdict.errors[0].error)) == ("lost", text, text)
    assert verdict.cause is error


def test_what_raised_while_it_was_created_would_raise_again() -> None:
    error = RayActorError(error_msg="the controller raised", actor_init_failed=True)
    assert classify_failure(None, error).kind == "failed"
    assert classify_failure(None, ControllerError(error)).kind == "failed"


def test_what_ray_cannot_start_fails() -> None:
    error = ControllerError(internal("WorkerGroupStartupTimeoutError", 8))
    verdict = classify_failure(None, error)
    assert verdict.kind == "failed"
    assert verdict.errors[0].error is error
    assert "waiting for 8 workers" in verdict.text


def test_a_run_that_left_its_machine_is_no_failure() -> None:
    notice = Notice("ray", "the machine of rank 1 is to be taken away")
    left = group({}, exit_notices={0: notice, 1: notice})
    verdict = classify_failure(left, None)
    assert (verdict.kind, verdict.text, verdict.errors) == ("preempted", notice.reason, ())
    assert classify_failure(group({}), missed(1, preempted=True)).kind == "preempted"
    info: Any = type("Info", (), {"preempted_ranks": [1]})()
    assert classify_failure(group({}), PreemptionError(info)).kind == "preempted"


def test_an_error_of_the_users_counts_more_than_that_its_run_left() -> None:
    told = group({0: KeyError("label")}, exit_notices={0: Notice("ray", "away")})
    assert classify_failure(told, None).kind == "failed"


def test_a_run_that_left_since_the_caller_ends_is_not_preempted() -> None:
    verdict = classify_failure(group({}, exit_notices={0: Notice("tune", "it is no good")}), None, is_stopping=True)
    assert (verdict.kind, verdict.text, kinds(verdict)) == ("failed", "it is no good", ["SystemExit"])


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_of_the_users_is_the_callers(code: int) -> None:
    told = group({1: SystemExit(code)}, values={0: b""})
    verdict = classify_failure(told, None)
    assert verdict.kind == "failed"
    assert kinds(verdict) == ["SystemExit"]
    assert verdict.errors[0].error.args == (code,)


def test_a_rank_without_a_word_is_told_of() -> None:
    verdict = classify_failure(WorkerGroup(2, 0.0, values={0: Value(b"").payload}), None)
    assert verdict.kind == "failed"
    assert "not every worker has reported how it ended" in verdict.text


def test_what_ray_is_told_of_a_failure_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(WorkerFailed(3, "KeyError")))
    assert str(error) == "rank 3 failed with KeyError, which is raised where RayLauncher.run was called"
