"""Every row of the bench: where it is measured, and its bar. A row of another module is a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from heliograph.packages.tests.benchmarks import (
    agreement,
    bridges,
    comparison,
    dispatch,
    evaluation,
    figures,
    gpu,
    hosted,
    imports,
    lean,
    recording,
    resume,
    saves,
    trackers,
    usual,
    watching,
)
from heliograph.packages.tests.benchmarks.figures import Figure
from heliograph.packages.tests.benchmarks.harness import Seconds, differences

Worker = Callable[[int], Any]  # measures in a fresh process, with a seed for the order of the turns
FAR = "a resume during an epoch of 10^9 samples, beyond a fresh start"
BESIDE_MANY = "a start beside 10,000 checkpoints, beyond an empty folder"
DIGESTS = f"{recording.DIGESTS}, beyond {recording.RECORDER}"
WITH_RECORDER = "the usual set with a Recorder, beyond it without"
RESUMED_OF_MANY = "a resume beside 10,000 checkpoints, beyond an empty folder"
PROCESSES, FEWER = 5, 3  # fewer where there is much to start


class Row(NamedTuple):
    """A figure: its name, the function that measures, what of its result is the figure, and the bar."""

    name: str
    worker: Worker
    figure: Figure
    bar: float | None = None
    digits: int = 2


class Table(NamedTuple):
    """Some rows that are printed under one title."""

    name: str  # of `--only`
    title: str
    note: str
    rows: tuple[Row, ...]
    processes: int = PROCESSES
    absent: Callable[[], str] = str  # why it cannot be measured here, if so


def rows(
    worker: Worker,
    figure: Callable[..., Figure],
    bars: Mapping[str, float | None],
    base: str | None = None,
    digits: int = 2,
) -> tuple[Row, ...]:
    """Return a row for each name of what a worker measures, with its bar; beyond that of a base, if one is given."""
    bases = () if base is None else (base,)
    return tuple(Row(name, worker, figure(name, *bases), bar, digits) for name, bar in bars.items())


def rows_from_base(
    worker: Worker,
    base: str,
    figure: Callable[..., Figure],
    names: Iterable[str],
    beyond: Callable[..., Figure],
    digits: int = 2,
) -> tuple[Row, ...]:
    """Return a row for a base, and one for each of these names, beyond it; without bars."""
    first = rows(worker, figure, {base: None}, digits=digits)
    return (*first, *rows(worker, beyond, dict.fromkeys(names), base, digits))


def usual_rows(name: str) -> tuple[Row, Row]:
    """Return the parts of a row of the usual set."""
    worker = usual.race_usual
    return (
        Row(f"{name}: steps between the saves", worker, figures.of(0, figures.between_saves(name))),
        Row(f"{name}: validation and save, ms each", worker, figures.of(0, figures.at_save(name)), None, 3),
    )


def hosted_rows(loop: str, worker: Worker) -> tuple[Row, ...]:
    """Return what our plugins take in a loop of others."""
    kinds = hosted.NOTHING, hosted.PREEMPTION, hosted.THREE
    each = rows_from_base(worker, hosted.IDLE, figures.tenth, kinds, figures.tenth, digits=1)
    return tuple(
        row._replace(name=f"{loop}, {row.name}" + (", beyond it" if index else "")) for index, row in enumerate(each)
    )


def probe(spent: Mapping[str, list[float]]) -> float:
    """Return the milliseconds that a start with the probe takes longer, beyond those of the batch that it loads."""
    return figures.beyond(comparison.PROBED, comparison.UNPROBED)(spent) - median(spent[comparison.BATCH])  # type: ignore[operator]


def further_handler(spent: Mapping[str, float]) -> float:
    """Return the nanoseconds of one handler more."""
    return (spent[f"{dispatch.EMIT} 20"] - spent[f"{dispatch.EMIT} 1"]) / 19


def further_handler_of_a_loop(seconds: Seconds) -> float:
    """Return the microseconds of one handler more."""
    return median(differences(seconds, lean.MANY, lean.ONE)) / 20


def no_gpu() -> str:
    """Return why the GPU cannot be measured, if so."""
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


TABLES = (
    Table(
        "usual",
        "The usual set: bar, log every 50 steps, TensorBoard, early stopping, validation and save every 1,000",
        "µs per step beyond the hand-written loop with the same features; all sync file and folder at a save",
        tuple(row for name in (lean.CONTROL, usual.OURS, usual.IGNITE) for row in usual_rows(name)),
    ),
    Table(
        "recorder",
        "Recorder, rules, Remote and Verdicts",
        "µs per step beyond the same loop without them",
        (
            *rows(recording.race_recorder, figures.step_beyond, {recording.NOBODY_AGAIN: None}, recording.NOBODY),
            *rows(recording.race_recorder, figures.step_beyond, {recording.RECORDER: 2.0}, recording.NOBODY),
            *rows(recording.race_recorder, figures.step_beyond, {recording.LOSSES: None}, recording.NOBODY),
            Row(DIGESTS, recording.race_recorder, figures.step_beyond(recording.DIGESTS, recording.RECORDER), 50.0),
            *rows(recording.race_recorder, figures.step_beyond, {recording.REMOTE: 1.0}, recording.NOBODY),
            *rows(recording.race_recorder, figures.step_beyond, {recording.VERDICTS: None}, recording.NOBODY),
            *rows(recording.race_recorder, figures.step_beyond, {recording.VERDICTS_READ: 2.0}, recording.LOGS_READ),
            *rows(recording.race_recorder, figures.step_beyond, {recording.STEP_RULE: None}, recording.NOBODY),
            *rows(recording.race_recorder, figures.step_beyond, {recording.LOG_RULE: None}, recording.LOGGED),
            Row(WITH_RECORDER, usual.race_usual, figures.of(0, figures.whole_beyond(usual.RECORDED, usual.OURS)), 2.0),
            Row("Recorder: a log more, µs each", recording.race_recorded_logs, recording.per_log, 25.0, 1),
        ),
        FEWER,
    ),
    Table(
        "resumable",
        "Resumable: RNGCapture, Checkpoint and SaveSchedule over prebuilt batches",
        "µs per step beyond 1 handler of BatchEnd",
        (
            *rows(resume.per_step, figures.beyond, {resume.AGAIN: None}, resume.LISTENED),
            *rows(resume.per_step, figures.beyond, {resume.KEPT: 1.0, resume.RESUMABLE: 1.0}, resume.LISTENED),
            Row(resume.COMPARABLE, resume.per_step, figures.beyond(resume.RESUMABLE, resume.UNCOMPARED), 0.2),
            *rows(comparison.per_batch, figures.typical, {comparison.ROW_OF_BATCH: 0.2}),
        ),
    ),
    Table(
        "loading",
        "Loading: batches of 8, of tensors, and of what draws from python, NumPy and torch",
        "µs per batch; read by a run, beyond torch's own",
        (
            *rows(resume.per_batch, figures.typical, {f"{resume.PLAIN}, 0 workers": None}),
            *rows(resume.per_batch, figures.typical, {f"{resume.PLAIN}, 2 workers": None}),
            *rows(resume.per_batch, figures.beyond, {f"{resume.KEYED}, 0 workers": 1.5}, f"{resume.PLAIN}, 0 workers"),
            *rows(resume.per_batch, figures.beyond, {f"{resume.KEYED}, 2 workers": None}, f"{resume.PLAIN}, 2 workers"),
            *rows(
                resume.per_batch,
                figures.beyond,
                {f"{resume.KEYED_DRAWING}, 0 workers": 8.0},
                f"{resume.DRAWING}, 0 workers",
            ),
            *rows(
                resume.per_batch,
                figures.beyond,
                {f"{resume.KEYED_DRAWING}, 2 workers": None},
                f"{resume.DRAWING}, 2 workers",
            ),
        ),
    ),
    Table(
        "small saves",
        "A save of a small model, beside one by hand that syncs file and folder",
        "ms; then as a multiple of the one by hand",
        (
            *rows(saves.small, figures.typical, dict.fromkeys((saves.SYNCED, saves.USUAL, saves.EXACT))),
            *rows(saves.small, figures.typical, {saves.BACKGROUND: None}),
            Row(f"{saves.USUAL}, of that by hand", saves.small, figures.multiple(saves.USUAL, saves.SYNCED), 1.5),
            Row(f"{saves.EXACT}, of that by hand", saves.small, figures.multiple(saves.EXACT, saves.SYNCED), 1.5),
        ),
        FEWER,
    ),
    Table(
        "validation",
        "Validation: 1,000 tiny batches",
        "µs of processor time per batch beyond a hand-written validation",
        (
            *rows(evaluation.per_batch, figures.beyond, {lean.CONTROL: None}, lean.HAND),
            *rows(evaluation.per_batch, figures.beyond, {lean.SUPERVISED: 2.0}, lean.HAND),
            *rows(evaluation.per_batch, figures.beyond, {lean.OWN_TASK: 2.0}, lean.HAND),
            *rows(evaluation.per_loaded_batch, figures.beyond, {evaluation.KEYED: None}, lean.HAND),
        ),
    ),
    Table(
        "saves",
        "A background save of 400 MB",
        "ms that the loop waits; then as a multiple of the copy in the same run",
        (
            *rows(saves.stalls, figures.typical, {saves.COPY: None, saves.SAVE: None}, digits=1),
            *rows(saves.stalls, figures.typical, {saves.FIRST: None, saves.LATER: None}, digits=1),
            Row(f"{saves.FIRST}, of the copy", saves.stalls, figures.multiple(saves.FIRST, saves.COPY), 1.3),
            Row(f"{saves.LATER}, of the copy", saves.stalls, figures.multiple(saves.LATER, saves.COPY), 1.3),
        ),
    ),
    Table(
        "compared",
        "Comparing a resumed run with the killed run",
        "ms",
        (
            *rows(comparison.at_save, figures.typical, {comparison.ATTRIBUTES: None}),
            Row("the probe, beyond one batch", comparison.starts, probe, 50.0),
        ),
        FEWER,
    ),
    Table(
        "start",
        "Start, and a resume",
        "ms; the imports in processor time beyond that of `import torch`, the first steps by the clock from there",
        (
            *rows(imports.starts, figures.middle_half, {imports.PACKAGE: 50.0, imports.TRAINER: 50.0}, digits=1),
            *rows(imports.starts, figures.middle_half, {imports.HAND_STEP: None, imports.FIT_STEP: None}, digits=1),
            *rows(imports.starts, figures.middle_half, {imports.MORE: 300.0}, digits=1),
            *rows(imports.starts_and_ends, figures.middle_half, dict.fromkeys(imports.STARTS, 300.0), digits=1),
            *rows(imports.starts_and_ends, figures.middle_half, dict.fromkeys(imports.ENDS), digits=1),
            Row(FAR, resume.far_resume, figures.beyond(resume.DURING, resume.FRESH), 50.0, 1),
            Row(BESIDE_MANY, comparison.folders, figures.beyond(comparison.FULL, comparison.EMPTY), 300.0, 1),
            Row(RESUMED_OF_MANY, comparison.folders, figures.beyond(comparison.AUTO, comparison.EMPTY), 300.0, 1),
        ),
        1,
    ),
    Table(
        "watch",
        "The page of a long recording",
        "ms of processor time",
        rows(watching.open_page, figures.typical, {watching.PAGE: 2_000.0}),
    ),
    Table(
        "ranks",
        "Agreement of two gloo ranks: the tiny model, batch 8 on each",
        "µs per step, medians; of all but the first row, what ten steps take beyond it, a step",
        rows_from_base(
            agreement.time_ranks,
            agreement.HAND,
            figures.each_step,
            agreement.VARIANTS[1:],
            figures.each_step_beyond,
            digits=0,
        ),
    ),
    Table(
        "dispatch",
        "Dispatch: handlers that do nothing",
        "ns per emission, the loop around it subtracted",
        (
            *rows(dispatch.time_dispatch, figures.value, {f"{dispatch.GUARD} 0": 10}, digits=0),
            Row("a further handler", dispatch.time_dispatch, further_handler, 100, 0),
            *rows(
                dispatch.time_dispatch,
                figures.value,
                dict.fromkeys(
                    f"{kind} {n}"
                    for kind in (dispatch.EMIT, dispatch.WAIT, dispatch.SEND, dispatch.PLAIN)
                    for n in (1, 20)
                ),
                digits=0,
            ),
        ),
    ),
    Table(
        "handlers",
        "The same in the training loop",
        "µs per step beyond the loop without handlers",
        (
            *rows(lean.race_handlers, figures.step_beyond, {lean.NOBODY_AGAIN: None, lean.ONE: None}, lean.NOBODY),
            *rows(lean.race_handlers, figures.step_beyond, {lean.MANY: None}, lean.NOBODY),
            Row("a further handler", lean.race_handlers, further_handler_of_a_loop, 0.1, 3),
        ),
    ),
    Table(
        "trackers",
        "Trackers: a log of three metrics every 50 steps",
        "µs of processor time per log, beyond the same loop without a tracker",
        tuple(
            Row(f"{name}: {about}", trackers.per_log, figures.of(kind, figures.apart(name, trackers.NONE)), bar, 0)
            for kind, about, bar in ((trackers.HANDLERS, "its handlers", 100), (trackers.OTHERS, "other threads", None))
            for name in trackers.MAKERS
            if name != trackers.NONE
        ),
    ),
    Table(
        "bridges",
        "An idle callback of another framework",
        "µs a call; of Lightning, µs of processor time a step, beyond the loop without it",
        (
            Row("Hugging Face, on_step_end: here", bridges.huggingface, figures.least(bridges.HERE)),
            Row("Hugging Face, on_step_end: in its handler", bridges.huggingface, figures.least(bridges.THERE)),
            Row("Ignite, ITERATION_COMPLETED: here", bridges.ignite, figures.least(bridges.HERE)),
            Row("Ignite, ITERATION_COMPLETED: in its engine", bridges.ignite, figures.least(bridges.THERE)),
            *rows(bridges.lightning, figures.least, dict.fromkeys(bridges.OF_OURS), bridges.OURS),
            *rows(bridges.lightning, figures.least, dict.fromkeys(bridges.OF_THEIRS), bridges.THEIRS),
        ),
        FEWER,
    ),
    Table(
        "hosted",
        "Our plugins in the loops of others",
        "µs of processor time of a step: of all, the one that is slower than a tenth",
        (
            *hosted_rows("Hugging Face", hosted.in_huggingface),
            *hosted_rows("Lightning", hosted.in_lightning),
            *hosted_rows("Ignite", hosted.in_ignite),
        ),
        FEWER,
    ),
    Table(
        "gpu",
        "A GPU: the lean loop, batches in pinned memory",
        "µs per step; of all but the first row, beyond it",
        (
            *rows(gpu.race_gpu, figures.step, {lean.HAND: None}),
            *rows(gpu.race_gpu, figures.step_beyond, {lean.CONTROL: None, lean.SUPERVISED: None}),
        ),
        absent=no_gpu,
    ),
)
