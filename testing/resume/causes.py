"""What is likely behind a difference, in words that say what to do."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph.builtin_callbacks.checkpoint.repeated.suspects import HIDDEN_STATE, emitted_again
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
    reasons: Sequence[str],
    workers: Sequence[str],
    hear_again: Sequence[str],
) -> tuple[str, ...]:
    """Return what makes a resumed run differ from an uninterrupted one, the likeliest first.

    Args:
        comparison: of the two.
        reasons: why the resumed run itself does not call the resume `exact`.
        workers: what makes the loader's workers doubtful.
        hear_again: who of the user's own listens to `EpochStart`, where the run was resumed within an epoch.
    """
    found = comparison.first
    assert found is not None
    causes = [*reasons, *workers] if found.what == "batch" else []
    causes += [each for each in reasons if each not in causes]
    causes += emitted_again(hear_again)
    if found.what.startswith("plugin ") and not causes:
        causes.append(f"{found.what} does not continue from what load_state_dict gives it")
    return tuple(causes or [AFTER_A_RESUME.get(found.what, HIDDEN_STATE)])
