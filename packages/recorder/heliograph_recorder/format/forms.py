"""Checks of the values in a line, so that readers can rely on their types and ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from math import isfinite
from types import NoneType
from typing import Any, get_args

from heliograph.events import Phase, Status, Verb

Form = Callable[[Any], bool]
LIMIT = 2**52  # larger than any real counter or clock
COUNTER_TYPES = [*[int] * 9, float]
ALL_COUNTER_TYPES = COUNTER_TYPES, [*COUNTER_TYPES, int]
ASKED = [[str, str, str, int, int, int, int, rank, str] for rank in (int, NoneType)]
THROUGH: list[list[type]] = [[], [str]]  # the plugin that asked in another's name may follow
REQUESTS = [[*each, *through] for each in ASKED for through in THROUGH]
VALUES: Mapping[str, type] = {"set_learning_rate": float, "enable_plugin": NoneType, "disable_plugin": NoneType}
CHANGES = {
    verb: [[*each, str, value, *through] for each in ASKED for through in THROUGH] for verb, value in VALUES.items()
}
VERBS = frozenset(get_args(Verb))
COUNTERS = (
    "epoch", "batch", "earlier_batches", "steps", "skipped_steps", "skipped_batches", "samples", "validations",
    "evaluated",
)  # fmt: skip


def is_text(value: Any) -> bool:
    return type(value) is str


def is_flag(value: Any) -> bool:
    return type(value) is bool


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LIMIT


def is_time(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value) and -1.0 <= value < LIMIT


def is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**512)


def _is_length(value: Any) -> bool:
    return is_count(value) or (type(value) is float and 0 < value < LIMIT)


def is_counters(values: Any) -> bool:
    return (
        type(values) is list
        and list(map(type, values)) in ALL_COUNTER_TYPES
        and min(values) >= 0
        and max(values) < LIMIT
        and isfinite(values[9])
    )


def is_request(values: Any) -> bool:
    types = list(map(type, values))
    return (
        types[:1] == [str]
        and types in CHANGES.get(values[0], REQUESTS)
        and values[0] in VERBS
        and min(values[3:7]) >= 0
        and max(values[3:7]) < LIMIT
    )


def _or_none(form: Form) -> Form:
    return lambda value: value is None or form(value)


def _each(form: Form) -> Form:
    return lambda value: type(value) is list and all(map(form, value))


def _by_name(form: Form) -> Form:
    return lambda value: type(value) is dict and all(map(form, value.values()))


def _are_metrics(value: Any) -> bool:
    return type(value) is dict and ({*map(type, value.values())} <= {float} or all(map(is_number, value.values())))


def _is_origin(value: Any) -> bool:
    names = (*COUNTERS, "seconds", "tokens")
    return type(value) is dict and value.keys() == {*names} and is_counters([value[name] for name in names])


def _is_status(value: Any) -> bool:
    return value in get_args(Status)


def _is_phase(value: Any) -> bool:
    return value in get_args(Phase)


def _is_moment(value: Any) -> bool:
    try:
        return value == "" or datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


METRICS = _are_metrics
COUNTS = _by_name(is_count)
COUNTED = {"batches": _or_none(is_count)}
MEASURED = {"metrics": METRICS, "batches": COUNTS}
EVENTS: Mapping[str, Mapping[str, Form]] = {
    "checkpoint_loaded": {
        "path": _or_none(is_text), "origin": _is_origin, "in_boundary": is_flag, "planned_steps": _or_none(is_count),
        "training": is_text,
    },
    "checkpoint_saved": {"path": is_text, "is_best": is_flag, "training": is_text},
    "checkpoint_pruned": {"path": is_text, "reason": is_text},
    "epoch_start": {"epoch": is_count, "resumed": is_flag, **COUNTED},
    "epoch_end": {"epoch": is_count},
    "replay": {"done": is_count, "batches": is_count},
    "change_served": {
        "verb": is_text, "target": is_text, "value": _or_none(is_number), "by": is_text, "reason": is_text,
        "refusal": is_text, "changed": is_flag,
    },
    "log": {"metrics": METRICS},
    "validation_start": COUNTED,
    "validation_end": MEASURED,
    "validation_cut": {"reason": is_text, "batches": COUNTS},
    "test_start": COUNTED,
    "test_end": MEASURED,
    "predict_start": COUNTED,
    "predict_end": MEASURED,
    "plugin_changed": {"plugin": is_text, "change": is_text, "by": is_text},
    "plugin_failed": {"plugin": is_text, "event": is_text, "error": is_text},
    "verdict": {"kind": is_text, "holds": is_flag, "value": is_number, "text": is_text},
    "run_failed": {
        "error": is_text, "text": is_text, "phase": _is_phase, "plugin": _or_none(is_text), "event": _or_none(is_text),
        "batches": COUNTS, "in_hand": is_flag, "is_last": is_flag, "window": is_count, "loss": _or_none(is_number),
    },
    "run_closed": {
        "status": _is_status, "reason": is_text, "by": _or_none(is_text), "rank": _or_none(is_count),
        "metrics": METRICS, "best": _or_none(is_text), "last": _or_none(is_text), "notes": _each(is_text),
        "warnings": _each(is_text),
    },
}  # fmt: skip
OPTIONAL: Mapping[str, Form] = {"asked": _each(is_count), "emission": is_count, "added": _each(is_text)}
OPTIONAL_OF: Mapping[str, Mapping[str, Form]] = {
    "checkpoint_loaded": {**OPTIONAL, "forked_from": _by_name(lambda _: True)},
    "plugin_changed": {**OPTIONAL, "ends_recording": is_flag},
}
NO_FORMS: Mapping[str, Form] = {}
ATTEMPT: Mapping[str, Form] = {
    "name": is_text, "phase": _is_phase, "began": _is_moment, "run": is_text, "world_size": is_count,
    "max_epochs": _or_none(_is_length), "max_steps": _or_none(is_count), "validation_sets": _each(is_text),
    "optimizers": _each(is_text), "hyper_parameters": _by_name(lambda _: True), "versions": _by_name(is_text),
    "losses": is_flag, "plan": _by_name(_each(is_text)), "planned_steps": _or_none(is_count),
}  # fmt: skip


def check_data(event: str, data: Mapping[str, Any]) -> None:
    needed, known = EVENTS.get(event, NO_FORMS), OPTIONAL_OF.get(event, OPTIONAL)
    for name, form in needed.items():
        if name not in data or not form(data[name]):
            raise ValueError(f"{event!r} with {name!r} missing or of another type")
    for name in data.keys() - needed.keys():
        if name in known and not known[name](data[name]):
            raise ValueError(f"{event!r} with {name!r} of another type")


def check_attempt(about: Any) -> None:
    if type(about) is not dict or not about.keys() >= ATTEMPT.keys():
        raise ValueError("an attempt with fields missing")
    for name, form in ATTEMPT.items():
        if not form(about[name]):
            raise ValueError(f"an attempt with {name!r} of another type")
