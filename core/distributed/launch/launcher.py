"""Start several processes on one machine that train together."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ....events.checks import check_number, check_whole_number
from .job import Job
from .processes import LAUNCHED


class RankValues(list[Any]):
    """What `launch` returns: the value of each rank, by rank.

    Attributes:
        messages: (rank, object) of all that was put into the ranks' queues, as it came; empty with `on_message`.
    """

    def __init__(self, values: Iterable[Any], messages: list[tuple[int, Any]]) -> None:
        super().__init__(values)
        self.messages = messages


def launch(
    fn: Callable[..., Any],
    /,
    *args: Any,
    nprocs: int | None = None,
    on_message: Callable[[int, Any], object] | None = None,
    grace: float = 30.0,
    **kwargs: Any,
) -> RankValues:
    """Call `fn(*args, **kwargs)` in several new processes on this machine; return what each returned.

    The processes find each other as under torchrun: an engine within `fn` makes them a group (so does
    `torch.distributed.init_process_group()`). Each is a fresh interpreter that imports the script again, so the script
    must call launch under `if __name__ == "__main__":`, and `fn` must be importable: a function at module level, not a
    lambda, and not one from a notebook or an interactive session. Arguments, values and messages are pickled; an
    argument that a parameter of launch hides is given by `functools.partial`. Unless the environment sets
    `OMP_NUM_THREADS`, it is 1, as under torchrun.

    A rank has succeeded when `fn` has returned and the value has arrived here, whatever becomes of its process after
    that. When one fails, the error leaves launch here, and its type, cause and attributes are those that it had there;
    a type that cannot be imported here is replaced by one of the same name that inherits from its nearest base that
    can. The error of the rank that failed first is raised, not one that merely followed; its traceback and the errors
    of other ranks are in its notes, its rank is in `heliograph_rank`. A SystemExit leaves as well, so that the script
    exits with the status that `fn` wanted; one with status 0 does so when the other ranks have ended by themselves.

    In the main thread, Ctrl-C, SIGTERM and SIGUSR1 are passed on to the ranks, which close properly; a second Ctrl-C
    kills them. If this process is killed, the ranks get a SIGTERM. None of them outlives launch, however it ends.

    Args:
        fn: what each process calls.
        args: its positional arguments.
        nprocs: how many processes; by default, one for each GPU that is visible.
        on_message: called in this thread with rank and object for everything that a rank puts into its queue
            (`run.queue`), while the ranks run; when it raises, they get a SIGTERM. By default, messages are kept.
        grace: seconds that the others have to close and report when a rank has failed, and that all have to exit when
            they have reported; who has not ended then is killed.
        kwargs: its keyword arguments.

    Raises:
        ValueError: an argument is out of its range; there is no GPU to count; `fn` is from an interactive session.
        TypeError: `fn`, its arguments or its value cannot be pickled.
        RuntimeError: this process was itself started by launch or torchrun.
        RankFailed: a rank died without a report.
        KeyboardInterrupt: upon Ctrl-C.
        BaseException: what `fn` or `on_message` raised.
    """
    _refuse_nesting()
    count = _checked_count(nprocs)
    grace = check_number("grace", grace, of="seconds", more_than=0)
    messages: list[tuple[int, Any]] = []

    def keep(rank: int, message: Any) -> None:
        messages.append((rank, message))

    job = Job(_pickled(fn, args, kwargs), count, grace, on_message or keep)
    return RankValues(job.run(), messages)


def _refuse_nesting() -> None:
    starter = "launch" if LAUNCHED in os.environ else "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else None
    if starter is not None:
        raise RuntimeError(
            f"launch was called in a process that {starter} started. Call it once, and from the script only: under "
            f'`if __name__ == "__main__":`, as each process imports the script again. Within a rank, and under '
            f"torchrun, call the function itself."
        )


def _checked_count(nprocs: int | None) -> int:
    if nprocs is None:
        import torch

        nprocs = torch.cuda.device_count()
        if not nprocs:
            raise ValueError("No GPU is visible, so launch cannot know how many processes to start: give nprocs.")
    return check_whole_number("nprocs", nprocs, at_least=1, or_else="None for one per visible GPU")


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if not callable(fn):
        raise TypeError(f"launch takes a function and its arguments, got {fn!r} as the function.")
    main = sys.modules["__main__"]
    if getattr(fn, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        raise ValueError(
            f"{fn!r} was defined in a notebook or an interactive session, which new processes cannot import. Put it "
            f"into a file, and import it from there."
        )
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"launch cannot send {fn!r} and its arguments to new processes: {error}. It takes a function at module "
            f"level (no lambda, none within a function) and arguments that can be pickled."
        ) from error
