"""The package of a callback: `lightning` and `pytorch_lightning` have the same classes."""

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
    """One of the two packages."""

    package: str

    def part(self, module: str, name: str) -> Any:
        return getattr(import_module(f"{self.package}.{module}"), name)

    @property
    def callback(self) -> Any:
        return self.part("callbacks.callback", "Callback")

    @property
    def module(self) -> Any:
        return self.part("core.module", "LightningModule")


def flavour_of(callback: Any) -> Flavour | None:
    for package in PACKAGES:
        if package in sys.modules and isinstance(callback, (flavour := Flavour(package)).callback):
            return flavour
    return None


@cache
def view_class(flavour: Flavour) -> Any:
    base: Any = flavour.module

    class ModuleView(base):  # type: ignore[misc]
        """The modules of a task, as a LightningModule."""

        def __init__(self, modules: Any) -> None:
            super().__init__()
            for name, module in modules.items():
                self.add_module(name, module)

        @property
        def device(self) -> Any:
            return next(self.parameters()).device

        def __getattr__(self, name: str) -> Any:
            modules = self.__dict__["_modules"]
            if name in modules or len(modules) != 1 or name.startswith("_"):
                return super().__getattr__(name)
            return getattr(next(iter(modules.values())), name)

    return ModuleView


@cache
def logger_class(flavour: Flavour) -> Any:
    base: Any = flavour.part("loggers.logger", "Logger")

    class RunLogger(base):  # type: ignore[misc]
        """A logger whose values are added to the next `Log` of the run."""

        def __init__(self, work: Any) -> None:
            super().__init__()
            self._work = work

        @property
        def name(self) -> str:
            return str(self._work.run.name)

        @property
        def version(self) -> str:
            return str(self._work.run.training_id)

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self._work.metrics.keep(metrics)

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(
                "Hyperparameters are logged once, before the training: pass them to fit(hyper_parameters={...})."
            )

    return RunLogger


def installed(purpose: str) -> Flavour:
    """Return the imported package, or else the first installed one; raise ImportError if there is none."""
    for package in (*(package for package in PACKAGES if package in sys.modules), *PACKAGES):
        if package in sys.modules or find_spec(package.partition(".")[0]) is not None:
            return Flavour(package)
    require(PACKAGES[0], purpose, extra="lightning")
    raise AssertionError("it is not there to be imported")
