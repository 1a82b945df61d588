"""What a message of jsonargparse is about: the innermost reason, the key, the class, the value as its user wrote it."""

from __future__ import annotations

import re

KEYS = re.compile(r'Parser key "([\w.]+)"')
UNION = re.compile(
    r"Does not validate against any of the Union subtypes\n( *)Subtypes: .*\n\1Errors:\n((?:\1  .*\n)+)"
    r"\1Given value type: .*\n\1Given value: (.*)"
)
WRONG_KIND = re.compile(
    r"(?:.*: )?(?:Expected an? |Not a valid subclass|Dict must include a class_path|Unexpected import path)"
)
INNER, OUTER = re.compile(r"given class_path '([\w.]+)'"), re.compile(r"class_path='([\w.]+)'")
OPTION = re.compile(r"NestedArg\(key='([\w.]+)', val='?(.*?)'?\)")
SPEC = re.compile(r"(?:Namespace\(class_path=|\{'class_path': )'([^']+)'.*")
CLASS_ONLY = re.compile(r"Namespace\(class_path=('[\w.]+')\)")
MAPPING = re.compile(r"\{'?([^':]+)'?: .{60,}")  # one that is too long to be shown whole


def innermost(text: str) -> str:
    """Return a message that says, of a value that may have several types, only why it fails as the one it is meant as.

    Where it has none of them, the message stays as it is.
    """
    while found := UNION.search(text):
        indent, reasons, value = found.groups()
        alternatives = re.split(rf"^{indent}  - ", reasons, flags=re.MULTILINE)[1:]
        meant = [each.rstrip() for each in alternatives if not WRONG_KIND.match(each)]
        if not meant:
            break
        reason = max(meant, key=lambda each: each.count("Parser key"))  # the one that has got furthest
        text = f"{text[: found.start()]}{reason}. Got value: {value}{text[found.end() :]}"
    return text


def key_of(text: str) -> str:
    """Return the key that a message is about, which it names part by part."""
    whole = ""
    for key in dict.fromkeys(KEYS.findall(text)):
        whole = key if not whole or key.startswith(f"{whole}.") else f"{whole}.{key}"
    return whole


def class_at(found: re.Match[str]) -> str | None:
    """Return the class path that a message is about: jsonargparse names an inner class before, an outer one after."""
    before, after = INNER.findall(found.string, 0, found.start()), OUTER.findall(found.string, found.end())
    return before[-1] if before else after[0] if after else None


def shown(value: str) -> str:
    """Return a value that a message shows, as its user wrote it."""
    value = OPTION.sub(r"only its option \1=\2", value)
    if spec := SPEC.fullmatch(value):
        return spec[1]
    value = CLASS_ONLY.sub(r"\1", value)
    if value.startswith("Namespace("):
        return f"only its options {value.removeprefix('Namespace(').removesuffix(')')}"
    if mapping := MAPPING.fullmatch(value):
        return f"{{{mapping[1]}: ...}}"
    return {"None": "null", "": "''"}.get(value, value)
