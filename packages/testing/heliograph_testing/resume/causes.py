"""The likely causes of a difference, and what to do about them."""

from __future__ import annotations

from collections.abc import Sequence

from .differences import Comparison, Difference

WITHOUT_KILL = {
    "batch": "what is loaded depends on more than the seed: on os.urandom, the clock, an unseeded generator, or an "
    "object that two calls of make_trainer share",
    "order": "something depends on the clock, such as Every(seconds=...)",
}
OTHERS_WITHOUT_KILL = (
    "the task, a plugin or the model draws from an unseeded generator or depends on the clock, or a kernel is not "
    "deterministic: see torch.use_deterministic_algorithms"
)
AFTER_RESUME = {
    "batch": "what is loaded depends on more than the seed and the position: the data was built from draws that "
    "make_trainer does not seed, or the dataset has state of its own, such as a counter or a generator",
    "order": "a plugin that makes requests does not keep its state: give it state_dict and load_state_dict",
    "modules": "a plugin or the task changes gradients or weights by state that no checkpoint holds, or a kernel is "
    "not deterministic: see torch.use_deterministic_algorithms",
    "optimizers": "something changes the optimizer by state that no checkpoint holds",
    "schedulers": "the scheduler is stepped by state that no checkpoint holds, or its state_dict is not complete",
    "data": "the loader's state_dict does not restore its position",
}
OTHERS_AFTER_RESUME = (
    "the task or a plugin has state that no checkpoint holds: give it state_dict and load_state_dict; or the data have "
    "changed"
)


def cause_without_kill(difference: Difference) -> str:
    """Return why two uninterrupted runs may differ."""
    return WITHOUT_KILL.get(difference.what, OTHERS_WITHOUT_KILL)


def causes_after_resume(
    comparison: Comparison,
    *,
    reasons: Sequence[str],
    workers: Sequence[str],
) -> tuple[str, ...]:
    """Return why a resumed run may differ from an uninterrupted one, the likeliest cause first.

    Args:
        comparison: of the two.
        reasons: what the resumed run itself reports that may make it differ.
        workers: what may make the loader's workers differ.
    """
    difference = comparison.first
    assert difference is not None
    causes = [*reasons, *workers] if difference.what == "batch" else []
    causes += [each for each in reasons if each not in causes]
    if difference.what.startswith("plugin ") and not causes:
        causes.append(f"{difference.what} does not continue from what load_state_dict gives it")
    return tuple(causes or [AFTER_RESUME.get(difference.what, OTHERS_AFTER_RESUME)])
