"""What W&B has written on this machine: the rows in its `.wandb` files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from heliograph.spi import require

FILE_HEADER: Final = 7  # bytes: `:W&B`, a magic number, a version
BLOCK: Final = 32_768  # bytes; no part of a record crosses the end of one
PART_HEADER: Final = 7  # bytes: a checksum (4), a length (2), a kind (1)
WHOLE, FIRST, LAST = 1, 2, 4


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the history in a `.wandb` file, up to where a kill cut it off."""
    messages = require("wandb.proto.wandb_internal_pb2", "WandB", extra="wandb")
    for content in records(path.read_bytes()):
        record = messages.Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            yield _row(record.history.item)


def last_steps(folder: Path, page: str) -> dict[tuple[str, int], int]:
    """Return the last step of each name and number of rollbacks in the files of a page: each attempt has one."""
    found: dict[tuple[str, int], int] = {}
    for path in folder.glob(f"*run-*-{page}*/*.wandb"):
        for row in rows(path):
            step, rollbacks = row.get("step", -1), row.get("rollbacks", 0)
            found.update(((name, rollbacks), step) for name in row if step > found.get((name, rollbacks), -1))
    return found


def records(content: bytes) -> Iterator[bytes]:
    """Yield the whole records in the bytes of a file, which is a log of LevelDB after a header."""
    position, record = FILE_HEADER, b""
    while position + PART_HEADER <= len(content):
        if BLOCK - position % BLOCK < PART_HEADER:  # the rest of the block is empty
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        position += PART_HEADER
        part = content[position : position + length]
        if len(part) < length:
            return
        record = part if kind in (WHOLE, FIRST) else record + part
        if kind in (WHOLE, LAST):
            yield record
        position += length


def _row(items: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for item in items:
        name, *inner = item.nested_key or [item.key]
        value = json.loads(item.value_json)
        if inner:  # an image and the like is described by several values
            row.setdefault(name, {})[".".join(inner)] = value
        else:
            row[name] = value
    return row
