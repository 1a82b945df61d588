"""What counts as first-party."""

from __future__ import annotations

import pytest
from heliograph.plugins.first_party import MODULES, is_first_party


@pytest.mark.parametrize("name", sorted(MODULES))
def test_first_party_modules_by_their_dotted_names(name: str) -> None:
    assert is_first_party(name)
    assert is_first_party(f"{name}.some.module")


@pytest.mark.parametrize("name", ["heliograph_mine", "heliographs.core", "my.heliograph", "torch.nn", "", None])
def test_a_name_that_only_begins_alike_is_not_first_party(name: str | None) -> None:
    assert not is_first_party(name)
