"""Names for addresses of processes, from their mappings. The names are kept when a process exits."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import WeakSet

from dprobes.errors import TargetError
from dprobes.target.code_names import LocatedCode, LocatedFunction, MappedCode, function_at
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.module_lookup import held_files, module_name, root_of
from dprobes.target.other_users import Allowance, foreign_owner
from dprobes.target.readable_names import Demangler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.target.code_names import InliningFinder
    from dprobes.target.probed_module import Module
    from dprobes.target.process_images import ProcessImage, ProcessImages
    from dprobes.target.process_maps import Mapping

__all__ = ["PROCESSES_MAX", "JitMap", "NamedProcess", "ProcessNames", "make_room"]

# Maps of just-in-time compilers: the functions that they list for perf in ``/tmp/perf-PID.map``.
# A line is ``START SIZE name``, in hexadecimal. The file is in the mount namespace of the process, and PID is that of
# its own PID namespace. Others can write into ``/tmp``, so a file counts only if the process's user, or root, owns it.


_DIRECTORY = "/tmp"  # noqa: S108 - where perf has them
_TO_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_SIZE_MAX = 64 << 20
_ROWS_MAX = 1 << 20
_NAME_MAX = 1024
_INTERVAL = 0.1
"""Seconds between checks of the file for a function that it lacked."""
_LAST = 256
"""Size in bytes of the end of the known part, which is compared to detect that a file was only appended to."""
_SHARE = 10
"""Minimum ratio of the time between two reads to the duration of a read, however often the file changes."""

_LINE = re.compile(rb"^(?:0x)?([0-9a-fA-F]{1,16}) (?:0x)?([0-9a-fA-F]{1,8}) ([^\n]+)$", re.MULTILINE)


class JitMap:
    """The perf map (``/tmp/perf-PID.map``) of one process's just-in-time compiler, which is read again as it grows."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: tuple[int, int, int] | None = None
        """Inode, size and time of the last change at the last read."""
        self._read_to = 0
        """Offset up to which the file was read. The next read starts there."""
        self._last = b""
        """The bytes before that offset, by which a rewritten file is detected."""
        self._next_look = float("-inf")
        self._functions: dict[int, LocatedFunction] = {}
        self._starts: list[int] = []

    def function_at(self, address: int) -> LocatedFunction | None:
        """Return the function at an address, with its extent in addresses, or None if it is not listed."""
        found = self._known(address)
        if found is None and (begun := time.monotonic()) >= self._next_look:
            self._read()
            now = time.monotonic()
            self._next_look = now + max(_INTERVAL, (now - begun) * _SHARE)
            found = self._known(address)
        return found

    def _known(self, address: int) -> LocatedFunction | None:
        number = bisect_right(self._starts, address) - 1
        found = self._functions[self._starts[number]] if number >= 0 else None
        return found if found is not None and address < found.end else None

    def _read(self) -> None:
        try:
            directory = os.open(root_of(self._pid) + _DIRECTORY, _TO_DIRECTORY)
        except OSError:
            return
        try:
            self._read_in(directory)
        except OSError:
            return
        finally:
            os.close(directory)

    def _read_in(self, directory: int) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(f"perf-{_own_number(self._pid)}.map", flags, dir_fd=directory)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            state = status.st_ino, status.st_size, status.st_mtime_ns
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, _user_of(self._pid)) or state == self._seen:
                return
            begin = self._read_to - len(self._last)
            file.seek(begin)
            data = file.read(_SIZE_MAX - begin)
            if self._seen is None or self._seen[0] != status.st_ino or not data.startswith(self._last):
                self._read_to, self._last, self._functions = 0, b"", {}
                file.seek(0)
                data = file.read(_SIZE_MAX)
            self._seen = state
        data = data[len(self._last) : data.rfind(b"\n") + 1]
        self._read_to += len(data)
        self._last = data[-_LAST:] or self._last
        for match in _LINE.finditer(data):
            start, size = int(match[1], 16), int(match[2], 16)
            if len(self._functions) >= _ROWS_MAX:
                break
            name = match[3][:_NAME_MAX].decode("utf-8", "backslashreplace")
            self._functions[start] = LocatedFunction(start, start + max(size, 1), name)  # the last one counts
        self._starts = sorted(self._functions)


