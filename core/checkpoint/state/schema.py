"""The schema of a saved state, and of which training and software it is."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

SCHEMA = 3


REQUIRED = (
    "schema", "run_name", "progress", "modules", "optimizers", "plugins", "metrics", "data", "control", "world",
    "ranks",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of the software that a cut is made with."""
    software = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": str(np.__version__)}
    return {"heliograph": version("heliograph"), **software}


def training_of(saved: Mapping[str, Any]) -> str:
    """Return of which training a cut is."""
    return saved.get("training_id") or training_named(saved["run_name"])


def training_named(run_name: str) -> str:
    """Return the training that all cuts of a name are taken for that were made when trainings had no identity yet."""
    return hashlib.sha256(f"heliograph training {run_name}".encode()).hexdigest()[:32]


def check_schema(saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless a loaded object is a cut that this version reads."""
    schema = saved.get("schema") if isinstance(saved, Mapping) else None
    if isinstance(schema, int) and schema != SCHEMA:
        mend = "update heliograph" if schema > SCHEMA else "run `python -m heliograph checkpoint migrate` on the file"
        raise ValueError(f"The checkpoint has schema {schema}, this version reads {SCHEMA}: {mend}.")
    lacking = [key for key in REQUIRED if key not in saved] if isinstance(saved, Mapping) else list(REQUIRED)
    if lacking:
        raise ValueError(f"This is no checkpoint of heliograph: it lacks {', '.join(lacking)}.")
