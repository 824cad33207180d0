"""
Names for the addresses in records, from the sources available when a record is formatted.

Names from the trace file, which were found when the record was written, come first. The mappings of a process that is
still running come next. For a process that has ended, or ran on another machine, only the address of the probepoint is
known. With a file of the same build, that address gives the addresses of its module. Names are not guessed: an unknown
address stays a number.
"""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from dprobes.dwarf.inlined_names import InlinedNames
from dprobes.errors import TargetError
from dprobes.target.code_names import CodeName, LocatedCode, LocatedFunction, MappedCode, function_at
from dprobes.target.kernel.kernel_copies import copy_name
from dprobes.target.other_users import foreign_owner
from dprobes.target.process_names import PROCESSES_MAX, ProcessNames, make_room
from dprobes.target.readable_names import Demangler

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.target.kernel.running_kernel import RunningKernel
    from dprobes.target.probed_module import Module
    from dprobes.target.process_names import NamedProcess
    from dprobes.trace.carried_names import CarriedNames

__all__ = ["AddressSymboliser", "KernelNames", "Symboliser", "is_of_kernel", "names_itself"]

# Names of addresses in the code of the running kernel.

_HALF = 63
_END = "_etext"
_FUNCTION_MAX = 1 << 20
"""Maximum size in bytes of a function whose end is unknown, such as a compiled BPF program."""


def is_of_kernel(address: int) -> bool:
    """Return whether an address is in the kernel's half of a 64-bit address space."""
    return bool(address >> _HALF)


class KernelNames:
    """The names of the running kernel's code; its list of symbols is read on first use."""

    def __init__(self, kernel: RunningKernel | None = None) -> None:
        self._given = kernel

    def name_of(self, address: int) -> tuple[str, str] | None:
        """
        Return the name of a function with the distance from its start, and its module.

        Return None if no symbol covers the address.
        """
        located = self.located(address)
        if located is None or located.function is None:
            return None
        function, distance, module, _ = located.name_of(address)
        return (f"{function}+{distance:#x}" if distance else function), module

    def located(self, address: int) -> LocatedCode | None:
        """
        Return the location of an address, or None if it is unknown.

        Each function is a mapping, at its kernel address.
        """
        try:
            symbol = self._kernel.symbols.covering(address)
            if symbol is None or address >= self._end_of(symbol.module, symbol.address):
                return None
            end = self._kernel.symbols.following(symbol) or address + 1
        except TargetError:
            return None
        start, end = symbol.address, max(address + 1, min(end, self._end_of(symbol.module, symbol.address)))
        mapped = MappedCode(start, end, start, symbol.module or "vmlinux", "")
        return LocatedCode(None, 0, mapped, LocatedFunction(start, end, copy_name(self._kernel, symbol)))

    def _end_of(self, module: str, function: int) -> int:
        """Return an upper bound for the end address of a function in a module; an empty ``module`` is the kernel."""
        if not module:
            return self._kernel_end
        loaded = self._kernel.modules.get(module)
        return function + _FUNCTION_MAX if loaded is None else loaded.address + loaded.size

    @cached_property
    def _kernel_end(self) -> int:
        return max((symbol.address for symbol in self._kernel.symbols.find(_END, "")), default=0)

    @cached_property
    def _kernel(self) -> RunningKernel:
        if self._given is not None:
            return self._given
        from dprobes.target.kernel.running_kernel import RunningKernel

        return RunningKernel(reads_anew=True)  # BPF programs, which come and go, have names too


_Kept = TypeVar("_Kept")

_NAMES_MAX = 4096
"""Maximum number of names that are kept for the kernel, and for each load address of a module."""

_START_TOLERANCE = 20_000_000
"""Tolerance in nanoseconds: the kernel reports the start of a process in hundredths of a second."""

_PLACE = re.compile(r"(?P<name>.+?)(?:\+0x(?P<distance>[0-9a-f]{1,16}))?", re.DOTALL)
_OFFSET = re.compile(r"0x[0-9a-f]{1,16}")
_PAGE = 4096


