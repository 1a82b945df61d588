"""Assertions on the key facts of a message, so that its wording can change without an edit of a test."""

from __future__ import annotations

from collections.abc import Iterable


def has_facts(message: object, *facts: str) -> bool:
    """True if the text of `message` contains all `facts` in this order, without overlap."""
    text = str(message)
    position = 0
    for fact in facts:
        found = text.find(fact, position)
        if found < 0:
            return False
        position = found + len(fact)
    return True


def assert_facts(message: object, *facts: str) -> None:
    """Assert that the text of `message` contains all `facts` in this order."""
    assert has_facts(message, *facts), f"{list(facts)} not in this order in {str(message)!r}"


def assert_each(messages: Iterable[object], *facts: tuple[str, ...]) -> None:
    """Assert that there are as many `messages` as tuples of `facts`, and that each message contains its facts."""
    texts = [str(message) for message in messages]
    assert len(texts) == len(facts), f"{len(texts)} messages instead of {len(facts)}: {texts}"
    for text, expected in zip(texts, facts, strict=True):
        assert_facts(text, *expected)
