"""`goto`: a recorded run, done again up to a step, and alive there."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from heliograph.spi import check_flag

from .change import Change, change_of
from .paused_run import PausedRun
from .program import Program
from .recorded import RecordedRun


def goto(
    run: str | Path,
    program: Program,
    *,
    step: int,
    change: Change | str | None = None,
    exact: bool = True,
    folder: str | Path | None = None,
) -> PausedRun:
    """Do a recorded run again, up to right before an optimizer step, and leave everything alive there.

    The newest checkpoint before that step is loaded, or the run begins at its start. From there on all that happens is
    compared with what was recorded, down to the last bit where `Recorder(digests=True)` recorded it. What people asked
    for from outside, with `Remote`, is requested again where they did, in their names. What the program's
    plugins write goes to a temporary folder; those that report elsewhere are left out, and so is `Preemption`. A plugin
    of your own without `rehearse(folder)` writes where it always does; `notes` names it.

        with h.goto("runs/x", "train:make_trainer", step=1200) as paused:
            print(paused.batch, paused.gradients["model.0.weight"].norm())
            paused.next_step()

    On several ranks every rank calls it, with the same arguments, and then the same methods.

    Args:
        run: its folder, or its recording.
        program: the function that made the trainer: returns it with the keywords of its `fit`, and takes nothing, or a
            folder to write to; or the name of that function, `module:function`.
        step: which optimizer step, from 1.
        change: of a run that is a fork, the function that changed it, or its name, `module:function`; called where the
            fork called it.
        exact: refuse a rerun that may differ or does differ; False goes there nevertheless.
        folder: where the temporary folder is made, if not where the system makes them. On several machines, all have to
            see it.

    Raises:
        NotExact: a resume of this program may differ, the rerun differs from the recording, or another function
            had changed the fork.
        ValueError: there is no such step, the program has no `Checkpoint`, the run has ended before, or is no fork
            that was changed although `change` is given.
        TypeError: the change is not a function.
        FileNotFoundError: there is no recording.
        UsageError: the program is not such a function, or there is no function of the name of the change.
    """
    check_flag("exact", exact)
    function, recorded = change_of("goto", change), RecordedRun(run)
    wanted = recorded.check_step(step, least=1)
    origin = recorded.origin(wanted - 1)
    changed = recorded.repeated_change(origin, function, exact=exact)
    paused = PausedRun(recorded, program, origin, folder, changed=changed, exact=exact)
    try:
        with recorded.naming_ranks() if exact else nullcontext():
            paused.go_to_step(wanted)
    except BaseException:  # whatever ended it, Ctrl-C included, no thread and no folder stays
        paused.close()
        raise
    return paused
