"""The package that a callback is of: `lightning` and `pytorch_lightning` have the same classes, twice."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from heliograph.spi import require

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


@dataclass(frozen=True, slots=True)
class Flavour:
    """One of the two packages.

    Attributes:
        package: its name, such as `lightning.pytorch`.
    """

    package: str

    def part(self, module: str, name: str) -> Any:
        """Return something that a module of the package has."""
        return getattr(import_module(f"{self.package}.{module}"), name)

    @property
    def callback(self) -> Any:
        """The base class of its callbacks."""
        return self.part("callbacks.callback", "Callback")

    @property
    def module(self) -> Any:
        """The base class of its modules."""
        return self.part("core.module", "LightningModule")


def flavour_of(callback: Any) -> Flavour | None:
    """Return the package whose callback an object is; None where it is not one. Imports neither."""
    for package in PACKAGES:
        if package in sys.modules and isinstance(callback, (flavour := Flavour(package)).callback):
            return flavour
    return None


@cache
def view_class(flavour: Flavour) -> Any:
    """Return the class of what callbacks get as `pl_module` where the task has no LightningModule."""
    base: Any = flavour.module

    class ModuleView(base):  # type: ignore[misc]
        """The modules of a task, as a LightningModule."""

        def __init__(self, modules: Any) -> None:
            super().__init__()
            for name, module in modules.items():
                self.add_module(name, module)

        @property
        def device(self) -> Any:
            """Where the parameters are."""
            return next(self.parameters()).device

        def __getattr__(self, name: str) -> Any:
            modules = self.__dict__["_modules"]
            if name in modules or len(modules) != 1 or name.startswith("_"):
                return super().__getattr__(name)
            return getattr(next(iter(modules.values())), name)

    return ModuleView


@cache
def logger_class(flavour: Flavour) -> Any:
    """Return the class of the one logger that callbacks find."""
    base: Any = flavour.part("loggers.logger", "Logger")

    class RunLogger(base):  # type: ignore[misc]
        """What is logged to it is in the next `Log` of the run, and so reaches every tracker."""

        def __init__(self, work: Any) -> None:
            super().__init__()
            self._work = work

        @property
        def name(self) -> str:
            """The name of the run."""
            return str(self._work.run.name)

        @property
        def version(self) -> str:
            """The id of the training."""
            return str(self._work.run.training_id)

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            """Keep values for the next log, whose step they get."""
            self._work.metrics.keep(metrics)

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            """Say where hyperparameters are given here."""
            raise NotImplementedError(
                "Hyperparameters are logged once, before the training: give them to fit(hyper_parameters={...})."
            )

    return RunLogger


def installed(purpose: str) -> Flavour:
    """Return the package that the program uses; of both or neither, the first that is installed.

    Args:
        purpose: what needs it, for the error message.

    Raises:
        ImportError: none is installed; the message gives the command that installs it.
    """
    for package in (*(each for each in PACKAGES if each in sys.modules), *PACKAGES):
        if package in sys.modules or find_spec(package.partition(".")[0]) is not None:
            return Flavour(package)
    require(PACKAGES[0], purpose, extra="lightning")
    raise AssertionError("it is not there to be imported")
