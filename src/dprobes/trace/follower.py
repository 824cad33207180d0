"""Read a trace through all its files: the older part, the file, and those that a limited writer puts in its place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from dprobes.errors import FormatError
from dprobes.lazydataclass import dataclass
from dprobes.trace.reader import TraceReader
from dprobes.trace.writer import older_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dprobes.trace.content import Damage, LostRecords, TraceTables
    from dprobes.trace.mixedblock import Block

__all__ = ["MissingPart", "TraceFollower"]


@dataclass(frozen=True, slots=True)
class MissingPart:
    """Say that a part of a trace could not be read, and why."""

    message: str


class TraceFollower:
    """
    Read a trace from its beginning, and go on with what is written to it.

    Without ``with_older`` the older part that may be there is not read. A reader that is slow sees both files that a
    limited writer keeps, whenever these change; nothing is left out unless the writer has filled two files meanwhile.
    With ``on_damage``, to which it is told, damage is skipped.
    """

    def __init__(
        self, path: Path, *, with_older: bool = True, on_damage: Callable[[Damage], None] | None = None
    ) -> None:
        self.path = path
        self._on_damage = on_damage
        self._with_older = with_older
        self._readers: list[TraceReader] = []
        self._tables: list[TraceTables] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up all files."""
        for reader in self._readers:
            reader.close()
        self._readers = []

    def tables(self) -> list[TraceTables]:
        """Return the latest keyed tables of each program, as far as the trace was read."""
        return [*self._tables, *(each for reader in self._readers for each in reader.tables)]

    def _give_up(self, reader: TraceReader) -> None:
        self._tables += reader.tables
        reader.close()

    def poll(self) -> Iterator[Block | LostRecords | MissingPart]:
        """
        Iterate over what is there and has not been read yet; raise ``FormatError`` at damage.

        Whoever stops iterating gets the rest with the next call.
        """
        if not self._readers:
            self._readers = self._open(after=None)
        while True:
            reader = self._readers[0]
            is_older = len(self._readers) > 1
            try:
                yield from reader.blocks()
            except FormatError as error:
                if not is_older:
                    raise
                # Nobody asked for this file by name, and what is in the other one can be read.
                yield MissingPart(f"{error.message}; the rest of it is skipped")
            if is_older:
                self._give_up(self._readers.pop(0))
                continue
            if not reader.was_replaced or not self.path.exists():
                return
            # Nothing is written to it any more, so this is the rest.
            yield from reader.blocks()
            following = self._open(after=reader)
            part, last = following[0].part, reader.origin.part
            if part and part != last + 1:
                yield MissingPart(f"'{self.path}' was replaced faster than it was read: records are missing here")
            self._give_up(reader)
            self._readers = following

    def _open(self, after: TraceReader | None) -> list[TraceReader]:
        """Open what has to be read, behind a reader if there is one: the file, and its older part before it."""
        while True:
            reader = TraceReader(self.path, self._on_damage)
            older = self._older() if self._with_older or after is not None else None
            if not reader.was_replaced:  # else these two need not be neighbours
                if older is None:
                    return [reader]
                if after is None or not os.path.samestat(older.status, after.status):
                    return [older, reader]
                older.close()
                return [reader]
            reader.close()
            if older is not None:
                older.close()

    def _older(self) -> TraceReader | None:
        path = older_part(self.path)
        if not path.exists():
            return None
        try:
            return TraceReader(path, self._on_damage)
        except FormatError:
            if path.exists():
                raise
            return None
