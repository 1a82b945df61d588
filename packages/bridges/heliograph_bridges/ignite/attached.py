"""Our plugins, attached to an engine of Ignite: its events become ours, and what plugins ask for becomes its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from ignite.engine import Events
from torch import Tensor

from ..hosted.batches import drop_gradients
from ..hosted.owner import PluginOwner
from ..hosted.training import HostedTraining
from .parts import Parts

ALWAYS = (Events.STARTED, Events.EXCEPTION_RAISED)  # other events mean nothing to a run that has not begun, or failed


class AttachedPlugins(PluginOwner):
    """What `attach` returns.

    Args:
        plugins: plugin objects.
        parts: the training that they take part in.

    Raises:
        ValueError: another call has attached plugins to the engine.
    """

    def __init__(self, plugins: Iterable[Any], parts: Parts) -> None:
        if any(isinstance(each, AttachedPlugins) for each in _owners_of_error_handlers(parts.engine)):
            raise ValueError(
                "This engine has attached plugins already, which take part whenever it runs: give all plugins to one "
                "attach, in one list. To train with others, make a new engine."
            )
        self._parts = parts
        self._training = HostedTraining(plugins, parts.host())
        self._check_asked()
        self._saved: Mapping[str, Any] | None = None
        self._hooks: list[Any] = []
        self._loss: Tensor | None = None
        self._in_iteration = self._is_backward_done = self._has_stepped = False
        self._serves_validation = False
        self._found: dict[str, dict[str, float]] = {}
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
        """Return the states of the plugins, for a checkpoint of the engine; after a run those of its end.

        Raises:
            RuntimeError: the engine has not run yet.
        """
        if (state := self._training.state()) is None:
            raise RuntimeError("The plugins have a state to save when the engine runs: save in one of its events.")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint of the engine when it runs next."""
        self._saved = state

    def _in_a_run(self, handler: Callable[..., None]) -> Callable[..., None]:
        """Return a handler that does nothing outside of a run, such as after an error that another handler took."""

        @wraps(handler)
        def handle(engine: Any, *arguments: Any) -> None:
            if self._training.run is not None:
                handler(engine, *arguments)

        return handle

    # The training.

    def _begin(self, engine: Any) -> None:
        continues = engine.state.iteration > 0  # a run that has ended, with a new length
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
                "The optimizer that attach was given never stepped, so plugins saw no steps: give it the one that the "
                "engine's function steps."
            )
        self._training.end(self._actions)

    def _fail(self, engine: Any, error: BaseException) -> None:
        self._remove_hooks()
        self._training.fail(error)
        # Where another handler takes it, that one decides.
        if len(_owners_of_error_handlers(engine)) == 1:
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
                    "The module that computes the loss was called twice in an iteration, and plugins see one loss: "
                    "give attach(loss=) a module that computes the sum, or a function of the engine's output."
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
        """Let plugins decide, do what is due, and leave where they ask for that."""
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
        self._serves_validation, self._found = True, {}
        self._training.begin_validation(None)
        for name, evaluator in parts.evaluators.items():
            evaluator.run(parts.validation_sets[name])
            if name not in self._found:  # it has failed, and a handler of it took the error
                self._training.leave_validation()
                break
        else:
            self._training.end_validation({key: each for found in self._found.values() for key, each in found.items()})
        self._serves_validation = False

    def _begin_validation(self, evaluator: Any, name: str) -> None:
        if not self._serves_validation:
            self._training.begin_validation(evaluator.state.epoch_length)

    def _begin_validation_batch(self, evaluator: Any, name: str) -> None:
        self._training.begin_validation_batch(evaluator.state.batch, name)

    def _end_validation_batch(self, evaluator: Any, name: str) -> None:
        self._training.end_validation_batch(name)

    def _end_validation(self, evaluator: Any, name: str) -> None:
        found = _scalars(evaluator.state.metrics, f"validation/{name}/" if name else "validation/")
        if self._serves_validation:
            self._found[name] = found
            return
        self._training.end_validation(found)
        run = self._training.active
        is_within = run.boundary_is_open or self._in_iteration or run.stepping.window
        if not is_within:  # what plugins ask for upon it is due at once
            self._boundary(self._parts.engine)

    def _check_asked(self) -> None:
        """Raise ValueError where a plugin asks for what attach was not given."""
        asks = self._training.plugins.declared("asks")
        for word, given, what in (
            ("validation", self._parts.validation_sets, "evaluator= and validation="),
            ("save", self._parts.save, "save="),
        ):
            if word in asks and not given:
                raise ValueError(f"Plugin {asks[word]!r} asks for a {word}: give attach {what}, or leave it out.")


def _owners_of_error_handlers(engine: Any) -> list[Any]:
    """Return whose methods handle an error of an engine, None for each other handler; nothing public says it."""
    return [getattr(each[0], "__self__", None) for each in engine._event_handlers.get(Events.EXCEPTION_RAISED, ())]


def _scalars(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the metrics of an engine that are numbers, by our names; lists and tensors of several are left out."""
    return {
        f"{prefix}{name}": float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) or getattr(value, "ndim", None) == 0
    }
