"""A sampler that stores its random states at each suggestion. Requires optuna."""

from __future__ import annotations

import logging
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from heliograph.spi import require
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, PartialFixedSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

States = dict[str, dict[str, Any]]


def states_of(sampler: Any) -> States:
    return {place: _state(generator) for place, generator in _generators(sampler)}


def load_states(sampler: Any, states: States) -> None:
    # A generator without a saved state does not change.
    for place, generator in _generators(sampler):
        if place in states:
            state = states[place]
            key = np.frombuffer(b64decode(state["key"]), dtype="<u4").astype(np.uint32)
            generator.set_state(("MT19937", key, state["position"], state["has_gauss"], state["gauss"]))


def _state(generator: np.random.RandomState) -> dict[str, Any]:
    _, key, position, has_gauss, gauss = generator.get_state(legacy=True)
    text = b64encode(np.asarray(key, dtype="<u4").tobytes()).decode()
    return {"key": text, "position": int(position), "has_gauss": int(has_gauss), "gauss": float(gauss)}


def _generators(sampler: Any) -> Iterator[tuple[str, np.random.RandomState]]:
    # All generators of a sampler and of its parts, each once.
    samplers = require("optuna.samplers", "A study", extra="optuna")
    pending, seen = [("", sampler)], set[int]()
    while pending:
        place, part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, np.random.RandomState):
            yield place, part
        elif isinstance(part, samplers.BaseSampler) or type(part).__module__.startswith("optuna.samplers."):
            if isinstance(getattr(type(part), "rng", None), property):
                part.rng  # noqa: B018  # creates a lazy generator
            for name, value in sorted(getattr(part, "__dict__", {}).items(), reverse=True):
                pending.append((f"{place}.{name}".lstrip("."), value))


KEY, RELATIVE = "heliograph:sampler:{}", "heliograph:sampler:relative"
SLOTS = (KEY.format(0), KEY.format(1), RELATIVE)
# Samplers without state other than random generators and the storage.
EXACT = ("BruteForceSampler", "GridSampler", "NSGAIIISampler", "NSGAIISampler", "RandomSampler", "TPESampler")

logger = logging.getLogger("heliograph")
Record = dict[str, Any]


class RememberingSampler(BaseSampler):
    """Stores the random states of a sampler in the trial of each suggestion.

    A record is written before the storage gets the drawn value, and is valid if the value arrived. Two records
    alternate, so one of them is valid after a kill at any time. Values that are drawn together are in their record.
    States are restored before each trial, whichever process made the last suggestion.
    """

    def __init__(self, sampler: BaseSampler) -> None:
        self.sampler = sampler
        self._saved: States = {}
        self._index = 0

    def __str__(self) -> str:
        return str(self.sampler)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        trials = study._storage.get_all_trials(study._study_id, deepcopy=False)
        if (newest := next(_valid_records(trials), None)) is not None:
            self._load(newest)
        record = next(_valid_records([trial]), None)
        self._index = 0 if record is None else record["index"] + 1
        self._saved = states_of(self.sampler)
        if record is None:
            self.sampler.before_trial(study, trial)
            self._save(study, trial, {"what": "begin"})

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        drawn = trial.system_attrs.get(RELATIVE)
        if drawn is not None:
            values = drawn["values"].items()
            return {name: search_space[name].to_external_repr(value) for name, value in values if name in search_space}
        relative = self.sampler.sample_relative(study, trial, search_space)
        internal = {name: float(search_space[name].to_internal_repr(value)) for name, value in relative.items()}
        self._save(study, trial, {"what": "relative", "values": internal}, always=bool(relative))
        return relative

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        value = self.sampler.sample_independent(study, trial, param_name, param_distribution)
        self._save(study, trial, {"what": "parameter", "name": param_name})
        return value

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self.sampler.after_trial(study, trial, state, values)
        self._save(study, trial, {"what": "end"})

    def reseed_rng(self) -> None:
        self.sampler.reseed_rng()

    def _load(self, record: Record) -> None:
        name = type(self.sampler).__name__
        if record["sampler"] != name:
            logger.warning("the study was sampled by %s: %s starts with new random states", record["sampler"], name)
            return
        load_states(self.sampler, record["states"])

    def _save(self, study: Study, trial: FrozenTrial, record: Record, *, always: bool = False) -> None:
        states = states_of(self.sampler)
        if states == self._saved and not always:
            return
        record |= {"index": self._index, "sampler": type(self.sampler).__name__, "states": states}
        key = RELATIVE if record["what"] == "relative" else KEY.format(self._index % 2)
        study._storage.set_trial_system_attr(trial._trial_id, key, record)
        self._index, self._saved = self._index + 1, states


def is_exact(sampler: BaseSampler) -> bool:
    if isinstance(sampler, PartialFixedSampler):
        return is_exact(sampler._base_sampler)
    return type(sampler).__module__.startswith("optuna.") and type(sampler).__name__ in EXACT


def _valid_records(trials: Iterable[FrozenTrial]) -> Iterator[Record]:
    for trial in sorted(trials, key=lambda trial: trial.number, reverse=True):
        records = [trial.system_attrs[key] for key in SLOTS if key in trial.system_attrs]
        for record in sorted(records, key=lambda record: record["index"], reverse=True):
            if _is_valid(record, trial):
                yield record


def _is_valid(record: Record, trial: FrozenTrial) -> bool:
    # The storage has the drawn value.
    if record["what"] == "parameter":
        return record["name"] in trial.params
    return record["what"] != "end" or trial.state.is_finished()
