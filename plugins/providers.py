"""What to use or install instead of a name that is not here: a package, or our word for that of another framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from inspect import Parameter, signature
from opcode import opname
from types import FrameType
from typing import Any

from ..events.checks import did_you_mean

KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


RESUME = "To resume, register Checkpoint(folder, resume='auto')."
AS_LIST = "Plugins are given to the trainer as a list: Trainer([EarlyStopping(), ...])."
LENGTH = "The length of a training is given to fit: epochs= or steps=."
VALIDATION = "fit takes the data to validate with as validation=."
VALIDATE_WHEN = "When to validate is for a plugin: ValidationSchedule(epochs=1)."
LOG = "Logs are written by plugins, such as JsonlLog(path), when LogSchedule(steps=50) says so."
SAVE = "Checkpoints are written by the plugin Checkpoint(folder, every=Every(epochs=1))."
DEVICE = "The hardware is chosen by Trainer(device='cuda') or gpus=[0, 1]; several processes by torchrun or launch."
CLIP = "Gradients are clipped by the plugin GradientClipping(1.0)."
ACCUMULATE = "Gradients of several batches are added up by the plugin GradientAccumulation(4)."
SEED = "Random generators are seeded, and kept for a resume, by the plugin RNGCapture(seed)."
BATCHES = "How a dataset is batched is given to fit: loader_params={'batch_size': 32, 'shuffle': True}."
OPTIMIZER = "fit takes an optimizer, or a function that makes one: optimizer=partial(torch.optim.Adam, lr=0.001)."
SCHEDULER = "fit takes scheduler=, such as warmup_cosine(0.03), and the plugin LearningRate('step') steps it."
TASK = "fit(task, train) begins with the task: Supervised(model, loss_fn, metrics={'accuracy': accuracy}), say."
FIT = "It is an argument of fit: trainer.fit(task, train, optimizer=..., epochs=...)."
PRECISION = "Precision and determinism are options of the trainer: Trainer(precision='bf16', deterministic=True)."
BAR = "Progress is shown by the plugin ProgressBar()."

TRAIN = "The training data are the second argument of fit, a loader, a dataset or a DataModule: fit(task, train, ...)."
TRY = "To try a whole program in a few steps: trainer.rehearse(task, train, ...); fit(limit_train=10) shortens epochs."
LIMIT = "fit takes how much of the data is read: limit_train=0.1, limit_validation=10."
TRACK = "A step or handler tracks a value with run.track(name, value); LogSchedule and the loggers write its mean."
STOP = (
    "A handler stops the run with run.control.stop(reason); the property run.control.should_stop says whether one did."
)
SAVE_NOW = "A handler requests a checkpoint with run.control.request_save(reason), which the plugin Checkpoint writes."
POSITION = "Counters are in run.progress: run.progress.epoch, run.progress.batch, run.progress.steps."
RUN = "Steps and handlers are given the run: run.progress, run.metrics, run.control, run.plugins, run.engine, run.task."
LOGGERS = (
    "Loggers are plugins, such as TensorBoard('runs'): run.plugins['tensorboard']; run.track(name, value) is for all."
)
REGISTERED = "Plugins are trainer.plugins, and run.plugins in a step or handler: plugins.register(EarlyStopping())."
MODEL = "The user's model code is run.task, and its modules by name are run.modules."
RATE = "The learning rate is run.optimizer.param_groups[0]['lr']; run.control.set_learning_rate(rate, reason) sets it."
HARDWARE = "The hardware and the ranks are run.engine: run.engine.device, run.engine.rank, run.engine.is_main."
LOOP = "The loop does that, from the loss that training_step returns; for several losses it yields (name, loss)."
KEPT = "Give them to fit as hyper_parameters={'lr': 0.01}; loggers get them."
CALLS = "trainer.fit(task, train, ...) trains; trainer.validate, trainer.test and trainer.predict evaluate."

# Arguments of Lightning, the HF Trainer, Keras, Catalyst, Ignite and skorch.
WORDS = {
    TRAIN: "train_dataset train_dataloader train_dataloaders train_data train_loader loaders datamodule",
    TRY: "fast_dev_run overfit_batches num_sanity_val_steps barebones",
    LIMIT: "limit_train_batches limit_val_batches limit_test_batches limit_predict_batches",
    RESUME: "resume resume_from resume_from_checkpoint ckpt_path checkpoint_path initial_epoch",
    AS_LIST: "callbacks callback plugin plugins hooks handlers",
    LENGTH: "epochs steps max_epochs max_steps num_epochs n_epochs num_train_epochs total_steps min_epochs max_time "
    "nb_epoch",
    VALIDATION: "val val_data val_loader val_dataloader val_dataloaders valid_loader valid_data validation_data "
    "validation_loader eval_dataset eval_data eval_loader eval_dataloader validation_split train_split",
    VALIDATE_WHEN: "eval_steps eval_strategy evaluation_strategy check_val_every_n_epoch val_check_interval "
    "validation_freq validate_every",
    LOG: "logger loggers logging_dir logging_steps log_every_n_steps report_to log_dir logdir",
    SAVE: "save_steps save_strategy save_total_limit enable_checkpointing checkpoint checkpoint_callback save_dir "
    "output_dir default_root_dir",
    DEVICE: "device devices gpus use_cpu engine accelerator strategy num_nodes n_gpu no_cuda tpu_cores",
    CLIP: "gradient_clip_val max_grad_norm clip_grad grad_clip clip_grad_norm gradient_clip_algorithm",
    ACCUMULATE: "accumulate_grad_batches gradient_accumulation_steps accumulation_steps grad_accum",
    SEED: "seed random_state data_seed seed_everything",
    BATCHES: "batch_size per_device_train_batch_size per_device_eval_batch_size shuffle num_workers collate_fn "
    "drop_last data_collator dataloader_num_workers",
    OPTIMIZER: "lr learning_rate optimizers optim optimizer_cls weight_decay",
    SCHEDULER: "lr_scheduler schedulers lr_schedulers lr_scheduler_type warmup_steps warmup_ratio",
    FIT: "name optimizer scheduler validation loader_params hyper_parameters on_interrupt task train",
    PRECISION: "precision deterministic cudnn_benchmark benchmark amp use_amp mixed_precision fp16 bf16 tf32",
    TASK: "model module loss loss_fn criterion loss_function compute_loss metrics metric compute_metrics",
    BAR: "verbose progress_bar enable_progress_bar disable_tqdm",
}
# Of arguments of an evaluation, and of a plugin, what else is meant.
OF_EVALUATION = {
    "weights= takes 'best', 'last' or the path of a checkpoint.": "ckpt_path checkpoint_path resume_from_checkpoint",
    "The data are the second argument, a loader or a dataset.": "dataloaders test_dataset eval_dataset",
}
OF_PLUGIN = {
    "keep_best= and keep_last= say how many checkpoints are kept.": "save_top_k save_total_limit save_last",
    "every= takes a filter, such as Every(steps=500).": "every_n_epochs every_n_train_steps save_steps save_freq",
    "monitor= names the metric, and mode= says which way is better.": "metric_for_best_model greater_is_better",
    "The folder is the first argument.": "dirpath default_root_dir",
}
TABLES = dict.fromkeys(("validate", "test", "predict"), OF_EVALUATION) | dict.fromkeys(
    ("fit", "run", "standard", "Supervised"), WORDS
)
# Attributes of their trainers, modules and callbacks, as a step or a handler would use them.
ATTRIBUTES = {
    TRACK: "log log_dict log_metrics",
    STOP: "stop should_stop should_training_stop stop_training",
    SAVE_NOW: "save save_checkpoint save_model should_save",
    POSITION: "epoch current_epoch global_step step_count batch_idx iteration",
    RUN: "trainer state args",
    LOGGERS: "logger loggers",
    REGISTERED: "callbacks add_callback",
    MODEL: "model module pl_module lightning_module",
    RATE: "lr learning_rate",
    HARDWARE: "device global_rank local_rank world_size is_global_zero is_world_process_zero",
    LOOP: "manual_backward backward optimizer_step zero_grad",
    KEPT: "hparams save_hyperparameters",
    CALLS: "train evaluate",
}
# Their classes and functions: what is imported here instead.
CLASSES = {
    "Checkpoint": "ModelCheckpoint CheckpointCallback",
    "Plugin": "Callback TrainerCallback LightningCallback",
    "Task": "LightningModule TrainerModule",
    "DataModule": "LightningDataModule",
    "EMA": "StochasticWeightAveraging WeightAveraging EMACallback",
    "EarlyStopping": "EarlyStoppingCallback",
    "LearningRate": "LearningRateMonitor LearningRateScheduler LRScheduler",
    "GradientAccumulation": "GradientAccumulationScheduler",
    "ProgressBar": "TQDMProgressBar RichProgressBar ProgressCallback",
    "TensorBoard": "TensorBoardLogger",
    "CSVLog": "CSVLogger",
    "RNGCapture": "seed_everything set_seed",
    "WandB": "WandbLogger WandbCallback",
    "MLflow": "MLFlowLogger MLflowCallback",
    "Trainer": "Fabric Seq2SeqTrainer TrainingArguments",
}
# Methods of their callbacks whose events have other names here; others are found by their own names.
HOOKS = {
    "TrainStart": "fit_start init_end",
    "BatchStart": "step_start",
    "BatchEnd": "substep_end",
    "ForwardEnd": "before_backward",
    "BackwardEnd": "after_backward",
    "GradientsReady": "before_optimizer_step pre_optimizer_step",
    "StepEnd": "optimizer_step before_zero_grad",
    "EpochEnd": "training_epoch_end",
    "Log": "log",
    "ValidationEnd": "evaluate",
    "SavePoint": "save save_checkpoint",
    "CheckpointLoaded": "load_checkpoint",
    "RunFailed": "exception",
    "RunClosed": "fit_end",
}


def missing_name(name: str, names: Iterable[str], caller: FrameType) -> AttributeError | ImportError:
    """Return the error for a name that `heliograph` does not have.

    Args:
        name: the missing name.
        names: those that there are.
        caller: the frame that needs the name. An import statement replaces an AttributeError by another error,
            without our sentence, so it gets an ImportError.
    """
    text = how_to_import(name) or did_you_mean(name, names).strip()
    if instead := hint(name, CLASSES):
        text = f"Here it is{instead}. {how_to_import(instead.strip())}"
    is_import = opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM"
    return (ImportError if is_import else AttributeError)(f"heliograph has no {name!r}. {text}".rstrip())


def hint(word: str, table: Mapping[str, str] = WORDS) -> str:
    """Return the tail of an error sentence about a word of other frameworks: what it is here; empty for others."""
    return next((f" {text}" for text, words in table.items() if word in words.split()), "")


def explain_call(error: TypeError, function: Callable[..., Any], count: int, options: Iterable[str]) -> str:
    """Return what is wrong with the arguments of a call; empty if they are right, and the error is another one.

    Args:
        error: what the call raised, with the frame of the caller.
        function: what was called.
        count: how many arguments were given by position.
        options: the names of the others.
    """
    if error.__traceback__ is None:
        return ""
    parameters = signature(function).parameters
    named = [name for name, each in parameters.items() if each.kind in KEYWORD and name != "self"]
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    table = TABLES.get(name, OF_PLUGIN)
    unknown = [word for word in options if word not in named]
    if error.__traceback__.tb_next is not None and not (unknown and "unexpected keyword argument" in str(error)):
        return ""  # within the function
    if unknown:
        text = did_you_mean(unknown[0], named) or hint(unknown[0], table)
        return f"{name} has no argument {unknown[0]!r}.{text} Known: {', '.join(named)}."
    by_place = [name for name in parameters if parameters[name].kind is Parameter.POSITIONAL_OR_KEYWORD]
    form = ", ".join(name if name in by_place else f"{name}=..." for name in named)
    return f"{error}.{' Give the others by name.' * (count > len(by_place))} Arguments: {form or 'none'}."


def how_to_import(name: str) -> str:
    """Return a sentence on a public name of a package: how to import it, or what to install first; empty for others."""
    package = NAMES.get(name)
    if package is None:
        return ""
    module, package = f"heliograph_{package}", package.partition(".")[0]
    if find_spec(f"heliograph_{package}") is None:
        return how_to_install(package)
    statement = f"import {module}" if name == "ray" else f"from {module} import {name}"
    return f"It is in heliograph-{package}: {statement}"


def how_to_install(package: str) -> str:
    """Return the sentence that says how to install a first-party package."""
    paths = [f"./packages/{name}" for name in (*NEEDS.get(package, ()), package)]
    return f"It is in heliograph-{package}: pip install {' '.join(paths)}"


def _by_name(**names: str) -> dict[str, str]:
    """Return the package of each name, given the names of each package."""
    return {name: package for package, text in names.items() for name in text.split()}


_OF_RECORDER = """
    Difference Digests Divergence Drill NotExact PausedRun Recorder Recording Remote RemoteAnswer RemoteRun Replayed
    StepCheck StepChecked StepDiffers Verdicts attach count_times diverge drill fork goto read replay story
    write_timeline
