"""State that no `state_dict` shows: the base of all kinds, and which there are."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from heliograph.packages.tests.torture.parts import Parts

Kind = Literal[
    "map", "loader", "weighted", "subset", "seekable", "list", "phases", "torchdata", "foreign sampler", "iterable",
    "reader", "cursor",
]  # fmt: skip
ANY: tuple[Kind, ...] = (
    "map", "loader", "weighted", "subset", "seekable", "list", "phases", "torchdata", "foreign sampler", "iterable",
    "reader", "cursor",
)  # fmt: skip
LOADED: tuple[Kind, ...] = ("map", "loader", "weighted", "subset", "seekable", "phases")  # and all of them map-style
HOMES = (
    "in_data", "in_transforms", "in_loaders", "in_models", "in_optimizers", "in_tasks", "in_plugins", "at_resume",
    "beyond",
)  # fmt: skip
_KINDS: dict[str, Hidden] = {}


def kinds() -> dict[str, Hidden]:
    """Return all kinds by their names."""
    for home in HOMES:
        import_module(f"heliograph.packages.tests.torture.hidden_{home}")
    return _KINDS


class Hidden:
    """One kind of hidden state; subclasses that are not bases register themselves, their docstring is their name.

    Attributes:
        name: in the table.
        row: of the audit, `E3` to `E5`; `own` is what it does not name.
        place: what is changed; two kinds of one place do not go together.
        data: the kinds of data that it can be hidden in.
        wants: what a program must be like so that it shows.
        beyond: it lies outside of every object that the run is given, so that only repeated steps can show it.
    """

    name: ClassVar[str]
    row: ClassVar[Literal["E3", "E4", "E5", "own"]]
    place: ClassVar[str]
    data: ClassVar[tuple[Kind, ...]] = ANY
    wants: ClassVar[dict[str, Any]] = {}
    beyond: ClassVar[bool] = False

    def __init_subclass__(cls, *, is_base: bool = False) -> None:
        if not is_base:
            cls.name = str(cls.__doc__).rstrip(".")
            _KINDS[cls.name] = cls()

    def hide(self, parts: Parts) -> None:
        """Put it into the parts of a program."""
        raise NotImplementedError

    def goes_with(self, other: Hidden) -> bool:
        """Return whether one program can have both."""
        both = set(self.data) & set(other.data)
        contradict = any(self.wants[name] != other.wants[name] for name in self.wants.keys() & other.wants.keys())
        return self.place != other.place and bool(both) and not contradict
