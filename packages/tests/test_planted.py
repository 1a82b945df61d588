"""The defects that are planted for the chaos kit: each has a place, and one of them is found."""

from __future__ import annotations

import pytest
from heliograph.packages.tests.mutants import ROOT, Fault, find
from heliograph.packages.tests.torture.planted import DEFECTS, finding


def test_there_are_fifty() -> None:
    assert len({defect.name for defect in DEFECTS}) == 50


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_has_its_place(defect: Fault) -> None:
    find(defect, ROOT)


@pytest.mark.whole
def test_a_defect_is_found() -> None:
    (defect,) = [each for each in DEFECTS if each.name == "one: schedulers are not restored"]
    found = finding(defect, "one")
    assert found is not None
    assert "differs: " in found