"""
_OF_RULES = """
    RuleController RuleError RuleFired RuleFiring RuleMetric RuleOperation RulePart RulePatience RuleSet RuleSpec
    register_function register_metric register_operation
"""
NAMES = _by_name(
    bridges="AccelerateEngine",
    optuna="Optuna open_study",
    ray="Attempt CreatorTrainer LocalLauncher RayLauncher RayReport RayValues Search Trial current_session ray tune "
    "tune_results",
    recorder=_OF_RECORDER,
    rules=_OF_RULES,
    testing="ResumeCheck assert_resume_exact check_plugin check_resume check_tracker",
    trackers="MLflow OpenTelemetry Profile Trackio WandB",
) | {
    "HeliographCallback": "bridges.lightning",  # and `bridges.huggingface`
    "from_huggingface": "bridges.huggingface",
    "from_ignite": "bridges.ignite",
    "from_lightning": "bridges.lightning",
}
COMMANDS = _by_name(
    cli="fit predict test validate",
    recorder="ask demo diverge explain fork goto replay timeline watch",
    rules="rules",
    testing="chaos new-plugin verify-resume",
)
PLUGINS = _by_name(
    optuna="optuna",
    ray="ray_report",
    recorder="recorder remote step_check verdicts",
    rules="rule_controller",
    trackers="mlflow open_telemetry profile trackio wandb",
)
NEEDS = {"rules": ("recorder",), "testing": ("recorder",)}
ENTRY_POINTS = {
    "heliograph.commands": COMMANDS,
    "heliograph.engines": {"accelerate": "bridges"},
    "heliograph.plugins": PLUGINS,
}
