"""The packages of this repository, and the bridges to other frameworks."""

from __future__ import annotations

PACKAGES = ("bridges", "cli", "export", "optuna", "ray", "recorder", "rules", "storage", "testing", "trackers")
"""The packages in this repository, by their folders in `packages/`."""

DISTRIBUTIONS = frozenset({"heliograph", *(f"heliograph-{name}" for name in PACKAGES)})
"""Their plugins need no `package:` prefix, and `HELIOGRAPH_PLUGINS=-all` keeps them."""

MODULES = frozenset(name.replace("-", "_") for name in DISTRIBUTIONS)
"""Their import packages. Not a prefix: the package of a user may be called `heliograph_mine`."""

BRIDGES = {
    "transformers": "from_huggingface(...) of heliograph_bridges.huggingface",
    "trl": "from_huggingface(...) of heliograph_bridges.huggingface",
    "lightning": "from_lightning(...) of heliograph_bridges.lightning",
    "pytorch_lightning": "from_lightning(...) of heliograph_bridges.lightning",
    "ignite": "from_ignite(...) of heliograph_bridges.ignite",
}


def is_first_party(module: str | None) -> bool:
    """True if a module, by its dotted name, belongs to a first-party package."""
    return (module or "").partition(".")[0] in MODULES
