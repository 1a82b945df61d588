"""Plain values as bytes: `torch.save` needs about a microsecond for every value that it pickles itself."""

from __future__ import annotations

from io import BytesIO
from pickle import Pickler, Unpickler, UnpicklingError
from pickletools import genops
from typing import Any, Final

# Reading needs no more memory than a small multiple of the bytes: nothing is shared, and no size is only announced.
_OPCODES: Final = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4",
    "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
    "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET", "STACK_GLOBAL", "REDUCE",
})  # fmt: skip


class _PlainPickler(Pickler):
    def reducer_override(self, value: Any) -> Any:
        # called for everything but built-in containers, numbers and texts
        if value is complex or type(value) is complex:
            return NotImplemented
        raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not a plain type")


class _PlainUnpickler(Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "complex"):
            return complex
        raise UnpicklingError(f"{module}.{name}: creating it could run code")


def pack(value: Any) -> bytes:
    content = BytesIO()
    pickler = _PlainPickler(content, 5)
    pickler.fast = True  # equal values have equal bytes, and no container is shared
    pickler.dump(value)
    return content.getvalue()


def unpack(content: object) -> Any:
    """Return the values that `pack` wrote.

    Raises:
        ValueError: the content is damaged, or forged.
    """
    try:
        if not isinstance(content, bytes):
            raise UnpicklingError(f"bytes are expected, not {type(content).__name__}")
        if refused := {opcode.name for opcode, *_ in genops(content)} - _OPCODES:
            raise UnpicklingError(f"{', '.join(sorted(refused))} could fill the memory or run code")
        return _PlainUnpickler(BytesIO(content)).load()
    except Exception as error:
        raise ValueError(f"The packed values of the checkpoint are damaged: {error}") from error
