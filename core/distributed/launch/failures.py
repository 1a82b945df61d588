"""Which error leaves `launch`, where several ranks failed."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ....events.errors import describe_error
from ...errors import RankFailed


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank, or in the caller's own `on_message`.

    Attributes:
        error: the exception.
        text: its traceback, formatted, where it comes from another process.
        rank: where; None in this process.
        signum: the signal that ended the rank, where one did.
    """

    error: BaseException
    text: str = ""
    rank: int | None = None
    signum: int = 0

    @property
    def is_no_failure(self) -> bool:
        """Whether the rank merely asked to exit, with status 0."""
        return isinstance(self.error, SystemExit) and not self.error.code

    @property
    def named(self) -> RankFailed | None:
        """What it says of the rank that failed first, if it says anything."""
        error: BaseException | None = self.error
        while error is not None and not isinstance(error, RankFailed):
            error = error.__cause__
        return error

    @property
    def follows(self) -> bool:
        """Whether this rank failed because another one did."""
        return self.named is not None and not self.died

    @property
    def died(self) -> bool:
        """Whether the rank did not even report."""
        return self.rank is not None and not self.text


def died(rank: int, status: int, *, began: bool) -> Failure:
    """Return the failure of a rank whose process ended without a report.

    Args:
        rank: its number.
        status: its exit status, or minus the number of the signal that ended it.
        began: whether it had got as far as the function.
    """
    how = f"signal {_name(-status)} ended it" if status < 0 else f"it ended with exit status {status}"
    text = f"{how} before it {'could report' if began else 'called the function'}. Look above for what it printed"
    if not began and status == 1:
        text += '. Each process imports the script anew: does that call launch outside of `if __name__ == "__main__":`?'
    return Failure(RankFailed(rank, "died", text, ""), rank=rank, signum=max(0, -status))


def raise_first(failures: list[Failure], killed: list[int], grace: float, heard: set[int]) -> None:
    """Raise the error that came first and does not merely follow another rank's, if there is one.

    Args:
        failures: in the order of their arrival.
        killed: ranks that did not end in time.
        grace: the seconds that they had.
        heard: the signals that the ranks were sent.
    """
    if not failures:
        return
    failures, ended = _apart(failures, heard)
    first = min(failures, key=lambda failure: (failure.is_no_failure, failure.follows))  # of equal ones, the earliest
    error = first.error
    if first.signum in heard:
        raise KeyboardInterrupt if first.signum == signal.SIGINT else SystemExit(128 + first.signum) from error
    if first.text:
        error.add_note(f"heliograph: raised on rank {first.rank}:\n{first.text.rstrip()}")
    for other in failures:
        if other is not first and other.signum not in heard:  # who died of what we sent has nothing to tell
            where = "on_message" if other.rank is None else f"rank {other.rank}"
            error.add_note(f"heliograph: also failed: {where}, with {describe_error(other.error)}")
    for hung in ended:
        error.add_note(f"heliograph: rank {hung.rank} hung, and has ended since: {hung.named and hung.named.text}")
    for rank in killed:
        error.add_note(f"heliograph: rank {rank} did not end within {grace:g} s of that, and was killed.")
    error.heliograph_rank = first.rank if first.named is None else first.named.rank  # type: ignore[attr-defined]
    raise error


def _apart(failures: list[Failure], heard: set[int]) -> tuple[list[Failure], list[Failure]]:
    """Return the failures, and apart from them how ranks ended that hung: that says less than what the others saw."""
    named = [each.named for each in failures]
    hung = {each.rank for each in named if each is not None and each.kind == "hung"}
    ended = [
        failure
        for failure, each in zip(failures, named, strict=True)
        if each is not None and each.kind == "died" and failure.rank in hung and failure.signum not in heard
    ]
    return [each for each in failures if each not in ended], ended


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return str(signum)
