"""A line as it stands in a recording: a JSON array, a tab, and the CRC-32 of the array's text in hexadecimal digits.

A digit that a disk got wrong would be another number, and nobody would know: a line that does not fit its checksum is
told as damage, and so is one that was cut short.
"""

from __future__ import annotations

import json
from typing import Any
from zlib import crc32

_encode = json.JSONEncoder(separators=(",", ":")).encode


def sealed(*items: Any) -> str:
    """Return the line of an array, without its end."""
    text = _encode(items)
    return f"{text}\t{crc32(text.encode()):08x}"


def parse(line: str | bytes) -> list[Any]:
    """Return a line's array.

    Raises:
        ValueError: it is none, or does not fit its checksum.
    """
    whole = line.encode() if isinstance(line, str) else line
    if not is_sealed(whole):
        raise ValueError("it is damaged")
    return array(whole.rpartition(b"\t")[0])


def is_sealed(line: bytes) -> bool:
    """Return whether a line fits its checksum."""
    text, tab, seal = line.rpartition(b"\t")
    return bool(tab) and seal == b"%08x" % crc32(text)


def array(text: bytes) -> list[Any]:
    """Return the array of a text, whatever its checksum is.

    Raises:
        ValueError: it is none whose first item is a name.
    """
    try:
        items = json.loads(text.decode())
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    if not isinstance(items, list) or not items or not isinstance(items[0], str):
        raise ValueError("it is no array with a name")
    return items
