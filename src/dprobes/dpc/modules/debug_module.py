"""
Debug information of a module for the compiler: types, variables, and places.

It is opened when it is first needed. So nothing is read for a program with its own declarations.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.dpc.types.c_types import Integer
from dprobes.errors import TargetError
from dprobes.target.elf.symbol_table import elf_symbols
from dprobes.target.go_binary import Convention, convention_of, passes_in_registers
from dprobes.target.probed_module import OWN_SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dprobes.dpc.modules.debug_values import DebugTypes, Machine
    from dprobes.dpc.types.c_types import Record
    from dprobes.dwarf.debug_entries import Entry
    from dprobes.dwarf.debug_file import DebugFile
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.probed_module import Module, SymbolProvider
    from dprobes.target.unwind.frame_tables import FileFrames

__all__ = ["DebugModule", "is_entry_by_name"]

_PLACE = re.compile(r"(?P<name>.+?)(?:\s*\+\s*(?P<distance>0[xX][0-9a-fA-F]+|[0-9]+))?\Z", re.DOTALL)
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+\Z|[0-9]+\Z")
_ARGUMENTS = {5: "arg0", 4: "arg1", 1: "arg2", 2: "arg3", 8: "arg4", 9: "arg5"}
"""Names of the argument registers on x86-64, by DWARF register number; functions of Go use other registers."""
_VECTORS = {17 + n: f"xmm{n}" for n in range(16)}
_GO_ARGUMENTS = 9
_C_ARGUMENTS = 6


def is_entry_by_name(place: str) -> bool:
    """Return whether a probepoint's place is a function's name alone, and not ``FUNCTION+8`` or a file offset."""
    match = _PLACE.match(place)
    return match is not None and match["distance"] is None and _NUMBER.match(place) is None


class DebugModule:
    """A module's file with its symbols and, read at the first use, its debug information (DWARF)."""

    def __init__(self, elf: ElfFile, symbols: SymbolProvider = OWN_SYMBOLS) -> None:
        self.elf = elf
        self._provider = symbols
        self.declared: Callable[[str, str], Record | None] = lambda _kind, _tag: None
        """Look-up of structures that the program itself declares, by kind and tag; it returns None if there is none."""

    @cached_property
    def file(self) -> DebugFile | None:
        """The debug information, in the module's file or a separate debug file; None if there is none."""
        from dprobes.dwarf.debug_file import debug_file_of

        return debug_file_of(self.elf)

    @cached_property
    def entry_types(self) -> DebugTypes | None:
        """The types, each read from its debugging information entry (DIE), or None if there is no debug information."""
        if self.file is None:
            return None
        from dprobes.dpc.modules.debug_values import DebugTypes

        return DebugTypes(self.file, self.elf.word_size, self.declared)

    @cached_property
    def _module(self) -> Module:
        return self._provider.module_of(self.elf)

    def address_of(self, place: str) -> int | None:
        """
        Return the link address of a place (``FUNCTION``, ``FUNCTION+8`` or a file offset).

        Return None if there is none.
        """
        if _NUMBER.match(place):
            return self.elf.link_address(int(place, 0))
        match = _PLACE.match(place)
        if match is None:
            return None
        try:
            address = self._module.address_of(match["name"].strip('"'))
        except TargetError:
            return None  # the resolution of the program reports the error
        return address + int(match["distance"] or "0", 0)

    def symbol_address(self, name: str) -> int | None:
        """Return the link address of a symbol, or None if there is none of that name, or several."""
        found = self._module.symbols.lookup(name)
        return found[0].address if len(found) == 1 else None

    def is_chooser(self, place: str) -> bool:
        """Return whether a place names an ifunc symbol: its code, a resolver, chooses the function at run time."""
        match = _PLACE.match(place)
        name = "" if match is None else match["name"].strip('"')
        return any(symbol.kind == "ifunc" for symbol in self._module.symbols.lookup(name))

    def is_thread_local(self, name: str) -> bool:
        """Return whether a symbol is that of a thread-local variable (STT_TLS)."""
        return any(symbol.kind == "tls" for symbol in self._module.symbols.lookup(name))

    def function_symbol(self, address: int) -> str | None:
        """Return the name of the symbol of the function at a link address, or None if no function covers it."""
        found = self._module.symbols.covering(address)
        return None if found is None else found.name

    def prologue_end(self, function: Entry, entry: int) -> int:
        """
        Return the link address after the prologue of the function at ``entry``, the code that stores its arguments.

        Return ``entry`` if its end is not known.
        """
        from dprobes.dwarf.address_lists import ranges_of
        from dprobes.dwarf.dwarf_numbers import At
        from dprobes.dwarf.line_table import LineProgram, LineSections

        unit = function.unit if function.unit.skeleton is None else function.unit.skeleton
        offset = unit.root.offset_in_section(At.STMT_LIST)
        if offset is None:
            return entry
        found = [unit.file.section(name) for name in (".debug_line", ".debug_str", ".debug_line_str")]
        lines, strings, line_strings = (bytes(each.data[each.start : each.end]) for each in found)
        sections = LineSections(lines, strings, line_strings, self.elf.byte_order == "big")
        end = max((end for start, end in ranges_of(function) if start <= entry < end), default=entry)
        second: int | None = None
        seen = False
        for row in LineProgram(sections, offset).rows():
            if row.address == entry:
                seen = True
            elif seen and row.address >= end:
                break
            elif seen and row.address > entry:
                if row.ends_prologue:
                    return row.address
                if second is None and (row.begins_statement or row.ends):
                    second = row.address
        return entry if second is None else second

    def are_untouched(self, registers: Sequence[str], start: int, end: int) -> bool:
        """Return whether the code between two link addresses keeps these argument registers, or False if unknown."""
        if start == end:
            return True
        if self.elf.machine != "x86_64":
            return False
        from dprobes.target.code.machine_code import registers_written

        names = {name: self._registers[number] for number, name in _ARGUMENTS.items()}
        written = registers_written(self._module, start, end)
        return written is not None and not any(names.get(each, each) in written for each in registers)

    @property
    def is_go(self) -> bool:
        """True if Go compiled the module, so that its functions take arguments in Go's own registers."""
        return passes_in_registers(self.elf)

    def arguments_at(self, place: str | None) -> int:
        """Return the number of arguments with names (``arg0`` and so on) at a place: 9 in functions of Go, else 6."""
        if place is None or not self.is_go or (address := self.address_of(place)) is None:
            return _C_ARGUMENTS
        return _GO_ARGUMENTS if convention_of(self.function_symbol(address)) is Convention.GO else _C_ARGUMENTS

    # For values

    def machine(self, *, at_entry: bool = False, at_return: bool = False) -> Machine:
        """
        Return the facts about the processor and the place that the computation of values needs.

        With ``at_entry``, the place is a function's first instruction. With ``at_return``, the function has returned:
        only the registers at its entry are known.
        """
        from dprobes.dpc.modules.debug_values import Machine

        word = Integer("unsigned long", self.elf.word_size, is_signed=False, rank=4)
        names = dict(self._registers)
        if self.elf.machine == "x86_64":
            if (at_entry or at_return) and not self.is_go:
                names |= _ARGUMENTS
            if not at_return:
                names |= _VECTORS
        return Machine(word, self.elf.byte_order, names, self._symbol_near, self._frame, at_return)

    @cached_property
    def _registers(self) -> Mapping[int, str]:
        from dprobes.target.unwind.stack_walk import COLUMNS

        columns = COLUMNS.get(self.elf.machine)
        if columns is None:
            return {}
        wide = self.elf.word_size == 8
        named = {n: name for n, name in enumerate(columns.names) if name}
        return {n: f"r{name[1:]}" if wide and name[0] == "e" else name for n, name in named.items()}

    @cached_property
    def _frames(self) -> FileFrames:
        from dprobes.target.unwind.frame_tables import FileFrames

        return FileFrames(self.elf)

    def _frame(self, address: int) -> tuple[int, int] | None:
        try:
            rules = self._frames.rules_at(address)
        except ValueError:
            return None
        row = rules.row_at(address) if rules is not None else None
        if row is None or row.frame.register is None:
            return None
        return row.frame.register, row.frame.offset

    def _symbol_near(self, address: int) -> tuple[str, int] | None:
        """Return a symbol with a unique name near an address, and the distance of the address from it, else None."""
        files = [self.elf] if self.file is None or self.file.elf is self.elf else [self.elf, self.file.elf]
        for elf in files:
            for table in elf_symbols(elf):
                for symbol in table.starting(address):
                    if self.symbol_address(symbol.name) == address:
                        return symbol.name, 0
        anchor = self._anchor
        return None if anchor is None else (anchor[0], address - anchor[1])

    @cached_property
    def _anchor(self) -> tuple[str, int] | None:
        """
        Name and link address of a function symbol to which places without a symbol are relative, or None.

        An object file has none, because the link addresses of its sections are not final.
        """
        if self.elf.type == "rel":
            return None
        for symbol in self._module.symbols.functions():
            if symbol.kind == "func" and self.symbol_address(symbol.name) == symbol.address:
                return symbol.name, symbol.address
        return None
