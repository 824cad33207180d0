"""Key fields as displayed values: numbers, strings, names of addresses, frames of stacks."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Protocol

from dprobes.keyed.table_layout import key_parts
from dprobes.rpn.instruction_set import StackEnd
from dprobes.rpn.keyed_tables import KeyKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.rpn.keyed_tables import Key, Table

__all__ = ["NO_NAMES", "STACK_ENDS", "Names", "Part", "kept_part", "parts_of"]

_BACKSLASH = 0x5C

Part = int | str | list[str]

STACK_ENDS = {
    StackEnd.NO_TABLE: "[cut: no unwind table]",
    StackEnd.BAD_TABLE: "[cut: unwind table]",
    StackEnd.UNREADABLE: "[cut: stack not copied]",
    StackEnd.NOT_RISING: "[cut: stack not rising]",
    StackEnd.GONE: "[cut: process gone]",
    StackEnd.NO_COPY: "[cut: no copy]",
}
"""Markers at the end of a displayed stack whose unwinding did not reach the outermost frame."""


class Names(Protocol):
    """A provider of names for addresses."""

    def name_of(self, address: int, pid: int | None) -> str | None:
        """
        Return the name of an address in a process; without ``pid``, in the kernel or the module.

        None if it is unknown.
        """

    def caller_name(self, address: int, pid: int | None) -> str | None:
        """Return the name of the code that contains the call before a return address; None if it is unknown."""

    def inlined_at(self, address: int, pid: int | None) -> Sequence[str]:
        """Return the names of the functions whose inlined code is at an address, the innermost first."""


class _NoNames:
    def name_of(self, address: int, pid: int | None) -> str | None:  # noqa: ARG002 - the protocol's
        return None

    def caller_name(self, address: int, pid: int | None) -> str | None:  # noqa: ARG002 - the protocol's
        return None

    def inlined_at(self, address: int, pid: int | None) -> Sequence[str]:  # noqa: ARG002 - the protocol's
        return ()


NO_NAMES: Names = _NoNames()
"""A provider that knows no names."""


def parts_of(table: Table, key: bytes, names: Names = NO_NAMES) -> tuple[Part, ...]:
    """Return the fields of a key as displayed; the frames of a stack are the innermost first."""
    return _parts(table.keys, key, names)


def kept_part(table: Table, cells: Sequence[int], names: Names = NO_NAMES) -> str | list[str]:
    """Return a stored string or call stack as displayed; the frames of a stack are the innermost first."""
    assert table.value is not None
    found = _parts((table.value,), struct.pack(f"{len(cells)}Q", *cells), names)[0]
    assert not isinstance(found, int)
    return found


def _parts(keys: Sequence[Key], key: bytes, names: Names) -> tuple[Part, ...]:
    found: list[Part] = []
    for each, part in zip(keys, key_parts(keys, key), strict=True):
        match each.kind, part:
            case KeyKind.BYTES, bytes():
                found.append(shown_bytes(part))
            case _, bytes():
                found.append(part.decode("utf-8", "backslashreplace"))
            case KeyKind.ADDRESS, int():
                found.append(names.name_of(part, None) or hex(part))
            case ((KeyKind.USER_STACK | KeyKind.USER_FRAMES), tuple()):
                pid = part[0] if part else None
                found.append(_frames(part[1:], pid, names))
            case ((KeyKind.KERNEL_STACK | KeyKind.FRAMES), tuple()):
                found.append(_frames(part, None, names))
            case _, int():
                found.append(part)
    return tuple(found)


def shown_bytes(data: bytes) -> str:
    """Return bytes as text: printable ASCII unchanged, a backslash and other bytes as hexadecimal escapes of Python."""
    return "".join(chr(byte) if 0x20 <= byte < 0x7F and byte != _BACKSLASH else f"\\x{byte:02x}" for byte in data)


def _frames(stack: Sequence[int], pid: int | None, names: Names) -> list[str]:
    found: list[str] = []
    for number, address in enumerate(stack):
        if address in STACK_ENDS:
            found.append(STACK_ENDS[StackEnd(address)])
            continue
        # All but the first address are return addresses, which may be at the start of the next function.
        name = names.caller_name(address, pid) if number else names.name_of(address, pid)
        found += (*names.inlined_at(address - (number > 0), pid), name or hex(address))
    return found
