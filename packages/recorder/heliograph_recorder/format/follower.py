"""Follow a recording that a run is writing: only what was added since the last look is parsed."""

from __future__ import annotations

from pathlib import Path

from .checksum import parse_line
from .gc_pause import gc_paused
from .parser import ParsedAttempt, Parser, missing_lines
from .reader import read_files
from .records import Recording
from .tail import parse_tail


class Follower:
    """A recording as it is at the last `update`.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parser, self._tail = Parser(path), b""
        self._remarks: list[str] = []

    def update(self) -> bool:
        before = self._parser.size, self._tail
        if self.path.stat().st_size < self._parser.size:
            self._parser = Parser(self.path)
        self._tail, added, self._remarks = read_files(self.path, self._parser.size)
        with gc_paused():
            self._parser.add(added, is_end=False)
        return (self._parser.size, self._tail) != before

    def recording(self) -> Recording:
        parsed = self._parser.attempts
        last = [self._with_tail(each.copy()) for each in parsed[-1:]]
        return Recording(self.path, tuple(each.finish() for each in [*parsed[:-1], *last]))

    def _with_tail(self, last: ParsedAttempt) -> ParsedAttempt:
        last.damage += self._remarks
        try:
            rows = parse_tail(self._tail)
        except ValueError as error:
            last.damage.append(str(error))
        else:
            for line in () if rows is None else missing_lines([last], rows):
                last.add(parse_line(line))
        return last
