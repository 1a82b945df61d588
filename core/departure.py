"""How a run leaves its group: together with the other ranks, or before them, for an error."""

from __future__ import annotations

from .context import RunContext

Failures = list[tuple[str, str, BaseException]]  # owner, event, error


class Departure:
    """The end of one run's part in its group.

    Args:
        run: the run.

    Attributes:
        failures: what failed while the group was left in haste.
    """

    def __init__(self, run: RunContext) -> None:
        self.failures: Failures = []
        self._run = run

    def fail(self, error: BaseException, place: str) -> BaseException:
        """Leave the group at once, for an error that not all ranks share; the others learn of it before.

        Args:
            error: why.
            place: where in the run it came up.

        Returns:
            What caused the error: itself, or that another rank failed.
        """
        run = self._run
        if run.outcome.has_left_group or error is run.control.agreed:
            return error
        run.outcome.has_left_group = True
        cause, watch = error, run.engine.watch
        try:
            if watch is not None:
                cause = watch.explain(error)
                if cause is error:
                    watch.announce(error, place)
                from .distributed.ranks.failure import release_groups

                release_groups(error)
            try:
                for act in run.hooks.leaving:
                    act()
            finally:
                run.engine.abandon()
        except BaseException as failure:  # noqa: BLE001  # joins those of the closing; the error itself matters more
            self.failures.append(("the run", "leaving the group", failure))
        return cause

    def finish(self) -> None:
        """End together with the others, if nothing failed: take the wrappers off, and agree on the exit status."""
        if not self._run.outcome.has_left_group:
            self._run.engine.tear_down()
            self._run.control.settle_exit()
