"""What a run calls on a data module: prepare on one process, set up, tear down whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ...events import Engine
from ...events.catalogue import Phase
from ...events.errors import describe_error
from ..system.errors import RankFailed
from .module import DataModule


def open_module(module: DataModule, life: ExitStack, engine: Engine) -> DataModule:
    """Prepare a module, on one process per machine, and set it up; leaving `life` tears it down. A collective."""
    _prepare(module, engine)
    life.enter_context(_tear_down_at_end(module))
    module.set_up()
    return module


def _prepare(module: DataModule, engine: Engine) -> None:
    """Prepare a module where that is this process's part, and wait until it is done everywhere.

    Raises:
        RankFailed: it failed on another rank; the exception itself leaves there.
    """
    failure: Exception | None = None
    if engine.is_local_main and not module._prepared:  # ours: a subclass need not call a constructor
        try:
            module.prepare()
        except Exception as error:  # noqa: BLE001  # raised when the others know
            failure = error
    described = None if failure is None else (type(failure).__qualname__, str(failure))
    of_ranks: list[tuple[str, str] | None] = engine.gather_objects(described)
    if failure is not None:
        raise failure
    for rank, other in enumerate(of_ranks):
        if other is not None:
            raise RankFailed(rank, *other, f"in {type(module).__name__}.prepare")
    module._prepared = True


@contextmanager
def _tear_down_at_end(module: DataModule) -> Iterator[None]:
    """Tear a module down at the end; a failure of that does not take the place of the error that it follows."""
    try:
        yield
    except BaseException as error:
        try:
            module.tear_down()
        except Exception as failure:  # noqa: BLE001  # added to the first one as a note
            error.add_note(f"heliograph: then tear_down failed: {describe_error(failure)}")
        raise
    module.tear_down()


def complete_options(module: DataModule, options: Any) -> None:
    """Complete the options of a fit with what the module says."""
    if "validation" not in options:
        options["validation"] = module.validation()
    if module.loader_params is not None:
        options.setdefault("loader_params", module.loader_params)


def data_of_phase(data: Any, phase: Phase, life: ExitStack, engine: Engine) -> Any:
    """Return the data that an evaluation reads, a module's own for its phase."""
    if not isinstance(data, DataModule):
        return data
    module = open_module(data, life, engine)
    data_of: Callable[[], Any] = getattr(module, phase)
    return data_of()
