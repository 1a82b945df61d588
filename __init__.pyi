"""The public names, and the module that each is imported from when it is first used: `__init__.py` reads them here."""

# isort: off

# Train, evaluate, predict
from .builtin_callbacks.standard import standard as standard
from .core.checkpoint.weights import load_weights as load_weights
from .core.distributed.launcher import launch as launch
from .core.metrics.metric_objects import accuracy as accuracy
from .builtin_callbacks.prediction_writer import read_prediction_batches as read_prediction_batches
from .builtin_callbacks.prediction_writer import read_predictions as read_predictions
from .core.run import TrainRun as TrainRun
from .core.summary import summary as summary
from .core.stepping.schedulers import warmup_cosine as warmup_cosine
from .core.stepping.schedulers import warmup_linear as warmup_linear
from .core.task import Supervised as Supervised
from .core.task import Task as Task
from .core.trainer import Trainer as Trainer

# Engines
from .core.engines.device import DeviceEngine as DeviceEngine
from .core.engines.data_parallel import DataParallelEngine as DataParallelEngine
from .core.engines.ddp import DDPEngine as DDPEngine
from .core.engines.fsdp import FSDPEngine as FSDPEngine

# Data
from .core.data.loaders import LoaderParams as LoaderParams
from .core.data.loaders import Phases as Phases
from .core.data.module import DataModule as DataModule
from .core.data.samplers import LengthGroupedSampler as LengthGroupedSampler
from .core.data.samplers import TokenBudgetBatchSampler as TokenBudgetBatchSampler
from .core.data.samplers import DistributedSampler as DistributedSampler
from .core.data.samplers import RandomSampler as RandomSampler
from .core.data.samplers import SequentialSampler as SequentialSampler
from .core.data.loaders import Periodic as Periodic
from .core.data.streams import Streams as Streams

# Plugins
from .builtin_callbacks.batch_transforms import BatchTransform as BatchTransform
from .builtin_callbacks.batch_transforms import CutMix as CutMix
from .builtin_callbacks.batch_transforms import Mixup as Mixup
from .builtin_callbacks.checkpoint.contents import CheckpointLabel as CheckpointLabel
from .builtin_callbacks.checkpoint.load_best import LoadBest as LoadBest
from .builtin_callbacks.checkpoint.plugin import Checkpoint as Checkpoint
from .builtin_callbacks.checkpoint.plugin import Resume as Resume
from .builtin_callbacks.checkpoint.contents import TrainedOnly as TrainedOnly
from .builtin_callbacks.checkpoint.verify_resume import VerifyResume as VerifyResume
from .builtin_callbacks.checkpoint.plugin import WeightsCheckpoint as WeightsCheckpoint
from .builtin_callbacks.compile import Compile as Compile
from .builtin_callbacks.early_stopping import EarlyStopping as EarlyStopping
from .builtin_callbacks.ema import EMA as EMA
from .builtin_callbacks.epoch_means import EpochMeans as EpochMeans
from .builtin_callbacks.exception_pass_through import ExceptionPassThrough as ExceptionPassThrough
from .builtin_callbacks.file_log import FileLog as FileLog
from .builtin_callbacks.gradient_accumulation import GradientAccumulation as GradientAccumulation
from .builtin_callbacks.gradients import GradientClipping as GradientClipping
from .builtin_callbacks.gradients import GradientNorm as GradientNorm
from .builtin_callbacks.times import HandlerTimes as HandlerTimes
from .builtin_callbacks.jsonl_log import JsonlLog as JsonlLog
from .builtin_callbacks.learning_rate import LearningRate as LearningRate
from .builtin_callbacks.non_finite_losses import NaNGuard as NaNGuard
from .builtin_callbacks.times import PhaseTimes as PhaseTimes
from .builtin_callbacks.prediction_writer import PredictionWriter as PredictionWriter
from .builtin_callbacks.preemption import Preemption as Preemption
from .builtin_callbacks.progress_bar import ProgressBar as ProgressBar
from .builtin_callbacks.rng_capture import RNGCapture as RNGCapture
from .builtin_callbacks.non_finite_losses import RollBack as RollBack
from .builtin_callbacks.schedules import LogSchedule as LogSchedule
from .builtin_callbacks.schedules import SaveSchedule as SaveSchedule
from .builtin_callbacks.schedules import ValidationSchedule as ValidationSchedule
from .builtin_callbacks.trackers import TensorBoard as TensorBoard
from .plugins import Plugin as Plugin
from .plugins import Plugins as Plugins
from .plugins import on as on

# Filters
from .plugins.filters import At as At
from .plugins.conditions import Between as Between
from .plugins.filters import Every as Every
from .plugins.filters import Filter as Filter
from .plugins.filters import Once as Once

# Events and what a handler is given: each event is named where it is declared and emitted, nowhere else
from .events import Bus as Bus
from .events import Control as Control
from .events import Lane as Lane
from .events import Progress as Progress
from .events import Run as Run
from .events.catalogue import *  # noqa: F403

# Results and errors
from .core.result import ResumeReport as ResumeReport
from .core.result import RunResult as RunResult
from .core.result import StrictError as StrictError
from .core.system.errors import NotRecorded as NotRecorded
from .core.system.errors import RankFailed as RankFailed
from .core.system.errors import ResumeDiffers as ResumeDiffers
from .core.system.errors import TrainingError as TrainingError

__version__: str
