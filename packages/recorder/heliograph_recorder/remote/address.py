"""Addresses and tokens of TCP, as they are given."""

from __future__ import annotations

SHORTEST_TOKEN, LONGEST_TOKEN = 16, 500  # characters
LOCAL = "127.0.0.1"


def parse_address(given: int | str) -> tuple[str, int]:
    """Return the host and the port of `host:port`, of `[::1]:port`, or of a port alone, which is on 127.0.0.1.

    Raises:
        ValueError: it is none of these.
    """
    host, _, port = str(given).rpartition(":")
    if isinstance(given, bool) or not port.isdecimal() or int(port) > 65535 or (isinstance(given, str) and not host):
        raise ValueError(f"An address of TCP is a port such as 8750, or host:port; got {given!r}.")
    return host.strip("[]") or LOCAL, int(port)


def check_token(token: str) -> str:
    """Return a token; ValueError where it is too short to be safe, or cannot be sent."""
    if not SHORTEST_TOKEN <= len(token) <= LONGEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ValueError(
            f"A token is {SHORTEST_TOKEN} to {LONGEST_TOKEN} printable ASCII characters, got {len(token)} characters."
        )
    return token
