"""The seeded faults are still to be had."""

from __future__ import annotations

import pytest
from heliograph.packages.tests.mutants import FAULTS, ROOT, Fault, find


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_of_a_fault_is_in_one_place(fault: Fault) -> None:
    assert find(fault, ROOT).suffix == ".py"
    assert fault.by != fault.text


def test_a_text_that_is_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="is in nowhere"):
        find(Fault("none", "no source has " + "this", ""), ROOT)
