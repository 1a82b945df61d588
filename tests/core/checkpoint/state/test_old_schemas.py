"""The chain from each schema to the present one."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from heliograph.core.checkpoint.state.schema import SCHEMA, STEPS, check_schema, is_older, migrate_state

Make = Callable[..., dict[str, Any]]


def test_there_is_a_step_from_every_schema_to_the_next() -> None:
    assert sorted(STEPS) == list(range(3, SCHEMA))


def test_an_older_schema_becomes_the_present_one(state: Make, older: Make) -> None:
    present = state(3)
    old = older(present)
    before = deepcopy(old)
    migrated, changes = migrate_state(old)
    check_schema(migrated)
    assert repr(dict(sorted(migrated.items()))) == repr(dict(sorted(present.items())))
    assert changes == [f"schema {SCHEMA - 1} to {SCHEMA}: 'place' is called 'data'"]
    assert (is_older(old), is_older(migrated)) == (True, False)
    assert repr(old) == repr(before)


def test_every_step_is_done_in_its_order(state: Make, older: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def migrate(state: dict[str, Any]) -> list[str]:
        state["place"] = state.pop("position")
        return []

    monkeypatch.setitem(STEPS, SCHEMA - 2, migrate)
    old = older(state(3, data={"seed": 5})) | {"schema": SCHEMA - 2}
    old["position"] = old.pop("place")
    migrated, changes = migrate_state(old)
    assert (migrated["schema"], migrated["data"]) == (SCHEMA, {"seed": 5})
    assert changes == [f"schema {SCHEMA - 1} to {SCHEMA}: 'place' is called 'data'"]


def test_the_present_schema_is_left_alone(state: Make) -> None:
    present = state(3)
    migrated, changes = migrate_state(present)
    assert changes == []
    assert migrated == present


@pytest.mark.parametrize("schema", [0, 1, 2, SCHEMA + 1, "1", None])
def test_other_schemas_are_refused(schema: Any, state: Make) -> None:
    with pytest.raises(ValueError, match=f"has schema {schema!r}, this version reads 3 to {SCHEMA}"):
        migrate_state(state(3, schema=schema))


def test_what_lacks_parts_is_refused(state: Make) -> None:
    present = state(3)
    del present["modules"]
    with pytest.raises(ValueError, match=f"says schema {SCHEMA}, but lacks modules"):
        migrate_state(present)
