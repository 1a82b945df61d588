"""Files of torch's looked at before they are believed: no part may claim more than the file has."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor

from ..state.plain import MAPPINGS, SEQUENCES, check_tree
from .safe_open import open_regular

EXPANDED = 2**40  # bytes: a small tensor may show its values in many places, but no memory has so many


def check_archive(path: Path) -> None:
    """Hold what the parts of a file claim against its size, before any of them is read.

    Torch stores its tensors as they are. A part that is compressed could grow a thousandfold in the memory.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no archive of torch's, a part is compressed, or they claim more bytes than there are.
    """
    with open_regular(path) as file:
        try:
            with ZipFile(file) as archive:
                parts = archive.infolist()
        except (BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            raise ValueError(f"{path} is damaged, or no file of torch.save: {type(error).__name__}: {error}") from None
        size = file.seek(0, 2)
    packed = [each.filename for each in parts if each.compress_type != ZIP_STORED]
    if packed:
        raise ValueError(f"{path} is no file of torch.save: its part {packed[0]!r} is compressed.")
    claimed = sum(each.file_size for each in parts)
    if claimed > size:
        raise ValueError(f"{path} is damaged or forged: its parts claim {claimed:,} bytes, the file has {size:,}.")


def check_content(value: Any, path: Path) -> None:
    """Raise ValueError where what was read from a file is no tree, or a tensor claims more bytes than the file has."""
    try:
        check_tree(value, "its content")
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
    size = path.stat().st_size
    for tensor in _tensors(value, set()):
        claimed = prod(tensor.shape) * tensor.element_size()
        if tensor.layout is torch.strided and claimed > max(size, EXPANDED):
            raise ValueError(
                f"{path} is damaged or forged: a tensor of {list(tensor.shape)} claims {claimed:,} bytes, the file has "
                f"{size:,}."
            )


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in a tree; what stands in several places, once."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (*MAPPINGS, *SEQUENCES) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if type(value) in MAPPINGS else value:
            yield from _tensors(item, seen)
