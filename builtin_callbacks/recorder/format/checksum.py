"""A line as it stands in a recording: a JSON array, a tab, and the CRC-32 of the array's text in hexadecimal digits.

A digit that a disk got wrong would be another number, and nobody would know: a line that does not fit its checksum is
told as damage, and so is one that was cut short.
"""

from __future__ import annotations

import json
from typing import Any
from zlib import crc32

_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode
_BLANKS = " \t\n\r"  # of JSON


def sealed(*items: Any) -> str:
    """Return the line of an array, without its end."""
    text = _encode(items)
    return f"{text}\t{crc32(text.encode()):08x}"


def parse(line: str | bytes) -> list[Any]:
    """Return a line's array.

    Raises:
        ValueError: it is none, or does not fit its checksum.
    """
    text = _unsealed(line.encode() if isinstance(line, str) else line)
    if text is None:
        raise ValueError("it is damaged")
    return array(text)


def is_sealed(line: bytes) -> bool:
    """Return whether a line fits its checksum."""
    return _unsealed(line) is not None


def array(text: bytes) -> list[Any]:
    """Return the array of a text, whatever its checksum is.

    Raises:
        ValueError: it is none whose first item is a name.
    """
    try:
        whole = text.decode().strip(_BLANKS)
        items, end = _decode(whole)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    if end != len(whole):
        raise ValueError("it is no JSON")
    if not isinstance(items, list) or not items or not isinstance(items[0], str):
        raise ValueError("it is no array with a name")
    return items


def _unsealed(line: bytes) -> bytes | None:
    """Return the text of a line's array, None where it does not fit its checksum."""
    text, tab, seal = line.rpartition(b"\t")
    return text if tab and seal == b"%08x" % crc32(text) else None
