"""`Remote`: requests to a running training over a Unix socket or TCP."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Collection
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

import heliograph as h
from heliograph.plugins import Policy
from heliograph.spi import check_path

from .outcomes import Outcomes, position_of
from .server import ClientCommand, Server
from .sockets import BACKLOG, check_token, host_name, listen, parse_address, write_secret

METRICS = 100  # in a status
logger = logging.getLogger("heliograph")


class PortError(OSError):
    pass


class Remote(h.Plugin):
    """Accept requests to a running training from outside, such as a stop or another learning rate.

    Send a request with `python -m heliograph ask runs/x stop`, optionally with `--reason "..."`, or with
    `heliograph_recorder.attach("runs/x").stop("...")`. You can also request a save, a validation, a log or the end of
    the epoch, and enable or disable a plugin. Each is an ordinary request to the control, made by `user@host`: it is in
    the history with its reason, all ranks agree on it, and a recorder records it. The run reads it at the next batch
    and serves it at the boundary after that batch, or after a running validation.

    A change of the run and the end of an epoch are saved at once if a plugin writes saves, because a kill would lose
    them. They are not if a plugin such as `RollBack` may load that save: you may change a run because it goes wrong,
    and it must not go back to that state. Without requests, a batch costs one check.

    The main rank listens on a Unix socket in the folder of the run, which only its user and root can open. TCP is for
    other machines, and off by default. Everybody who sends the token may make requests, and nothing is encrypted, so
    listen on 127.0.0.1 and use an SSH tunnel. If no socket can be made in the folder, the result has a warning.

    Args:
        folder: of the run, for the socket; created if missing.
        tcp: a port on 127.0.0.1, 0 for a free one, or `host:port`; None for no TCP.
        token: of TCP, at least 16 ASCII characters. By default each run has a new one, in a file beside the socket that
            only this user can read.

    Raises:
        TypeError: the folder is not a path.
        ValueError: the port is invalid, or the token is too short or given without TCP.
        OSError: the port is taken when a training starts.
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
            raise ValueError("token= needs TCP: give tcp= too, or leave the token out.")
        self._token = None if token is None else check_token(token)
        self.path: Path | None = None
        self.address: tuple[str, int] | None = None
        self._run: h.Run | None = None
        self._server: Server | None = None
        self._outcomes = Outcomes(self.name)
        self._inbox: Collection[ClientCommand] = ()
        self._followed = self._outcomes.followed
        self._facts: dict[str, Any] = {}

    def describe(self, run: h.Run) -> str:
        addresses = [str(self.path or self.folder)]
        addresses += [] if self.address is None else ["{}:{}".format(*self.address)]
        return f"accepts requests at {' and '.join(addresses)}"

    def reset(self) -> None:
        self.policy = "observer"

    @h.on(h.TrainStart)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        if run.report.is_replay:
            raise h.NotRecorded("connections to `Remote`, only the requests")
        try:
            self._begin(run)
        except PortError:
            self.policy = "critical"  # the error of an observer would only be visible at the end of the run
            raise

    @h.on(h.BatchEnd)
    def look(self, run: h.Run, event: h.BatchEnd) -> None:
        if self._inbox or self._followed:
            self._outcomes.follow(run)
            self._take(run)

    @h.on(h.ValidationBatchEnd, optional=True)
    def look_in_validation(self, run: h.Run, event: h.ValidationBatchEnd) -> None:
        if self._inbox:
            self._take(run)

    @h.on(h.ChangeServed, optional=True)
    def note_change(self, run: h.Run, event: h.ChangeServed) -> None:
        self._outcomes.serve_change(run, event)

    @h.on(h.SavePoint, lane=h.Lane.MEASURE, optional=True)
    def note_save(self, run: h.Run, event: h.SavePoint) -> None:
        self._outcomes.count_save()

    @h.on(h.PluginChanged, h.CheckpointLoaded)
    def note_facts(self, run: h.Run, event: h.PluginChanged | h.CheckpointLoaded) -> None:
        # The plugin may have been enabled during the training.
        if self._run is not run and run.optimizer is not None and not run.report.is_replay:
            self._begin(run)
        self._note_facts(run)

    @h.on(h.RunClosed)
    def end(self, run: h.Run, event: h.RunClosed) -> None:
        self._outcomes.end(run, event.status)
        server = self._server
        if server is None:
            return
        if server.error is not None:
            run.warn(f"Remote failed to serve a client: {type(server.error).__name__}: {server.error}.")
        while server.inbox:
            answer = {"state": "unserved", "text": f"the run ended first, {event.status}.", **position_of(run)}
            server.inbox.popleft().answers.put(answer)

    def close(self) -> None:
        server, self._server, self._inbox, self._run = self._server, None, (), None
        self.path = self.address = None
        if server is not None:
            server.close()

    def status(self) -> dict[str, Any]:
        """Return the status of the run as plain data. Called in the request server thread, at any time."""
        if (run := self._run) is None:
            return {}
        progress, stop = run.progress, run.control.stop_request
        rates = {name: optimizer.param_groups[0]["lr"] for name, optimizer in run.optimizers.items()}
        return {
            "run": run.name,
            "host": host_name(),
            "process": os.getpid(),
            "tcp": self.address,
            "phase": run.phase,
            **position_of(run),
            "evaluated": progress.evaluated if run.phase != "train" else None,
            "samples": progress.samples,
            "seconds": round(progress.seconds, 3),
            "learning_rates": {name: rate for name, rate in rates.items() if isinstance(rate, float | int)},
            "metrics": dict(list(dict(run.metrics).items())[:METRICS]),
            **self._facts,
            "stop": None if stop is None else f"{stop.by}: {stop.reason}",
        }

    def _begin(self, run: h.Run) -> None:
        self.close()
        self._run, self._outcomes = run, Outcomes(self.name)
        self._followed = self._outcomes.followed
        self._note_facts(run)
        server = Server(self.status)
        try:
            self._listen(run, server)
        except BaseException:
            server.close()
            raise
        if self.path is None and self.address is None:
            server.close()
            return
        self._server, self._inbox = server, server.inbox
        server.start()

    def _listen(self, run: h.Run, server: Server) -> None:
        try:
            listener, self.path = listen(self.folder)
        except (OSError, AttributeError) as error:  # Windows has no Unix sockets in Python
            run.warn(f"Remote cannot make a socket in {self.folder}: {error}. Use another folder.")
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
                f"or tcp=0 for a free port."
            ) from None
        self.address = over_tcp.getsockname()[:2]
        token = self._token or token_urlsafe(32)
        file = self.path or self.folder.absolute() / f"remote-{host_name()}-{self.address[1]}"
        file = file.with_suffix(".token")
        server.add(over_tcp, token=token, files=(file,))
        write_secret(file, token)
        logger.info("run %r accepts requests at %s:%d with the token in %s", run.name, *self.address, file)

    def _take(self, run: h.Run) -> None:
        server = self._server
        while server is not None and server.inbox:
            command = server.inbox.popleft()
            command.answers.put(self._outcomes.accept(run, command))

    def _note_facts(self, run: h.Run) -> None:
        """Copy the part of the status that only the training's thread may read."""
        self._facts = {
            "planned_steps": run.length.planned_steps,
            "max_epochs": run.length.max_epochs,
            "plugins": {name: run.plugins.is_enabled(name) for name in run.plugins.names()},
        }
