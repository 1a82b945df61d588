"""What a training has logged, as rows: bounded, and small in a checkpoint."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Self

import torch

from .means import added

LONGEST = 10_000  # rows: a few MB in memory, and 8 bytes for each value in a checkpoint
WAITING = 100  # rows are put into columns by so many, which costs half as much as one by one
Row = dict[str, float]


def add_row(run: Any, metrics: Mapping[str, float], *, by_the_clock: bool = False) -> None:
    """Add what was logged or measured now to the rows of a run's result.

    Args:
        run: the run.
        metrics: by name.
        by_the_clock: whether they are of this process, and not of the training: no checkpoint holds them.
    """
    outcome, progress, length = run.outcome, run.progress, run.batches_per_epoch
    if outcome.rows is None:
        outcome.rows = LogRows()
    epoch = progress.epoch + (min(1.0, progress.batch / length) if length else 0.0)
    outcome.rows.add(progress.steps, epoch, {} if by_the_clock else metrics)
    if by_the_clock:
        outcome.rows.paces[progress.steps] = dict(metrics)


class LogRows:
    """A row for each optimizer step at which something was logged, validated or tested: `step`, `epoch`, the metrics.

    The newest 10,000 are kept, by column, so that a save copies them in no time. A checkpoint holds two tensors.

    Attributes:
        dropped: how many older rows are no longer there.
        paces: by step, what belongs to its row by the clock.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self.paces: dict[int, Row] = {}
        self._newest: list[Row] = []  # not in the columns yet
        self._count = 0
        self._values: dict[str, array[float]] = {}
        self._known: dict[str, bytearray] = {}  # whether a row has a value there

    @property
    def rows(self) -> list[Row]:
        """The rows, the oldest first."""
        self._extend_columns()
        rows: list[Row] = [{} for _ in range(self._count)]
        for name, values in self._values.items():
            for row, value, is_known in zip(rows, values, self._known[name], strict=True):
                if is_known:
                    row[name] = value
        for row in rows:
            row["step"] = int(row["step"])
        return rows

    def add(self, step: int, epoch: float, metrics: Mapping[str, float]) -> None:
        """Add what is known at a step; what was measured at the same step is one row.

        Args:
            step: optimizer steps.
            epoch: finished epochs, with the part of the present one.
            metrics: by name.
        """
        newest = self._newest
        if newest and newest[-1]["step"] == step:
            newest[-1].update(metrics)
        elif not newest and self._count and self._values["step"][-1] == step:
            self._count -= 1
            row = {name: (values.pop(), self._known[name].pop()) for name, values in self._values.items()}
            self._newest.append({name: value for name, (value, is_known) in row.items() if is_known} | dict(metrics))
        else:
            newest.append({"step": step, "epoch": epoch, **metrics})
            if len(newest) > WAITING:
                self._extend_columns()

    def finish(self, run: Any) -> None:
        """At the end of a training that did not fail: read what was not logged. On several ranks a collective."""
        self._extend_columns()
        run.means.totals = added(run.means.totals, run.means.sums())
        if self.dropped:
            run.note(
                f"log_history holds the newest {LONGEST:,} rows, and {self.dropped:,} older ones are not in it: log "
                f"less often, or keep all of them in a file, JsonlLog('log.jsonl')"
            )

    def as_results(self, run: Any) -> dict[str, Any]:
        """Return the rows, and the mean of each training value over all that was read, as the result names them."""
        totals = run.means.totals if run.settings.train else {}
        means = {f"train/{name}": value / weight for name, (value, weight) in totals.items() if weight}
        rows = [{**row, **self.paces.get(int(row["step"]), {}), **row} for row in self.rows]
        return {"log_history": rows, "means": means}

    def state_dict(self) -> dict[str, Any]:
        """Return a row of values for each name, as float64, and where there is one."""
        self._extend_columns()
        shape = (len(self._values), self._count)
        values, known = (bytearray().join(each.values()) for each in (self._values, self._known))
        return {
            "names": list(self._values),
            "values": torch.frombuffer(values, dtype=torch.float64).reshape(shape),
            "known": torch.frombuffer(known, dtype=torch.bool).reshape(shape),
            "dropped": self.dropped,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], former: LogRows | None = None) -> Self:
        """Return the rows of a saved state.

        Args:
            state: the state.
            former: those of a run that goes back, which knows what the clock said.
        """
        made = cls()
        made.dropped, made._count = state["dropped"], state["values"].shape[1]
        for name, values, known in zip(state["names"], state["values"], state["known"], strict=True):
            made._values[name], made._known[name] = array("d", values.tolist()), bytearray(known.tolist())
        paces = {} if former is None else former.paces
        made.paces = {step: paces[step] for step in map(int, made._values["step"]) if step in paces}
        return made

    def _extend_columns(self) -> None:
        """Put the newest rows into the columns, and drop the oldest that are too many."""
        newest, self._newest = self._newest, []
        for name in dict.fromkeys(name for row in newest for name in row):
            if name not in self._values:
                self._values[name], self._known[name] = array("d", bytes(8 * self._count)), bytearray(self._count)
        for name, values in self._values.items():
            values.extend([row.get(name, 0.0) for row in newest])
            self._known[name].extend([name in row for row in newest])
        self._count += len(newest)
        if (surplus := self._count - LONGEST) > 0:
            for step in self._values["step"][:surplus]:
                self.paces.pop(int(step), None)
            for name, values in self._values.items():
                del values[:surplus], self._known[name][:surplus]
            self._count, self.dropped = LONGEST, self.dropped + surplus
