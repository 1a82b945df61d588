"""The validated arguments of `CreatorTrainer`, which are sent to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

from heliograph.core.engines.options import EngineOptions
from heliograph.core.settings import check_name
from heliograph.spi import LoopEngine, check_whole_number, known_names

Config = Mapping[str, Any]
StepFrequency = Literal["batch", "epoch", "manual"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The arguments of `CreatorTrainer`, which documents them."""

    model_creator: Callable[[Any], Any]
    data_creator: Callable[[Any], Any]
    optimizer_creator: Callable[[Any, Any], Any]
    loss_creator: Callable[..., Any]
    scheduler_creator: Callable[[Any, Any], Any] | None = None
    scheduler_step_freq: StepFrequency | None = "batch"
    config: Config = field(default_factory=dict)
    batch_size: int = 16
    dataloader_config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    train_function: Callable[..., Mapping[str, Any]] | None = None
    validation_function: Callable[..., Mapping[str, Any]] | None = None
    initialization_hook: Callable[[Any], object] | None = None
    plugin_creator: Callable[[Any], Iterable[Any]] | None = None
    engine: Callable[[], LoopEngine] | str | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
    seed: int = 6691
    name: str = "run"

    def __post_init__(self) -> None:
        self._check_names()
        self._check_functions()
        for name in ("config", "dataloader_config", "metrics"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise TypeError(f"{name}= takes a dict, got {value!r}.")
        check_whole_number("batch_size=", self.batch_size, of="samples of all ranks together", at_least=1)
        if duplicates := self.dataloader_config.keys() & {"batch_size", "global_batch_size"}:
            raise ValueError(f"dataloader_config[{duplicates.pop()!r}] is given by batch_size=: leave it out.")
        check_whole_number("seed=", self.seed)
        self._check_stepping()
        if self.metrics and self.train_function is not None:
            raise ValueError("metrics= is for the default training: a train_function returns its own. Leave it out.")

    def _check_names(self) -> None:
        if unknown := sorted(self.options.keys() - EngineOptions.__annotations__.keys()):
            names = {"launcher", *EngineOptions.__annotations__, *(field.name for field in fields(self))} - {"options"}
            raise TypeError(
                f"CreatorTrainer has no argument {unknown[0]!r}.{known_names(unknown[0], names)} "
                f"docs/howto/migrate_from_raysgd.md has a table of RaySGD's arguments."
            )
        check_name(self.name)

    def _check_functions(self) -> None:
        for option in fields(self):
            value, is_function = getattr(self, option.name), option.name.endswith(("_creator", "_function", "_hook"))
            if is_function and not callable(value) and (value is not None or option.default is MISSING):
                raise TypeError(f"{option.name}= takes a function, got {value!r}.")
        if self.engine is not None and not isinstance(self.engine, str) and not callable(self.engine):
            raise TypeError(
                f"engine= takes the name of an engine, or a function that makes one on each rank, as DDPEngine does; "
                f"got {self.engine!r}."
            )

    def _check_stepping(self) -> None:
        if self.scheduler_step_freq not in (None, *get_args(StepFrequency)):
            raise ValueError(
                f"scheduler_step_freq= is 'batch', 'epoch', 'manual' or None, got {self.scheduler_step_freq!r}."
            )
        if self.scheduler_creator is None:
            return
        if self.train_function is not None and self.scheduler_step_freq == "batch":
            raise ValueError(
                "With a train_function, scheduler_step_freq='batch' would step a scheduler that the function may step "
                "too: call scheduler.step() in it and pass scheduler_step_freq=None, or pass 'epoch'."
            )
        if self.train_function is None and self.plugin_creator is None and self.scheduler_step_freq is None:
            raise ValueError(
                "scheduler_step_freq=None leaves the scheduler to a train_function or to a plugin, and there is none: "
                "pass 'batch', 'epoch', or 'manual' for trainer.update_scheduler(metric)."
            )
