"""State that no `state_dict` holds, compared with what it was when the run was saved."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from ....events import Run
from .attributes import CLASS, Attribute, encode_attributes, find_attributes, find_holder, state_dict_storages
from .listeners import Chains, compare_listeners, connections, describe_listeners, find_numbers
from .program import compare_programs, describe_program, encode_options, encode_scheduler_options, list_overridden
from .values import MISSING, Value, differing, equal, show, show_both

logger = logging.getLogger("heliograph")
MAX_NAMES: Final = 5  # attributes that a note lists
MEND: Final = "name it in the class's resume_ignores, if no bit of the training depends on it"
MEND_PLUGIN: Final = f"{MEND}, or set affects_training = False on a plugin that only looks"
OBSERVE: Final = "or let an observer count it, if no bit of the training depends on it"


@dataclass(slots=True)
class UnseenState:
    """The state of a run that no `state_dict` holds.

    Attributes:
        at_start: the attributes and numbers when the run started or was resumed.
        options: of the optimizers and schedulers, as the program made them.
        changed: the attributes that the training has changed, in the runs that this one resumes too.
        saved: the saved state, until its listeners are compared.
        early_changes: the listeners that differed before the epoch began; None if it had begun.
        heavy: what is noted to take long at each save.
        without_users: the listeners of events none of which is the user's, as they were at the last save.
    """

    at_start: dict[str, dict[str, Any]]
    options: dict[str, dict[str, Any]]
    changed: set[str] = field(default_factory=set)
    saved: Mapping[str, Any] | None = None
    early_changes: list[str] | None = None
    heavy: set[str] = field(default_factory=set)
    without_users: Chains = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> UnseenState:
        """Return the state of a run that starts."""
        return cls(_encode_all(run), encode_options(run))

    def state_dict(self, run: Run) -> dict[str, Any]:
        """Return the attributes, which of them the training has changed, the listeners and the program."""
        connected, note = connections(run, self.without_users), partial(self._note_heavy, run)
        attributes = encode_attributes(find_attributes(run), partial(note, MEND))
        counted = find_numbers(run, connected)
        self.changed.update(where for where, *_ in differing(self.at_start, attributes | counted))
        for where, value in attributes.items():
            if "unseen" in value:
                run.data.doubt("not exact", f"{where} is in no state_dict, and {value['unseen']}")
        kept = {where: counted[where] for where in counted.keys() & self.changed}
        return {
            "attributes": attributes,
            "numbers": kept,
            "changed": sorted(self.changed),
            "options": self.options,
            "listening": describe_listeners(run, connected),
            **describe_program(run, partial(note, MEND_PLUGIN)),
        }

    def update_schedulers(self, run: Run) -> None:
        """Take the options of schedulers that were made again."""
        self.options |= encode_scheduler_options(run)

    def _note_heavy(self, run: Run, mend: str, where: str, value: Value, weight: int) -> None:
        """Say once that an attribute is so large that looking at it makes every save longer."""
        if where in self.heavy:
            return
        self.heavy.add(where)
        looks = f"{where}, to compare it at a resume"
        if "unseen" in value:
            looks = f"much of {where}, and a resume cannot compare it, as {value['unseen']}"
        run.note(f"every save looks at {looks}; that takes about {weight / 1000:.0f} ms: {mend}")

    def resume(self, run: Run, saved: Mapping[str, Any], *, restores: bool, is_roll_back: bool) -> list[str]:
        """Compare the attributes with the saved ones: restore those that can be, report the others as doubts.

        An attribute that differs though the training never changed it was changed in the program, and is kept.

        Args:
            run: the run, with its state loaded.
            saved: what `state_dict` returned.
            restores: whether to restore anything.
            is_roll_back: whether the same process wrote the state.

        Returns:
            A text for each restored attribute.
        """
        self.changed |= set(saved["changed"])
        restored = list[str]()
        found, before = find_attributes(run), saved["attributes"]
        weights = state_dict_storages(run)
        same_engine = saved["settings"]["engine"] == type(run.engine).__name__
        for where, was, value in list(_differing_attributes(before, found, same_engine=same_engine)):
            attribute = found.get(where)
            if attribute is not None and equal(was, encode_attributes({where: attribute})[where]):
                continue  # restored together with the object that holds it
            if restores and (is_roll_back or where in self.changed) and _restore(run, where, was, attribute, weights):
                restored.append(f"{where} = {show(was)}")
            else:
                run.data.doubt("not exact", self._describe_difference(where, was, value, attribute))
        if restored:
            more = f", and {len(restored) - MAX_NAMES} more" * (len(restored) > MAX_NAMES)
            run.note(f"restored what no state_dict holds: {', '.join(restored[:MAX_NAMES])}{more}")
        if not is_roll_back:
            self._doubt_numbers(run, saved["numbers"])
        return restored

    def _doubt_numbers(self, run: Run, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Report numbers outside of objects that the training had changed and that differ now."""
        now = find_numbers(run)
        for where, was, value in differing(saved, {where: now[where] for where in saved.keys() & now.keys()}):
            how = f"it was {show(was)}, and is {show(value)}: keep it in a state_dict, {OBSERVE}"
            run.data.doubt("not exact", f"the training changed {where}, which no checkpoint restores: {how}")

    def _describe_difference(self, where: str, was: Value, value: Value, attribute: Attribute | None) -> str:
        """Return how an attribute differs, and how to mend it."""
        before, now = show_both(was, value)
        mend = MEND if attribute is not None and attribute.is_users else ""
        if where not in self.changed:
            return f"{where} was {before} in the program, and is {now}{mend and ': '}{mend}"
        how = f"it was {before}, and is {now}: keep it in a state_dict{mend and ', or '}{mend}"
        return f"the training changed {where}, which no checkpoint restores: {how}"

    def compare(self, run: Run, saved: Mapping[str, Any], *, is_roll_back: bool) -> None:
        """Compare plugins and settings once every plugin has its state; attributes that change later are changes."""
        if not is_roll_back:
            for level, change in compare_programs(saved, describe_program(run)):
                run.data.doubt(level, change)
            for change in sorted(list_overridden(saved["options"], self.options, encode_options(run))):
                run.note(change)
                logger.warning(change)
        self.at_start, self.saved = _encode_all(run), saved
        self.early_changes = None if run.epoch_begun else _listener_changes(run, saved)

    def compare_listeners(self, run: Run) -> None:
        """Compare the listeners with the saved ones, after plugins have connected theirs at the start of an epoch.

        If the epoch had not begun when the state was saved, only what also differed before its start counts: some
        plugins disconnect listeners when an epoch ends, some do not.
        """
        if self.saved is None:
            return
        saved, self.saved = self.saved, None
        for change in _listener_changes(run, saved):
            if self.early_changes is None or change in self.early_changes:
                run.data.doubt("not exact", change)


