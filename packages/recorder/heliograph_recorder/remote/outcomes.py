"""What becomes of the commands: requests to the control, followed until they are served or taken back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from heliograph import ChangeServed, Progress, Run
from heliograph.core.stepping.changes import refuse_change
from heliograph.events import CHANGES, Request

from ..verbs import TAKEN_BACK, VERBS
from .clients import Asked
from .messages import VERBS as WORDS
from .messages import Command

FOLLOWED = 1000  # commands of which it is known at once what becomes of them
KEEPS = "so that a kill does not lose"  # how the reason of a save after a change begins: no person has asked for it
Answer = dict[str, Any]


class RefusedCommandError(Exception):
    """What was requested cannot be done; the text says why."""


@dataclass(slots=True, eq=False)
class Followed:
    """A command that was accepted.

    Attributes:
        asked: the command.
        request: what the control holds for it, which is an earlier one where somebody had asked for the same.
        origin: of the run at that moment: another one since then means that it rolled back.
        seen: how many requests the history had.
        saves: how many saves there were.
        remark: why nothing changes by it, empty where something does.
    """

    asked: Asked
    request: Request
    origin: Progress
    seen: int
    saves: int
    remark: str


class Outcomes:
    """Turns commands into requests, and finds out what becomes of them. Only the training's thread uses it.

    Args:
        own: the name of the plugin, which does not disable itself.

    Attributes:
        followed: the commands whose askers wait.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self.followed: list[Followed] = []
        self._place: Answer = {}
        self._saves = 0

    def accept(self, run: Run, asked: Asked) -> tuple[Answer, bool]:
        """Request what a command asks for; return the answer, and whether it is the last one."""
        try:
            check_command(run, asked.command, self._own)
            remark = _no_change(run, asked)
            request = make_request(run, asked.command, asked.by)
        except (RefusedCommandError, RuntimeError) as error:  # a loop of another framework cannot serve every verb
            return {"state": "refused", "text": str(error), **place_of(run)}, True
        if request.verb == "end_epoch" or (request.verb in CHANGES and not remark):
            self._save(run, request)
        waits = asked.command.waits and len(self.followed) < FOLLOWED
        if waits:
            history = run.control.history
            self.followed.append(Followed(asked, request, run.origin, history.total, self._saves, remark))
        text = f"{request.what} is requested{remark and f': nothing will change, {remark}'}."
        return {"state": "accepted", "text": text, **place_of(run)}, not waits

    def count_save(self) -> None:
        """Note that the run saves."""
        self._saves += 1

    def serve_change(self, run: Run, event: ChangeServed) -> Iterator[tuple[Asked, Answer]]:
        """Yield what became of the commands for a change that the run has served."""
        for each in list(self.followed):
            request = each.request
            if _is_change(request, event):
                refused = {"state": "refused", "text": event.refusal}
                done = f"nothing has changed, {each.remark}" if each.remark else "done"
                served = {"state": "served", "text": f"{request.what}: {done}."}
                yield self._settle(each, {**(refused if event.refusal else served), **place_of(run)})

    def follow(self, run: Run) -> Iterator[tuple[Asked, Answer]]:
        """Yield what became of commands since this was called last."""
        due = run.control.open_requests()
        for each in list(self.followed):
            if not _is_open(each.request, due):
                yield self._settle(each, self._outcome(run, each))
        self._place = place_of(run)

    def end(self, run: Run, status: str) -> Iterator[tuple[Asked, Answer]]:
        """Yield what became of all others when the run ends."""
        yield from self.follow(run)
        for each in list(self.followed):
            if each.request.verb == "stop" and status == "stopped":
                answer = {"state": "served", "text": f"the run has stopped: {run.report.reason(None)}."}
            else:
                answer = {"state": "unserved", "text": f"the run has ended before that, {status}."}
            yield self._settle(each, {**answer, **place_of(run)})

    def _save(self, run: Run, request: Request) -> None:
        """Ask for a save after it, if it can be had: a run that is resumed after a kill would not do the same again.

        Not where a plugin may go back to a checkpoint: people change a run that goes wrong, it must not go back there.
        """
        goes, asks = request.target if request.verb == "disable_plugin" else "", run.plugins.declared("asks")
        if run.plugins.writes_saves(without=goes) and "save" in asks and "roll_back" not in asks:
            run.control.request_save(f"{KEEPS} {request.what}", by=request.by)

    def _settle(self, followed: Followed, answer: Answer) -> tuple[Asked, Answer]:
        self.followed.remove(followed)
        return followed.asked, answer

    def _outcome(self, run: Run, followed: Followed) -> Answer:
        """Return what became of a request that is not open any more."""
        request = followed.request
        if run.origin is not followed.origin:
            return {"state": "unserved", "text": "the run has gone back to an earlier state first.", **place_of(run)}
        taker = _taker(run, followed)
        if taker is None and (request.verb != "save" or self._saves > followed.saves):
            return {"state": "served", "text": f"{VERBS[request.verb].mark}: done.", **(self._place or place_of(run))}
        how = "taken back" if taker is None else f"{VERBS[taker.verb].mark} by {taker.by} ({taker.reason})"
        return {"state": "unserved", "text": f"{how}.", **place_of(run)}


