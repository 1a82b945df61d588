"""What was in no state_dict when a run was saved, beside what its program has made now."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ....events import Run
from .attributes import CLASS, MISSING, Part, encoded, equal, holder_of, parts, show, shown_apart, storages
from .listeners import listeners, listening_changes
from .variables import numbers, options_of, overridden, program, program_changes

logger = logging.getLogger("heliograph")
MOST: Final = 5  # attributes that a note names
MEND: Final = "name it in the class's resume_ignores, if no bit of the training depends on it"
OBSERVE: Final = "or let an observer count it, if no bit of the training depends on it"
Change = tuple[str, Mapping[str, Any], Mapping[str, Any]]


@dataclass(slots=True)
class Unseen:
    """What no state_dict holds of a run, since it began or was resumed.

    Attributes:
        began: the attributes as they were then.
        options: of the optimizers and schedulers, as the program made them.
        changed: those that had changed before, in the runs that this one resumes.
        cut: what was saved, until it has been seen what listens now.
        suspected: what did not listen as it had, before an epoch began; None where it had begun.
    """

    began: dict[str, dict[str, Any]]
    options: dict[str, dict[str, Any]]
    changed: set[str] = field(default_factory=set)
    cut: Mapping[str, Any] | None = None
    suspected: list[str] | None = None

    @classmethod
    def of(cls, run: Run) -> Unseen:
        """Look at a run that begins."""
        return cls(_looked_at(run), options_of(run))

    def state_dict(self, run: Run) -> dict[str, Any]:
        """Return the attributes as they are, which of them the training has changed, and the program."""
        attributes, counted = encoded(parts(run)), numbers(run)
        now = attributes | counted
        for where in now.keys() | self.began.keys():
            if not equal(self.began.get(where, MISSING), now.get(where, MISSING)):
                self.changed.add(where)
        for where, value in attributes.items():
            if "unseen" in value:
                run.data.doubt("not exact", f"{where} is in no state_dict, and {value['unseen']}")
        kept = {where: counted[where] for where in counted.keys() & self.changed}
        return {
            "attributes": attributes,
            "numbers": kept,
            "changed": sorted(self.changed),
            "options": self.options,
            "listening": listeners(run),
            **program(run),
        }

    def resume(self, run: Run, saved: Mapping[str, Any], *, restores: bool, is_roll_back: bool) -> list[str]:
        """Compare attributes with what was saved: restore what is plain and return it, doubt the rest.

        What differs although no training ever changed it, somebody changed in the program: it stays as it is there.

        Args:
            run: the run, with its state loaded.
            saved: what `state_dict` returned.
            restores: whether to restore anything.
            is_roll_back: whether the program is the very one that wrote it.
        """
        self.changed |= set(saved["changed"])
        restored = list[str]()
        found, before = parts(run), saved["attributes"]
        weights = storages(run)
        same_engine = saved["settings"]["engine"] == type(run.engine).__name__
        for where, was, value in _differing(before, found, same_engine=same_engine):
            part = found.get(where)
            if part is not None and equal(was, encoded({where: part})[where]):  # restored with what it is held by
                continue
            if restores and (is_roll_back or where in self.changed) and _restore(run, where, was, part, weights):
                restored.append(f"{where} = {show(was)}")
            else:
                run.data.doubt("not exact", self._difference(where, was, value, part))
        if restored:
            more = f", and {len(restored) - MOST} more" * (len(restored) > MOST)
            run.note(f"restored what no state_dict holds: {', '.join(restored[:MOST])}{more}")
        if not is_roll_back:
            self._doubt_numbers(run, saved.get("numbers", {}))
        return restored

    def _doubt_numbers(self, run: Run, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Doubt the numbers beside objects that the training had changed, and that are other ones now."""
        now = numbers(run)
        for where, was in saved.items():
            if not equal(was, value := now.get(where, MISSING)):
                how = f"it was {show(was)}, and is {show(value)}: keep it in a state_dict, {OBSERVE}"
                run.data.doubt("not exact", f"the training changed {where}, which no checkpoint restores: {how}")

    def _difference(self, where: str, was: Mapping[str, Any], value: Mapping[str, Any], part: Part | None) -> str:
        """Return in words what of an attribute differs, and how to mend it."""
        before, now = shown_apart(was, value)
        mend = MEND if part is not None and part.is_users else ""
        if where not in self.changed:
            return f"{where} was {before} in the program, and is {now}{mend and ': '}{mend}"
        how = f"it was {before}, and is {now}: keep it in a state_dict{mend and ', or '}{mend}"
        return f"the training changed {where}, which no checkpoint restores: {how}"

    def settle(self, run: Run, saved: Mapping[str, Any], *, is_roll_back: bool) -> None:
        """Compare plugins and settings, now that every plugin has its state; the attributes change from here on."""
        if not is_roll_back:
            for level, change in program_changes(saved, program(run)):
                run.data.doubt(level, change)
            for change in sorted(overridden(saved.get("options", {}), self.options)):
                run.note(change)
                logger.warning(change)
        self.began, self.cut = _looked_at(run), saved
        self.suspected = None if run.epoch_begun else _listening_changes(run, saved)

    def compare_listeners(self, run: Run) -> None:
        """Compare what listens with what did, now that plugins have connected what they connect when an epoch begins.

        Where the epoch had not begun when the state was saved, only what differed before counts, too: some plugins
        remove it when the epoch ends, some do not.
        """
        if self.cut is None:
            return
        cut, self.cut = self.cut, None
        for change in _listening_changes(run, cut):
            if self.suspected is None or change in self.suspected:
                run.data.doubt("not exact", change)


def _listening_changes(run: Run, saved: Mapping[str, Any]) -> list[str]:
    if "listening" not in saved:
        return []
    return list(listening_changes(saved["listening"], listeners(run), saved["plugins"], program(run)["plugins"]))


def _looked_at(run: Run) -> dict[str, dict[str, Any]]:
    return encoded(parts(run)) | numbers(run)


def _differing(
    before: Mapping[str, Mapping[str, Any]], found: Mapping[str, Part], *, same_engine: bool
) -> list[Change]:
    """Return the attributes that differ: where, as they were, as they are."""
    differing, after = list[Change](), encoded(found)
    for where in {**before, **after}:
        was, value = before.get(where, MISSING), after.get(where, MISSING)
        is_engines = MISSING in (was, value) or where.endswith(CLASS)  # engines put attributes and classes into modules
        if equal(was, value) or (is_engines and not same_engine):
            continue
        if where in found and found[where].follows_epoch:
            continue
        differing.append((where, was, value))
    return differing


def _restore(run: Run, where: str, was: Mapping[str, Any], part: Part | None, weights: Collection[int]) -> bool:
    """Give an attribute of a module or the task its saved value; return whether that could be done."""
    if "value" not in was:
        return False
    if part is None:  # the training made it
        holder, name = holder_of(run, where)
        if holder is None:
            return False
        setattr(holder, name, was["value"])
        return True
    if part.holder is None:
        return False
    part.restore(was["value"], weights)
    return True
