"""A line of a recording: a JSON array, a tab, and the CRC-32 of the array's text in hexadecimal digits.

Without it, a wrong digit would go unnoticed. A line that does not match its checksum, such as one that was cut short,
is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import JSONEncoder, encode_basestring_ascii
from typing import Any
from zlib import crc32

_SEPARATORS = ":", ","
_encoder = JSONEncoder()
_decode = json.JSONDecoder().raw_decode
_BLANKS = " \t\n\r"  # of JSON
# JSONEncoder.encode makes this object for each call, which takes as long as encoding a line.
_encode_pieces = json.encoder.c_make_encoder(  # type: ignore[attr-defined]  # torch runs on CPython only, which has it
    None, _encoder.default, encode_basestring_ascii, None, *_SEPARATORS, False, False, True
)


def format_line(*items: Any) -> str:
    return seal(to_json(items))


def seal(text: str) -> str:
    return f"{text}\t{crc32(text.encode()):08x}"


def to_json(items: Sequence[Any]) -> str:
    return "".join(_encode_pieces(items, 0))


def parse_line(line: str | bytes) -> list[Any]:
    text = _check_text(line.encode() if isinstance(line, str) else line)
    if text is None:
        raise ValueError("damaged")
    return parse_array(text)


def parse_lines(lines: Iterable[bytes]) -> Iterator[list[Any] | ValueError]:
    for line in lines:
        text, tab, checksum = line.rpartition(b"\t")
        if not tab or checksum != b"%08x" % crc32(text):
            yield ValueError("damaged")
            continue
        try:
            yield parse_array(text)
        except ValueError as error:
            yield error


def is_intact(line: bytes) -> bool:
    return _check_text(line) is not None


def parse_array(text: bytes) -> list[Any]:
    try:
        whole = text.decode()
        if whole[:1] != "[" or whole[-1:] != "]":
            whole = whole.strip(_BLANKS)
        items, end = _decode(whole)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if end != len(whole):
        raise ValueError("not JSON")
    if not isinstance(items, list) or not items or not isinstance(items[0], str):
        raise ValueError("not an array that begins with a name")
    return items


def _check_text(line: bytes) -> bytes | None:
    text, tab, checksum = line.rpartition(b"\t")
    return text if tab and checksum == b"%08x" % crc32(text) else None
