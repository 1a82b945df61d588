"""What ranks do together: every rank learns what came of it, and the same error is raised on all."""

from __future__ import annotations

from typing import Any

import pytest
from heliograph import DDPEngine, DeviceEngine
from heliograph.core.distributed.outcomes import on_main, outcome_of, values_of_ranks
from heliograph.tests.messages import assert_each
from heliograph.tests.ranks_pool import Pool


class PickyError(Exception):
    """Does not survive pickling: it takes two arguments, and keeps one."""

    def __init__(self, what: str, place: str) -> None:
        super().__init__(f"{what} at {place}")


def work_of(rank: int, fails_on: int, error: Exception | None) -> str:
    if rank == fails_on and error is not None:
        raise error
    return f"by rank {rank}"


def reported(error: Exception) -> tuple[str, str, list[str]]:
    return type(error).__name__, str(error), getattr(error, "__notes__", [])


def do_it(fails_on: int, kind: str) -> tuple[Any, Any]:
    engine = DDPEngine(device="cpu")
    errors = {"OSError": OSError("disk full"), "PickyError": PickyError("odd", "home"), "none": None}
    results: list[Any] = []
    with engine.process():
        for act in (
            lambda: on_main(engine, lambda: work_of(engine.rank, fails_on, errors[kind])),
            lambda: values_of_ranks(engine, outcome_of(lambda: work_of(engine.rank, fails_on, errors[kind]))),
        ):
            try:
                results.append(act())
            except Exception as error:  # noqa: BLE001  # whatever it is
                results.append(reported(error))
    return results[0], results[1]


def test_every_rank_learns_what_came_of_it(ranks: Pool) -> None:
    both = ["by rank 0", "by rank 1"]
    assert ranks(2).run(do_it, 0, "none") == [("by rank 0", both)] * 2


def test_an_error_is_raised_on_all_ranks(ranks: Pool) -> None:
    main, other = ranks(2).run(do_it, 0, "OSError")
    assert main[0] == ("OSError", "disk full", [])
    assert other[0][:2] == ("OSError", "disk full")
    assert_each(other[0][2], ["rank 0"])
    main, other = ranks(2).run(do_it, 1, "PickyError")
    by, (kind, text, notes) = main
    assert (by, kind, text) == ("by rank 0", "RuntimeError", "PickyError: odd at home")
    assert_each(notes, ["rank 1"])
    assert other == ("by rank 0", ("PickyError", "odd at home", []))


def test_a_single_process_is_spared_all_of_it() -> None:
    engine, error = DeviceEngine("cpu"), PickyError("odd", "home")
    assert on_main(engine, lambda: 3) == 3
    with pytest.raises(PickyError) as caught:
        on_main(engine, lambda: work_of(0, 0, error))
    assert caught.value is error


def test_an_interrupt_is_no_outcome() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        outcome_of(interrupt)
