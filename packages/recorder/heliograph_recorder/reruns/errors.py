"""`NotExact`: a rerun that differs from its recording."""

from __future__ import annotations

from ..divergence.report import FirstDifference


class NotExact(RuntimeError):  # noqa: N818  # says what is missing
    """A recorded run cannot be repeated bit for bit.

    Attributes:
        reasons: why a resume may differ; may be empty.
        difference: the first difference between the rerun and the recording, None if there is none.
        has_option: `exact=False` is possible.
    """

    def __init__(
        self, reasons: tuple[str, ...], difference: FirstDifference | None = None, *, has_option: bool = True
    ) -> None:
        super().__init__(reasons, difference)
        self.reasons, self.difference, self.has_option = reasons, difference, has_option

    def __str__(self) -> str:
        reasons = [reason.rstrip(".") for reason in self.reasons]
        if self.difference is None:
            text = f"The run cannot be repeated bit for bit: {'; '.join(reasons)}."
        else:
            text = f"The rerun differs from the recording. The first difference: {self.difference}".rstrip(".") + "."
            text += "".join(f" Likely cause: {reason}." for reason in reasons)
        return text + " To repeat it anyway, give exact=False (--inexact on the command line)." * self.has_option
