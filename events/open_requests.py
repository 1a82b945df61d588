"""The open requests of a control as a whole: saved, loaded, replaced, taken back, dropped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from .progress import Skips

Control = Any  # naming its type here would close a circle of imports


def withdraw(control: Control, verb: str, known: Collection[str], reason: str, by: str | None) -> bool:
    """Take a request back; see `Control.withdraw`."""
    if verb not in known:
        raise ValueError(f"control.withdraw takes one of {', '.join(known)}; got {verb!r}.")
    rest = control.open_requests()
    if (found := rest.pop(verb, None)) is None or found.required:
        return False
    control.record(f"withdraw_{verb}", reason, by)
    control.adopt(rest, vetoed=control.vetoed)
    control.pending = True  # a boundary ends a veto
    return True


def adopt(control: Control, agreed: Mapping[str, Any], *, vetoed: bool) -> None:
    """Replace the requests of this rank; see `Control.adopt`."""
    mine, due = control.open_requests(), dict(agreed)
    for what in [what for what in due if what not in mine]:
        control.history.add(due[what])
    control.stop_request, control._vetoed = due.pop("stop", None), vetoed
    control._end_request, control._back_request = due.pop("end_epoch", None), due.pop("roll_back", None)
    control._due, control.pending = due, bool(agreed)


def discard(control: Control) -> None:
    """Drop the requests of an epoch; see `Control.discard_epoch`."""
    control.close_batch()
    control.close_epoch()
    control._due.clear()
    control._later.clear()
    control._postponed.clear()
    control._back_request, control.leaving, control._vetoed, control._save_veto = None, False, False, None
    control.pending = control.should_stop


def save(control: Control, changing: Collection[str], *, is_over: bool) -> dict[str, Any]:
    """Return what a checkpoint keeps; see `Control.state_dict`.

    Args:
        control: the control.
        changing: the verbs of changes of the run, whose requests are kept whole and in order.
        is_over: whether the training is over.
    """
    later = {**control._later, **control._due}
    changes = [each for each in later.values() if each.verb in changing]
    due = {what for what, each in later.items() if each.verb not in changing} | control._postponed
    state = {"due": sorted(due), "postponed": sorted(control._postponed), "end_epoch": control.should_end_epoch}
    has_skipped = control.skips.count and control.skips.step == control._progress.steps
    stop, veto = control.stop_request, control._save_veto
    if stop and (stop.required or control.stopped or (is_over and not stop.vetoed)):
        stop = None
    asked = [each for each in (*later.values(), control._end_request) if each is not None and each.verb not in changing]
    more = {
        "asked": {each.verb: [each.by, each.reason] for each in asked},
        "stop": stop and [stop.by, stop.reason, stop.rank, stop.vetoed],
        "veto_save": veto and [veto.by, veto.reason],
        "skips": [control.skips.count, control.skips.by_engine] if has_skipped else None,
        "changes": [[each.verb, each.target, each.value, each.by, each.reason] for each in changes],
        "switches": dict(control.switches),
    }
    return state | {name: value for name, value in more.items() if value}


def load(control: Control, state: Mapping[str, Any], make: Callable[..., Any], *, at_save_point: bool) -> None:
    """Add saved requests to those of a new run; see `Control.load_state_dict`.

    Args:
        control: the control.
        state: what was saved.
        make: makes a request of its fields.
        at_save_point: whether that was at the end of a boundary.
    """
    place = control._progress
    where = place.epoch, place.batch, place.steps
    for verb in (*state["due"], *(["end_epoch"] if state["end_epoch"] else [])):
        by, reason = state.get("asked", {}).get(verb, ("the checkpoint", "it was due there"))
        request = make(verb, by, reason, *where)
        if verb == "end_epoch":
            control._end_request = control._end_request or request
        else:
            is_later = at_save_point and verb not in state.get("postponed", ())
            (control._later if is_later else control._due).setdefault(verb, request)
    for verb, target, value, by, reason in state.get("changes", ()):
        request = make(verb, by, reason, *where, target=target, value=value)
        (control._later if at_save_point else control._due).setdefault(request.what, request)
    if "stop" in state and control.stop_request is None:
        by, reason, rank, vetoed = state["stop"]
        control.stop_request = make("stop", by, reason, *where, rank=rank, vetoed=vetoed or None)
    if "veto_save" in state and not at_save_point:
        control._save_veto = make("veto_save", *state["veto_save"], *where)
    control.skips = Skips(place.steps, *state.get("skips", ()))
    control.switches = dict(state.get("switches", {}))
    control.pending = bool(control.pending or control.open_requests())
