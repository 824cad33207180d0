"""
Names for the addresses in records, from what is at hand when a record is formatted.

A process that still runs says itself what it maps where. Of one that has ended, or ran on another machine, only the
address of the probepoint is known: together with a file of the same build that gives the addresses of that module. What
cannot be known is not guessed: the address then stays a number.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from dprobes.errors import TargetError
from dprobes.formatters.kernelnames import KernelNames, is_of_kernel
from dprobes.target.allowance import Allowance
from dprobes.target.ownership import foreign_owner

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.record.layout import LogRecord
    from dprobes.record.origin import RecordSource
    from dprobes.record.probeinfo import Place
    from dprobes.target.location import Module
    from dprobes.target.processmaps import Mapping

__all__ = ["AddressSymboliser", "Symboliser"]

PROCESSES_MAX = 64
"""How many processes' mappings are kept."""

NAMES_MAX = 4096
"""How many names are kept for each process, and for each place that a module was loaded at."""

FOREIGN_SIZE = 64 << 20
"""Bytes of the largest file of another user whose symbols are read."""

_FOREIGN_TIME, _FOREIGN_RATE = 5.0, 0.01
"""Seconds that reading one other user's files may take at once, and how much of the time after that."""

_MAPS_MAX = 64 << 20
"""Bytes that are read of what a process maps: half a million mappings."""

_NANOSECONDS = 1_000_000_000
_START_TOLERANCE = 2 * _NANOSECONDS // 100
"""The kernel says when a process started in hundredths of a second."""

_PLACE = re.compile(r"(?P<name>.+?)(?:\+0x(?P<distance>[0-9a-f]{1,16}))?", re.DOTALL)
_OFFSET = re.compile(r"0x[0-9a-f]{1,16}")
_PAGE = 4096

_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")


class Symboliser(Protocol):
    """Name addresses of the process that a record is of."""

    def name_of(self, address: int, record: LogRecord, place: Place | None) -> str | None:
        """Return ``symbol+0x4 [module]`` or the like; None if nothing is known of the address."""


class AddressSymboliser:
    """
    Name the addresses in the records of one source.

    With ``live`` the records are of processes of this machine since it was started, which may still run.
    """

    def __init__(self, source: RecordSource | None, *, live: bool) -> None:
        self._source = source
        self._live = live
        self._processes: OrderedDict[tuple[int, str], _Process | None] = OrderedDict()
        self._loaded: OrderedDict[int, dict[int, str | None]] = OrderedDict()
        self._modules = _Modules()
        self._own: Module | None = None
        self._own_is_known = False
        self._kernel = KernelNames()
        self._kernel_names: dict[int, str | None] = {}

    def name_of(self, address: int, record: LogRecord, place: Place | None) -> str | None:
        """Return ``symbol+0x4 [module]`` or ``module+offset in its file``; None if nothing is known of the address."""
        if place is not None and address == record.ip and place.is_at_ip and not _OFFSET.fullmatch(place.symbol):
            return _shown(place.symbol, place.module)
        if self._live and is_of_kernel(address):
            return _kept(self._kernel_names, address, lambda: self._name_in_kernel(address))
        if self._live and record.pid is not None:
            process = self._process(record.pid, record, place)
            if process is not None:
                return process.name_of(address)
        return self._from_probepoint(address, record, place)

    def _name_in_kernel(self, address: int) -> str | None:
        found = self._kernel.name_of(address)
        return None if found is None else _shown(*found)

    # Processes that are there

    def _process(self, pid: int, record: LogRecord, place: Place | None) -> _Process | None:
        key = (pid, record.process_name or "")
        if key not in self._processes:
            _make_room(self._processes, PROCESSES_MAX)
            self._processes[key] = _Process.open(pid, self._modules)
        process = self._processes[key]
        if process is None or not process.made(record, place):
            return None
        return process

    # Processes that are not

    def _from_probepoint(self, address: int, record: LogRecord, place: Place | None) -> str | None:
        # Behind a return the address is the caller's, and nothing tells where that is; nor where a sample was taken.
        if place is None or record.ip is None or not place.is_at_ip:
            return None
        module = self._own_module(place)
        bias = _bias(module, place, record.ip) if module is not None else None
        if module is None or bias is None:
            return None
        if bias not in self._loaded:
            _make_room(self._loaded, PROCESSES_MAX)
            self._loaded[bias] = {}
        names = self._loaded[bias]
        return _kept(names, address, lambda: _name_in(module, place.module, address - bias))

    def _own_module(self, place: Place) -> Module | None:
        """Return the source's module, if this machine has a file of the same build."""
        if not self._own_is_known:
            self._own_is_known = True
            if self._source is not None:
                self._own = _file_of_build(place.module, self._source)
        return self._own


