"""What the page asks of a run that lives, through the socket of its `Remote`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from heliograph.spi import is_number

from ..remote.client import RemoteAnswer, RemoteRun
from ..remote.sockets import sockets_in
from .watched_run import WatchedRun

THROUGH = " (through watch)"
ASKED = "asked on the page"
PATIENCE = 20.0  # seconds in which a run says that it has seen a request
VERBS: Final[dict[str, Callable[..., RemoteAnswer]]] = {
    "stop": RemoteRun.stop,
    "save": RemoteRun.save,
    "validate": RemoteRun.validate,
    "log": RemoteRun.log,
    "end_epoch": RemoteRun.end_epoch,
}
RATE = "set_learning_rate"


def can_be_asked(run: WatchedRun) -> bool:
    """Return whether a run lives on this machine, with a socket in the folder of its recording."""
    return run.process is not None and bool(sockets_in(run.path.parent))


def ask(run: WatchedRun, what: Any) -> RemoteAnswer:
    """Ask a run for something, in the name of the user of this process; return what became of it.

    Args:
        run: the run.
        what: `verb` and perhaps `reason`, and for another learning rate its `value`; as the page has sent it.

    Raises:
        ValueError: there is no such verb, or the reason or the value is none.
        LookupError: the run cannot be asked.
        OSError: the run cannot be reached.
    """
    what = what if isinstance(what, dict) else {}
    verb, reason, value = (what.get(name) for name in ("verb", "reason", "value"))
    reason = ASKED if reason is None else reason
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError("Give a reason, or leave it out: it is in the history of the run.")
    reason = reason.strip() + THROUGH
    if verb == RATE:
        if not is_number(value) or value <= 0:
            raise ValueError(f"A learning rate is a number of more than 0, got {value!r}.")
        return _remote_of(run).set_learning_rate(float(value), reason, timeout=PATIENCE)
    if not isinstance(verb, str) or verb not in VERBS:
        raise ValueError(f"A run can be asked for {', '.join([*VERBS, RATE])}, got {verb!r}.")
    return VERBS[verb](_remote_of(run), reason, timeout=PATIENCE)


def _remote_of(run: WatchedRun) -> RemoteRun:
    """Return the remote of the process that writes a recording: several runs may have their sockets in one folder."""
    process, silent = run.process, list[str]()
    for socket in sockets_in(run.path.parent) if process is not None else ():
        remote = RemoteRun(socket)
        try:
            if remote.status().get("process") == process:
                return remote
        except TimeoutError as error:
            silent.append(str(error))
        except OSError:  # of a run that was killed
            continue
    if silent:
        raise TimeoutError("; ".join(silent))
    raise LookupError(f"{run.name} has ended, or has no Remote in {run.path.parent}.")
