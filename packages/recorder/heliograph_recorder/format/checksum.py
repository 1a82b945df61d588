"""A line of a recording: a JSON array, a tab, and the CRC-32 of the array's text in hexadecimal digits.

The checksum detects lines that are cut short or have a wrong digit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import JSONEncoder, encode_basestring_ascii
from typing import Any
from zlib import crc32

_encoder = JSONEncoder()
_decode = json.JSONDecoder().raw_decode
# JSONEncoder.encode makes this object for each call, which takes as long as encoding a line.
_encode_pieces = json.encoder.c_make_encoder(  # type: ignore[attr-defined]  # torch runs on CPython only, which has it
    None, _encoder.default, encode_basestring_ascii, None, ":", ",", False, False, True
)


def format_line(*items: Any) -> str:
    return seal(to_json(items))


def seal(text: str) -> str:
    return f"{text}\t{crc32(text.encode()):08x}"


def to_json(items: Sequence[Any]) -> str:
    return "".join(_encode_pieces(items, 0))


def parse_line(line: str | bytes) -> list[Any]:
    text = _verified_text(line.encode() if isinstance(line, str) else line)
    if text is None:
        raise ValueError("damaged")
    return parse_array(text)


def is_intact(line: bytes) -> bool:
    return _verified_text(line) is not None


def parse_array(text: bytes) -> list[Any]:
    try:
        decoded = text.decode()
        items, end = _decode(decoded)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if end != len(decoded):
        raise ValueError("not JSON")
    if not isinstance(items, list) or not items or not isinstance(items[0], str):
        raise ValueError("not an array that begins with a name")
    return items


def _verified_text(line: bytes) -> bytes | None:
    text, tab, checksum = line.rpartition(b"\t")
    return text if tab and checksum == b"%08x" % crc32(text) else None
