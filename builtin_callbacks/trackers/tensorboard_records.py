"""The records of TensorBoard's files. Its own writer imports 130 modules more: a third of a usual start."""

from __future__ import annotations

import struct

_REVERSED, _MASK, _ALL = 0x82F63B78, 0xA282EAD8, 0xFFFFFFFF  # the polynomial of CRC-32C; what TFRecord files add


def record(content: bytes) -> bytes:
    """Return a record: the length of its content, and the content, each with its checksum after it."""
    length = struct.pack("<Q", len(content))
    return b"".join((length, _checksum(length), content, _checksum(content)))


def _checksum(content: bytes) -> bytes:
    crc = _ALL
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= _ALL
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & _ALL)


def _of_byte(rest: int) -> int:
    for _ in range(8):
        rest = rest >> 1 ^ (_REVERSED if rest & 1 else 0)
    return rest


_TABLE = tuple(map(_of_byte, range(256)))
