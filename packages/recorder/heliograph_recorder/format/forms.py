"""Check the types and ranges of the values in a line."""

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
REQUEST_TYPES = [[str, str, str, int, int, int, int, rank, str] for rank in (int, NoneType)]
THROUGH: list[list[type]] = [[], [str]]  # optional: the plugin that made the request under another name
REQUESTS = [[*types, *through] for types in REQUEST_TYPES for through in THROUGH]
VALUES: Mapping[str, type] = {"set_learning_rate": float, "enable_plugin": NoneType, "disable_plugin": NoneType}
CHANGES = {  # the target and the value follow
    verb: [[*types, str, value, *through] for types in REQUEST_TYPES for through in THROUGH]
    for verb, value in VALUES.items()
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
    # A clock may begin slightly below 0.
    return type(value) in (int, float) and isfinite(value) and -1.0 <= value < LIMIT


def is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**512)


def _is_epochs(value: Any) -> bool:
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


def _list_of(form: Form) -> Form:
    return lambda value: type(value) is list and all(map(form, value))


def _dict_of(form: Form) -> Form:
    return lambda value: type(value) is dict and all(map(form, value.values()))


def _are_metrics(value: Any) -> bool:
    return type(value) is dict and ({*map(type, value.values())} <= {float} or all(map(is_number, value.values())))


def _is_origin(value: Any) -> bool:
    names = (*COUNTERS, "seconds", "tokens")
    return type(value) is dict and value.keys() == {*names} and is_counters([value[name] for name in names])


def _is_moment(value: Any) -> bool:
    try:
        return value == "" or datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


_is_phase = get_args(Phase).__contains__
COUNTS = _dict_of(is_count)
COUNTED = {"batches": _or_none(is_count)}
MEASURED = {"metrics": _are_metrics, "batches": COUNTS}
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
    "log": {"metrics": _are_metrics},
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
        "status": get_args(Status).__contains__, "reason": is_text, "by": _or_none(is_text), "rank": _or_none(is_count),
        "metrics": _are_metrics, "best": _or_none(is_text), "last": _or_none(is_text), "notes": _list_of(is_text),
        "warnings": _list_of(is_text),
    },
}  # fmt: skip
OPTIONAL: Mapping[str, Form] = {"asked": _list_of(is_count), "emission": is_count, "added": _list_of(is_text)}
OPTIONAL_OF: Mapping[str, Mapping[str, Form]] = {
    "checkpoint_loaded": {**OPTIONAL, "forked_from": _dict_of(lambda _: True)},
    "plugin_changed": {**OPTIONAL, "ends_recording": is_flag},
}
NO_FORMS: Mapping[str, Form] = {}
ATTEMPT: Mapping[str, Form] = {
    "name": is_text, "phase": _is_phase, "began": _is_moment, "run": is_text, "world_size": is_count,
    "max_epochs": _or_none(_is_epochs), "max_steps": _or_none(is_count), "validation_sets": _list_of(is_text),
    "optimizers": _list_of(is_text), "hyper_parameters": _dict_of(lambda _: True), "versions": _dict_of(is_text),
    "losses": is_flag, "plan": _dict_of(_list_of(is_text)), "planned_steps": _or_none(is_count),
}  # fmt: skip


def check_data(event: str, data: Mapping[str, Any]) -> None:
    """Raise ValueError if an event of the catalogue lacks data; custom events may have any."""
    required, optional = EVENTS.get(event, NO_FORMS), OPTIONAL_OF.get(event, OPTIONAL)
    for name, form in required.items():
        if name not in data or not form(data[name]):
            raise ValueError(f"{event!r} with {name!r} missing or of a wrong type")
    for name in data.keys() - required.keys():
        if name in optional and not optional[name](data[name]):
            raise ValueError(f"{event!r} with {name!r} of a wrong type")


def check_attempt(about: Any) -> None:
    if type(about) is not dict or not about.keys() >= ATTEMPT.keys():
        raise ValueError("an attempt with fields missing")
    for name, form in ATTEMPT.items():
        if not form(about[name]):
            raise ValueError(f"an attempt with {name!r} of a wrong type")