def _user_of(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def _own_number(pid: int) -> int:
    """Return the id of a process in its own PID namespace (proc(5), NSpid)."""
    for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
        if line.startswith(b"NSpid:"):
            return int(line.split()[-1])
    return pid


PROCESSES_MAX = 64
"""Maximum number of processes whose mappings are kept."""

_NAMES_MAX = 4096
"""Maximum number of a process's addresses that are kept."""

FOREIGN_SIZE = 64 << 20
"""Maximum size in bytes of another user's file whose symbols are read."""

_FOREIGN_TIME, _FOREIGN_RATE = 5.0, 0.01
"""Seconds that reading another user's files may take in a burst, and the share of elapsed time afterwards."""

_NANOSECONDS = 1_000_000_000
_MILLISECOND = 1_000_000
_PAGE = 4096

_VDSO, _VDSO_MAX = "[vdso]", 1 << 20
_JIT = "JIT"
"""Module name of code that no file contains."""

_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")


def make_room(kept: OrderedDict[_Key, _Kept], limit: int) -> None:
    """Remove the oldest items of ``kept`` until it has fewer than ``limit``."""
    while len(kept) >= limit:
        kept.popitem(last=False)


class _Look(NamedTuple):
    """A snapshot of a process: its start time in clock ticks since the machine's start, and its mappings."""

    ticks: int
    program: str
    mappings: list[Mapping]
    name: str

    @property
    def started(self) -> int:
        """Start time of the process in nanoseconds of CLOCK_MONOTONIC, accurate to a millisecond."""
        return max(0, _monotonic(self.ticks))

    @property
    def image(self) -> tuple[str | int, ...]:
        """A value that differs after an exec: the program, and the address of ``[vdso]``."""
        return self.program, *(each.start for each in self.mappings if each.path == "[vdso]")


class ProcessNames:
    """
    A cache of the processes to whose addresses records refer, to give these addresses names.

    ``images`` has the mappings of processes that have exited, ``inlining`` finds the calls that were inlined into
    functions. ``called`` are the names that programs use for modules.
    """

    def __init__(
        self,
        images: ProcessImages | None = None,
        inlining: InliningFinder | None = None,
        called: Sequence[str] = (),
    ) -> None:
        self._images = images
        self._called = called
        self._processes: OrderedDict[tuple[int, str | ProcessImage], NamedProcess | None] = OrderedDict()
        self._modules = _Modules(inlining)

    def process(self, pid: int, name: str, seen: int | None) -> NamedProcess | None:
        """
        Return the process with an id and a name, running or ended; None if it is unknown, or may not be inspected.

        If a process's name has changed, it may have executed another program. ``seen`` is a time in nanoseconds of
        CLOCK_MONOTONIC at which the process executed the program with that name.
        """
        image = self._images.at(pid, seen) if self._images is not None else None
        key = (pid, name if image is None else image)
        if key not in self._processes:
            make_room(self._processes, PROCESSES_MAX)
            self._processes[key] = self._open(pid, seen) if image is None else self._open_image(image)
        return self._processes[key]

    def _open_image(self, image: ProcessImage) -> NamedProcess:
        look = _look_at(image.pid)
        if look is not None and not _shows(look, image):
            look = None  # the process has executed another program since, or its number was reused
        return NamedProcess(image.pid, look, self._modules, image.since, image, called=(*self._called, image.name))

    def _open(self, pid: int, seen: int | None) -> NamedProcess | None:
        look = _look_at(pid)
        if look is None:
            return None
        since = look.started
        for (other, _), process in self._processes.items():
            if other == pid and process is not None and process.ticks == look.ticks:
                if process.is_same(look.image):
                    return process  # only the name of a thread differs
                since = time.monotonic_ns() if seen is None else seen
        return NamedProcess(pid, look, self._modules, since, called=(*self._called, look.name))


class NamedProcess:
    """
    A process, running or exited, whose code addresses can be named by its mappings.

    It can be inspected, or its ``image`` is known, or both. ``called`` are possible names of its modules.
    """

    def __init__(
        self,
        pid: int,
        look: _Look | None,
        modules: _Modules,
        since: int,
        image: ProcessImage | None = None,
        *,
        called: Sequence[str] = (),
    ) -> None:
        self._called = called
        self._names: dict[str, str] = {}
        self.ticks = None if look is None else look.ticks
        self.started = since if look is None or image is not None else look.started
        self._image = image
        self._since = since
        self._pid = pid
        self._look = look
        self._modules = modules
        self._jit: JitMap | None = None
        self._found: dict[int, LocatedCode | None] = {}
        self._unknown: set[int] = set()

    def is_same(self, image: tuple[str | int, ...]) -> bool:
        """Return whether the process still executes the program of ``image``, judging by its mappings."""
        return self._look is not None and self._look.image == image

    def maps_file_at(self, address: int) -> bool:
        """Return whether the process maps a file at an address."""
        mapping = self._mapping_at(address)
        return mapping is not None and mapping.is_file

    def located(self, address: int) -> LocatedCode | None:
        """Return the location of an address, or None for memory without a file."""
        if address not in self._found:
            if len(self._found) >= _NAMES_MAX:
                self._found.clear()
            self._found[address] = self._locate(address)
        return self._found[address]

    def _locate(self, address: int) -> LocatedCode | None:
        mapping = self._mapping_at(address)
        if mapping is None or not (mapping.is_file or mapping.path == _VDSO):
            return self._located_in_jit(address) if mapping is not None and mapping.executable else None
        module, build = self._modules.mapped(self._pid, mapping)
        if module is None and mapping.executable and (made := self._located_in_jit(address)) is not None:
            return made  # in shared memory that is written through another mapping
        offset = address - mapping.start + mapping.offset
        function = self._modules.function_at(module, offset) if module is not None else None
        mapped = MappedCode(mapping.start, mapping.end, mapping.offset, self._name_of(mapping, module), build)
        return LocatedCode(self._pid, self._since, mapped, function)

    def _name_of(self, mapping: Mapping, module: Module | None) -> str:
        """Return the name of a mapping's file in output: a name from a program, its SONAME, or its base name."""
        if mapping.path not in self._names:
            soname = module.elf.soname if module is not None and mapping.is_file else None
            self._names[mapping.path] = module_name(mapping.path, soname, self._called, root_of(self._pid))
        return self._names[mapping.path]

    def _located_in_jit(self, address: int) -> LocatedCode | None:
        """Return the location of an address in code from a just-in-time compiler, or None if it is not listed."""
        if self._jit is None:
            self._jit = JitMap(self._pid)
        function = self._jit.function_at(address)
        if function is None:
            return None
        mapped = MappedCode(function.start, function.end, function.start, _JIT, f"perf-{self._pid}")
        return LocatedCode(self._pid, self._since, mapped, function)

    def _mapping_at(self, address: int) -> Mapping | None:
        if self._image is not None and (mapped := self._image.covering(address)) is not None:
            return mapped
        return self._mapping_seen(address) if self._look is not None else None

    def _mapping_seen(self, address: int) -> Mapping | None:
        found = self._known_mapping_at(address)
        if (found is None or not found.is_file) and address // _PAGE not in self._unknown:
            # A library may have been loaded there since. Each page is looked up only once, to limit the cost.
            if len(self._unknown) >= _NAMES_MAX:
                self._unknown.clear()
            self._unknown.add(address // _PAGE)
            look = _look_at(self._pid)
            if look is not None and look.ticks == self.ticks:
                if not self.is_same(look.image):
                    self._since = time.monotonic_ns()
                self._look = look
                self._found.clear()
                found = self._known_mapping_at(address)
        return found

    def _known_mapping_at(self, address: int) -> Mapping | None:
        mappings = self._look.mappings if self._look is not None else ()
        return next((mapping for mapping in mappings if mapping.start <= address < mapping.end), None)


class _Modules:
    """A cache of the files that processes map, with their symbols and build IDs."""

    def __init__(self, inlining: InliningFinder | None) -> None:
        self._inlining = inlining
        self._modules: OrderedDict[tuple[int, int, str], tuple[Module | None, str]] = OrderedDict()
        self._foreign: WeakSet[Module] = WeakSet()
        """Modules of files that other users own."""
        self._demangler = Demangler()
        self._allowances: defaultdict[str, Allowance] = defaultdict(lambda: Allowance(_FOREIGN_TIME, _FOREIGN_RATE))

    def mapped(self, pid: int, mapping: Mapping) -> tuple[Module | None, str]:
        """
        Return the module of a mapping and its build-id.

        Return None and "" if its file cannot be reached or is not a module.
        """
        key = (mapping.device, mapping.inode, mapping.path)
        if key not in self._modules:
            make_room(self._modules, PROCESSES_MAX)
            self._modules[key] = None, ""
            with contextlib.suppress(TargetError, OSError):
                module = self._open(pid, mapping)
                if module is not None:
                    self._modules[key] = module, module.elf.build_id or ""
        return self._modules[key]

    def function_at(self, module: Module, offset: int) -> LocatedFunction | None:
        """Return the function at an offset of a module's file, with its readable name, or None if it is unknown."""
        is_trusted = module not in self._foreign
        name_of = partial(self._demangler.name_of, is_trusted=is_trusted)
        return function_at(module, offset, name_of, self._inlining if is_trusted else None)

    def _open(self, pid: int, mapping: Mapping) -> Module | None:
        from dprobes.target.probed_module import OWN_SYMBOLS, Module

        if mapping.path == _VDSO:
            return OWN_SYMBOLS.module_of(ElfFile.of_bytes(Path(_VDSO), _memory_of(pid, mapping)))
        if (found := _file_of(pid, mapping)) is None:
            return None
        reached, status = found
        if (owner := foreign_owner(status)) is None:
            return Module.load(mapping.path, reached=reached)
        # Records wait meanwhile, and the file's owner may try to delay them.
        allowance, began = self._allowances[owner], time.monotonic()
        if status.st_size > FOREIGN_SIZE or not allowance.has(0, began):
            return None
        try:
            module = Module.load(mapping.path, reached=reached)
            self._foreign.add(module)
            module.symbol_at(mapping.offset)  # do the slowest work now, within the allowance
            return module
        finally:
            allowance.use(time.monotonic() - began)


def _file_of(pid: int, mapping: Mapping) -> tuple[Path, os.stat_result] | None:
    """Return a path that leads to a mapping's file, and the file's status, or None if no path does."""
    plain = () if mapping.deleted else (Path(root_of(pid) + mapping.path),)
    for path in (*plain, *held_files(mapping, pid)):
        with contextlib.suppress(OSError):
            if (status := path.stat()).st_ino == mapping.inode:
                return path, status
    return None


def _shows(look: _Look, image: ProcessImage) -> bool:
    """Return whether a snapshot of a process still has the code mapping at which ``image`` begins."""
    code = {(each.start, each.inode) for each in look.mappings if each.executable}
    return all((each.start, each.inode) in code for each in image.mappings[:1])


def _memory_of(pid: int, mapping: Mapping) -> bytes:
    """Return the vDSO image that a process maps; raise OSError if the process has ended."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        return os.pread(memory.fileno(), min(mapping.end - mapping.start, _VDSO_MAX), mapping.start)


def _look_at(pid: int) -> _Look | None:
    """Return a snapshot of a process, or None if it has ended or may not be inspected."""
    from dprobes.target.process_maps import command_name, mappings_of

    try:
        program = str(Path(f"/proc/{pid}/exe").readlink())
        return _Look(_start_of(pid), program, mappings_of(pid), command_name(pid))
    except (TargetError, OSError, ValueError, IndexError):
        return None


def _start_of(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot (proc(5), field 22 of ``stat``)."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[19])


def _monotonic(ticks: int) -> int:
    """Return ticks since the machine's start as nanoseconds of CLOCK_MONOTONIC, which does not count sleep."""
    slept = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    slept = round(slept / _MILLISECOND) * _MILLISECOND  # the two clocks are not read at the same moment
    return ticks * _NANOSECONDS // os.sysconf("SC_CLK_TCK") - slept
