"""The life cycle of a data module in a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ...events import Engine
from ...events.catalogue import Phase
from ...events.checks import describe_error
from ..system.errors import RankFailed
from .module import DataModule


def open_module(module: DataModule, life: ExitStack, engine: Engine) -> DataModule:
    # A collective. Leaving `life` tears the module down.
    _prepare(module, engine)
    life.enter_context(_tear_down_at_end(module))
    module.set_up()
    return module


def _prepare(module: DataModule, engine: Engine) -> None:
    """Prepare a module on the first process of each machine; wait for all.

    Raises:
        RankFailed: it failed on another rank, which raises the original exception.
    """
    failure: Exception | None = None
    if engine.is_local_main and not module._prepared:  # ours: a subclass need not call a constructor
        try:
            module.prepare()
        except Exception as error:  # noqa: BLE001  # raised after the exchange
            failure = error
    described = None if failure is None else (type(failure).__qualname__, str(failure))
    of_ranks: list[tuple[str, str] | None] = engine.gather_objects(described)
    if failure is not None:
        raise failure
    for rank, failed in enumerate(of_ranks):
        if failed is not None:
            raise RankFailed(rank, *failed, f"in {type(module).__name__}.prepare")
    module._prepared = True


@contextmanager
def _tear_down_at_end(module: DataModule) -> Iterator[None]:
    # A failure of tear_down must not replace the original error.
    try:
        yield
    except BaseException as error:
        try:
            module.tear_down()
        except Exception as failure:  # noqa: BLE001  # added to the original error as a note
            error.add_note(f"heliograph: then tear_down failed: {describe_error(failure)}")
        raise
    module.tear_down()


def complete_options(module: DataModule, options: Any) -> None:
    if "validation" not in options:
        options["validation"] = module.validation()
    if module.loader_params is not None:
        options.setdefault("loader_params", module.loader_params)


def data_of_phase(data: Any, phase: Phase, life: ExitStack, engine: Engine) -> Any:
    if not isinstance(data, DataModule):
        return data
    return getattr(open_module(data, life, engine), phase)()