class _Process:
    """
    Name addresses by what a process maps.

    What was read stays, so that records can be named that come to us after its end.
    """

    def __init__(self, pid: int, started: int, mappings: list[Mapping], modules: _Modules) -> None:
        self._pid = pid
        self._started = started
        self._mappings = mappings
        self._modules = modules
        self._names: dict[int, str | None] = {}
        self._unknown: set[int] = set()

    @classmethod
    def open(cls, pid: int, modules: _Modules) -> _Process | None:
        """Return a process, None if it is gone or not ours to see."""
        looked = _look_at(pid)
        return None if looked is None else cls(pid, *looked, modules)

    def made(self, record: LogRecord, place: Place | None) -> bool:
        """Return whether this is the process that a record is of, and not one that has its number now."""
        if record.time is not None and _monotonic(self._started) > record.time + _START_TOLERANCE:
            return False
        if record.ip is None or place is None or not place.is_at_ip:
            return True
        mapping = self._mapping_at(record.ip)
        return mapping is not None and mapping.is_file

    def name_of(self, address: int) -> str | None:
        """Return ``symbol+0x4 [file]`` or ``file+offset``; None for memory that shows no file."""
        return _kept(self._names, address, lambda: self._name_of(address))

    def _name_of(self, address: int) -> str | None:
        mapping = self._mapping_at(address)
        if mapping is None or not mapping.is_file:
            return None
        offset = address - mapping.start + mapping.offset
        module = self._modules.mapped(self._pid, mapping)
        name = Path(mapping.path).name
        if module is not None and (symbol := module.symbol_at(offset)) is not None:
            return _shown(f"{symbol[0]}+{symbol[1]:#x}" if symbol[1] else symbol[0], name)
        return f"{name}+{offset:#x}"

    def _mapping_at(self, address: int) -> Mapping | None:
        found = self._known_mapping_at(address)
        if (found is None or not found.is_file) and address // _PAGE not in self._unknown:
            # A library may have been loaded there since; but the same question is not asked again and again.
            if len(self._unknown) >= NAMES_MAX:
                self._unknown.clear()
            self._unknown.add(address // _PAGE)
            looked = _look_at(self._pid)
            if looked is not None and looked[0] == self._started:
                self._mappings = looked[1]
                self._names.clear()
                found = self._known_mapping_at(address)
        return found

    def _known_mapping_at(self, address: int) -> Mapping | None:
        return next((mapping for mapping in self._mappings if mapping.start <= address < mapping.end), None)


class _Modules:
    """Keep the files that processes map, with their symbols."""

    def __init__(self) -> None:
        self._modules: OrderedDict[tuple[int, int, str], Module | None] = OrderedDict()
        self._allowances: defaultdict[str, Allowance] = defaultdict(lambda: Allowance(_FOREIGN_TIME, _FOREIGN_RATE))

    def mapped(self, pid: int, mapping: Mapping) -> Module | None:
        """Return what a mapping shows; None if the file is gone, replaced, or no module."""
        key = (mapping.device, mapping.inode, mapping.path)
        if key not in self._modules:
            _make_room(self._modules, PROCESSES_MAX)
            self._modules[key] = None
            with contextlib.suppress(TargetError, OSError):
                self._modules[key] = self._open(pid, mapping)
        return self._modules[key]

    def _open(self, pid: int, mapping: Mapping) -> Module | None:
        from dprobes.target.location import Module
        from dprobes.target.modules import root_of

        reached = Path(root_of(pid) + mapping.path)
        status = reached.stat()
        if mapping.deleted or status.st_ino != mapping.inode:
            return None
        if (owner := foreign_owner(status)) is None:
            return Module.load(mapping.path, reached=reached)
        # Records wait meanwhile, and whoever made the file may want them to.
        allowance, began = self._allowances[owner], time.monotonic()
        if status.st_size > FOREIGN_SIZE or not allowance.has(0, began):
            return None
        try:
            module = Module.load(mapping.path, reached=reached)
            module.symbol_at(mapping.offset)  # what takes the most time is done at the first question
            return module
        finally:
            allowance.use(time.monotonic() - began)


def _file_of_build(name: str, source: RecordSource) -> Module | None:
    from dprobes.target.elf.identity import module_identity
    from dprobes.target.location import Module
    from dprobes.target.modules import find_module

    found = find_module(name) if source.build_ids else None
    for path in (*map(Path, source.paths), *((found,) if found is not None else ())):
        # A path may be from another machine: whatever it leads to here is looked at as a file, if it is one.
        with contextlib.suppress(TargetError, OSError, ValueError):
            if path.is_file() and module_identity((module := Module.load(path)).elf) in source.build_ids:
                return module
    return None


def _bias(module: Module, place: Place, address: int) -> int | None:
    """Return what a module's link addresses lack to be run-time addresses if ``place`` in it is at ``address``."""
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


def _name_in(module: Module, name: str, link_address: int) -> str | None:
    offset = module.elf.file_offset(link_address)
    if offset is None:
        return None
    symbol = module.symbol_at(offset)
    if symbol is None:
        return f"{name}+{offset:#x}"
    return _shown(f"{symbol[0]}+{symbol[1]:#x}" if symbol[1] else symbol[0], name)


def _shown(symbol: str, module: str) -> str:
    return f"{symbol} [{module}]"


def _kept(names: dict[int, str | None], address: int, find: Callable[[], str | None]) -> str | None:
    if address not in names:
        if len(names) >= NAMES_MAX:
            names.clear()
        names[address] = find()
    return names[address]


def _make_room(kept: OrderedDict[_Key, _Kept], limit: int) -> None:
    while len(kept) >= limit:
        kept.popitem(last=False)


def _look_at(pid: int) -> tuple[int, list[Mapping]] | None:
    """Return when a process started, and what it maps; None if it is gone or not ours to see."""
    from dprobes.target.processmaps import parse_maps, read_maps

    try:
        return _start_of(pid), parse_maps(read_maps(pid, _MAPS_MAX))
    except (TargetError, OSError, ValueError, IndexError):
        return None


def _start_of(pid: int) -> int:
    """Return when a process started, in clock ticks since this machine did; see proc(5), field 22 of ``stat``."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[19])


def _monotonic(ticks: int) -> int:
    """Return ticks since the machine was started in nanoseconds of CLOCK_MONOTONIC, which does not count sleep."""
    slept = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return ticks * _NANOSECONDS // os.sysconf("SC_CLK_TCK") - slept
