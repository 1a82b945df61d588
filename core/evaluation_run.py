"""A validation, test or prediction of its own; a run that fails before it begins, as its data module does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..events import Bus
from ..events.catalogue import Phase
from ..plugins import Plugins
from .checkpoint.weights import load_for_run
from .data.evaluation_data import check_in_order
from .data.loaders import LoaderParams, check_params, params_of_one_process, shared_params
from .data.module import DataModule
from .data.module_life import complete_options, data_of_phase, open_module
from .data.run_loaders import named_sets, plain_sets
from .run import TrainRun, apart_from_others, is_in_run
from .run_end import close_run
from .settings import FitOptions, Settings, check_name, evaluation

if TYPE_CHECKING:
    from .engines.contract import LoopEngine


def evaluation_run(
    bus: Bus,
    plugins: Plugins,
    engine: LoopEngine,
    task: Any,
    data: Any,
    phase: Phase,
    *,
    loader_params: LoaderParams | None = None,
    limit: Any = None,
    name: str = "run",
    weights: str | Path | None = None,
) -> TrainRun:
    """Return a run for the sets of one phase; see `Trainer.validate`, `Trainer.test` and `Trainer.predict`."""
    with ExitStack() as life:
        life.enter_context(apart_from_others())
        opening = life.enter_context(failing_with_data(bus, plugins, engine, task, phase, name))
        life.enter_context(engine.process())
        with opening():
            loaders = data_of_phase(data, phase, life, engine)
        if loader_params is None and isinstance(data, DataModule):
            loader_params = shared_params(data.loader_params)
        loaders = plain_sets(named_sets(loaders))  # periodic ones, too, are read by every run of this kind
        check_params(loader_params, loaders.values())
        params = params_of_one_process(loader_params, engine.world_size)
        checked = evaluation(task, loaders, phase, name, params, limit)
        if phase == "predict":
            for loader in checked.evaluations[phase].values():
                check_in_order(loader)
        note = None if weights is None else load_for_run(plugins, engine, task, weights, name)
        run = TrainRun(checked, bus, plugins, engine, phase)
        if note is not None:
            run.note(note)
        run.hooks.closing.push(life.pop_all())
    return run


@contextmanager
def failing_with_data(
    bus: Bus, plugins: Plugins, engine: LoopEngine, task: Any, phase: Phase, name: str
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Let a data module that fails fail the run that was to begin: emit RunFailed and RunClosed when all is closed.

    Yields what makes the context in which the module is prepared, set up and asked for its data.
    """
    failures: list[BaseException] = []

    @contextmanager
    def opening() -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            failures.append(error)
            raise

    try:
        yield opening
    except BaseException as error:
        if not any(error is failure for failure in failures) or is_in_run(engine):
            raise
        run = TrainRun(Settings(name=check_name(name), task=task), bus, plugins, engine, phase)
        run.outcome.has_left_group = True
        run.plugins.open(run)
        close_run(run, error)
        raise


def open_training_data(
    bus: Bus, plugins: Plugins, engine: LoopEngine, module: DataModule, task: Any, options: FitOptions, life: ExitStack
) -> Any:
    """Return the training data of a module, and complete the options with the rest of it."""
    opening = failing_with_data(bus, plugins, engine, task, "train", options.get("name", "run"))
    opened = life.enter_context(opening)
    life.enter_context(engine.process())
    with opened():
        open_module(module, life, engine)
        train = module.train()
        complete_options(module, options)
    return train
