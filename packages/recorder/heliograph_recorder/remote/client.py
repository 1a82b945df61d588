"""Ask a run from outside: `attach("runs/x").stop("...")`. It needs no torch."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from reprlib import repr as shorten
from time import monotonic
from typing import Any, Literal, SupportsFloat

from heliograph.spi import check_number

from .address import check_token, parse_address
from .messages import LONGEST, NAME, REASON, STATUS, encode
from .sockets import connect, host_name, peer, sockets_in

State = Literal["queued", "accepted", "served", "refused", "unserved", "lost"]
ENDS = ("served", "refused", "unserved", "lost")
SILENT = "its process hangs, or is suspended"
TOKEN = "HELIOGRAPH_TOKEN"  # noqa: S105  # the name of a variable
SOON = 5.0  # seconds in which a run that lives says so: the thread that does needs a moment of Python's lock
ACCEPTED = 60.0  # seconds until a request is seen, where nobody waits for more
LONGEST_WAIT = 366 * 86_400.0  # seconds
ANSWER = 1 << 20  # bytes


@dataclass(frozen=True)
class RemoteAnswer:
    """What became of a request.

    Attributes:
        state: `accepted`, it is requested and will be served; `served`; `refused`; `unserved`, it was taken back, or
            the run ended before; `queued`, the run has not seen it yet; `lost`, the connection ended before that.
        text: the rest, in words.
        epoch, batch, step: where the run was then; None where that is not known.
    """

    state: State
    text: str
    epoch: int | None = None
    batch: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        place = "" if self.step is None else f" at epoch {self.epoch}, batch {self.batch}, step {self.step}"
        return f"{self.state}{place}: {self.text}"


ASKED = "asked through attach()"


class RemoteRun:
    """A run that is asked from outside. Each call is a connection of its own.

    A request returns when the run has seen it, which is after the batch that is running, or with `wait=True` when it is
    known what became of it. Its reason is in the history of the run, in its recording, and in what `explain` says; by
    default it says that the request came from `attach`.

    Args:
        address: the socket, or the host and port.
        token: what is sent with every message; empty for a socket.

    Attributes:
        address: as above.
    """

    def __init__(self, address: Path | tuple[str, int], token: str = "") -> None:
        self.address, self._token = address, token

    def __repr__(self) -> str:
        return f"RemoteRun({_name(self.address)})"

    def status(self, *, timeout: float = SOON) -> dict[str, Any]:
        """Return where the run is: phase, epoch, batch, step, metrics, plugins and more. It answers at any moment.

        Args:
            timeout: seconds to wait for the answer.

        Raises:
            ValueError: the timeout is not a number above 0.
            TimeoutError: the run does not answer: its process hangs, or is suspended.
            PermissionError: it refuses to, as where the token is wrong.
            OSError: it cannot be reached.
        """
        for message in self._exchange({"ask": STATUS}, _check_timeout(timeout)):
            if message["state"] == STATUS:
                status: dict[str, Any] = message["status"]
                return status
            raise PermissionError(f"{_name(self.address)} refuses to answer: {message['text']}")
        raise TimeoutError(f"{_name(self.address)} does not answer within {timeout:g} seconds: {SILENT}.")

    def stop(self, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None) -> RemoteAnswer:
        """Ask the run to stop, as `control.stop` does: plugins may postpone it or take it back.

        Args:
            reason: why, for people; by default that it was asked through `attach`.
            wait: whether to wait until it is known what became of it.
            timeout: seconds after which the last answer is returned, whatever it is; by default 60, of a run that says
                nothing at all 5, or as long as it takes with `wait`.

        Raises:
            ValueError: the reason is empty or too long, or the timeout is not a number above 0.
            OSError: the run cannot be reached.
        """
        return self._ask("stop", reason, wait=wait, timeout=timeout)

    def save(self, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None) -> RemoteAnswer:
        """Ask for a checkpoint; see `stop` for the arguments."""
        return self._ask("save", reason, wait=wait, timeout=timeout)

    def validate(self, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None) -> RemoteAnswer:
        """Ask for a validation; see `stop` for the arguments."""
        return self._ask("validate", reason, wait=wait, timeout=timeout)

    def log(self, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None) -> RemoteAnswer:
        """Ask for a log; see `stop` for the arguments."""
        return self._ask("log", reason, wait=wait, timeout=timeout)

    def end_epoch(self, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None) -> RemoteAnswer:
        """Ask for the end of the epoch; see `stop` for the arguments."""
        return self._ask("end-epoch", reason, wait=wait, timeout=timeout)

    def set_learning_rate(
        self, rate: float, reason: str = ASKED, *, optimizer: str = "", wait: bool = False, timeout: float | None = None
    ) -> RemoteAnswer:
        """Ask for another learning rate, as `control.set_learning_rate` does; see `stop` for the other arguments.

        Args:
            rate: more than 0.
            reason: why, for people.
            optimizer: the name of the one that is meant, of several with different rates.
            wait: see `stop`.
            timeout: see `stop`.

        Raises:
            TypeError: the rate is not a number.
            ValueError: the rate is not above 0, or as for `stop`.
            OSError: the run cannot be reached.
        """
        is_flag = str(getattr(rate, "dtype", type(rate).__name__)).endswith("bool")
        if is_flag or not isinstance(rate, SupportsFloat):  # a scalar of NumPy or torch is one
            raise TypeError(f"A learning rate is a number above 0, such as 0.01; got {shorten(rate)}.")
        try:
            value = float(rate)
        except OverflowError:
            value = inf
        if not (isfinite(value) and value > 0):
            raise ValueError(f"A learning rate is a number above 0, such as 0.01; got {value:g}.")
        return self._ask("set-lr", reason, wait=wait, timeout=timeout, value=value, target=optimizer)

    def enable(
        self, plugin: str, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None
    ) -> RemoteAnswer:
        """Ask for a plugin, by its name, to be enabled; see `stop` for the other arguments."""
        return self._ask("enable", reason, wait=wait, timeout=timeout, target=_check_plugin(plugin))

    def disable(
        self, plugin: str, reason: str = ASKED, *, wait: bool = False, timeout: float | None = None
    ) -> RemoteAnswer:
        """Ask for a plugin, by its name, to be disabled; see `stop` for the other arguments."""
        return self._ask("disable", reason, wait=wait, timeout=timeout, target=_check_plugin(plugin))

    def _ask(self, word: str, reason: str, *, wait: bool, timeout: float | None, **more: Any) -> RemoteAnswer:
        if not isinstance(reason, str) or not 0 < len(reason.strip()) <= REASON:
            given = shorten(reason) + (f", {len(reason)} characters" if isinstance(reason, str) else "")
            raise ValueError(f"A request has a reason, a text of 1 to {REASON} characters; got {given}.")
        if timeout is not None:
            timeout = _check_timeout(timeout)
        answer = RemoteAnswer("queued", f"the run does not answer: {SILENT}. It looks at this if it continues.")
        message = {"ask": word, "reason": reason, "wait": wait, **{name: each for name, each in more.items() if each}}
        first, rest = (SOON, ACCEPTED) if timeout is None and not wait else (timeout, timeout)
        for each in self._exchange(message, rest, first):
            place = (each.get(name) for name in ("epoch", "batch", "step"))
            answer = RemoteAnswer(each["state"], each["text"], *place)
            if answer.state in ENDS or (answer.state == "accepted" and not wait):
                break
        return answer

    def _exchange(
        self, message: Mapping[str, Any], seconds: float | None, first: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """Send a message and yield the answers, until there are none or the time is over.

        Args:
            message: what is sent.
            seconds: the time for all answers, None without a limit.
            first: the time for the first of them, if that is less.
        """
        begin = monotonic()
        due, first_due = (None if each is None else begin + each for each in (seconds, first))
        who = {} if isinstance(self.address, Path) else {"user": f"{getpass.getuser()}@{host_name()}"}
        line = encode({**message, **who, **({"token": self._token} if self._token else {})})
        if len(line) > LONGEST:
            raise ValueError(f"A message has at most {LONGEST} bytes, this one has {len(line)}: give a shorter reason.")
        with closing(self._connect(due)) as connection:
            try:
                connection.sendall(line)
                yield from _answers(connection, due, due if first is None else first_due)
            except ConnectionError:
                yield {"state": "lost", "text": "the connection ended before that: the run may have been killed."}

    def _connect(self, due: float | None) -> socket.socket:
        seconds = SOON if due is None else min(SOON, _left(due))
        try:
            if isinstance(self.address, Path):
                return connect(self.address, seconds)
            return socket.create_connection(self.address, seconds)
        except (TimeoutError, BlockingIOError):  # it accepts no connection
            raise TimeoutError(f"{_name(self.address)} does not answer: {SILENT}.") from None
        except OSError as error:
            raise ConnectionError(f"{_name(self.address)} cannot be reached: {_why_not(error)}.") from error


def _check_timeout(timeout: float) -> float:
    return check_number("timeout", timeout, of="seconds", more_than=0, at_most=LONGEST_WAIT)


def _check_plugin(name: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= NAME or not name.isprintable():
        raise ValueError(f"The name of a plugin is a text of 1 to {NAME} printable characters; got {shorten(name)}.")
    return name


def _left(due: float) -> float:
    return max(0.0, due - monotonic())


def _answers(connection: socket.socket, due: float | None, first_due: float | None) -> Iterator[dict[str, Any]]:
    """Yield the messages that come.

    Args:
        connection: where they come from.
        due: when the time is over, None without a limit.
        first_due: when it is over if none has come.

    Raises:
        ConnectionError: the connection has ended.
    """
    import json

    received, last = bytearray(), first_due
    while len(received) < ANSWER:
        while (end := received.find(b"\n")) >= 0:
            line = bytes(received[:end])
            del received[: end + 1]
            last = due
            yield json.loads(line)
        left = None if last is None else _left(last)
        if left == 0:
            return
        connection.settimeout(left)
        try:
            more = connection.recv(65536)
        except TimeoutError:
            return
        if not more:
            raise ConnectionResetError
        received += more
    raise ConnectionResetError


def attach(path: str | Path, *, token: str | None = None) -> RemoteRun:
    """Return a run that lives, to ask it for something.

    Args:
        path: the folder that its `Remote` was given; the socket there; or `host:port`, where it listens on TCP.
        token: of a run over TCP; by default that in the environment variable HELIOGRAPH_TOKEN.

    Raises:
        LookupError: there is no run in the folder that lives, or there are several, which are named.
        ValueError: the run is over TCP and no token is given, or is not and one is.
        OSError: the run cannot be reached.
    """
    if isinstance(path, str) and not Path(path).exists() and path.rpartition(":")[2].isdecimal():
        given = os.environ.get(TOKEN) if token is None else token
        if not given:
            raise ValueError(
                f"A run over TCP is asked with its token: set {TOKEN}, or give it as token=, on the command line with "
                f"--token-file FILE."
            )
        return RemoteRun(parse_address(path), check_token(given))
    if token is not None:
        raise ValueError(
            "A token (token=, --token-file) is for host:port: the socket of a run is open to its user, and needs none."
        )
    path = Path(path)
    if path.is_socket():
        return RemoteRun(path)
    if not path.is_dir():
        raise LookupError(f"{path} is neither a folder nor a socket: give the folder that the run's Remote was given.")
    return RemoteRun(_only_live(path))


def _only_live(folder: Path) -> Path:
    found = {path: _look_at(path) for path in sockets_in(folder)}
    live = [path for path, (lives, _) in found.items() if lives]
    if len(live) == 1:
        return live[0]
    if live:
        names = ", ".join(f"{path}{found[path][1]}" for path in live)
        raise LookupError(f"{folder} has {len(live)} runs: give the socket of one of them, {names}.")
    dead = "".join(f" {path.name}: {why}." for path, (_, why) in found.items())
    raise LookupError(
        f"No run in {folder} can be asked: it has ended, has not begun yet, or has no Remote({str(folder)!r}).{dead}"
    )


def _look_at(path: Path) -> tuple[bool, str]:
    """Return whether the process of a run is there, although it may not answer; and which it is, or why it is not."""
    try:
        with connect(path, 0.0) as connection:
            served = peer(connection)
    except BlockingIOError:  # many are waiting to be accepted
        return True, ""
    except OSError as error:
        return False, _why_not(error)
    return True, "" if served is None else f" (process {served[0]})"


def _why_not(error: OSError) -> str:
    """Return why a run cannot be reached."""
    match error:
        case ConnectionRefusedError():
            return "the run was killed or has ended, or is on another machine"
        case FileNotFoundError():
            return "the run has ended, and its socket is gone"
    return error.strerror or str(error)


def _name(address: Path | tuple[str, int]) -> str:
    return str(address) if isinstance(address, Path) else "{}:{}".format(*address)
