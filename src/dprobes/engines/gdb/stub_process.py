"""
Files that a process has loaded, and their addresses, from the process's own memory.

The kernel passes information to a program in the auxiliary vector (getauxval(3)). The dynamic linker keeps a list of
the files that it has loaded for debuggers (``struct r_debug`` and ``struct link_map`` in glibc's elf/link.h)::

    auxv ─► AT_PHDR ─► PT_DYNAMIC ─► DT_DEBUG ─► r_debug: version │ r_map │ r_brk │ r_state
                                                            │
                                                                    └─► link_map: l_addr │ l_name │ l_ld │ l_next │
                                                                    l_prev

``l_addr`` is the load bias of a file. The linker calls ``r_brk``, an empty function, before and after each change of
the list; ``r_state`` is the kind of change.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.gdb.remote_protocol import Stopped
from dprobes.engines.gdb.stub_registers import check_description
from dprobes.errors import EngineError, TargetError
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.symbol_table import FunctionDescriptors
from dprobes.target.module_lookup import find_module
from dprobes.target.process_maps import PAGE_SIZE
from dprobes.target.process_maps import Mapping as MemoryMapping

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dprobes.engines.gdb.remote_protocol import ThreadId
    from dprobes.engines.gdb.stub_registers import StubProcessor
    from dprobes.engines.gdb.stub_target import StubTarget
    from dprobes.resolve.probepoints import ResolvedModule
    from dprobes.target.process_images import ProcessImages

__all__ = ["CodeFiles", "StubProcess"]

_AT_NULL, _AT_PHDR, _AT_PHENT, _AT_PHNUM, _AT_ENTRY, _AT_UID, _AT_EXECFN = 0, 3, 4, 5, 9, 11, 31
_PT_DYNAMIC, _PT_PHDR = 2, 6
_DT_NULL, _DT_DEBUG = 0, 21
_RT_DELETE = 2
_FILES_MAX = 4096
_DYNAMIC_MAX = 4096
_NAME_MAX = 4096


class LoadedFile(NamedTuple):
    """A file by its path in the target, "" for the program itself, and its load bias."""

    path: str
    bias: int


@dataclass(frozen=True, slots=True)
class ProcessImage:
    """
    Data about a process from its auxiliary vector: load bias, entry and user of its program.

    ``path`` is the path by which the program was executed, or "" if it is unknown. ``debug_place`` is the address of
    the pointer to r_debug, or None in a program without a dynamic linker.
    """

    bias: int
    header: int
    """Address of the ELF header of the program."""
    entry: int
    uid: int
    debug_place: int | None
    word_size: int
    path: str = ""
    has_descriptors: bool = False
    """True if a function's address is a descriptor (64-bit PowerPC), whose first word is the code's address."""

    def code_of(self, target: StubTarget, function: int) -> int | None:
        """
        Return the address of a function's code, or None if its descriptor cannot be read.

        The load bias is added if the linker has not relocated the descriptor.
        """
        if not self.has_descriptors:
            return function
        code = target.word(function, self.word_size)
        return code + self.bias if code is not None and code < self.bias else code

    def loaded_files(self, target: StubTarget) -> tuple[LoadedFile, ...]:
        """Return the files that are loaded now, the program first."""
        entries = (LoadedFile(_text(target, name), bias) for _, bias, name in self.linker_entries(target))
        return (LoadedFile("", self.bias), *(each for each in entries if each.path))

    def linker_entries(self, target: StubTarget) -> Iterator[tuple[int, int, int]]:
        """Iterate over the entries of the dynamic linker's list: the address, ``l_addr`` and ``l_name`` of each."""
        at = self._debug(target, 1)
        seen: set[int] = set()
        while at and at not in seen and len(seen) < _FILES_MAX:
            seen.add(at)
            bias, name, _, following = (target.word(at + n * self.word_size, self.word_size) for n in range(4))
            if bias is None or following is None:
                break
            yield at, bias, name or 0
            at = following

    def headers(self, target: StubTarget) -> tuple[int, ...]:
        """Return the addresses of the ELF headers of the program and of the files that are loaded now."""
        return (self.header, *(file.bias for file in self.loaded_files(target) if file.path))

    def linker_breakpoint(self, target: StubTarget) -> int | None:
        """Return the address of ``r_brk``, None until the dynamic linker has set it."""
        function = self._debug(target, 2)
        return self.code_of(target, function) if function else None

    def is_unloading(self, target: StubTarget) -> bool:
        """Return whether the dynamic linker is about to unload files."""
        return self._debug(target, 3) & 0xFFFF_FFFF == _RT_DELETE

    def _debug(self, target: StubTarget, field: int) -> int:
        """Return a word of r_debug, 0 if it does not exist yet."""
        if self.debug_place is None:
            return 0
        start = target.word(self.debug_place, self.word_size)
        return (target.word(start + field * self.word_size, self.word_size) or 0) if start else 0


