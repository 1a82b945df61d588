"""The chain from each schema to the present one."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from math import isnan
from typing import Any

import pytest
import torch
from heliograph.core.checkpoint.state.old_schemas import STEPS, judged, migrate_state, place_of
from heliograph.core.checkpoint.state.schema import SCHEMA, check_schema

GENERATORS = {"globals": {"python": [3, [1], None]}, "generator": {"bit_generator": "PCG64"}}


def schema_1(**more: Any) -> dict[str, Any]:
    progress = {"epoch": 1, "batch": 0, "earlier_batches": 4, "steps": 4, "samples": 16, "validations": 1}
    return {
        "schema": 1,
        "saved_at": 1000.5,
        "library": {"torch": "2.6.0"},
        "run_name": "run",
        "progress": progress,
        "modules": {"model": {"weight": torch.ones(2)}},
        "optimizer": {"state": {}, "param_groups": [{}]},
        "scheduler": None,
        "task": {},
        "metrics": {"validation/loss": 0.5},
        "means": {},
        "plugins": {},
        **more,
    }


def test_there_is_a_step_from_every_schema_to_the_next() -> None:
    assert sorted(STEPS) == list(range(1, SCHEMA))


def test_schema_1_becomes_the_present_one() -> None:
    old = schema_1()
    before = deepcopy(old)
    state, changes = migrate_state(old)
    check_schema(state)
    assert state["schema"] == SCHEMA
    assert state["versions"] == {"torch": "2.6.0"}
    assert state["world"] == {"size": 1}
    assert state["control"] == {"due": [], "end_epoch": False}
    assert state["data"] == {"seed": None, "phase": 0, "advances": False, "doubts": [], "source": None, "state": {}}
    assert "library" not in state
    assert changes[0] == "schema 1 to 2: added 'data', 'control' and 'world'; 'library' is called 'versions'"
    assert changes[1].startswith("schema 1 to 2: not exact: epochs are shuffled by the seed and the epoch now")
    assert state["optimizers"] == {"optimizer": old["optimizer"]}
    assert state["schedulers"] == {}
    assert state["ranks"] == [{}]
    assert not state.keys() & {"optimizer", "scheduler", "optimizer_kind", "scheduler_kind"}
    assert changes[2].startswith("schema 2 to 3: optimizer and scheduler are kept by name")
    assert len(changes) == 3
    assert repr(old) == repr(before)


def test_a_position_amid_an_epoch_is_told_to_be_inexact() -> None:
    old = schema_1()
    old["progress"]["batch"] = 3
    _, changes = migrate_state(old)
    assert changes[2].startswith("schema 1 to 2: not exact: the epoch was left after 3 batches of another order")


def test_random_generators_are_known_by_their_shape() -> None:
    of_plugin = {"now": {**GENERATORS, "loaders": [torch.zeros(3)]}, "epoch": {**GENERATORS, "loaders": []}}
    state, changes = migrate_state(schema_1(plugins={"my_seed": of_plugin, "other": {"now": 1}}))
    assert state["plugins"] == {"my_seed": {**GENERATORS, "held": []}, "other": {"now": 1}}
    assert changes[2].endswith("plugin 'my_seed': kept the random generators, left out those of the loader")


def test_the_list_of_checkpoints_goes_into_the_manifests() -> None:
    kept = {
        "saved": ["a.pth", "b.pth"],
        "best": [[-0.9, "a.pth"], [float("inf"), "c.pth"]],
        "judged_by": ["x/acc", "max"],
    }
    old = schema_1(plugins={"checkpoint": kept})
    state, _ = migrate_state(old)
    assert state["plugins"]["checkpoint"]["since"] < place_of(old) < 0
    assert judged(old, "a.pth") == ("x/acc", "max", 0.9)
    worst = judged(old, "c.pth")
    assert worst is not None
    assert worst[2] is not None
    assert isnan(worst[2])
    assert judged(old, "b.pth") is None
    assert judged(schema_1(), "a.pth") is None


def test_schema_2_told_of_what_kind_its_parts_were() -> None:
    kinds = {"optimizer_kind": "SGD", "scheduler_kind": "StepLR", "scheduler": {"last_epoch": 3}}
    old = schema_1(schema=2, versions={}, world={"size": 1}, control={}, data={}, **kinds)
    state, changes = migrate_state(old)
    check_schema(state)
    assert (state["optimizer_kinds"], state["scheduler_kinds"]) == ({"optimizer": "SGD"}, {"optimizer": "StepLR"})
    assert state["schedulers"] == {"optimizer": {"last_epoch": 3}}
    assert len(changes) == 1


def test_the_order_of_writing_is_kept() -> None:
    assert place_of(schema_1(saved_at=1000.5)) < place_of(schema_1(saved_at=1000.502)) < 0


def test_the_present_schema_is_left_alone(state: Callable[..., dict[str, Any]]) -> None:
    present = state(3)
    migrated, changes = migrate_state(present)
    assert changes == []
    assert migrated == present


@pytest.mark.parametrize("schema", [0, SCHEMA + 1, "1", None])
def test_other_schemas_are_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=f"has schema {schema!r}, this version migrates 1 to {SCHEMA}"):
        migrate_state(schema_1(schema=schema))


def test_what_lacks_parts_is_refused() -> None:
    old = schema_1()
    del old["modules"]
    with pytest.raises(ValueError, match="says schema 1, but lacks modules"):
        migrate_state(old)
