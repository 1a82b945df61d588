"""What is judged of stretches of a training, and when a verdict is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph_recorder.explain.judge import KINDS, LIMITS, BottleneckJudge, Measured, findings, merged

GIB = 2**30
FINE = Measured(10.0, 100, 50, 0.0, 0, 0.0, 0, (0.1,), (0.01,), (0.03,), (GIB,), (0,))


def stretch(**fields: Any) -> Measured:
    return replace(FINE, **fields)


def said(*stretches: Measured) -> list[tuple[int, str, bool]]:
    """Return what a judge says, with the number of the stretch after which it does."""
    judge = BottleneckJudge()
    return [(at, each.kind, each.holds) for at, one in enumerate(stretches) for each in judge.add(one)]


def holding(*stretches: Measured) -> dict[str, str]:
    return {each.kind: each.text for each in findings(stretches) if each.holds}


def test_a_training_in_which_all_is_well_has_no_verdict() -> None:
    assert said(*[FINE] * 50) == []
    assert holding(*[FINE] * 50) == {}
    assert findings([]) == []


def test_waits_for_data() -> None:
    slow = stretch(load=(0.04,))
    assert_each(holding(slow).items(), ("input_bound", "40.0 ms of", "0.10 s", "40.0 %"))
    assert said(slow, slow, slow) == [(1, "input_bound", True)]


def test_a_single_slow_stretch_is_no_verdict() -> None:
    slow = stretch(load=(0.04,))
    assert said(FINE, slow, FINE, slow, FINE) == []


def test_too_few_batches_are_no_evidence() -> None:
    assert said(*[stretch(load=(0.09,), sampled=9)] * 5) == []
    assert holding(stretch(load=(0.09,), sampled=9)) == {}


def test_a_verdict_ends_once_it_is_clearly_over() -> None:
    slow, between, fine = stretch(load=(0.04,)), stretch(load=(0.25,), batch=(1.0,)), stretch(load=(0.01,))
    assert said(slow, slow, between, slow, between, between, fine, between, fine, fine, slow) == [
        (1, "input_bound", True),
        (9, "input_bound", False),
    ]


def test_a_slow_rank() -> None:
    late = stretch(
        batch=(0.1,) * 4, load=(0.01,) * 4, forward=(0.03, 0.03, 0.05, 0.03), memory=(GIB,) * 4, device_memory=(0,) * 4
    )
    assert_each(holding(late).items(), ("straggler", "rank 2", "60.0 ms", "40.0 ms"))
    assert said(late, late) == [(1, "straggler", True)]
    slightly = replace(late, forward=(0.03, 0.03, 0.036, 0.03))
    assert said(slightly, slightly) == []
    of_little = replace(late, load=(0.0,) * 4, forward=(0.001, 0.001, 0.004, 0.001))  # four times, yet of 100 ms
    assert said(of_little, of_little) == []


def test_two_ranks_one_of_which_loads_slowly() -> None:
    late = stretch(batch=(0.1,) * 2, load=(0.01, 0.05), forward=(0.02,) * 2, memory=(GIB,) * 2, device_memory=(0,) * 2)
    assert list(holding(late)) == ["straggler"]


def test_validations_and_saves() -> None:
    assert_each(
        holding(stretch(validation=4.0, validations=2)).items(),
        ("validation_bound", "2 validations", "4.00 s of", "10.0 s", "40.0 %"),
    )
    assert_each(holding(stretch(save=1.5, saves=3)).items(), ("save_bound", "3 saves", "1.50 s of", "10.0 s", "15.0 %"))
    assert holding(stretch(validation=4.0, validations=1, save=4.0, saves=1)) == {}  # one is no evidence


def test_rare_events_are_judged_by_all_stretches() -> None:
    long = stretch(validation=9.0, validations=1)
    assert said(long, FINE, FINE, long, *[FINE] * 12) == [(3, "validation_bound", True), (9, "validation_bound", False)]


def test_growing_memory() -> None:
    growing = [stretch(memory=(GIB + at * 100 * 2**20,)) for at in range(12)]
    assert said(*growing) == [(9, "growing_memory", True)]
    (text,) = holding(*growing).values()
    assert_facts(text, "memory of rank 0", "1.39 GiB", "2.07 GiB", "80.0 s")
    assert said(*growing, *[growing[-1]] * 9)[1:] == [(18, "growing_memory", False)]


def test_memory_that_settles_or_comes_and_goes_is_not_growing() -> None:
    assert said(*[stretch(memory=(GIB * min(at + 1, 3),)) for at in range(20)]) == []
    assert said(*[stretch(memory=(GIB * (1 + at % 2),)) for at in range(20)]) == []
    assert said(*[stretch(memory=(GIB + at * 2**20,)) for at in range(20)]) == []  # little
    assert said(*[stretch(memory=(0,)) for _ in range(20)]) == []  # of another system


def test_growing_memory_of_a_gpu() -> None:
    growing = [stretch(device_memory=(GIB + at * 2**28,)) for at in range(10)]
    assert "GPU memory" in holding(*growing)["growing_memory"]


def test_stretches_are_merged_by_their_batches() -> None:
    one, other = stretch(batches=100, load=(0.01,)), stretch(batches=300, load=(0.05,), seconds=30.0, saves=2, save=1.0)
    both = merged([one, other])
    assert (both.seconds, both.batches, both.sampled, both.saves, both.save) == (40.0, 400, 100, 2, 1.0)
    assert both.load[0] == pytest.approx(0.04)
    assert merged([stretch(sampled=0, load=(0.0,), batch=(0.0,)), one]).load[0] == pytest.approx(0.01)


def test_of_what_use_a_stretch_was() -> None:
    assert stretch(load=(0.02,), validation=3.0, save=1.0).useful == pytest.approx(6.0 * 0.8)
    assert stretch(sampled=0, load=(0.0,), batch=(0.0,)).useful == 10.0


def test_each_kind_has_limits_with_room_between_them() -> None:
    assert tuple(LIMITS) == KINDS
    assert all(on > off for on, off in LIMITS.values())
