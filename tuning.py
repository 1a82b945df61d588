"""Functions that try a training in advance: rehearse, overfit, find a learning rate or a batch size, count steps."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from .core.data.batch_size import find_executable_batch_size as find_executable_batch_size
from .core.data.loaders import LoaderParams
from .core.data.module import DataModule, open_module
from .core.data.training_data import TrainingData
from .core.length import Length
from .core.rehearsal.probes import LearningRateSearch as LearningRateSearch
from .core.rehearsal.probes import Overfitting as Overfitting
from .core.rehearsal.probes import find_learning_rate as find_learning_rate
from .core.rehearsal.probes import overfit as overfit
from .core.rehearsal.rehearsal import find_batch_size as find_batch_size
from .core.rehearsal.rehearsal import rehearse as rehearse
from .core.rehearsal.report import Rehearsal as Rehearsal
from .core.settings import Settings, check_length, training_loaders
from .core.trainer import Trainer
from .events import Progress


def planned_steps(
    trainer: Trainer,
    train: Any,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    limit_train: float | Mapping[str, float] | None = None,
    loader_params: LoaderParams | Mapping[str, Any] | None = None,
) -> int:
    """Return how many optimizer steps a `fit` with these arguments will make.

    The count includes gradient accumulation, ranks, a shorter last window and dropped batches. It cannot include
    skipped steps and epochs that end early. With several optimizers by name it counts rounds, in which each optimizer
    may step once. On several ranks, call it on each rank.

    Args:
        trainer: the trainer with its engine and plugins.
        train: see `Trainer.fit`; a `DataModule` is prepared, set up and torn down.
        epochs: see `Trainer.fit`.
        steps: see `Trainer.fit`.
        limit_train: see `Trainer.fit`.
        loader_params: see `Trainer.fit`.

    Raises:
        ValueError: the number is unknown before the run: a loader has no length, or the phases differ in length.
    """
    engine = trainer.engine
    options: dict[str, Any] = {"loader_params": loader_params, "limit_train": limit_train}
    epochs, steps = check_length(epochs, steps)
    with ExitStack() as life:
        life.enter_context(engine.process())
        if isinstance(train, DataModule):
            module = open_module(train, life, engine)
            train, options["loader_params"] = module.train(), loader_params or module.loader_params
        loaders = training_loaders(train, options, engine.world_size)[0]
        data = TrainingData(loaders, engine)
        life.callback(data.close)
        settings = Settings("run", None, loaders, epochs=epochs, steps=steps)
        return Length(settings, data, trainer.plugins, Progress()).steps_or_raise("planned_steps")
