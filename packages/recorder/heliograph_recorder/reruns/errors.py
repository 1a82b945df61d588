"""Why a recorded run cannot be done again."""

from __future__ import annotations

from ..divergence.report import Difference


class NotExact(RuntimeError):  # noqa: N818  # says what is missing
    """A recorded run is not done again bit for bit.

    Attributes:
        reasons: why a resume of it may differ, in sentences; empty if nothing is known.
        difference: where what was done again differs from what was recorded; None where it does not.
        has_option: whether it can be done nevertheless, with an option.
    """

    def __init__(
        self, reasons: tuple[str, ...], difference: Difference | None = None, *, has_option: bool = True
    ) -> None:
        super().__init__(reasons, difference)
        self.reasons, self.difference, self.has_option = reasons, difference, has_option

    def __str__(self) -> str:
        if self.difference is not None:
            what = (
                f"What is done again is not what was recorded. The first difference: {self.difference}".rstrip(".")
                + "."
                + "".join(f" Likely cause: {reason.rstrip('.')}." for reason in self.reasons)
            )
        else:
            reasons = "; ".join(each.rstrip(".") for each in self.reasons)
            what = f"The run cannot be done again bit for bit: {reasons}."
        if not self.has_option:
            return what
        return f"{what} To do it nevertheless, give exact=False (--inexact on the command line)."
