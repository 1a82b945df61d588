"""Run a page that needs torchvision: `python -m heliograph.packages.tests.vision docs/howto/use_timm.md`."""

from __future__ import annotations

import sys
from ctypes import CDLL
from importlib.util import find_spec
from pathlib import Path

import torch
from heliograph.packages.tests.test_docs import run

OPERATORS = ("nms", "qnms")  # what torchvision describes further when it is imported


def declare_operators() -> None:
    """Declare what torchvision's compiled part defines, where that is made for another build of torch than this one.

    The rest of torchvision is Python, and works without it.
    """
    spec = find_spec("torchvision")
    assert spec is not None, "torchvision is not installed"
    assert spec.origin is not None
    try:
        CDLL(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        for name in OPERATORS:
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if __name__ == "__main__":
    declare_operators()
    run(Path(sys.argv[1]))