class Symboliser(Protocol):
    """A provider of names for addresses in the process of a record."""

    def name_of(self, address: int, record: LogRecord, place: Place | None) -> str | None:
        """Return ``symbol+0x4 [module]`` or similar; None if the address is unknown."""

    def code_name(self, address: int, record: LogRecord, place: Place | None) -> CodeName | None:
        """Return the parts of the name, or None if the address is unknown."""

    def caller_name(self, address: int, record: LogRecord, place: Place | None) -> CodeName | None:
        """Return the name of the call instruction before a return address, or None if the address is unknown."""


class AddressSymboliser:
    """
    A provider of names for the addresses in the records of one source.

    With ``live`` the records are of processes of this machine and boot, which may still run. ``carried`` are the names
    in a trace file.
    """

    def __init__(self, source: RecordSource | None, *, live: bool, carried: CarriedNames | None = None) -> None:
        self._source = source
        self._live = live
        self._carried = carried
        self._demangler = Demangler()
        self._processes = ProcessNames(
            source.images if source is not None else None,
            InlinedNames(),
            (source.module,) if source is not None else (),
        )
        self._loaded: OrderedDict[int, dict[int, CodeName | None]] = OrderedDict()
        self._own: Module | None = None
        self._own_is_known = self._own_is_trusted = False
        elsewhere = None if source is None else source.kernel
        self._kernel = KernelNames(elsewhere)
        self._sees_processes = live and elsewhere is None
        self._kernel_places: dict[int, LocatedCode | None] = {}

    def know(self, source: RecordSource) -> None:
        """Use ``source`` from now on. It may name more files, so the module is searched again unless it was found."""
        self._source = source
        self._own_is_known = self._own is not None

    def name_of(self, address: int, record: LogRecord, place: Place | None) -> str | None:
        """Return ``symbol+0x4 [module]`` or ``module+offset in its file``; None if the address is unknown."""
        if place is not None and address == record.ip and names_itself(place):
            return f"{place.symbol} [{_file_name(place)}]"
        found = self.code_name(address, record, place)
        return None if found is None else found.text

    def code_name(self, address: int, record: LogRecord, place: Place | None) -> CodeName | None:
        """Return the parts of the name, or None if the address is unknown."""
        if place is not None and address == record.ip and names_itself(place):
            return _name_of_place(place)
        pid = None if is_of_kernel(address) else record.pid
        if self._carried is not None and (carried := self._carried.name_of(address, pid, record.time)) is not None:
            return carried
        if self._live and is_of_kernel(address):
            located = self._kernel_place(address)
            return None if located is None else located.name_of(address)
        if self._sees_processes and (process := self._process(record, place)) is not None:
            located = process.located(address)
            return None if located is None else located.name_of(address)
        return self._from_probepoint(address, record, place)

    def caller_name(self, address: int, record: LogRecord, place: Place | None) -> CodeName | None:
        """
        Return the name of the call before a return address; the call may be the last instruction of a function.

        A signal handler returns to the first instruction of the code that ends the signal, which has no function before
        it.
        """
        if not address:
            return None
        before = self.code_name(address - 1, record, place)
        if before is not None and before.function:
            return before._replace(distance=before.distance + 1)
        return self.code_name(address, record, place)

    def located(self, address: int, record: LogRecord, place: Place | None) -> LocatedCode | None:
        """Return the location of an address in the kernel, or in the process if it still runs; None if unknown."""
        if is_of_kernel(address):
            return self._kernel_place(address)
        process = self._process(record, place)
        return None if process is None else process.located(address)

    def _kernel_place(self, address: int) -> LocatedCode | None:
        return _kept(self._kernel_places, address, lambda: self._kernel.located(address))

    # Running processes

    def _process(self, record: LogRecord, place: Place | None) -> NamedProcess | None:
        """
        Return the process of a record.

        Return None if the record has no pid, the process has ended, or its id was reused.
        """
        if record.pid is None:
            return None
        process = self._processes.process(record.pid, record.process_name or "", record.time)
        if process is None or (record.time is not None and process.started > record.time + _START_TOLERANCE):
            return None
        if record.ip is not None and place is not None and place.is_at_ip and not process.maps_file_at(record.ip):
            return None
        return process

    # Ended processes

    def _from_probepoint(self, address: int, record: LogRecord, place: Place | None) -> CodeName | None:
        # At a return the ip is in the unknown caller, and for a sample it is anywhere.
        if place is None or record.ip is None or not place.is_at_ip:
            return None
        module = self._own_module(place)
        bias = _bias(module, place, record.ip) if module is not None else None
        if module is None or bias is None:
            return None
        if bias not in self._loaded:
            make_room(self._loaded, PROCESSES_MAX)
            self._loaded[bias] = {}
        name_of = partial(self._demangler.name_of, is_trusted=self._own_is_trusted)
        return _kept(self._loaded[bias], address, lambda: _name_in(module, _file_name(place), address - bias, name_of))

    def _own_module(self, place: Place) -> Module | None:
        """Return the probed module, loaded from this machine, or None if no file has the same build ID."""
        if not self._own_is_known:
            self._own_is_known = True
            if self._source is not None:
                self._own = _file_of_build(place.module, self._source)
            if self._own is not None:
                with contextlib.suppress(OSError):
                    self._own_is_trusted = foreign_owner(self._own.path.stat()) is None
        return self._own


