"""The server of the page, on this machine only; requests to a run need a token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_urlsafe
from typing import Any
from urllib.parse import parse_qs

from ..remote.client import RemoteAnswer, RemoteRun
from ..remote.sockets import sockets_in
from ..timeline.page import live_page
from .run_list import RunList, WatchedRun

ADDRESS = "127.0.0.1"
# Values of the Host header. With another name (DNS rebinding), a foreign page could read this one.
HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
LONGEST = 8192  # bytes of a request
TIMEOUT = 60  # seconds without a request until a connection is closed
THROUGH = " (through watch)"
ASKED = "asked on the page"
PATIENCE = 20.0  # seconds until a run has read a request
VERBS = ("stop", "save", "validate", "log", "end-epoch", "set-lr")


class WatchServer(ThreadingHTTPServer):
    """Serves the page of some runs.

    Args:
        runs: the recordings.
        port: 0 for a free one.

    Attributes:
        token: sent by the page with each request; the printed address contains it.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, runs: RunList, port: int = 0) -> None:
        self.runs, self.token = runs, token_urlsafe()
        super().__init__((ADDRESS, port), _PageHandler)

    @property
    def url(self) -> str:
        """The address of the page, with the token: without it the page is read-only."""
        return f"http://{ADDRESS}:{self.server_port}/?token={self.token}"


class _PageHandler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT

    def do_GET(self) -> None:  # named by http.server
        path, _, text = self.path.partition("?")
        query = parse_qs(text)
        if self._is_foreign():
            return
        if path == "/":
            self._send_page(query)
        elif path == "/runs":
            self._send(HTTPStatus.OK, json.dumps(self.server.runs.rows(), allow_nan=False).encode(), JSON)
        elif path == "/facts":
            self._send_facts(query)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")

    def do_POST(self) -> None:  # named by http.server
        length = self.headers.get("Content-Length", "")
        if self._is_foreign():
            return
        if self.path != "/ask":
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")
        elif not self._is_token(self.headers.get("X-Watch-Token", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "The page has no valid token: open the address that watch printed.")
        elif not length.isdecimal() or int(length) > LONGEST:
            self._refuse(HTTPStatus.BAD_REQUEST, f"A request has at most {LONGEST} bytes.")
        else:
            self._ask(self.rfile.read(int(length)))

    def _is_token(self, token: str) -> bool:
        return compare_digest(token.encode(errors="replace"), self.server.token.encode())

    def _ask(self, body: bytes) -> None:
        runs = self.server.runs.runs()
        try:
            request = json.loads(body)
            number = request.get("run") if isinstance(request, dict) else None
            if type(number) is not int or not 0 <= number < len(runs):
                raise ValueError(f"There is no run {number!r}.")
            answer = str(_request(runs[number], request))
        except (ValueError, LookupError, RecursionError, OSError) as error:
            self._send(HTTPStatus.BAD_REQUEST, str(error).encode(), TEXT)
        else:
            self._send(HTTPStatus.OK, answer.encode(), TEXT)

    def log_message(self, *args: Any) -> None:
        """Print nothing: a page sends a request every second."""

    def _is_foreign(self) -> bool:
        """Refuse a request with the name of another host."""
        if HOST.fullmatch(self.headers.get("Host", "")):
            return False
        self._refuse(HTTPStatus.FORBIDDEN, f"Open this page as http://{ADDRESS}:{self.server.server_port}/.")
        return True

    def _send_page(self, query: Mapping[str, list[str]]) -> None:
        # Every user of this machine can reach this server, so the page only gets the token if the query has it.
        token = self.server.token if self._is_token(query.get("token", [""])[0]) else ""
        chosen, runs = self.server.runs.first(), self.server.runs.runs()
        title = f"watch: {', '.join(runs[number].name for number in chosen) or 'no recording yet'}"
        page = live_page({"chosen": chosen, "token": token}, title)
        self._send(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8")

    def _send_facts(self, query: Mapping[str, list[str]]) -> None:
        runs = self.server.runs.runs()
        number, version = (_number(query, name) for name in ("run", "known"))
        if not 0 <= number < len(runs):
            self._refuse(HTTPStatus.NOT_FOUND, f"There is no run {number}.")
            return
        newest, facts = runs[number].versioned_facts()
        if version == newest:
            self._send(HTTPStatus.NO_CONTENT, b"", JSON)
            return
        content = {"version": newest, "facts": facts}
        self._send(HTTPStatus.OK, json.dumps(content, allow_nan=False, separators=(",", ":")).encode(), JSON)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self.close_connection = True  # the body of the request is not read
        self._send(status, f"{reason}\n".encode(), TEXT)

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        length = {} if status == HTTPStatus.NO_CONTENT else {"Content-Length": str(len(body))}
        for name, value in {**HEADERS, **length, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _number(query: Mapping[str, list[str]], name: str) -> int:
    value = query.get(name, [""])[0]
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else -1


def _request(run: WatchedRun, fields: Mapping[str, Any]) -> RemoteAnswer:
    """Send a request to a run, in the name of the user of this process.

    Args:
        run: the run.
        fields: `verb`, perhaps `reason`, and the `value` of a learning rate, as sent by the page.
    """
    verb, reason = fields.get("verb"), fields.get("reason")
    reason = f"{reason or ASKED}".strip() + THROUGH
    if verb not in VERBS:
        raise ValueError(f"The verb must be one of {', '.join(VERBS)}, got {verb!r}.")
    return _remote_of(run).ask(verb, reason, value=fields.get("value"), timeout=PATIENCE)


def _remote_of(run: WatchedRun) -> RemoteRun:
    """Return the remote of the process that writes a recording: several runs may have sockets in one folder."""
    process, timeouts = run.process, list[str]()
    for socket in sockets_in(run.path.parent) if process is not None else ():
        remote = RemoteRun(socket)
        try:
            if remote.status().get("process") == process:
                return remote
        except TimeoutError as error:
            timeouts.append(str(error))
        except OSError:  # of a killed run
            continue
    if timeouts:
        raise TimeoutError("; ".join(timeouts))
    raise LookupError(f"{run.name} has ended, or has no Remote in {run.path.parent}.")
