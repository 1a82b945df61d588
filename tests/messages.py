"""Check the key facts of a message, so that its wording can improve."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def pattern(*facts: object) -> str:
    """Return a regular expression of a text that contains all facts in this order.

    A number at either end of a fact does not match a part of a longer number: "step 1" is not in "step 12".
    """
    return "(?s)" + ".*".join(
        (r"(?<!\d)(?<!\d[.,])" if text[:1].isdigit() else "")
        + re.escape(text)
        + (r"(?![.,]?\d)" if text[-1:].isdigit() else "")
        for text in map(str, facts)
    )


def has_facts(message: object, *facts: object) -> bool:
    """Return whether a message contains all facts in this order."""
    return re.search(pattern(*facts), str(message)) is not None


def assert_facts(message: object, *facts: object) -> None:
    """Assert that a message contains all facts in this order."""
    assert has_facts(message, *facts), f"{str(message)!r} lacks one of {[str(fact) for fact in facts]}"


def assert_each(messages: Iterable[object], *facts: Sequence[object]) -> None:
    """Assert that there is one message for each sequence of facts, and that each contains its facts."""
    texts = [str(message) for message in messages]
    assert len(texts) == len(facts), texts
    for text, expected in zip(texts, facts, strict=True):
        assert_facts(text, *expected)
