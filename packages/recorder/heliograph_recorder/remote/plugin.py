"""Let people steer a run from outside: over a socket in its folder, and over TCP where that is asked for."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

from heliograph import (
    BatchEnd,
    ChangeServed,
    CheckpointLoaded,
    Lane,
    NotRecorded,
    Plugin,
    PluginChanged,
    Run,
    RunClosed,
    SavePoint,
    TrainStart,
    ValidationBatchEnd,
    on,
)
from heliograph.plugins import Policy
from heliograph.spi import check_path

from .address import check_token, parse_address
from .clients import Asked
from .outcomes import Answer, Outcomes, place_of
from .server import Server
from .sockets import BACKLOG, host_name, listen, write_secret

METRICS = 100  # in a status
logger = logging.getLogger("heliograph")


class PortError(OSError):
    """A port of TCP cannot be listened on."""


class Remote(Plugin):
    """Let people ask for a stop, a save, a validation, a log, the end of an epoch, another learning rate, a plugin.

    They ask with `python -m heliograph ask runs/x stop`, perhaps with `--reason "..."`, or
    `heliograph_recorder.attach("runs/x").stop("...")`. Each is an ordinary request to the control, in the name of who
    asks (`user@host`): in the history with its reason, agreed on by all ranks, recorded. It is seen at the next batch
    and served at the boundary after it; in a validation, after that. A change of the run and the end of an epoch are
    saved at once, if a plugin writes saves: a kill would lose them. With a plugin that may go back to a checkpoint,
    such as `RollBack`, the next save is the first with them: a run that is changed as it goes wrong must not go back to
    that. Without requests, a batch costs one check.

    The main rank has a Unix socket in the folder of the run, which only its user can open, and root. TCP is for other
    machines, and off unless asked for: who sends the token may ask, and nothing is encrypted, so let it listen on
    127.0.0.1 and come through an SSH tunnel. Where the folder can have no socket, the result has a warning.

    Args:
        folder: of the run, where the socket is; created if it is missing.
        tcp: a port on 127.0.0.1, 0 for a free one, or `host:port`; None for no TCP.
        token: what has to be sent over TCP, at least 16 characters of ASCII; by default a new one for each run, in a
            file beside the socket that only this user can read.

    Raises:
        TypeError: the folder is not a path.
        ValueError: there is no such port, or the token is too short, or given without TCP.
        OSError: at a training's start, the port is taken.
    """

    policy: Policy = "observer"
    draws = False
    ranks = "main"
    rehearses = False

    def __init__(self, folder: str | Path, *, tcp: int | str | None = None, token: str | None = None) -> None:
        check_path("Remote(folder)", folder, "a folder")
        self.folder = Path(folder)
        self.tcp = None if tcp is None else parse_address(tcp)
        if token is not None and tcp is None:
            raise ValueError("token= is for TCP, and none was asked for: give tcp=, or leave the token out.")
        self._token = None if token is None else check_token(token)
        self.path: Path | None = None
        self.address: tuple[str, int] | None = None
        self._run: Run | None = None
        self._server: Server | None = None
        self._outcomes = Outcomes(self.name)
        self._inbox: Iterable[Asked] = ()
        self._followed = self._outcomes.followed
        self._facts: dict[str, Any] = {}

    def describe(self, run: Run) -> str:
        """Say where it listens."""
        where = [str(self.path or self.folder)]
        where += [] if self.address is None else ["{}:{}".format(*self.address)]
        return f"can be asked at {' and '.join(where)}"

    def reset(self) -> None:
        """Forget that the former training could not begin."""
        self.policy = "observer"

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Listen."""
        if run.report.is_replay:
            raise NotRecorded("what people ask for from outside, but as requests")
        try:
            self._begin(run)
        except PortError:
            self.policy = "critical"  # nobody would see it before the end of the run otherwise
            raise

    @on(BatchEnd)
    def look(self, run: Run, event: BatchEnd) -> None:
        """Request what was asked for, and answer what became of what was asked before."""
        if self._inbox or self._followed:
            self._answer(self._outcomes.follow(run))
            self._take(run)

    @on(ValidationBatchEnd, optional=True)
    def look_in_validation(self, run: Run, event: ValidationBatchEnd) -> None:
        """Request what was asked for."""
        if self._inbox:
            self._take(run)

    @on(ChangeServed, optional=True)
    def note_change(self, run: Run, event: ChangeServed) -> None:
        """Answer what became of a change."""
        self._answer(self._outcomes.serve_change(run, event))

    @on(SavePoint, lane=Lane.MEASURE, optional=True)
    def note_save(self, run: Run, event: SavePoint) -> None:
        """Note that the run saves."""
        self._outcomes.count_save()

    @on(PluginChanged, CheckpointLoaded)
    def note_facts(self, run: Run, event: PluginChanged | CheckpointLoaded) -> None:
        """Note which plugins there are, and the length; listen, where this one was enabled in the training."""
        if self._run is not run and run.optimizer is not None and not run.report.is_replay:
            self._begin(run)
        self._note_facts(run)

    @on(RunClosed)
    def end(self, run: Run, event: RunClosed) -> None:
        """Answer everybody who waits."""
        self._answer(self._outcomes.end(run, event.status))
        server = self._server
        if server is None:
            return
        if server.error is not None:
            run.warn(f"Remote stopped listening: {type(server.error).__name__}: {server.error}.")
        while server.inbox:
            answer = {"state": "unserved", "text": f"the run has ended before that, {event.status}.", **place_of(run)}
            server.answer(server.inbox.popleft().client, answer, last=True)

    def close(self) -> None:
        """Listen no longer."""
        server, self._server, self._inbox, self._run = self._server, None, (), None
        self.path = self.address = None
        if server is not None:
            server.close()

    def status(self) -> dict[str, Any]:
        """Return where the run is, as plain data: read at any moment, by the thread that answers."""
        if (run := self._run) is None:
            return {}
        progress, stop = run.progress, run.control.stop_request
        rates = {name: each.param_groups[0]["lr"] for name, each in run.optimizers.items()}
        return {
            "run": run.name,
            "host": host_name(),
            "process": os.getpid(),
            "tcp": self.address,
            "phase": run.phase,
            **place_of(run),
            "evaluated": progress.evaluated if run.phase != "train" else None,
            "samples": progress.samples,
            "seconds": round(progress.seconds, 3),
            "learning_rates": {name: rate for name, rate in rates.items() if isinstance(rate, float | int)},
            "metrics": dict(list(dict(run.metrics).items())[:METRICS]),
            **self._facts,
            "stop": None if stop is None else f"{stop.by}: {stop.reason}",
        }

    def _begin(self, run: Run) -> None:
        self.close()
        self._run, self._outcomes = run, Outcomes(self.name)
        self._followed = self._outcomes.followed
        self._note_facts(run)
        server = Server(self.status)
        try:
            self._listen(run, server)
        except BaseException:  # whatever it is, nothing stays open
            server.close()
            raise
        if self.path is None and self.address is None:
            server.close()
            return
        self._server, self._inbox = server, server.inbox
        server.start()

    def _listen(self, run: Run, server: Server) -> None:
        try:
            listener, self.path = listen(self.folder)
        except (OSError, AttributeError) as error:  # Windows has no Unix sockets in Python
            run.warn(f"Nobody can ask the run in {self.folder}, there can be no socket: {error}. Take another folder.")
        else:
            server.add(listener, files=(self.path,))
        if self.tcp is None:
            return
        try:
            family = socket.AF_INET6 if ":" in self.tcp[0] else socket.AF_INET
            over_tcp = socket.create_server(self.tcp, family=family, backlog=BACKLOG)
        except OSError as error:
            raise PortError(
                f"Remote cannot listen on {self.tcp[0]}:{self.tcp[1]}: {error.strerror or error}. Give another port, "
                f"or tcp=0 for a free one."
            ) from None
        self.address = over_tcp.getsockname()[:2]
        token, file = self._token or token_urlsafe(32), self._token_file()
        server.add(over_tcp, token=token, files=(file,))
        write_secret(file, token)
        logger.info("run %r can be asked at %s:%d with the token in %s", run.name, *self.address, file)

    def _token_file(self) -> Path:
        assert self.address is not None  # it is made for it
        path = self.path or self.folder.absolute() / f"remote-{host_name()}-{self.address[1]}"
        return path.with_suffix(".token")

    def _take(self, run: Run) -> None:
        server = self._server
        while server is not None and server.inbox:
            asked = server.inbox.popleft()
            answer, last = self._outcomes.accept(run, asked)
            server.answer(asked.client, answer, last=last)

    def _answer(self, outcomes: Iterable[tuple[Asked, Mapping[str, Any] | Answer]]) -> None:
        for asked, answer in outcomes:
            if self._server is not None:
                self._server.answer(asked.client, answer, last=True)

    def _note_facts(self, run: Run) -> None:
        """Note what is looked up in parts of the run that only its own thread may use."""
        plugins = {name: run.plugins.is_enabled(name) for name in run.plugins.names()}
        self._facts = {
            "planned_steps": run.length.planned_steps,
            "max_epochs": run.length.max_epochs,
            "plugins": plugins,
        }