def _text(target: StubTarget, address: int) -> str:
    data = bytearray()
    while address and len(data) < _NAME_MAX:
        piece = target.read(address + len(data), 64 - (address + len(data)) % 64)
        end = piece.find(b"\0")
        data += piece if end < 0 else piece[:end]
        if end >= 0 or not piece:
            break
    return data.decode("utf-8", "surrogateescape")


def process_image(target: StubTarget, word_size: int, *, has_descriptors: bool = False) -> ProcessImage | None:
    """Return the image of a process, None if the stub has no auxiliary vector: then it is no process of Linux."""
    data = target.stub.read_object("auxv")
    if data is None:
        return None
    order = "<" if target.byte_order == "little" else ">"
    entry = struct.Struct(f"{order}{'QQ' if word_size == 8 else 'II'}")
    vector: dict[int, int] = {}
    for key, value in entry.iter_unpack(data[: len(data) // entry.size * entry.size]):
        if key == _AT_NULL:
            break
        vector[key] = value
    headers = _program_headers(target, vector, word_size, order)
    bias = next((vector[_AT_PHDR] - address for kind, address in headers if kind == _PT_PHDR), 0)
    dynamic = next((bias + address for kind, address in headers if kind == _PT_DYNAMIC), None)
    place = None if dynamic is None else _place_of_debug(target, dynamic, entry)
    header = vector.get(_AT_PHDR, 0) & -PAGE_SIZE  # program headers are in the first page, after it
    path = _text(target, vector.get(_AT_EXECFN, 0))
    return ProcessImage(
        bias, header, vector.get(_AT_ENTRY, 0), vector.get(_AT_UID, 0), place, word_size, path, has_descriptors
    )


def _program_headers(
    target: StubTarget, vector: Mapping[int, int], word_size: int, order: str
) -> list[tuple[int, int]]:
    """Return the type and the link address of each program header (gABI, chapter 5)."""
    start, size, count = (vector.get(key, 0) for key in (_AT_PHDR, _AT_PHENT, _AT_PHNUM))
    if not start:
        return []
    form = struct.Struct(f"{order}I4xQQ" if word_size == 8 else f"{order}III")
    data = target.read(start, size * count)
    if size < form.size or len(data) < size * count:
        raise EngineError(f"the program headers at {start:#x} cannot be read through the stub {target.stub.name}")
    return [(kind, address) for kind, _, address in (form.unpack_from(data, n * size) for n in range(count))]


def _place_of_debug(target: StubTarget, dynamic: int, entry: struct.Struct) -> int | None:
    for at in range(dynamic, dynamic + _DYNAMIC_MAX * entry.size, entry.size):
        data = target.read(at, entry.size)
        if len(data) < entry.size:
            return None
        tag, _ = entry.unpack(data)
        if tag == _DT_NULL:
            return None
        if tag == _DT_DEBUG:
            return at + entry.size // 2
    return None


_HEAD = 1024
"""Number of bytes that are compared: the headers, and in most files the build ID."""


class CodeFiles:
    """
    Files of this machine that the process ``pid`` has loaded, which are reported to ``images`` for symbols.

    A stub reports the address of a file and its path, which may be on another machine, or in a directory that an
    emulator uses as its root. A file on this machine counts as the same one if its first bytes are the same. ``name``
    is the name of the process, ``module`` the probed file, and ``program`` the path of the process's program, as far as
    known.
    """

    def __init__(
        self, target: StubTarget, images: ProcessImages, module: ElfFile, pid: int, name: str, program: str
    ) -> None:
        self._target, self._images, self._module = target, images, module
        self._pid, self._program = pid, program
        self._known: set[LoadedFile] = set()
        images.began(pid, time.monotonic_ns(), (), name)

    def look(self, loaded: Sequence[LoadedFile]) -> None:
        """Report the files that have been loaded since the last call."""
        for file in loaded:
            if file not in self._known:
                self._known.add(file)
                for mapping in self._mappings(file):
                    self._images.mapped(self._pid, time.monotonic_ns(), mapping)

    def _mappings(self, file: LoadedFile) -> Iterator[MemoryMapping]:
        """Iterate over the code mappings of a file. If the file is not on this machine, there are none."""
        for elf in self._candidates(file.path or self._program):
            if self._is_at(elf, file.bias):
                status = elf.path.stat()
                for segment in elf.load_segments:
                    if segment.executable:
                        start, end = file.bias + segment.vaddr & -PAGE_SIZE, file.bias + segment.vaddr + segment.memsz
                        offset = segment.offset & -PAGE_SIZE
                        place = (start, end, "r-xp", offset, status.st_dev, status.st_ino, str(elf.path))
                        yield MemoryMapping(*place, deleted=False)
                return

    def _candidates(self, path: str) -> Iterator[ElfFile]:
        """Iterate over files of this machine that may be the file with a path on the stub's machine."""
        yield self._module
        if path:
            by_name = find_module(os.path.basename(path), architecture=self._module.machine)
            for each in dict.fromkeys((Path(path), by_name)):
                if each is not None:
                    try:
                        yield ElfFile.open(each)
                    except TargetError:
                        continue

    def _is_at(self, elf: ElfFile, bias: int) -> bool:
        """Return whether the beginning of a file equals the memory at its load bias."""
        if elf.machine != self._module.machine or not elf.load_segments:
            return False
        first = elf.load_segments[0]
        head = bytes(elf.data[first.offset : first.offset + min(first.filesz, _HEAD)])
        return self._target.read(bias + first.vaddr, len(head)) == head


_START_PATIENCE = 30.0
"""Maximum number of seconds for a started process to reach its entry point."""
_COMM_MAX = 15
"""Maximum length of a thread's name in bytes (TASK_COMM_LEN)."""


class StubProcess:
    """
    Stopped process. If the process has not begun, the constructor runs it to its entry point.

    ``program`` is the path of its executable, or "" if unknown. ``linker_place`` is the address of the dynamic linker's
    function for debuggers (``r_brk``), or None without a dynamic linker. The constructor raises ``EngineError`` if the
    ``target`` is no process of Linux, or its processor is not the module's.
    """

    def __init__(self, target: StubTarget, processor: StubProcessor, resolved: ResolvedModule) -> None:
        self._target, self._processor, self._resolved = target, processor, resolved
        self._endpoint = target.stub.name
        self._check_processor()
        reply = target.reason()
        if not isinstance(reply, Stopped):
            target.is_over = True
            raise EngineError(f"there is no program behind the stub {self._endpoint}: it has ended")
        thread = reply.thread or target.stub.current_thread()
        target.process = 0 if thread is None else thread.process
        has_descriptors = FunctionDescriptors.of(resolved.module.elf) is not None
        image = process_image(target, resolved.architecture.word_size, has_descriptors=has_descriptors)
        if image is None:
            raise EngineError(f"the stub {self._endpoint} does not serve a process of Linux")
        self._image = image
        self.uid = image.uid
        self.pid = self._pid_of(thread)
        path = target.stub.read_object("exec-file", f"{target.process:x}") or os.fsencode(image.path)
        self.program = os.fsdecode(path)
        self.name = (os.path.basename(path) or os.fsencode(resolved.module.elf.path.name))[:_COMM_MAX]
        if image.debug_place is not None and image.linker_breakpoint(target) is None:
            self._run_to_entry(thread)
        self.linker_place = image.linker_breakpoint(target)

    def _check_processor(self) -> None:
        described = self._target.description.architecture
        if described and described not in self._processor.descriptions:
            raise EngineError(
                f"the stub {self._endpoint} serves a processor '{described}', "
                f"'{self._resolved.module.elf.path}' is for {self._resolved.architecture.name}"
            )
        check_description(self._target.description, self._processor, self._endpoint)

    def _pid_of(self, thread: ThreadId | None) -> int:
        """Return the process id. QEMU reports 1 for any process, but uses the kernel's thread ids."""
        if thread is None:
            return 0
        return thread.process if thread.process > 1 else min(each.thread for each in self._target.stub.threads())

    def _run_to_entry(self, thread: ThreadId | None) -> None:
        """
        Run to the executable's entry point; raise ``EngineError`` if the process does not reach it.

        Files cannot be probed until the dynamic linker has loaded them.
        """
        entry = self._image.code_of(self._target, self._image.entry) or 0
        self.insert(entry)
        self._target.resume()
        reply = self._target.await_stop(_START_PATIENCE)
        if reply is None:
            self._target.stop()
        if reply is not None and not isinstance(reply, Stopped):
            self._target.is_over = True
        else:
            self._target.remove(entry)
        if not isinstance(reply, Stopped):
            raise EngineError(f"the program behind the stub {self._endpoint} has not reached its entry {entry:#x}")
        registers = self._target.registers(reply.thread or thread)
        if registers[self._processor.pc] == entry + self._processor.moved:
            registers[self._processor.pc] = entry
            self._target.write_back(reply.thread or thread, registers)

    def insert(self, address: int) -> None:
        """Insert a breakpoint for the engine itself, as in the dynamic linker; raise ``EngineError`` on failure."""
        if not self._target.insert(address):
            raise EngineError(f"the stub {self._endpoint} inserts no breakpoint at {address:#x}")

    def headers(self) -> tuple[int, ...]:
        """Return the addresses of the ELF headers of loaded files."""
        return self._image.headers(self._target)

    def files_in_memory(self) -> Iterator[tuple[int, str]]:
        """Iterate over the ELF headers' addresses and the paths of loaded files, the program first."""
        yield self._image.header, self.program
        for file in self._image.loaded_files(self._target):
            if file.path:
                yield file.bias, file.path

    def linker_entries(self) -> Iterator[int]:
        """Iterate over the addresses of the entries in the dynamic linker's list."""
        return (at for at, _, _ in self._image.linker_entries(self._target))

    def loaded_files(self) -> tuple[LoadedFile, ...]:
        """Return the files that are loaded now; none if some are about to be unloaded."""
        return () if self._image.is_unloading(self._target) else self._image.loaded_files(self._target)

    def bias_of_module(self, files: Iterable[LoadedFile]) -> int | None:
        """Return the load bias of the module, None if it is not among the loaded files."""
        elf = self._resolved.module.elf
        for loaded in files:
            if loaded.path and os.path.basename(loaded.path) == elf.path.name:
                return loaded.bias
            if not loaded.path and elf.entry and loaded.bias + elf.entry == self._image.entry:
                return loaded.bias
        return None
