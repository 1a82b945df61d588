"""`DataModule`, the base class for data with a life cycle: prepare, set up, provide, tear down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

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

    def __repr__(self) -> str:
        from ...events.signatures import show_attributes

        return show_attributes(self)

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
