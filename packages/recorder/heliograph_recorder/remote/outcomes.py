"""Serves the commands of clients as requests to the control, and follows the requests to their outcomes."""

from __future__ import annotations

from dataclasses import dataclass

from heliograph import ChangeServed, Progress, Run
from heliograph.core.stepping.changes import refuse_change
from heliograph.events import CHANGES, Request

from ..verbs import TAKEN_BACK, VERBS
from .messages import VERBS as WORDS
from .messages import Command
from .server import Answer, ClientCommand

KEEPS = "so that a kill does not lose"  # begins the reason of a save that `Remote` requests itself


class RefusedCommandError(Exception):
    """A command that cannot be served, and why."""


@dataclass(slots=True, eq=False)
class FollowedCommand:
    """An accepted command whose client waits for the outcome.

    Attributes:
        request: in the control; an earlier one if the same thing was requested already.
        origin: of the run; another one later means a roll-back.
        saves: the number of saves so far.
    """

    source: ClientCommand
    request: Request
    origin: Progress
    saves: int


class Outcomes:
    """Serves commands in the training's thread, and answers those whose clients wait for the outcome.

    Args:
        plugin: the name of the plugin that receives the commands.

    Attributes:
        followed: the accepted commands without an outcome.
    """

    def __init__(self, plugin: str) -> None:
        self._plugin = plugin
        self.followed: list[FollowedCommand] = []
        self._position: Answer = {}
        self._saves = 0

    def accept(self, run: Run, source: ClientCommand) -> Answer:
        """Make the request, and return the answer."""
        try:
            check_command(run, source.command, self._plugin)
            request = make_request(run, source.command, source.by)
        except (RefusedCommandError, RuntimeError) as error:  # RuntimeError: the loop of another framework
            return {"state": "refused", "text": str(error), **position_of(run)}
        if request.verb == "end_epoch" or request.verb in CHANGES:
            self._request_save(run, request)
        if source.command.wait:
            self.followed.append(FollowedCommand(source, request, run.origin, self._saves))
        return {"state": "accepted", "text": f"{request.what} is requested.", **position_of(run)}

    def count_save(self) -> None:
        self._saves += 1

    def serve_change(self, run: Run, event: ChangeServed) -> None:
        for followed in list(self.followed):
            request = followed.request
            if (request.verb, request.target, request.value) == (event.verb, event.target, event.value):
                state, text = "served", f"{request.what}: done."
                if event.refusal:
                    state, text = "refused", event.refusal
                self._settle(followed, {"state": state, "text": text, **position_of(run)})

    def follow(self, run: Run) -> None:
        """Send the outcomes since the previous call."""
        open_requests = run.control.open_requests()
        for followed in list(self.followed):
            current = open_requests.get(followed.request.what)
            # The ranks may have replaced the request by an equal copy.
            if current is None or _identity(current) != _identity(followed.request):
                self._settle(followed, self._outcome(run, followed))
        self._position = position_of(run)

    def end(self, run: Run, status: str) -> None:
        """Send all remaining outcomes at the end of the run."""
        self.follow(run)
        for followed in list(self.followed):
            if followed.request.verb == "stop" and status == "stopped":
                answer = {"state": "served", "text": f"the run has stopped: {run.report.reason(None)}."}
            else:
                answer = {"state": "unserved", "text": f"the run ended first, {status}."}
            self._settle(followed, {**answer, **position_of(run)})

    def _request_save(self, run: Run, request: Request) -> None:
        """Request a save after a change: a run that resumes after a kill would not repeat the change.

        Not with a plugin that may roll back: the change is often a reaction to a run that goes wrong, and a roll-back
        must not return to that state.
        """
        disabled = request.target if request.verb == "disable_plugin" else ""
        asks = run.plugins.declared("asks")
        if run.plugins.writes_saves(without=disabled) and "save" in asks and "roll_back" not in asks:
            run.control.request_save(f"{KEEPS} {request.what}", by=request.by)

    def _settle(self, followed: FollowedCommand, answer: Answer) -> None:
        self.followed.remove(followed)
        followed.source.answers.put(answer)

    def _outcome(self, run: Run, followed: FollowedCommand) -> Answer:
        request = followed.request
        if run.origin is not followed.origin:
            return {"state": "unserved", "text": "the run rolled back first.", **position_of(run)}
        withdrawal = _withdrawal(run, request)
        if withdrawal is None and (request.verb != "save" or self._saves > followed.saves):
            text = f"{VERBS[request.verb].mark}: done."
            return {"state": "served", "text": text, **(self._position or position_of(run))}
        text = "withdrawn."
        if withdrawal is not None:
            text = f"{VERBS[withdrawal.verb].mark} by {withdrawal.by} ({withdrawal.reason})."
        return {"state": "unserved", "text": text, **position_of(run)}


def position_of(run: Run) -> Answer:
    progress = run.progress
    return {"epoch": progress.epoch, "batch": progress.batch, "step": progress.steps}


def check_command(run: Run, command: Command, receiver: str = "") -> None:
    """Refuse a command that has no effect, fails the run, or disables the plugin that received it."""
    word, target, plugins = command.ask, command.target, run.plugins
    if word == "validate" and not run.data.validation_sets:
        raise RefusedCommandError("the run has no validation data.")
    if word == "save" and not plugins.writes_saves():
        raise RefusedCommandError("no plugin of the run writes saves.")
    asks = {**plugins.declared("asks"), **plugins.declared("asks", enabled=False)}
    if word in ("validate", "save") and WORDS[word] not in asks:  # in the loop of another framework
        raise RefusedCommandError(f"no plugin of the run asks for a {WORDS[word]}, so its loop may not support it.")
    if word == "end-epoch" and not run.progress.batch:
        raise RefusedCommandError("no epoch is running now.")
    if word == "disable" and target == receiver:
        raise RefusedCommandError(f"{target} cannot disable itself: the run would accept no more requests.")
    if WORDS[word] in CHANGES and (refusal := refuse_change(run, WORDS[word], target, command.value)):
        raise RefusedCommandError(refusal)


def make_request(run: Run, command: Command, by: str) -> Request:
    """Make the request of a command; return the open request, which may be an earlier one."""
    control = run.control
    plain = {
        "stop": control.stop,
        "save": control.request_save,
        "validate": control.request_validation,
        "log": control.request_log,
        "end-epoch": control.end_epoch,
    }
    if command.ask == "set-lr":
        control.set_learning_rate(command.value, command.reason, optimizer=command.target, by=by)
    elif command.ask in plain:
        plain[command.ask](command.reason, by=by)
    else:
        switch = control.enable_plugin if command.ask == "enable" else control.disable_plugin
        switch(command.target, command.reason, by=by)
    verb = WORDS[command.ask]
    return next(request for request in reversed(control.open_requests().values()) if request.verb == verb)


def _identity(request: Request) -> tuple[object, ...]:
    return request.by, request.reason, request.epoch, request.batch, request.step


def _withdrawal(run: Run, followed: Request) -> Request | None:
    """Return the request that withdrew or vetoed another one; None if an earlier veto was repeated."""
    for request in reversed(run.control.history):
        if TAKEN_BACK.get(request.verb) == followed.verb:
            return request
        if _identity(request) == _identity(followed):
            break
    return None
