"""Names for the addresses in keyed tables: of running and ended processes, and of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.keyed.table_layout import NO_NAMES, STACK_ENDS, row_parts
from dprobes.record.log_record import LogRecord
from dprobes.rpn.keyed_tables import KeyKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.formatters.address_names import AddressSymboliser
    from dprobes.keyed.table_layout import Names, TableContents
    from dprobes.record.record_origin import RecordSource
    from dprobes.rpn.keyed_tables import Table
    from dprobes.target.code_names import CodeName, LocatedCode
    from dprobes.target.process_images import ProcessImages
    from dprobes.trace.carried_names import CarriedNames

__all__ = ["ProcessAddresses", "has_addresses", "names_for"]

_KINDS = (KeyKind.ADDRESS, KeyKind.USER_STACK, KeyKind.USER_FRAMES, KeyKind.KERNEL_STACK, KeyKind.FRAMES)


def has_addresses(tables: Sequence[Table]) -> bool:
    """Return whether keys or stored values of tables contain addresses."""
    return any(part.kind in _KINDS for table in tables for part in table.parts)


def names_for(
    source: RecordSource, tables: Sequence[Table], *, live: bool = True, carried: CarriedNames | None = None
) -> Names:
    """
    Return the provider of names for the addresses in tables, which is empty if there are no addresses.

    ``live`` is True if the addresses are of processes of this machine. ``carried`` has the names in their trace file.
    """
    if not has_addresses(tables):
        return NO_NAMES
    from dprobes.formatters.address_names import AddressSymboliser

    symboliser = AddressSymboliser(source, live=live, carried=carried)
    return ProcessAddresses(symboliser, source.images if carried is None else carried)


class ProcessAddresses:
    """
    Names of the addresses in the mappings of a run's processes (``keyed.key_parts.Names``).

    An address without a process has the name that the processes with code there agree on, whether they have ended or
    not. It has no name if they disagree.
    """

    def __init__(self, symboliser: AddressSymboliser, images: ProcessImages | CarriedNames | None) -> None:
        self._symboliser = symboliser
        self._images = images

    def name_of(self, address: int, pid: int | None) -> str | None:
        """Return the name of an address in a process, or in any process without ``pid``, or None if it is unknown."""
        return self._symboliser.name_of(address, self._record(address, pid), None)

    def caller_name(self, address: int, pid: int | None) -> str | None:
        """Return the name of the call before a return address, or None if it is unknown."""
        name = self._symboliser.caller_name(address, self._record(address - 1, pid), None)
        return None if name is None else name.text

    def inlined_at(self, address: int, pid: int | None) -> Sequence[str]:
        """Return the names of the functions whose inlined code is at an address, the innermost first."""
        name = self._symboliser.code_name(address, self._record(address, pid), None)
        return () if name is None else name.inlined_texts

    def frame_at(self, address: int, pid: int | None, *, is_caller: bool) -> CodeName | None:
        """
        Return the parts of the name of a stack's address, or None if it is unknown.

        With ``is_caller``, it is a return address, and the name is that of the call before it.
        """
        record = self._record(address - is_caller, pid)
        find = self._symboliser.caller_name if is_caller else self._symboliser.code_name
        return find(address, record, None)

    def located(self, contents: Sequence[TableContents]) -> list[LocatedCode]:
        """Return the module and function of each code address in keyed tables, as far as they can be determined."""
        found: dict[int, LocatedCode] = {}
        for address, pid in dict.fromkeys(each for table in contents for each in _addresses(table)):
            # A signal handler returns to the start of a function, and no function is before it (``caller_name``).
            for place in (address, address + 1):
                located = self._symboliser.located(place, self._record(place, pid), None)
                if located is not None:
                    found[id(located)] = located
                if located is None or located.function is not None:
                    break
        return list(found.values())

    def _record(self, address: int, pid: int | None) -> LogRecord:
        if pid is not None or self._images is None:
            return LogRecord(pid=pid)
        # The process may have executed another program since.
        records = [LogRecord(pid=pid, time=since) for pid, since in self._images.code_at(address)]
        if len(records) > 1 and len({self._symboliser.code_name(address, each, None) for each in records}) > 1:
            return LogRecord()
        return records[0] if records else LogRecord()


def _addresses(contents: TableContents) -> Iterator[tuple[int, int | None]]:
    """Iterate over the addresses in a table, each with the process id in its key, None without one."""
    table = contents.table
    if not has_addresses([table]):
        return
    for row in contents.rows:
        for key, part in zip(table.parts, row_parts(table, row.key, row.cells), strict=False):
            match key.kind, part:
                case KeyKind.ADDRESS, int():
                    yield part, None
                case ((KeyKind.USER_STACK | KeyKind.USER_FRAMES), tuple()) if part:
                    yield from ((address, part[0]) for address in _frames(part[1:]))
                case ((KeyKind.KERNEL_STACK | KeyKind.FRAMES), tuple()):
                    yield from ((address, None) for address in _frames(part))


def _frames(stack: Sequence[int]) -> Iterator[int]:
    return (address - (number > 0) for number, address in enumerate(stack) if address not in STACK_ENDS)
