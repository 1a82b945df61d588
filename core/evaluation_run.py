"""A validation or test outside of a training."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..events import Bus
from ..events.catalogue import Phase
from ..plugins import Plugins
from .data.loaders import LoaderParams, check_params, params_of_one_process
from .data.module import DataModule
from .data.module_life import data_of_phase
from .run import TrainRun, apart_from_others
from .settings import evaluation

if TYPE_CHECKING:
    from .engines.contract import LoopEngine


def evaluation_run(
    bus: Bus,
    plugins: Plugins,
    engine: LoopEngine,
    task: Any,
    data: Any,
    phase: Phase,
    params: LoaderParams | None,
    name: str,
) -> TrainRun:
    """Return a run for the sets of one phase; see `Trainer.validate` and `Trainer.test`."""
    with ExitStack() as life:
        life.enter_context(apart_from_others())
        life.enter_context(engine.process())
        loaders = data_of_phase(data, phase, life, engine)
        params = data.loader_params if params is None and isinstance(data, DataModule) else params
        check_params(params, loaders.values() if isinstance(loaders, Mapping) else [loaders])
        params = params_of_one_process(params, engine.world_size)
        checked = evaluation(task, loaders, phase, name, params)
        run = TrainRun(checked, bus, plugins, engine, phase)
        run.hooks.closing.push(life.pop_all())
    return run
