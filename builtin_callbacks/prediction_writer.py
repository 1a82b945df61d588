"""Files with the outputs of a prediction."""

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
    """Write the outputs of `predict_step` to files, separately on each rank.

    With `trainer.predict(..., gather=False)`, at most `batches` outputs are in memory at a time.
    `heliograph.read_predictions(folder)` returns all of them in the order of the data; `read_prediction_batches` yields
    them. Files are renamed to their final name when complete, and the index, which readers need, is written last. The
    files are written by `torch.save` and can be loaded with `weights_only=True`.

    Args:
        folder: the folder of the files; created if it does not exist. Files of a killed run are removed.
        batches: the number of batches in a file.
        overwrite: whether to remove complete predictions in the folder; otherwise they are an error.

    Raises:
        ValueError: `batches` is not an integer of at least 1; at the start of a prediction, the folder contains another
            one.
        TypeError: an argument has another type; in a prediction, the outputs have a type that cannot be loaded safely.
        OSError: a file cannot be written, for example because the disk is full.
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
        """Check and clear the folder."""
        if run.report.is_replay:
            raise NotRecorded("the outputs of a prediction")
        engine = run.engine
        if not self.overwrite:
            check_free(self.folder)
        engine.barrier()  # every rank has checked before one clears
        if engine.is_local_main:
            clear_folder(self.folder)
        token = engine.broadcast(uuid4().hex)  # after every folder was cleared
        self._writer, self._counts = PartWriter(self.folder, token, engine.rank, self.batches), Counter()

    @on(PredictBatchEnd, lane=Lane.PERSIST)
    def take(self, run: Run, event: PredictBatchEnd) -> None:
        """Write the outputs of a batch."""
        if self._writer is None:  # enabled during the prediction
            return
        number = self._counts[event.dataset] * run.engine.world_size + run.engine.rank
        self._counts[event.dataset] += 1
        self._writer.add(event.dataset, number, run.outputs)

    @on(PredictEnd, lane=Lane.PERSIST)
    def finish(self, run: Run, event: PredictEnd) -> None:
        """Write the remaining outputs and the index."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        writer.finish(run.engine)
        run.note(f"the predictions are in {self.folder}")

    @on(ValidationCut, RunFailed, lane=Lane.PERSIST)
    def leave(self, run: Run, event: ValidationCut | RunFailed) -> None:
        """Warn that the predictions are incomplete."""
        if self._writer is not None:
            run.warn(f"The predictions in {self.folder} are not complete, so they cannot be read: predict again.")
        self._writer = None

    def close(self) -> None:
        self._writer = None
