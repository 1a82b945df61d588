"""`DataModule`, the base class of the user's: prepare, set up, give the data, tear down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .loaders import LoaderParams


class DataModule:
    """Base of data modules, for `fit`, `validate`, `test` and `predict`: write `train`, and what else there is.

    A run calls `prepare` (once per object, and on one process per machine, for which the others wait), then `set_up`,
    then `train` and `validation`, or `test`, or `predict`; and, however it ends, `tear_down`.

    Attributes:
        loader_params: how to batch the datasets that the methods return; see `LoaderParams`. What `fit` is given wins.
    """

    loader_params: LoaderParams | Mapping[str, Any] | None = None
    _prepared = False

    def __repr__(self) -> str:
        from ...events.signatures import show_attributes

        return show_attributes(self)

    def prepare(self) -> None:
        """Download, unpack, convert. Keep no state: other processes will not see it."""

    def set_up(self) -> None:
        """Open files, split, tokenize: what this process needs."""

    def train(self) -> Any:
        """Return the training data: a dataset, a loader, several of them by name, or `Phases(...)` of such."""
        raise TypeError(f"{type(self).__name__} needs a method train() to be trained on.")

    def validation(self) -> Any:
        """Return the validation data, one dataset or loader or several by name; None where there is none."""
        return None

    def test(self) -> Any:
        """Return the test data, one dataset or loader or several by name."""
        raise TypeError(f"{type(self).__name__} needs a method test() to be tested on.")

    def predict(self) -> Any:
        """Return the data to predict, one dataset or loader or several by name."""
        raise TypeError(f"{type(self).__name__} needs a method predict() to be predicted on.")

    def tear_down(self) -> None:
        """Close what `set_up` opened; also called after a `set_up` that failed."""
