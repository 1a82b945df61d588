"""Plugins that are attached to an Ignite engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from heliograph import BackwardEnd, ForwardEnd, GradientsReady
from heliograph.spi import require
from ignite.engine import Events
from torch import Tensor, nn

from ..hosted.host import HostLoop
from ..hosted.run import TrainingFacts
from ..hosted.saved import Position
from ..hosted.training import HostedTraining, PluginOwner, drop_gradients

ALWAYS = (Events.STARTED, Events.EXCEPTION_RAISED)  # handled also outside of a run

NAME = "Ignite"


class AttachedPlugins(PluginOwner):
    """The return value of `attach`."""

    def __init__(self, plugins: Iterable[Any], parts: AttachOptions) -> None:
        if any(isinstance(owner, AttachedPlugins) for owner in _owners_of_error_handlers(parts.engine)):
            raise ValueError(
                "This engine already has attached plugins: pass all plugins to one call of attach. To train with "
                "others, create a new engine."
            )
        self._parts = parts
        self._training = HostedTraining(plugins, parts.host())
        asks = self._training.plugins.declared("asks")
        for word, value, option in (
            ("validation", parts.validation_sets, "evaluator= and validation="),
            ("save", parts.save, "save="),
        ):
            if word in asks and not value:
                raise ValueError(f"Plugin {asks[word]!r} requests a {word}: pass attach {option}, or remove it.")
        self._saved: Mapping[str, Any] | None = None
        self._hooks: list[Any] = []
        self._loss: Tensor | None = None
        self._in_iteration = self._is_backward_done = self._has_stepped = False
        self._serves_validation = False
        self._results: dict[str, dict[str, float]] = {}
        self._actions: dict[str, Callable[[], object]] = {
            "log": self._log,
            "validation": self._validate,
            "save": self._save,
        }
        for event, handler in (
            (Events.STARTED, self._begin),
            (Events.EPOCH_STARTED, self._begin_epoch),
            (Events.ITERATION_STARTED, self._begin_iteration),
            (Events.ITERATION_COMPLETED, self._end_iteration),
            (Events.EPOCH_COMPLETED, self._end_epoch),
            (Events.COMPLETED, self._end),
            (Events.EXCEPTION_RAISED, self._fail),
        ):
            parts.engine.add_event_handler(event, handler if event in ALWAYS else self._in_a_run(handler))
        for name, evaluator in parts.evaluators.items():
            for event, listen in (
                (Events.STARTED, self._begin_validation),
                (Events.ITERATION_STARTED, self._begin_validation_batch),
                (Events.ITERATION_COMPLETED, self._end_validation_batch),
                (Events.COMPLETED, self._end_validation),
            ):
                evaluator.add_event_handler(event, self._in_a_run(listen), name)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the plugins, for a checkpoint of the engine; after a run, those of its end.

        Raises:
            RuntimeError: the engine has not run yet.
        """
        if (state := self._training.state()) is None:
            raise RuntimeError("The plugins have no state before the engine runs: save in one of its events.")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint of the engine in its next run."""
        self._saved = state

    def _in_a_run(self, handler: Callable[..., None]) -> Callable[..., None]:
        @wraps(handler)
        def handle(engine: Any, *arguments: Any) -> None:
            if self._training.run is not None:
                handler(engine, *arguments)

        return handle

    # The training.

    def _begin(self, engine: Any) -> None:
        continues = engine.state.iteration > 0  # a finished run is extended
        saved, self._saved = self._saved or (self._training.state() if continues else None), None
        leave = self._training.begin(self._parts.facts(), saved, None, self._parts.position())
        optimizer, loss = self._parts.optimizer, self._parts.loss_module
        if optimizer is not None:
            self._hooks += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
        if loss is not None:
            self._hooks.append(loss.register_forward_hook(self._see_loss))
        if leave.stop:
            engine.terminate()

    def _begin_epoch(self, engine: Any) -> None:
        self._training.begin_epoch(engine.state.epoch - 1)

    def _end_epoch(self, engine: Any) -> None:
        if self._training.end_epoch(is_over=True):
            self._boundary(engine)

    def _end(self, engine: Any) -> None:
        self._remove_hooks()
        if engine.should_terminate and not self._parts.is_complete():
            self._training.stop_by_host("terminate() was called")
        progress = self._training.active.progress
        if self._parts.optimizer is not None and progress.batches and not progress.steps + progress.skipped_steps:
            self._training.active.warn(
                "The optimizer= of attach never stepped, so plugins saw no steps: pass the optimizer that the engine's "
                "function steps."
            )
        self._training.end(self._actions)

    def _fail(self, engine: Any, error: BaseException) -> None:
        self._remove_hooks()
        self._training.fail(error)
        if len(_owners_of_error_handlers(engine)) == 1:  # otherwise another handler decides
            raise error

    def _remove_hooks(self) -> None:
        self._in_iteration = self._serves_validation = False
        while self._hooks:
            self._hooks.pop().remove()

    # An iteration.

    def _begin_iteration(self, engine: Any) -> None:
        self._in_iteration, self._is_backward_done, self._has_stepped, self._loss = True, False, False, None
        self._training.begin_batch(engine.state.batch)

    def _see_loss(self, module: Any, arguments: Any, loss: Any) -> None:
        if self._in_iteration and isinstance(loss, Tensor):
            if self._loss is not None:
                raise RuntimeError(
                    "The loss module was called twice in an iteration, but plugins see one loss: pass attach(loss=) a "
                    "module that computes the sum, or a function of the engine's output."
                )
            self._loss = loss.detach() if loss.ndim == 0 else loss.detach().mean()
            self._training.end_forward(self._loss)

    def _before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        if not self._in_iteration:
            return
        self._end_backward(self._loss)
        if self._training.begin_step():
            drop_gradients(optimizer)

    def _after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        if self._in_iteration:
            self._training.end_step()
            self._has_stepped = True

    def _end_backward(self, loss: Tensor | None) -> None:
        if not self._is_backward_done:
            self._is_backward_done = True
            self._training.end_backward(loss)

    def _end_iteration(self, engine: Any) -> None:
        loss = self._parts.loss_of(engine.state.output) if self._loss is None else self._loss
        self._end_backward(loss)
        if self._parts.optimizer is None:
            self._training.begin_step()
            self._training.end_step()
            self._has_stepped = True
        self._training.track_loss(loss)
        self._in_iteration = False
        self._training.end_batch(loss)
        if self._has_stepped:
            self._boundary(engine)

    # A boundary.

    def _boundary(self, engine: Any) -> None:
        self._training.serve(self._actions)
        leave = self._training.close_boundary()
        if leave.stop:
            engine.terminate()
        elif leave.end_epoch and engine.last_event_name != Events.EPOCH_COMPLETED:
            engine.terminate_epoch()

    def _log(self) -> None:
        self._training.log(_scalars(self._parts.engine.state.metrics, "train/"))

    def _save(self) -> None:
        assert self._parts.save is not None, "plugins that ask for it are refused"
        self._parts.save(self._parts.engine)
        written = getattr(self._parts.save, "last_checkpoint", None)
        self._training.save(Path(written) if written else None)

    # Validation.

    def _validate(self) -> None:
        parts = self._parts
        self._serves_validation, self._results = True, {}
        self._training.begin_validation(None)
        for name, evaluator in parts.evaluators.items():
            evaluator.run(parts.validation_sets[name])
            if name not in self._results:  # it failed, and one of its handlers suppressed the error
                self._training.leave_validation()
                break
        else:
            self._training.end_validation(
                {key: value for metrics in self._results.values() for key, value in metrics.items()}
            )
        self._serves_validation = False

    def _begin_validation(self, evaluator: Any, name: str) -> None:
        if not self._serves_validation:
            self._training.begin_validation(evaluator.state.epoch_length)

    def _begin_validation_batch(self, evaluator: Any, name: str) -> None:
        self._training.begin_validation_batch(evaluator.state.batch, name)

    def _end_validation_batch(self, evaluator: Any, name: str) -> None:
        self._training.end_validation_batch(name)

    def _end_validation(self, evaluator: Any, name: str) -> None:
        metrics = _scalars(evaluator.state.metrics, f"validation/{name}/" if name else "validation/")
        if self._serves_validation:
            self._results[name] = metrics
            return
        self._training.end_validation(metrics)
        run = self._training.active
        is_within = run.boundary_is_open or self._in_iteration or run.stepping.window
        if not is_within:  # serve requests at once
            self._boundary(self._parts.engine)


def _owners_of_error_handlers(engine: Any) -> list[Any]:
    return [getattr(entry[0], "__self__", None) for entry in engine._event_handlers.get(Events.EXCEPTION_RAISED, ())]


def _scalars(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {
        f"{prefix}{name}": float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) or getattr(value, "ndim", None) == 0
    }


@dataclass(frozen=True)
class AttachOptions:
    """The arguments of `attach`, validated."""

    engine: Any
    modules: Mapping[str, nn.Module]
    optimizer: Any
    loss: Any
    evaluators: Mapping[str, Any]
    validation_sets: Mapping[str, Any]
    save: Callable[[Any], Any] | None
    name: str
    hyper_parameters: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        kind = require("ignite.engine", "attach", extra="ignite").Engine
        for option, values, allowed in (
            ("engine", [self.engine], kind),
            ("model", self.modules.values(), nn.Module),
            ("evaluator", self.evaluators.values(), kind),
        ):
            if wrong := [value for value in values if not isinstance(value, allowed)]:
                raise TypeError(
                    f"attach({option}=) takes {allowed.__name__} objects, got {type(wrong[0]).__name__}: {wrong[0]!r}."
                )
        if self.optimizer is not None and not hasattr(self.optimizer, "register_step_pre_hook"):
            raise TypeError(f"attach(optimizer=) takes a torch optimizer, got {type(self.optimizer).__name__}.")
        if not (self.loss is None or callable(self.loss)):
            raise TypeError(
                f"attach(loss=) takes a module or a function of the output, got {type(self.loss).__name__}."
            )
        if self.validation_sets and self.validation_sets.keys() != self.evaluators.keys():
            raise ValueError(
                f"attach(validation=) needs data for each evaluator, {sorted(self.evaluators)}; got "
                f"{sorted(self.validation_sets)}."
            )

    @property
    def loss_module(self) -> nn.Module | None:
        return self.loss if isinstance(self.loss, nn.Module) else None

    def loss_of(self, output: Any) -> Tensor:
        return _loss_in(output) if self.loss is None or self.loss_module is not None else self.loss(output)

    def host(self) -> HostLoop:
        within = frozenset[Any]() if self.sees_gradients else {ForwardEnd, BackwardEnd, GradientsReady}
        remedies = {
            "checkpoints": "use ignite.handlers.Checkpoint, with the return value of attach in its to_save",
            "length": "pass engine.run(epoch_length=)"
            if self.optimizer is None
            else "omit attach(optimizer=), so that each iteration is a step",
        }
        if not self.sees_gradients:
            remedies["skip_step"] = "pass attach the optimizer and the loss module"
        return HostLoop(
            NAME,
            frozenset({"veto_stop", "skip_step"} if self.sees_gradients else {"veto_stop"}),
            frozenset(within),
            remedies,
        )

    @property
    def sees_gradients(self) -> bool:
        return self.loss_module is not None and self.optimizer is not None

    def facts(self) -> TrainingFacts:
        state = self.engine.state
        loader = state.dataloader
        parameter = next((parameter for module in self.modules.values() for parameter in module.parameters()), None)
        return TrainingFacts(
            modules=self.modules,
            optimizer=self.optimizer,
            device=torch.device("cpu") if parameter is None else parameter.device,
            epochs=state.max_epochs,
            steps=self._steps(),
            batches=state.epoch_length,
            loader=loader,
            batch_size=getattr(loader, "batch_size", None),
            validation=self.validation_sets or self.evaluators,
            does=frozenset({"validation"} if self.evaluators else ()),
            name=self.name,
            hyper_parameters=dict(self.hyper_parameters or {}),
            world_size=require("ignite.distributed", "attach", extra="ignite").get_world_size(),
        )

    def _steps(self) -> int | None:
        state = self.engine.state
        if self.optimizer is not None:  # several iterations may make a step
            return None
        if state.max_epochs is None or state.epoch_length is None:
            return state.max_iters  # type: ignore[no-any-return]
        return int(state.max_epochs * state.epoch_length)

    def position(self) -> Position:
        state = self.engine.state
        if not state.iteration:
            return Position()
        step = state.iteration if self.optimizer is None else None
        if not state.epoch_length:
            return Position(state.epoch, 0, step)
        epoch, batch = divmod(state.iteration, state.epoch_length)
        return Position(epoch, batch, step)

    def is_complete(self) -> bool:
        state = self.engine.state
        if state.max_iters is not None:
            return bool(state.iteration >= state.max_iters)
        return state.max_epochs is not None and bool(
            state.iteration >= state.max_epochs * (state.epoch_length or math.inf)
        )


def by_name(value: Any, name: str = "") -> Mapping[str, Any]:
    if value is None:
        return {}
    return value if isinstance(value, Mapping) else {name: value}


def _loss_in(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.detach().reshape(())
    if isinstance(loss, int | float):
        return torch.tensor(float(loss))
    raise TypeError(
        f"Plugins need the loss of each iteration, but the output of the engine, a {type(output).__name__}, has none: "
        f"pass attach(loss=) the loss module, or a function of the output."
    )