def names_itself(place: Place) -> bool:
    """Return whether the address in the item ``ip`` has the name by which the program specifies the place."""
    return place.is_at_ip and not _OFFSET.fullmatch(place.symbol)


def _name_of_place(place: Place) -> CodeName:
    match = _PLACE.fullmatch(place.symbol)
    if match is None:
        return CodeName(place.symbol, 0, _file_name(place))
    return CodeName(match["name"], int(match["distance"] or "0", 16), _file_name(place))


def _file_name(place: Place) -> str:
    """Return the file name of a module, which a program may specify with its directory."""
    return place.module.rpartition("/")[2] or place.module


def _file_of_build(name: str, source: RecordSource) -> Module | None:
    from dprobes.target.elf.elf_file import module_identity
    from dprobes.target.module_lookup import find_module
    from dprobes.target.probed_module import Module

    found = find_module(name) if source.build_ids else None
    for path in (*map(Path, source.paths), *((found,) if found is not None else ())):
        # The path may be from another machine; a file there counts only if its build id matches.
        with contextlib.suppress(TargetError, OSError, ValueError):
            if path.is_file() and module_identity((module := Module.load(path)).elf) in source.build_ids:
                return module
    return None


def _bias(module: Module, place: Place, address: int) -> int | None:
    """Return a module's load bias if ``place`` in it is at run-time ``address``, or None if it cannot be there."""
    if _OFFSET.fullmatch(place.symbol):
        link_address = module.elf.link_address(int(place.symbol, 16))
    else:
        match = _PLACE.fullmatch(place.symbol)
        try:
            link_address = module.address_of(match["name"]) if match is not None else None
        except TargetError:
            link_address = None
        if match is not None and link_address is not None:
            link_address += int(match["distance"] or "0", 16)
    if link_address is None:
        return None
    bias = address - link_address
    is_possible = bias % _PAGE == 0 if module.elf.is_pie_or_shared else bias == 0
    return bias if is_possible else None


def _name_in(module: Module, name: str, link_address: int, name_of: Callable[[str], str]) -> CodeName | None:
    offset = module.elf.file_offset(link_address)
    if offset is None:
        return None
    function = function_at(module, offset, name_of)
    return CodeName("", offset, name) if function is None else CodeName(function.name, offset - function.start, name)


def _kept(names: dict[int, _Kept], address: int, find: Callable[[], _Kept]) -> _Kept:
    if address not in names:
        if len(names) >= _NAMES_MAX:
            names.clear()
        names[address] = find()
    return names[address]
