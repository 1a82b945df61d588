"""What is likely behind a difference, in words that say what to do."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph.core.repeated.suspects import HIDDEN_STATE, heard_again
from heliograph.testing.resume.differences import Comparison, Difference

WITHOUT_A_KILL = {
    "batch": "what is loaded depends on more than the seed: on os.urandom, the clock, a generator without a seed, or "
    "an object that two calls of make_trainer share",
    "order": "something goes by the clock, such as Every(seconds=...)",
}
OTHERWISE_WITHOUT_A_KILL = (
    "the task, a plugin or the model draws from a generator without a seed or goes by the clock, or a kernel is not "
    "deterministic: see torch.use_deterministic_algorithms"
)
AFTER_A_RESUME = {
    "batch": "what is loaded depends on more than the seed and the position: the data was built from draws that "
    "make_trainer does not seed, or the dataset has state of its own, such as a counter or a generator",
    "order": "a plugin that asks for things forgets its state: give it state_dict and load_state_dict",
    "modules": "a plugin or the task changes gradients or weights by state that no checkpoint holds, or a kernel is "
    "not deterministic: see torch.use_deterministic_algorithms",
    "optimizers": "something changes the optimizer by state that no checkpoint holds",
    "schedulers": "the scheduler is stepped by state that no checkpoint holds, or its state_dict is not complete",
    "data": "the loader's state_dict does not give back its position",
}


def without_a_kill(found: Difference) -> str:
    """Return what makes two uninterrupted runs differ."""
    return WITHOUT_A_KILL.get(found.what, OTHERWISE_WITHOUT_A_KILL)


def after_a_resume(
    comparison: Comparison,
    *,
    keeps_draws: bool,
    not_kept: Sequence[str],
    probed: Sequence[str],
    hear_again: Sequence[str],
) -> tuple[str, ...]:
    """Return what makes a resumed run differ from an uninterrupted one, the likeliest first.

    Args:
        comparison: of the two.
        keeps_draws: whether a plugin keeps the random state.
        not_kept: attributes that the resumed run did not have again.
        probed: what makes the loading doubtful.
        hear_again: who of the user's own heard `EpochStart` again, since the run was resumed amid an epoch.
    """
    found = comparison.first
    assert found is not None
    causes = list(probed) if found.what == "batch" else []
    if comparison.draws is not None and not keeps_draws:
        causes.append("no plugin keeps the random state: add RNGCapture()")
    if not_kept:
        causes.append(f"no checkpoint holds {', '.join(not_kept)}: save what matters in state_dict, or in a buffer")
    causes += heard_again(hear_again)
    if found.what.startswith("plugin ") and not causes:
        causes.append(f"{found.what} does not go on from what load_state_dict gives it")
    return tuple(causes or [AFTER_A_RESUME.get(found.what, HIDDEN_STATE)])
