"""The open block: the batches since the last line of batches. They are written to the tail one by one."""

from __future__ import annotations

from time import monotonic

from heliograph import Run

from .format.tail import BEGIN, LONGEST, Tail

NEVER = -1  # no sum of counters


class OpenBlock:
    """Add batches to a tail, and set the run's clock, which advances only at batches and events.

    A batch is regular if it is one more batch and step than the previous batch, with the same number of samples. The
    handler of `BatchEnd` compares and writes attributes directly, because a method call is too slow there.

    Attributes:
        at: the offset of the next batch's mark in `buffer`, 0 if no block is open.
        stop: the offset at which a batch needs more work than `add`.
        due: the monotonic time at which the clock has to be set again.
        batch, steps, samples: the values of `Progress` at a regular batch, minus `at` (or `at` times `size`, for
            samples).
        constant: the sum of the counters that a regular batch does not change; none of them ever decreases.
        size: the samples of a regular batch.
        buffer: the tail's content.
        progress: the run's progress.
        hundredths: the run's clock, in hundredths of a second.
        offset: the run's clock minus the monotonic clock.
        is_single: whether there is one rank; several ranks agree on the time.
    """

    def __init__(self, run: Run) -> None:
        # The attributes that are read for every batch come first, so that they are close together in memory.
        self.at = self.stop = 0
        self.due = 0.0
        self.batch = self.steps = self.samples = self.size = 0
        self.constant = NEVER
        self.tail = Tail(None)
        self.buffer = self.tail.buffer
        self.progress = run.progress
        self.offset = self.progress.own_seconds - monotonic()
        self.hundredths = self._last_hundredths = 0  # now, and at the last batch
        self.is_single = run.engine.world_size == 1
        self._has_one_window = len(run.optimizers) == 1

    def begin(self, tail: Tail, samples: int) -> None:
        self.size, self.samples, self.constant, self.tail, self.buffer, self.at = (
            0, samples, NEVER, tail, tail.buffer, BEGIN,
        )  # fmt: skip

    @property
    def batches(self) -> int:
        return self.at - BEGIN if self.at else 0

    @property
    def last_batch(self) -> int:
        return self.batch + self.at - 1

    def add(self, run: Run) -> None:
        """Add the batch that has ended; the block has it even if OSError is raised because of the file."""
        at, progress = self.at, self.progress
        self.set_clock()
        passed = self.hundredths - self._last_hundredths
        batch, steps, samples, size, constant = self.batch, self.steps, self.samples, self.size, self.constant
        counters = progress.skipped_steps + progress.skipped_batches + progress.tokens
        if (
            progress.batch - at == batch
            and progress.steps - at == steps
            and progress.samples - at * size == samples
            and counters == constant
            and 0 <= passed <= LONGEST
        ):
            self.tail.add_mark(at, passed)
        else:
            window = run.stepping.window
            size = max(0, progress.samples - (at - 1) * size - samples)
            batch, steps, samples = progress.batch - at, progress.steps - at, progress.samples - at * size
            # A regular batch ends a window, and has no other windows.
            constant = NEVER if window or not self._has_one_window else counters
            self.tail.add_row(
                at, self.hundredths, progress.steps, progress.skipped_steps, progress.skipped_batches, progress.samples,
                window, progress.tokens, progress.batch, size,
            )  # fmt: skip
        # One assignment at the end, so that a Ctrl-C leaves a block either with or without the batch.
        self.batch, self.steps, self.samples, self.size, self.constant, self._last_hundredths, self.at = (
            batch, steps, samples, size, constant, self.hundredths, at + 1,
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
