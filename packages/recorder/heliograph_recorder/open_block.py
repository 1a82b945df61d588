"""The open block: the batches since the last line of batches, each written to the tail as it ends."""

from __future__ import annotations

from time import monotonic

from heliograph import Run

from .format.tail import BEGIN, FIRST_ROW, LONGEST, Tail

NEVER = -1  # no sum of counters


class OpenBlock:
    """Adds batches to a tail, and keeps the run's clock, which advances only at batches and events.

    A batch is regular if it is one more batch and step than the one before, and as many samples as that was. The
    handler of `BatchEnd` compares and writes attributes directly, because calling a method takes too long there.

    Args:
        run: the run.

    Attributes:
        at: the offset of the next batch's mark in `buffer`, 0 if no block is open.
        stop: the offset from which on something is due besides adding the batch.
        due: the monotonic time at which the clock has to be set again.
        batch, steps, samples: what `Progress` has at a regular batch, minus `at` (or `at` times `size`, for samples).
        rest: the sum of the counters that a regular batch leaves as they are; none of them ever decreases.
        size: the samples of a regular batch.
        buffer: the tail's content.
        progress: of the run.
        hundredths: the run's clock, in hundredths of a second.
        offset: the run's clock minus the monotonic one.
        is_single: whether there is one rank; of several, all have agreed on the time.
    """

    def __init__(self, run: Run) -> None:
        # What is read for every batch comes first, so that it is close together in memory.
        self.at = self.stop = 0
        self.due = 0.0
        self.batch = self.steps = self.samples = self.size = 0
        self.rest = NEVER
        self.tail = Tail(None)
        self.buffer = self.tail.buffer
        self.progress = run.progress
        self.offset = self.progress.own_seconds - monotonic()
        self.hundredths = self._of_last = 0  # the latter at the last batch
        self.is_single = run.engine.world_size == 1
        self._has_one_window = len(run.optimizers) == 1

    def begin(self, tail: Tail, samples: int) -> None:
        self.size, self.samples, self.rest, self.tail, self.buffer, self.at = (
            0, samples, NEVER, tail, tail.buffer, BEGIN,
        )  # fmt: skip

    @property
    def batches(self) -> int:
        return self.at - BEGIN if self.at else 0

    @property
    def last_batch(self) -> int:
        return self.batch + self.at - 1

    @property
    def is_full(self) -> bool:
        return self.at == FIRST_ROW

    def add(self, run: Run) -> None:
        at, progress = self.at, self.progress
        self.set_clock()
        passed = self.hundredths - self._of_last
        batch, steps, samples, size, rest = self.batch, self.steps, self.samples, self.size, self.rest
        others = progress.skipped_steps + progress.skipped_batches + progress.tokens
        if (
            progress.batch - at == batch
            and progress.steps - at == steps
            and progress.samples - at * size == samples
            and others == rest
            and 0 <= passed <= LONGEST
        ):
            self.tail.add_mark(at, passed)
        else:
            window = run.stepping.window
            size = max(0, progress.samples - (at - 1) * size - samples)
            batch, steps, samples = progress.batch - at, progress.steps - at, progress.samples - at * size
            # Only a step of the only window leaves none.
            rest = NEVER if window or not self._has_one_window else others
            self.tail.add_row(
                at, self.hundredths, progress.steps, progress.skipped_steps, progress.skipped_batches, progress.samples,
                window, progress.tokens, progress.batch, size,
            )  # fmt: skip
        # At once and last, so that a Ctrl-C at any line leaves a block with or without the batch.
        self.batch, self.steps, self.samples, self.size, self.rest, self._of_last, self.at = (
            batch, steps, samples, size, rest, self.hundredths, at + 1,
        )  # fmt: skip
        self.tail.write_batch(at)

    # The clock.

    def set_clock(self) -> None:
        if self.is_single:
            self.hundredths = int((monotonic() + self.offset) * 100)
            self.due = (self.hundredths + 1) / 100 - self.offset
            self.progress.set_seconds(self.hundredths / 100)
        else:
            self.hundredths = int(round(self.progress.seconds * 100, 6))

    def release_clock(self) -> None:
        if self.is_single:
            self.progress.set_seconds(self.progress.own_seconds)
            self.progress.load_state_dict(self.progress.state_dict())
