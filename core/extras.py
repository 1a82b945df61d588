"""Optional packages, asked for where they are used."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, extra: str, purpose: str) -> Any:
    """Import an optional module.

    Raises:
        ImportError: it is not installed; gives the exact command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {module.split('.')[0]}, which is not installed: pip install 'heliograph[{extra}]'"
        ) from error
