"""The first-party distributions and modules; everything else is the user's or a third party's."""

from __future__ import annotations

from typing import Final

PACKAGES: Final = ("bridges", "cli", "export", "optuna", "ray", "recorder", "rules", "testing", "trackers")
"""The packages in this repository, by their folders in `packages/`."""

DISTRIBUTIONS: Final = frozenset({"heliograph", *(f"heliograph-{name}" for name in PACKAGES)})
"""Their plugins need no `package:` prefix, and `HELIOGRAPH_PLUGINS=-all` keeps them."""

MODULES: Final = frozenset(name.replace("-", "_") for name in DISTRIBUTIONS)
"""Their import packages. Not a prefix: the package of a user may be called `heliograph_mine`."""


def is_first_party(module: str | None) -> bool:
    """True if a module, by its dotted name, belongs to a first-party package."""
    return (module or "").partition(".")[0] in MODULES