def place_of(run: Run) -> Answer:
    """Return where a run is."""
    progress = run.progress
    return {"epoch": progress.epoch, "batch": progress.batch, "step": progress.steps}


def _no_change(run: Run, asked: Asked) -> str:
    """Return why a change of the run changes nothing; empty where it does, or where another one comes first."""
    word, target, rate = asked.command.word, asked.command.target, asked.command.value
    before = [each for each in run.control.open_requests().values() if each.verb in CHANGES]
    if word in ("enable", "disable") and target not in {each.target for each in before}:
        return f"{target} is {word}d already" if run.plugins.is_enabled(target) == (word == "enable") else ""
    if word == "set-lr" and "set_learning_rate" not in {each.verb for each in before}:
        names = [target] if target else run.optimizers
        rates = {run.optimizers[name].param_groups[0]["lr"] for name in names}
        return f"the learning rate is {rate!r} already" if {float(each) for each in rates} == {rate} else ""
    return ""


def check_command(run: Run, command: Command, own: str = "") -> None:
    """Raise `RefusedCommandError` where a command would have no effect, or would fail the run.

    Args:
        run: the run.
        command: the command.
        own: the name of the plugin that took it, which does not disable itself.
    """
    word, target, plugins = command.word, command.target, run.plugins
    if word == "validate" and not run.data.validation_sets:
        raise RefusedCommandError("the run has no validation data.")
    if word == "save" and not plugins.writes_saves():
        raise RefusedCommandError("no plugin of the run writes saves.")
    asks = {**plugins.declared("asks"), **plugins.declared("asks", enabled=False)}
    if word in ("validate", "save") and WORDS[word] not in asks:  # in a loop of another framework
        raise RefusedCommandError(f"no plugin of the run asks for a {WORDS[word]}, so its loop may be unable to.")
    if word == "end-epoch" and not run.progress.batch:
        raise RefusedCommandError("no epoch is running now.")
    if word == "disable" and target == own:
        raise RefusedCommandError(f"{target} does not disable itself: nobody could ask for anything any more.")
    if WORDS[word] in CHANGES and (refusal := refuse_change(run, WORDS[word], target, command.value)):
        raise RefusedCommandError(refusal)


def make_request(run: Run, command: Command, by: str) -> Request:
    """Request what a command asks for, in the name of who asks; return what the control holds for it."""
    control = run.control
    match command.word:
        case "set-lr":
            control.set_learning_rate(command.value, command.reason, optimizer=command.target, by=by)
        case "enable":
            control.enable_plugin(command.target, command.reason, by=by)
        case "disable":
            control.disable_plugin(command.target, command.reason, by=by)
        case "stop":
            control.stop(command.reason, by=by)
        case "end-epoch":
            control.end_epoch(command.reason, by=by)
        case "log":
            control.request_log(command.reason, by=by)
        case "validate":
            control.request_validation(command.reason, by=by)
        case "save":
            control.request_save(command.reason, by=by)
    due = control.open_requests()
    verb = WORDS[command.word]
    if verb not in CHANGES:
        return due[verb]
    return next(each for each in reversed(due.values()) if each.verb == verb)


def _is_change(request: Request, event: ChangeServed) -> bool:
    return (request.verb, request.target, request.value) == (event.verb, event.target, event.value)


def _is_open(request: Request, due: dict[str, Request]) -> bool:
    """Return whether a request is still due; the ranks may have replaced it by a copy."""
    other = due.get(request.what)
    return other is not None and _facts(other) == _facts(request)


def _facts(request: Request) -> tuple[object, ...]:
    return request.by, request.reason, request.epoch, request.batch, request.step


def _taker(run: Run, followed: Followed) -> Request | None:
    """Return the request that took another one back, None where none did; a veto of a save is counted, not listed."""
    history, verb = run.control.history, followed.request.verb
    newest = len(history) - min(history.total - followed.seen, len(history))
    for number, each in reversed(list(enumerate(history))):
        if TAKEN_BACK.get(each.verb) == verb and (number >= newest or each.verb == "veto_save"):
            return each
    return None
