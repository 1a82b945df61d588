"""`DataModule`, the base class for data with a life cycle: prepare, set up, provide, tear down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from ...events.checks import describe_error
from ...events.signatures import show_attributes
from ..system.errors import RankFailed

if TYPE_CHECKING:
    from ...events import Engine, Phase
    from .loaders import LoaderParams


class DataModule:
    """Base class of data modules for `fit`, `validate`, `test` and `predict`.

    A run calls `prepare` (once per object, on one process per machine, while the other processes wait), then `set_up`,
    then `train` and `validation`, or `test`, or `predict`. At its end, also after a failure, it calls `tear_down`.
    Define `train`, and the other methods that you need.

    Attributes:
        loader_params: how to batch the datasets that the methods return; see `LoaderParams`. An argument of `fit` takes
            precedence.
    """

    loader_params: LoaderParams | Mapping[str, Any] | None = None
    _prepared = False

    __repr__ = show_attributes

    def prepare(self) -> None:
        """Download, unpack, convert. Keep no state, because other processes do not see it."""

    def set_up(self) -> None:
        """Open files, split, tokenize: whatever this process needs."""

    def train(self) -> Any:
        """Return the training data: a dataset or loader, several by name, or `Phases`."""
        raise TypeError(f"{type(self).__name__} has no training data: define train().")

    def validation(self) -> Any:
        """Return the validation data, one or several by name, or None."""
        return None

    def test(self) -> Any:
        """Return the test data: a dataset or loader, or several by name."""
        raise TypeError(f"{type(self).__name__} has no test data: define test().")

    def predict(self) -> Any:
        """Return the data to predict: a dataset or loader, or several by name."""
        raise TypeError(f"{type(self).__name__} has no data to predict: define predict().")

    def tear_down(self) -> None:
        """Close the resources of `set_up`; also called if `set_up` failed."""


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
