"""What was in no state_dict when a run was saved, beside what its program has made now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ...events import Progress
from .attributes import Part, encoded, holder_of, parts
from .program import program, program_changes
from .values import MISSING, equal, show

if TYPE_CHECKING:
    from ..context import RunContext

MOST: Final = 5  # attributes that a note names


@dataclass(slots=True)
class Unseen:
    """What no state_dict holds of a run, since it began or was resumed.

    Attributes:
        began: the attributes as they were then.
        changed: those that had changed before, in the runs that this one resumes.
    """

    began: dict[str, dict[str, Any]]
    changed: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, run: RunContext) -> Unseen:
        """Look at a run that begins."""
        return cls(encoded(parts(run)))

    def state_dict(self, run: RunContext) -> dict[str, Any]:
        """Return the attributes as they are, which of them the training has changed, and the program."""
        now = encoded(parts(run))
        for where in now.keys() | self.began.keys():
            if not equal(self.began.get(where, MISSING), now.get(where, MISSING)):
                self.changed.add(where)
        for where, value in now.items():
            if "unseen" in value:
                run.data.doubt("not exact", f"{where} is in no state_dict, and {value['unseen']}")
        return {"attributes": now, "changed": sorted(self.changed), **program(run)}

    def resume(self, run: RunContext, saved: Mapping[str, Any], *, restores: bool, is_roll_back: bool) -> None:
        """Compare attributes with what was saved: restore what is plain, doubt the rest.

        What differs although no training ever changed it, somebody changed in the program: it stays as it is there.

        Args:
            run: the run, with its state loaded.
            saved: what `state_dict` returned.
            restores: whether to restore anything.
            is_roll_back: whether the program is the very one that wrote it.
        """
        self.changed |= set(saved["changed"])
        found, restored = parts(run), list[str]()
        for where, was, value in _differing(run, saved, found, encoded(found)):
            part = found.get(where)
            if part is not None and equal(was, encoded({where: part})[where]):  # restored with what it is held by
                continue
            if restores and (is_roll_back or where in self.changed) and _restore(run, where, was, part):
                restored.append(f"{where} = {show(was)}")
            elif where in self.changed:
                how = f"it was {show(was)}, and is {show(value)}: keep it in a state_dict"
                run.data.doubt("not exact", f"the training changed {where}, which no checkpoint restores: {how}")
            else:
                run.data.doubt("not exact", f"{where} was {show(was)} in the program, and is {show(value)}")
        if restored:
            more = f", and {len(restored) - MOST} more" * (len(restored) > MOST)
            run.note(f"restored what no state_dict holds: {', '.join(restored[:MOST])}{more}")
        run.restored += restored

    def settle(self, run: RunContext, saved: Mapping[str, Any], *, is_roll_back: bool) -> None:
        """Compare plugins and settings, now that every plugin has its state; the attributes change from here on."""
        if not is_roll_back:
            for level, change in program_changes(saved, program(run)):
                run.data.doubt(level, change)
        self.began = encoded(parts(run))


def _differing(
    run: RunContext, saved: Mapping[str, Any], found: Mapping[str, Part], now: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Return the attributes that differ: where, as they were, as they are."""
    same_engine = saved["settings"]["engine"] == type(run.engine).__name__
    differing = []
    for where in {**saved["attributes"], **now}:
        was, value = saved["attributes"].get(where, MISSING), now.get(where, MISSING)
        one_is_missing = MISSING in (was, value)
        if equal(was, value) or (one_is_missing and not same_engine):  # engines put attributes into modules
            continue
        if where in found and found[where].follows_epoch and _is_epoch(was, run.progress):
            continue
        differing.append((where, was, value))
    return differing


def _is_epoch(was: Mapping[str, Any], progress: Progress) -> bool:
    """Return whether an attribute was set by `set_epoch`, as it will be again before anything is read."""
    return type(was.get("value")) is int and was["value"] in (progress.epoch, progress.epoch - 1)


def _restore(run: RunContext, where: str, was: Mapping[str, Any], part: Part | None) -> bool:
    """Give an attribute of a module or the task its saved value; return whether that could be done."""
    if "value" not in was:
        return False
    if part is None:  # the training made it
        holder, name = holder_of(run, where)
        if holder is None:
            return False
        setattr(holder, name, was["value"])
        return True
    if part.set is None:
        return False
    part.restore(was["value"])
    return True
