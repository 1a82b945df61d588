"""The server of the page: on this machine only; to ask a run for something, one has to know its token."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_urlsafe
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

from ..timeline.page import live_page
from .requests import ask
from .run_list import RunList

ADDRESS = "127.0.0.1"
# Of the header Host: another name that leads here may be that of a page elsewhere, which wants to read this one.
HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
TEXT = "text/plain; charset=utf-8"
LONGEST = 8192  # bytes of a request to a run
MIN_COMPRESSED = 1000  # bytes
TIMEOUT = 60  # seconds without a request after which a connection is closed


class WatchServer(ThreadingHTTPServer):
    """Serves the page of some runs.

    Args:
        runs: the recordings.
        port: 0 for one that is free.

    Attributes:
        token: what a page sends with each request to a run; it is in the address that is printed.
        first_look: the thread that reads what the page shows at first.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, runs: RunList, port: int = 0) -> None:
        self.runs, self.token = runs, token_urlsafe()
        super().__init__((ADDRESS, port), _Request)
        self.first_look = Thread(target=self._read_first, daemon=True)
        self.first_look.start()

    def _read_first(self) -> None:
        """Read what the page shows at first, while its reader opens it."""
        runs = self.runs.runs()
        for number in self.runs.first():
            runs[number].facts()

    @property
    def url(self) -> str:
        """The address of the page, with the token: without it the page shows everything, and can ask for nothing."""
        return f"http://{ADDRESS}:{self.server_port}/?token={self.token}"


class _Request(BaseHTTPRequestHandler):
    """One connection; `server` has the runs."""

    server: WatchServer
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT

    def do_GET(self) -> None:  # named by http.server
        """Answer with the page, the list of runs, or the facts of one."""
        path, _, query = self.path.partition("?")
        answers: dict[str, Callable[[], None]] = {
            "/": partial(self._send_page, parse_qs(query)),
            "/runs": partial(self._send_json, lambda: self.server.runs.rows()),
            "/facts": partial(self._send_facts, parse_qs(query)),
        }
        answer = answers.get(path)
        if self._is_foreign():
            return
        if answer is None:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")
        else:
            answer()

    def do_POST(self) -> None:  # named by http.server
        """Answer with what became of a request to a run; a page elsewhere knows no token, and can ask for nothing."""
        length = self.headers.get("Content-Length", "")
        if self._is_foreign():
            return
        if self.path != "/ask":
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")
        elif not self._knows(self.headers.get("X-Watch-Token", "")):
            self._refuse(
                HTTPStatus.FORBIDDEN, "This page has not the token of watch: open the address that it printed."
            )
        elif not length.isdecimal() or int(length) > LONGEST:
            self._refuse(HTTPStatus.BAD_REQUEST, f"A request has at most {LONGEST} bytes.")
        else:
            self._ask(self.rfile.read(int(length)))

    def _knows(self, token: str) -> bool:
        return compare_digest(token.encode(errors="replace"), self.server.token.encode())

    def _ask(self, body: bytes) -> None:
        runs = self.server.runs.runs()
        try:
            what = json.loads(body)
            number = what.get("run") if isinstance(what, dict) else None
            if type(number) is not int or not 0 <= number < len(runs):
                raise ValueError("There is no such run.")
            answer = str(ask(runs[number], what))
        except (ValueError, LookupError, RecursionError, OSError) as error:
            self._send(HTTPStatus.BAD_REQUEST, str(error).encode(), TEXT)
        else:
            self._send(HTTPStatus.OK, answer.encode(), TEXT)

    def log_message(self, *args: Any) -> None:
        """Print nothing: a page asks every second."""

    def _is_foreign(self) -> bool:
        """Refuse a request that names another host."""
        if HOST.fullmatch(self.headers.get("Host", "")):
            return False
        self._refuse(HTTPStatus.FORBIDDEN, f"Open this page as http://{ADDRESS}:{self.server.server_port}/.")
        return True

    def _send_page(self, query: Mapping[str, list[str]]) -> None:
        """Send the page; to who knows the token, since each user of this machine can reach this server."""
        token = self.server.token if self._knows(query.get("token", [""])[0]) else ""
        chosen, runs = self.server.runs.first(), self.server.runs.runs()
        title = f"watch: {', '.join(runs[number].name for number in chosen) or 'no recording yet'}"
        page = live_page({"chosen": chosen, "token": token}, title)
        self._send(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8")

    def _send_json(self, make: Callable[[], Any]) -> None:
        self._send(HTTPStatus.OK, json.dumps(make(), allow_nan=False).encode(), "application/json")

    def _send_facts(self, query: Mapping[str, list[str]]) -> None:
        runs = self.server.runs.runs()
        number, known = (_number(query, name) for name in ("run", "known"))
        if not 0 <= number < len(runs):
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such run.")
            return
        version, text = runs[number].text(known)
        if text:
            text = b'{"version":%d,"facts":%b}' % (version, text)
        self._send(HTTPStatus.OK if text else HTTPStatus.NO_CONTENT, text, "application/json")

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True  # whatever was sent is not read
        self._send(status, f"{why}\n".encode(), TEXT)

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        is_compressed = len(body) >= MIN_COMPRESSED and "gzip" in self.headers.get("Accept-Encoding", "")
        body = gzip.compress(body, 1) if is_compressed else body
        self.send_response(status)
        encoding = {"Content-Encoding": "gzip"} if is_compressed else {}
        length = {} if status == HTTPStatus.NO_CONTENT else {"Content-Length": str(len(body))}
        for name, value in {**HEADERS, **encoding, **length, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _number(query: Mapping[str, list[str]], name: str) -> int:
    """Return a number of a query, -1 where it has none."""
    value = query.get(name, [""])[0]
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else -1
