"""What pruners learn from the first trials, and go by after a restart, too. Imported where optuna is there."""

from __future__ import annotations

from optuna.pruners import BasePruner, HyperbandPruner, PatientPruner, SuccessiveHalvingPruner
from optuna.study import Study

KEY = "heliograph:pruner"


def load_learned(study: Study) -> None:
    """Let the study's pruner go by what it has learned, and begin with that where it has to learn nothing."""
    pruner = _learner(study.pruner)
    learned = study._storage.get_study_system_attrs(study._study_id).get(KEY)
    if pruner is not None and learned is not None and learned["pruner"] == type(pruner).__name__:
        setattr(pruner, _attribute(pruner), learned["resource"])
    if isinstance(pruner, HyperbandPruner) and pruner._max_resource != "auto" and not pruner._pruners:
        pruner._try_initialization(study)


def save_learned(study: Study) -> None:
    """Write down what the pruner has learned from trials that are over."""
    pruner = _learner(study.pruner)
    if pruner is None:
        return
    learned = {"pruner": type(pruner).__name__, "resource": getattr(pruner, _attribute(pruner))}
    is_known = study._storage.get_study_system_attrs(study._study_id).get(KEY) == learned
    if isinstance(learned["resource"], int) and not is_known:
        study._storage.set_study_system_attr(study._study_id, KEY, learned)


def _learner(pruner: BasePruner | None) -> HyperbandPruner | SuccessiveHalvingPruner | None:
    while isinstance(pruner, PatientPruner):
        pruner = pruner._wrapped_pruner
    return pruner if isinstance(pruner, HyperbandPruner | SuccessiveHalvingPruner) else None


def _attribute(pruner: BasePruner) -> str:
    return "_max_resource" if isinstance(pruner, HyperbandPruner) else "_min_resource"
