"""Errors of collectives: whether another rank left or was late, and the references that keep a group open."""

from __future__ import annotations

import re
from dis import opname

from torch.distributed import DistError, ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ...events.checks import error_text
from .failure import error_chain

# The names of the backends in their errors.
BROKEN = re.compile(r"\bgloo\b|\bNCCL\b|\bProcessGroup\w*\b|\bpair closure\b")
TIMED_OUT = "Timed out"  # in the text of gloo's error after a timeout, which is a plain RuntimeError


class LateRankError(DistError):
    """A rank is alive, but did not arrive in time."""


def is_broken_collective(error: BaseException) -> bool:
    """Return True if an exception in the chain is a collective that another rank did not complete."""
    return any(map(_is_broken, error_chain(error)))


def is_late(error: BaseException) -> bool:
    """Return True if an exception in the chain is a collective that timed out."""
    return any(map(_is_late, error_chain(error)))


def release_groups(error: BaseException) -> None:
    """Clear the frames of an exception that refer to a process group.

    While there is a reference to a gloo group, its connections stay open and the other ranks keep waiting.
    """
    for link in error_chain(error):
        trace = link.__traceback__
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
            variables = frame.f_locals  # a dict that stays with the frame
            if any(map(_holds_group, variables.values())):
                try:
                    frame.clear()
                except RuntimeError:  # it is still running
                    continue
                variables.clear()


def _holds_group(value: object) -> bool:
    # torch's wrappers pass groups on in tuples and dicts of arguments.
    parts = value if type(value) is tuple else value.values() if type(value) is dict else (value,)
    return any(isinstance(part, ProcessGroup | DistributedDataParallel) for part in parts)


def _is_broken(error: BaseException) -> bool:
    if isinstance(error, DistError):
        return True
    is_by_text = isinstance(error, RuntimeError) and BROKEN.search(error_text(error)) is not None
    return is_by_text and not _was_raised_in_python(error)


def _is_late(error: BaseException) -> bool:
    return isinstance(error, LateRankError) or (_is_broken(error) and TIMED_OUT in error_text(error))


def _was_raised_in_python(error: BaseException) -> bool:
    # An error with a `raise` is user code, whatever its text; errors of a backend come from C++. The functions in the
    # traceback show nothing, because user code runs within torch's wrappers and may call collectives itself.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
