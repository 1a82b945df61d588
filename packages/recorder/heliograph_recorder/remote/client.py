"""The client of `Remote`: `attach("runs/x").stop("...")`. It does not import torch."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shorten
from time import monotonic
from typing import Any, Literal

from heliograph.spi import check_number

from .messages import LONGEST, NAME, REASON, STATUS, encode
from .sockets import check_token, connect, host_name, parse_address, peer, sockets_in

State = Literal["queued", "accepted", "served", "refused", "unserved", "lost"]
ENDS = ("served", "refused", "unserved", "lost")
SILENT = "its process hangs or is suspended"
TOKEN = "HELIOGRAPH_TOKEN"  # noqa: S105  # the name of a variable
SOON = 5.0  # seconds: the request server thread of a running process needs Python's lock to answer
ACCEPTED = 60.0  # seconds: the default timeout without `wait`
LONGEST_WAIT = 366 * 86_400.0  # seconds
ANSWER = 1 << 20  # bytes
ASKED = "asked through attach()"


@dataclass(frozen=True)
class RemoteAnswer:
    """The answer of a run to a request.

    Attributes:
        state: `accepted`: the run will serve the request; `served`; `refused`; `unserved`: a plugin withdrew it, or the
            run ended first; `queued`: the run has not read it yet; `lost`: the connection ended first.
        text: the details, in a sentence.
        epoch, batch, step: the position of the run, None if unknown.
    """

    state: State
    text: str
    epoch: int | None = None
    batch: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        place = "" if self.step is None else f" at epoch {self.epoch}, batch {self.batch}, step {self.step}"
        return f"{self.state}{place}: {self.text}"


class RemoteRun:
    """A running training that accepts requests from outside. Each call opens a connection.

    A request returns when the run has read it, after the current batch; with `wait=True`, when its outcome is known.
    The reason is in the history of the run, in its recording, and in the output of `explain`. The default reason says
    that the request came from `attach`.

    Args:
        address: the socket, or the host and port.
        token: sent with every message; empty for a socket.

    Attributes:
        address: as above.
    """

    def __init__(self, address: Path | tuple[str, int], token: str = "") -> None:
        self.address, self._token = address, token

    def __repr__(self) -> str:
        return f"RemoteRun({_name(self.address)})"

    def status(self, *, timeout: float = SOON) -> dict[str, Any]:
        """Return the status: phase, epoch, batch, step, metrics, plugins and more.

        The run answers at once, also during a batch or a validation.

        Args:
            timeout: seconds to wait for the answer.

        Raises:
            ValueError: the timeout is not a number above 0.
            TimeoutError: the run does not answer, because its process hangs or is suspended.
            PermissionError: the run refuses to answer, for example because the token is wrong.
            OSError: the run cannot be reached.
        """
        for message in self._exchange({"ask": STATUS}, _check_timeout(timeout)):
            if message["state"] == STATUS:
                status: dict[str, Any] = message["status"]
                return status
            raise PermissionError(f"{_name(self.address)} refuses to answer: {message['text']}")
        raise TimeoutError(f"{_name(self.address)} does not answer within {timeout:g} seconds: {SILENT}.")

    def stop(self, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None) -> RemoteAnswer:
        """Request a stop, as `control.stop` does. Plugins may postpone or withdraw it.

        Args:
            reason: why, for people.
            wait: whether to wait for the outcome.
            timeout: seconds after which the latest answer is returned. By default 60, or 5 if the run does not answer
                at all; with `wait`, there is no limit.

        Raises:
            ValueError: the reason is empty or too long, or the timeout is not a number above 0.
            OSError: the run cannot be reached.
        """
        return self.ask("stop", reason, wait=wait, timeout=timeout)

    def save(self, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None) -> RemoteAnswer:
        """Request a checkpoint; see `stop` for the arguments."""
        return self.ask("save", reason, wait=wait, timeout=timeout)

    def validate(self, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None) -> RemoteAnswer:
        """Request a validation; see `stop` for the arguments."""
        return self.ask("validate", reason, wait=wait, timeout=timeout)

    def log(self, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None) -> RemoteAnswer:
        """Request a log; see `stop` for the arguments."""
        return self.ask("log", reason, wait=wait, timeout=timeout)

    def end_epoch(self, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None) -> RemoteAnswer:
        """Request the end of the epoch; see `stop` for the arguments."""
        return self.ask("end-epoch", reason, wait=wait, timeout=timeout)

    def set_learning_rate(
        self, rate: float, reason: str = ASKED, *, optimizer: str = "", wait: bool = False, timeout: float | None = None
    ) -> RemoteAnswer:
        """Request another learning rate, as `control.set_learning_rate` does.

        Args:
            rate: more than 0.
            reason: why, for people.
            optimizer: its name; needed if several optimizers have different rates.
            wait: see `stop`.
            timeout: see `stop`.

        Raises:
            ValueError: the rate is not a number above 0, or as for `stop`.
            OSError: the run cannot be reached.
        """
        return self.ask("set-lr", reason, wait=wait, timeout=timeout, value=rate, target=optimizer)

    def enable(
        self, plugin: str, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None
    ) -> RemoteAnswer:
        """Request that a plugin is enabled, by its name; see `stop` for the other arguments."""
        return self.ask("enable", reason, wait=wait, timeout=timeout, target=plugin)

    def disable(
        self, plugin: str, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None
    ) -> RemoteAnswer:
        """Request that a plugin is disabled, by its name; see `stop` for the other arguments."""
        return self.ask("disable", reason, wait=wait, timeout=timeout, target=plugin)

    def ask(
        self,
        verb: str,
        reason: str = ASKED,
        *,
        target: str = "",
        value: float | None = None,
        wait: bool = False,
        timeout: float | None = None,
    ) -> RemoteAnswer:
        """Send a request by the name of its verb on the command line, such as `set-lr`.

        Args:
            verb: the verb.
            reason: why, for people.
            target: the plugin or the optimizer.
            value: the learning rate.
            wait: see `stop`.
            timeout: see `stop`.

        Raises:
            ValueError: as for the method of the verb.
            OSError: the run cannot be reached.
        """
        if not isinstance(reason, str) or not 0 < len(reason.strip()) <= REASON:
            length = f", {len(reason)} characters" if isinstance(reason, str) else ""
            raise ValueError(f"A request needs a reason of 1 to {REASON} characters; got {shorten(reason)}{length}.")
        if verb in ("enable", "disable") and (
            not isinstance(target, str) or not 0 < len(target) <= NAME or not target.isprintable()
        ):
            raise ValueError(f"The name of a plugin has 1 to {NAME} printable characters; got {shorten(target)}.")
        if timeout is not None:
            timeout = _check_timeout(timeout)
        message = {"ask": verb, "reason": reason, "wait": wait, "target": target}
        if verb == "set-lr":
            message["value"] = check_number("the learning rate", value, more_than=0)
        answer = RemoteAnswer("queued", f"the run does not answer: {SILENT}. It reads the request if it continues.")
        first, total = (SOON, ACCEPTED) if timeout is None and not wait else (timeout, timeout)
        for reply in self._exchange(message, total, first):
            position = (reply.get(name) for name in ("epoch", "batch", "step"))
            answer = RemoteAnswer(reply["state"], reply["text"], *position)
            if answer.state in ENDS or (answer.state == "accepted" and not wait):
                break
        return answer

    def _exchange(
        self, message: Mapping[str, Any], seconds: float | None, first: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """Send a message and yield the answers of `seconds`, or of `first` seconds if none has arrived by then."""
        begin = monotonic()
        user = {} if isinstance(self.address, Path) else {"user": f"{getpass.getuser()}@{host_name()}"}
        line = encode({**message, **user, **({"token": self._token} if self._token else {})})
        if len(line) > LONGEST:
            raise ValueError(f"A message has at most {LONGEST} bytes; got {len(line)}: shorten the reason.")
        limit = seconds if first is None else first
        with self._connect(SOON if seconds is None else min(SOON, seconds)) as connection:
            lines = connection.makefile("rb")
            try:
                with suppress(BrokenPipeError):  # refused unread, with an answer
                    connection.sendall(line)
                while limit is None or (left := limit - (monotonic() - begin)) > 0:
                    connection.settimeout(None if limit is None else left)
                    line = lines.readline(ANSWER)
                    if not line.endswith(b"\n"):
                        raise ConnectionResetError
                    yield json.loads(line)
                    limit = seconds
            except TimeoutError:
                return
            except ConnectionError:
                yield {"state": "lost", "text": "the connection ended first: the run may have been killed."}

    def _connect(self, seconds: float) -> socket.socket:
        try:
            if isinstance(self.address, Path):
                return connect(self.address, seconds)
            return socket.create_connection(self.address, seconds)
        except (TimeoutError, BlockingIOError):
            raise TimeoutError(f"{_name(self.address)} does not answer: {SILENT}.") from None
        except OSError as error:
            raise ConnectionError(f"{_name(self.address)} cannot be reached: {_cause(error)}.") from error


def _check_timeout(timeout: float) -> float:
    return check_number("timeout", timeout, of="seconds", more_than=0, at_most=LONGEST_WAIT)


def attach(path: str | Path, *, token: str | None = None) -> RemoteRun:
    """Return the running training in a folder, for requests.

    Args:
        path: the folder of its `Remote`; a socket there; or `host:port`, for TCP.
        token: of TCP; by default the environment variable HELIOGRAPH_TOKEN.

    Raises:
        LookupError: no run is active in the folder, or several are, which the error names.
        ValueError: TCP without a token, or a token without TCP.
        OSError: the run cannot be reached.
    """
    if isinstance(path, str) and not Path(path).exists() and path.rpartition(":")[2].isdecimal():
        token = os.environ.get(TOKEN) if token is None else token
        if not token:
            raise ValueError(f"TCP needs a token: set {TOKEN}, or give token= (--token-file on the command line).")
        return RemoteRun(parse_address(path), check_token(token))
    if token is not None:
        raise ValueError("token= (--token-file) is for host:port only: a Unix socket is open to its user without one.")
    path = Path(path)
    if path.is_socket():
        return RemoteRun(path)
    if not path.is_dir():
        raise LookupError(f"{path} is neither a folder nor a socket: give the folder of the run's Remote.")
    return RemoteRun(_only_active(path))


def _only_active(folder: Path) -> Path:
    active, stale = dict[Path, str](), ""
    for path in sockets_in(folder):
        try:
            with connect(path, 0.0) as connection:
                process = peer(connection)
            active[path] = "" if process is None else f" (process {process[0]})"
        except BlockingIOError:  # many clients are waiting
            active[path] = ""
        except OSError as error:
            stale += f" {path.name}: {_cause(error)}."
    if len(active) == 1:
        return next(iter(active))
    if active:
        names = ", ".join(f"{path}{process}" for path, process in active.items())
        raise LookupError(f"{folder} has {len(active)} active runs: give the socket of one of them, {names}.")
    raise LookupError(
        f"No active run in {folder}: it has ended, has not begun, or has no Remote({str(folder)!r}).{stale}"
    )


def _cause(error: OSError) -> str:
    match error:
        case ConnectionRefusedError():
            return "the run was killed or has ended, or is on another machine"
        case FileNotFoundError():
            return "the run has ended, and its socket was removed"
    return error.strerror or str(error)


def _name(address: Path | tuple[str, int]) -> str:
    return str(address) if isinstance(address, Path) else "{}:{}".format(*address)