def _listener_changes(run: Run, saved: Mapping[str, Any]) -> list[str]:
    plugins = describe_program(run)["plugins"]
    return list(compare_listeners(saved["listening"], describe_listeners(run), saved["plugins"], plugins))


def _encode_all(run: Run) -> dict[str, dict[str, Any]]:
    return encode_attributes(find_attributes(run)) | find_numbers(run)


def _differing_attributes(
    before: Mapping[str, Value], found: Mapping[str, Attribute], *, same_engine: bool
) -> Iterator[tuple[str, Value, Value]]:
    """Yield the attributes that differ: where, the former and the present value."""
    for where, was, value in differing(before, encode_attributes(found)):
        is_engines = MISSING in (was, value) or where.endswith(CLASS)  # engines put attributes and classes into modules
        if (same_engine or not is_engines) and not (where in found and found[where].follows_epoch):
            yield where, was, value


def _restore(run: Run, where: str, was: Value, attribute: Attribute | None, weights: Collection[int]) -> bool:
    """Set an attribute of a module or the task to its saved value; return whether that was possible."""
    if "value" not in was:
        return False
    if attribute is None:  # the training made it
        holder, name = find_holder(run, where)
        if holder is None:
            return False
        setattr(holder, name, was["value"])
        return True
    if attribute.holder is None:
        return False
    attribute.restore(was["value"], weights)
    return True
