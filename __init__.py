"""Heliograph: an event-bus callback framework for PyTorch training."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if __name__ != "heliograph":
    raise ImportError(
        f"The package was imported as {__name__!r}: its classes would exist twice. Import it as 'heliograph'."
    )

if _TYPE_CHECKING:
    from .builtin_callbacks import ray as ray
    from .builtin_callbacks.checkpoint.plugin import Checkpoint as Checkpoint
    from .builtin_callbacks.compile import Compile as Compile
    from .builtin_callbacks.early_stopping import EarlyStopping as EarlyStopping
    from .builtin_callbacks.ema import EMA as EMA
    from .builtin_callbacks.exception_pass_through import ExceptionPassThrough as ExceptionPassThrough
    from .builtin_callbacks.file_log import FileLog as FileLog
    from .builtin_callbacks.gradient_accumulation import GradientAccumulation as GradientAccumulation
    from .builtin_callbacks.gradient_clipping import GradientClipping as GradientClipping
    from .builtin_callbacks.gradient_norm import GradientNorm as GradientNorm
    from .builtin_callbacks.handler_times import HandlerTimes as HandlerTimes
    from .builtin_callbacks.jsonl_log import JsonlLog as JsonlLog
    from .builtin_callbacks.learning_rate import LearningRate as LearningRate
    from .builtin_callbacks.nan_guard import NaNGuard as NaNGuard
    from .builtin_callbacks.optuna.plugin import Optuna as Optuna
    from .builtin_callbacks.optuna.study import open_study as open_study
    from .builtin_callbacks.preemption import Preemption as Preemption
    from .builtin_callbacks.profile.plugin import Profile as Profile
    from .builtin_callbacks.progress_bar import ProgressBar as ProgressBar
    from .builtin_callbacks.ray.creators.local import LocalLauncher as LocalLauncher
    from .builtin_callbacks.ray.creators.trainer import CreatorTrainer as CreatorTrainer
    from .builtin_callbacks.ray.launcher.launcher import RayLauncher as RayLauncher
    from .builtin_callbacks.ray.report import RayReport as RayReport
    from .builtin_callbacks.recorder.plugin import Recorder as Recorder
    from .builtin_callbacks.recorder.replay.replay import replay as replay
    from .builtin_callbacks.recorder.replay.report import Replayed as Replayed
    from .builtin_callbacks.rng_capture import RNGCapture as RNGCapture
    from .builtin_callbacks.roll_back import RollBack as RollBack
    from .builtin_callbacks.rules.base import RuleFiring as RuleFiring
    from .builtin_callbacks.rules.base import RuleMetric as RuleMetric
    from .builtin_callbacks.rules.base import RuleOperation as RuleOperation
    from .builtin_callbacks.rules.controller import RuleController as RuleController
    from .builtin_callbacks.rules.errors import RuleError as RuleError
    from .builtin_callbacks.rules.files.specs import RulePart as RulePart
    from .builtin_callbacks.rules.files.specs import RuleSet as RuleSet
    from .builtin_callbacks.rules.files.specs import RuleSpec as RuleSpec
    from .builtin_callbacks.rules.fired import RuleFired as RuleFired
    from .builtin_callbacks.rules.operations.functions import register_function as register_function
    from .builtin_callbacks.rules.patience import RulePatience as RulePatience
    from .builtin_callbacks.rules.registry import register_metric as register_metric
    from .builtin_callbacks.rules.registry import register_operation as register_operation
    from .builtin_callbacks.schedules import LogSchedule as LogSchedule
    from .builtin_callbacks.schedules import SaveSchedule as SaveSchedule
    from .builtin_callbacks.schedules import ValidationSchedule as ValidationSchedule
    from .builtin_callbacks.tensorboard import TensorBoard as TensorBoard
    from .core.checkpoint.storage import load_weights as load_weights
    from .core.data.batch_size import find_batch_size as find_batch_size
    from .core.data.loaders import LoaderParams as LoaderParams
    from .core.data.loaders import Phases as Phases
    from .core.data.module import DataModule as DataModule
    from .core.data.order.samplers import DistributedSampler as DistributedSampler
    from .core.data.order.samplers import RandomSampler as RandomSampler
    from .core.data.order.samplers import SeekableSampler as SeekableSampler
    from .core.data.order.samplers import SequentialSampler as SequentialSampler
    from .core.distributed.launch import launch as launch
    from .core.engines.accelerate import AccelerateEngine as AccelerateEngine
    from .core.engines.choice import choose_engine as choose_engine
    from .core.engines.contract import LoopEngine as LoopEngine
    from .core.engines.data_parallel import DataParallelEngine as DataParallelEngine
    from .core.engines.ddp import DDPEngine as DDPEngine
    from .core.engines.device import DeviceEngine as DeviceEngine
    from .core.engines.movers import register_mover as register_mover
    from .core.engines.sharded.fsdp import FSDPEngine as FSDPEngine
    from .core.errors import NotRecorded as NotRecorded
    from .core.errors import RankFailed as RankFailed
    from .core.errors import ResumeDiffers as ResumeDiffers
    from .core.errors import TrainingError as TrainingError
    from .core.filters import At as At
    from .core.filters import Between as Between
    from .core.filters import Every as Every
    from .core.filters import Filter as Filter
    from .core.filters import Once as Once
    from .core.metrics.means import accuracy as accuracy
    from .core.result import ResumeReport as ResumeReport
    from .core.result import RunResult as RunResult
    from .core.run import TrainRun as TrainRun
    from .core.task import Supervised as Supervised
    from .core.task import Task as Task
    from .core.trainer import Trainer as Trainer
    from .events import *  # noqa: F403
    from .plugins import Plugin as Plugin
    from .plugins import Plugins as Plugins
    from .plugins import on as on

# What needs torch is imported when it is first asked for: `import heliograph.events` must not wait for it.
_HOMES = {
    "builtin_callbacks.checkpoint.plugin": "Checkpoint",
    "builtin_callbacks.compile": "Compile",
    "builtin_callbacks.early_stopping": "EarlyStopping",
    "builtin_callbacks.ema": "EMA",
    "builtin_callbacks.exception_pass_through": "ExceptionPassThrough",
    "builtin_callbacks.file_log": "FileLog",
    "builtin_callbacks.gradient_accumulation": "GradientAccumulation",
    "builtin_callbacks.gradient_clipping": "GradientClipping",
    "builtin_callbacks.gradient_norm": "GradientNorm",
    "builtin_callbacks.handler_times": "HandlerTimes",
    "builtin_callbacks.jsonl_log": "JsonlLog",
    "builtin_callbacks.learning_rate": "LearningRate",
    "builtin_callbacks.nan_guard": "NaNGuard",
    "builtin_callbacks.optuna.plugin": "Optuna",
    "builtin_callbacks.preemption": "Preemption",
    "builtin_callbacks.profile.plugin": "Profile",
    "builtin_callbacks.progress_bar": "ProgressBar",
    "builtin_callbacks.ray.report": "RayReport",
    "builtin_callbacks.recorder.plugin": "Recorder",
    "builtin_callbacks.rng_capture": "RNGCapture",
    "builtin_callbacks.roll_back": "RollBack",
    "builtin_callbacks.rules.base": "RuleFiring RuleMetric RuleOperation",
    "builtin_callbacks.rules.operations.functions": "register_function",
    "builtin_callbacks.rules.controller": "RuleController",
    "builtin_callbacks.rules.errors": "RuleError",
    "builtin_callbacks.rules.fired": "RuleFired",
    "builtin_callbacks.rules.patience": "RulePatience",
    "builtin_callbacks.rules.registry": "register_metric register_operation",
    "builtin_callbacks.rules.files.specs": "RulePart RuleSet RuleSpec",
    "builtin_callbacks.schedules": "LogSchedule SaveSchedule ValidationSchedule",
    "builtin_callbacks.tensorboard": "TensorBoard",
    "core.data.batch_size": "find_batch_size",
    "builtin_callbacks.ray.creators.local": "LocalLauncher",
    "builtin_callbacks.ray.creators.trainer": "CreatorTrainer",
    "core.data.loaders": "LoaderParams Phases",
    "core.data.module": "DataModule",
    "core.data.order.samplers": "DistributedSampler RandomSampler SeekableSampler SequentialSampler",
    "core.engines.accelerate": "AccelerateEngine",
    "core.engines.choice": "choose_engine",
    "core.engines.contract": "LoopEngine",
    "core.engines.data_parallel": "DataParallelEngine",
    "core.engines.ddp": "DDPEngine",
    "core.engines.device": "DeviceEngine",
    "core.engines.sharded.fsdp": "FSDPEngine",
    "core.engines.movers": "register_mover",
    "core.errors": "NotRecorded RankFailed ResumeDiffers TrainingError",
    "core.filters": "At Between Every Filter Once",
    "core.distributed.launch": "launch",
    "core.metrics.means": "accuracy",
    "builtin_callbacks.ray": "ray",
    "builtin_callbacks.ray.launcher.launcher": "RayLauncher",
    "builtin_callbacks.recorder.replay.replay": "replay",
    "builtin_callbacks.recorder.replay.report": "Replayed",
    "core.result": "ResumeReport RunResult",
    "core.run": "TrainRun",
    "builtin_callbacks.optuna.study": "open_study",
    "core.checkpoint.storage": "load_weights",
    "core.task": "Supervised Task",
    "core.trainer": "Trainer",
    "plugins": "Plugin Plugins on",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> _Any:
    if name == "__all__":
        return __dir__()
    home = _HOME_OF.get(name, "events")
    module = _importlib.import_module(f".{home}", __name__)
    value = getattr(module, name, module if home == f"core.{name}" else None)
    if value is None or name.startswith("_"):
        from .events.checks import known_names

        raise AttributeError(f"heliograph has no {name!r}.{known_names(name, __dir__())}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    from . import events

    return sorted({*_HOME_OF, *events.__all__})
