"""Names for the addresses in keyed tables: of processes that ran, also of those that have ended, and of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.keyed.parts import NO_NAMES
from dprobes.record.layout import LogRecord
from dprobes.rpn.tables import KeyKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.keyed.parts import Names
    from dprobes.record.origin import RecordSource
    from dprobes.rpn.tables import Table

__all__ = ["ProcessAddresses", "has_addresses", "names_for"]

_KINDS = (KeyKind.ADDRESS, KeyKind.USER_STACK, KeyKind.KERNEL_STACK)


def has_addresses(tables: Sequence[Table]) -> bool:
    """Return whether keys of tables have names."""
    return any(key.kind in _KINDS for table in tables for key in table.keys)


def names_for(source: RecordSource, tables: Sequence[Table]) -> Names:
    """Return what names the addresses in tables; nothing where there are none."""
    return ProcessAddresses(source) if has_addresses(tables) else NO_NAMES


class ProcessAddresses:
    """
    Name addresses of what the processes of a run map (``keyed.parts.Names``).

    An address without a process is named by any of them that has code there: the program that is probed is mostly one.
    """

    def __init__(self, source: RecordSource) -> None:
        from dprobes.formatters.addressnames import AddressSymboliser

        self._symboliser = AddressSymboliser(source, live=True)
        self._images = source.images

    def name_of(self, address: int, pid: int | None) -> str | None:
        """Return the name of an address in a process, or in any one."""
        if pid is None and self._images is not None:
            pid = self._images.any_covering(address)
        return self._symboliser.name_of(address, LogRecord(pid=pid), None)
