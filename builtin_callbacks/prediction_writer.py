"""Write the outputs of a prediction to disk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from uuid import uuid4

from ..core.outputs.files import PartWriter, check_free, clear_folder
from ..core.system.errors import NotRecorded
from ..events import Lane, PredictBatchEnd, PredictEnd, PredictStart, Run, RunFailed, ValidationCut
from ..events.checks import check_flag, check_path, check_whole_number
from ..plugins import Plugin, on


class PredictionWriter(Plugin):
    """Write what `predict_step` returns to files, each rank its own.

    With `trainer.predict(..., gather=False)` no more than `batches` of them are in memory at a time.
    `heliograph.read_predictions(folder)` returns all of them in the order of the data, `read_prediction_batches` yields
    them. A file gets its name when all of it is on the disk, and the index, without which nothing is read, when all
    files have theirs. The files are of `torch.save`, and are read with `weights_only=True`.

    Args:
        folder: where to write; made where it is missing. What a killed run has left there is removed.
        batches: how many there are in a file.
        overwrite: whether complete predictions that are in the folder are removed; else they are an error.

    Raises:
        ValueError: `batches` is not a whole number of at least 1; at the start of a prediction, the folder holds
            another one.
        TypeError: an argument has another type; in a prediction, the outputs are of one that cannot be read safely.
        OSError: the disk is full, say.
    """

    affects_training = False
    draws = False
    exclusive = ("predictions",)

    def __init__(self, folder: str | Path, *, batches: int = 16, overwrite: bool = False) -> None:
        check_path("PredictionWriter(folder)", folder, "a folder")
        check_flag("overwrite", overwrite)
        self.folder, self.overwrite = Path(folder), overwrite
        self.batches = check_whole_number("batches", batches, of="batches in a file", at_least=1)
        self._writer: PartWriter | None = None
        self._counts: Counter[str] = Counter()

    @on(PredictStart, lane=Lane.PERSIST)
    def begin(self, run: Run, event: PredictStart) -> None:
        """Prepare the folder."""
        if run.report.is_replay:
            raise NotRecorded("the outputs of a prediction")
        engine = run.engine
        if not self.overwrite:
            check_free(self.folder)
        engine.barrier()  # all have looked
        if engine.is_local_main:
            clear_folder(self.folder)
        token = engine.broadcast(uuid4().hex)  # when it is empty everywhere
        self._writer, self._counts = PartWriter(self.folder, token, engine.rank, self.batches), Counter()

    @on(PredictBatchEnd, lane=Lane.PERSIST)
    def take(self, run: Run, event: PredictBatchEnd) -> None:
        """Take the outputs of a batch, of those that are dealt out to the ranks in turn."""
        if self._writer is None:  # it was switched on in the middle
            return
        number = self._counts[event.dataset] * run.engine.world_size + run.engine.rank
        self._counts[event.dataset] += 1
        self._writer.add(event.dataset, number, run.outputs)

    @on(PredictEnd, lane=Lane.PERSIST)
    def finish(self, run: Run, event: PredictEnd) -> None:
        """Write the rest, and the index."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        writer.finish(run.engine)
        run.note(f"the predictions are in {self.folder}")

    @on(ValidationCut, RunFailed, lane=Lane.PERSIST)
    def leave(self, run: Run, event: ValidationCut | RunFailed) -> None:
        """Leave what is written without an index."""
        if self._writer is not None:
            run.warn(f"The predictions in {self.folder} are not complete, so they cannot be read: predict again.")
        self._writer = None

    def close(self) -> None:
        self._writer = None
