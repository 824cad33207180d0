"""
Replies to the tracer's requests for the sites in a file that a process maps.

Each place in each file becomes a probepoint of its own. So hits in copies of a module, for another processor or at
another path, are counted separately.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import Event, Notice
from dprobes.engines.foreign_users import ForeignUsers
from dprobes.engines.ptrace.breakpoint_sites import Code, Role, Site, Sites, WatchSite
from dprobes.errors import SourceError, TargetError
from dprobes.platform.linux.procfs import without_waiting
from dprobes.platform.x86.debug_registers import Watch
from dprobes.platform.x86.instruction_emulation import plan
from dprobes.platform.x86.instruction_relocation import copy_of
from dprobes.resolve.probepoints import ProbeKind, ProbeState, Space, space_of
from dprobes.rpn.instruction_encoding import CodeImage, encode
from dprobes.rpn.program_checker import check
from dprobes.rpn.program_needs import entry_counters, entry_registers
from dprobes.rpn.rpn_program import Point
from dprobes.target.code.function_exits import ExitKind
from dprobes.target.code.machine_code import decode_at
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.module_lookup import held_files, matches, replaced_file
from dprobes.target.other_users import foreign_owner
from dprobes.target.probed_module import OWN_SYMBOLS
from dprobes.target.process_maps import PAGE_SIZE, code_mappings, mappings_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.arch import Architecture
    from dprobes.engines.ptrace.tracer_messages import ModuleMapped
    from dprobes.platform.foreign.examiner import Examiner
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint, ResolvedModule
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.probed_module import Module, SymbolProvider

__all__ = ["Answers", "reachable"]

_LINKER = re.compile(r"ld(-.*)?\.so(\.\d+)*|ld-musl-.*\.so(\.\d+)*")
_LINKER_HOOK = "_dl_debug_state"
"""Function that dynamic linkers call after they have mapped or unmapped a file (``r_brk`` in ``<link.h>``)."""

_UNWINDER = re.compile(r"(libc|libgcc_s|libunwind|libpthread)([-.].*)?\.so(\.\d+)*|(libc|ld)\.musl-.*|ld-musl-.*")
_UNWINDING = (
    "longjmp", "_longjmp", "siglongjmp", "__longjmp_chk", "_Unwind_RaiseException", "_Unwind_ForcedUnwind",
)  # fmt: skip
"""Functions that discard stack frames without a return. ``_UNWINDER`` matches the names of files with them."""


_NAMES_MAX = 4096
"""Maximum number of names of mapped files that are kept: a process may map any number of files."""


class CompiledSite(NamedTuple):
    """Resolved module and point of a probepoint in code; ``file`` is the module's device and inode number."""

    resolved: ResolvedModule
    point: Point
    file: tuple[int, int]


class Answers:
    """
    Replies to a tracer's requests for the sites of one program.

    ``symbols`` provides the symbols of the program's modules. ``resolved`` is a module that is already resolved, or
    None.
    """

    def __init__(
        self,
        program: Program,
        *,
        allow_write: bool,
        symbols: SymbolProvider = OWN_SYMBOLS,
        resolved: ResolvedModule | None = None,
    ) -> None:
        self._program = program
        self._resolved = resolved
        self._returns = any(definition.at_return for definition in program.definitions)
        self._allow_write = allow_write
        self._symbols = symbols
        self._given: dict[tuple[int, int], Sites] = {}
        self._users = ForeignUsers(program.name)
        self.is_stopping = False
        """True if the run is to end: the examination of files is cancelled."""
        self.probes: list[Probepoint] = []
        """The probepoints, in the order of their numbers."""
        self.compiled: dict[int, CompiledSite] = {}
        """The compiled form of probepoints at instructions, by number."""
        self.left_out: list[LeftOutProbe] = []
        self.mapped_files: dict[str, str] = {}
        """Paths of the files that the tracer has reported, by file name, in the order of their mapping."""

    def sites(self, mapped: ModuleMapped) -> tuple[Sites, list[Event]]:
        """Return the sites in a file that a process has mapped, and events; errors of the file become events."""
        try:
            return self._find(mapped, reachable(mapped)) if self._is_wanted(mapped) else (Sites(), [])
        except TargetError as error:
            return Sites(), [Notice(f"{mapped.path}: {error.message}", error.hint)]
        except SourceError as error:
            return Sites(), [Notice(f"{mapped.path}: the program cannot be inserted here", details=error.message)]

    def prepare(self, mapped: ModuleMapped) -> tuple[Sites, list[Event]] | None:
        """
        Return the reply for a file about which the tracer has asked for another program, as ``sites`` does.

        Return None if the file cannot be found any more. Raise ``TargetError`` or ``SourceError`` if the program cannot
        be inserted into it.
        """
        if not self._is_wanted(mapped):
            return Sites(), []
        try:
            path = reachable(mapped)
        except TargetError:
            return None
        return self._find(mapped, path)

    def _is_wanted(self, mapped: ModuleMapped) -> bool:
        """Return True if a file may contain sites. Most files are excluded without opening them."""
        if space_of(self._program) is not Space.MODULE:
            return False  # the program probes no files
        if len(self.mapped_files) < _NAMES_MAX:
            self.mapped_files[mapped.path.rpartition("/")[2]] = mapped.path
        return _is_linker(mapped) or self._unwinds(mapped) or self._may_match(mapped)

    def _unwinds(self, mapped: ModuleMapped) -> bool:
        return self._returns and _UNWINDER.fullmatch(Path(mapped.path).name) is not None

    def _find(self, mapped: ModuleMapped, path: Path) -> tuple[Sites, list[Event]]:
        known = self._known(path)
        if known is None and (owner := foreign_owner(path.stat())) is not None:
            return self._find_foreign(mapped, path, owner)
        elf = known.elf if known is not None else ElfFile.open(path)
        is_probed = matches(self._program.name, mapped.path, elf.soname) or self._is_named(mapped)
        own = _own_sites(elf, (_LINKER_HOOK,), Role.LINKER) if _is_linker(mapped) else ()
        if self._returns and (is_probed or self._unwinds(mapped)):
            own += _own_sites(elf, _UNWINDING, Role.UNWINDING)
        if not is_probed:
            return Sites(own), []
        # The same file at another path, as in a container, has the same probepoints.
        key = (mapped.device, mapped.inode)
        if key in self._given:
            return self._given[key], []
        resolved = self._resolve(known or self._symbols.module_of(elf))
        self._given[key] = self._new_sites(resolved, mapped, own)
        return self._given[key], self._doubts(resolved, mapped.path)

    def _find_foreign(self, mapped: ModuleMapped, path: Path, owner: str) -> tuple[Sites, list[Event]]:
        """
        Return the same as ``_find`` for a file that ``owner``, another user, can change.

        The examiner, a separate process, reads the file within limits.
        """
        from dprobes.platform.foreign.foreign_outlines import Question

        key = (mapped.device, mapped.inode)
        if key in self._given:
            return self._given[key], []
        if not self._users.may_have_file(owner):
            return Sites(), list(self._users.notices())
        roles = dict.fromkeys((_LINKER_HOOK,), Role.LINKER) if _is_linker(mapped) else {}
        if self._returns:
            roles |= dict.fromkeys(_UNWINDING, Role.UNWINDING)
        is_named = self._is_named(mapped)
        question = Question(
            mapped.path,
            self._program,
            self._symbols,
            allow_write=self._allow_write,
            soname=None if is_named else self._program.name,
            own_functions=tuple(roles),
        )
        began = time.monotonic()
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                examined = self._examiner.examine(question, descriptor, lambda: not self.is_stopping)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise TargetError(f"'{mapped.path}' no longer exists") from error
        finally:
            self._users.note_reading(owner, time.monotonic() - began)
        if examined is None:
            return Sites(), []
        module, resolved = examined.module, examined.resolved
        places = {place: roles[name] for name, place in module.outline.own_places.items() if name in roles}
        if resolved is None and not self._unwinds(mapped):
            places = {place: role for place, role in places.items() if role is not Role.UNWINDING}
        own = tuple(_own_site(module, place, role) for place, role in places.items())
        if resolved is None:
            return Sites(own), []
        self._given[key] = self._new_sites(resolved, mapped, own)
        text = examined.warnings
        doubts = f"{mapped.path}: this file does not match the program\n{text}"
        return self._given[key], [Notice(doubts)] if text else []

    @cached_property
    def _examiner(self) -> Examiner:
        from dprobes.platform.foreign.examiner import Examiner

        return Examiner()

    def close(self) -> None:
        """Close the examiner. ``sites`` must not be called afterwards."""
        if "_examiner" in self.__dict__:
            self._examiner.close()

    def everywhere(self) -> dict[int, Sites | str]:
        """Return the watchpoints of all processes by word size, or the reason why there are none; call this once."""
        if space_of(self._program) is not Space.PROCESSES:
            return {}
        found: dict[int, Sites | str] = {}
        for arch in (architecture("x86_64"), architecture("i386")):
            diagnostics = Diagnostics()
            try:
                check(self._program, arch, diagnostics, allow_write=self._allow_write)
                from dprobes.resolve.local_module import resolve_everywhere

                watchpoints = resolve_everywhere(self._program, arch, diagnostics, by_pages=True)
            except SourceError as error:
                found[arch.word_size] = error.message
                continue
            # It is the same probepoint on each architecture.
            self.probes = self.probes or list(watchpoints)
            code = Code(arch.name, _bytes_only(encode(self._program, arch)))
            found[arch.word_size] = Sites(code=code, watches=self._watch_sites(watchpoints, 0))
        return found

    def _watch_sites(self, watchpoints: tuple[Probepoint, ...], first: int) -> tuple[WatchSite, ...]:
        """Return the watch sites of compiled watchpoints, the first of which has the number ``first``."""
        return tuple(
            WatchSite(
                number,
                watchpoint.number,
                Watch(watchpoint.memory.address, watchpoint.memory.length, watchpoint.memory.access),
                watchpoint.memory.absolute,
                Point.of(self._program, watchpoint.definition, watchpoint.memory.address),
            )
            for number, watchpoint in enumerate(watchpoints, first)
            if watchpoint.state is ProbeState.COMPILED
        )

    def _known(self, path: Path) -> Module | None:
        """Return the module resolved first if ``path`` is its file, else None."""
        with contextlib.suppress(OSError):  # the process whose /proc entry led to the file has ended
            if self._resolved is not None and path.samefile(self._resolved.module.path):
                return self._resolved.module
        return None

    def _resolve(self, module: Module) -> ResolvedModule:
        if self._resolved is not None and module is self._resolved.module:
            return self._resolved
        from dprobes.resolve.local_module import resolve

        return resolve(self._program, module, Diagnostics(), allow_write=self._allow_write, by_pages=True)

    def _doubts(self, resolved: ResolvedModule, path: str) -> list[Event]:
        if resolved is self._resolved or not resolved.warnings:
            return []  # warnings about the module resolved before have been reported
        text = "\n".join(warning.render() for warning in resolved.warnings)
        return [Notice(f"{path}: this file does not match the program", details=text)]

    def _is_named(self, mapped: ModuleMapped) -> bool:
        """Return whether a file has the path or name of the program's module, or is the module resolved first."""
        name = self._program.name
        if matches(name, mapped.path, None):
            return True
        found = [Path(name)] if "/" in name else []
        if self._resolved is not None:
            found.append(self._resolved.module.path)
        for path in found:
            with contextlib.suppress(OSError, ValueError):
                if path.is_file() and _is_mapped_file(path, mapped):
                    return True
        return False

    def _may_match(self, mapped: ModuleMapped) -> bool:
        """Return True if a file may be the program's module. Most files are excluded without opening them."""
        wanted, path = self._program.name, mapped.path
        if self._is_named(mapped):
            return True
        # A library's file name may differ from its soname, but usually begins with the same letters.
        stem = re.split(r"[-.]", Path(wanted).name)[0]
        return "/" not in wanted and ".so" in Path(path).name and Path(path).name.startswith(stem)

    def _new_sites(self, resolved: ResolvedModule, mapped: ModuleMapped, own: tuple[Site, ...]) -> Sites:
        sites: list[Site] = []
        for probe in resolved.in_code:
            if probe.state is ProbeState.COMPILED:
                point = Point.of(self._program, probe.definition, probe.offset, probe.arguments)
                sites += _sites_of(len(self.probes), probe, point, self._program, resolved.architecture)
                self.compiled[len(self.probes)] = CompiledSite(resolved, point, (mapped.device, mapped.inode))
            # Use the path as the process sees it: the one used here may lead through /proc.
            self.probes.append(probe._replace(path=mapped.path))
        self.left_out += [left_out._replace(path=mapped.path) for left_out in resolved.left_out]
        watchpoints = resolved.of(ProbeKind.WATCHPOINT)
        watches = self._watch_sites(watchpoints, len(self.probes))
        self.probes += [watchpoint._replace(path=mapped.path) for watchpoint in watchpoints]
        segment = next(s for s in resolved.module.elf.load_segments if s.executable)
        return Sites(
            (*sites, *own),
            Code(resolved.architecture.name, _bytes_only(resolved.image)),
            resolved.symbols,
            (segment.offset, segment.vaddr),
            _padding(resolved.module),
            watches=watches,
        )


def _is_linker(mapped: ModuleMapped) -> bool:
    return _LINKER.fullmatch(Path(mapped.path).name) is not None


def _bytes_only(image: CodeImage) -> CodeImage:
    """Return an image without the decoded instructions, which the tracer does not need."""
    return image._replace(instructions=(), labels={})


def _sites_of(
    number: int, probe: Probepoint, point: Point, program: Program, architecture: Architecture
) -> Iterator[Site]:
    """Iterate over the places where a probepoint needs a breakpoint."""
    word_size = architecture.word_size
    if not probe.at_return:
        raw, usdt = probe.instruction.raw, probe.code.usdt
        semaphore = usdt.semaphore - usdt.address if usdt is not None and usdt.semaphore else 0
        ways = plan(raw, word_size), copy_of(raw, word_size)
        yield Site(number, probe.number, probe.offset, raw, *ways, point, semaphore=semaphore)
        return
    registers = entry_registers(program, probe.definition, architecture)
    kept = tuple((register.index, register.memory_offset) for register in registers or ())
    if registers is not None:
        raw = probe.instruction.raw
        ways = plan(raw, word_size), copy_of(raw, word_size)
        counters = entry_counters(program, probe.definition)
        yield Site(number, probe.number, probe.offset, raw, *ways, role=Role.ENTRY, counters=counters, kept=kept)
    for leaving in probe.code.exits.exits:
        raw = leaving.raw
        is_return = leaving.kind is ExitKind.RETURN
        ranges = probe.code.exits.ranges
        yield Site(
            number,
            probe.number,
            leaving.offset,
            raw,
            plan(raw, word_size),
            copy_of(raw, word_size),
            point,
            Role.RETURN if is_return else Role.JUMP,
            () if is_return else tuple((start - leaving.address, end - leaving.address) for start, end in ranges),
            kept=kept,
        )


def _own_sites(elf: ElfFile, names: tuple[str, ...], role: Role) -> tuple[Site, ...]:
    """Return sites for breakpoints of the engine itself, at those of the functions ``names`` that a file contains."""
    # Use the file's own symbols: a provider may have only those that the program names.
    module = OWN_SYMBOLS.module_of(elf)
    sites: dict[int, Site] = {}
    for name in names:
        with contextlib.suppress(TargetError):
            offset = module.file_offset(module.address_of(name))
            sites[offset] = _own_site(module, offset, role)
    return tuple(sites.values())


def _own_site(module: Module, offset: int, role: Role) -> Site:
    raw = decode_at(module, offset).raw
    emulation, copy = plan(raw, module.word_size), copy_of(raw, module.word_size)
    return Site(-1, -1, offset, raw, emulation, copy, role=role)


def _padding(module: Module) -> tuple[tuple[int, int], ...]:
    """Return (file offset, size) of the unused bytes between the end of each code segment and of its last page."""
    ends = [s.offset + s.filesz for s in module.elf.load_segments if s.executable and s.memsz == s.filesz]
    return tuple((end, -end % PAGE_SIZE) for end in ends)


def reachable(mapped: ModuleMapped) -> Path:
    """Return a path to the mapped file itself; raise ``TargetError`` if no path leads to it."""
    candidates = [
        Path(mapped.path),
        Path(f"/proc/{mapped.pid}/root{mapped.path}"),
        *_held(mapped),
    ]
    for candidate in candidates:
        with contextlib.suppress(OSError, ValueError):
            if _is_mapped_file(candidate, mapped):
                return candidate
    raise replaced_file(mapped.path, mapped.pid)


def _held(mapped: ModuleMapped) -> Iterator[Path]:
    """Iterate over other paths to a mapped file, through /proc, for a path that leads to another file or to none."""
    with contextlib.suppress(TargetError):
        for mapping in code_mappings(mapped.pid)[0]:
            if (mapping.device, mapping.inode) == (mapped.device, mapped.inode):
                yield from held_files(mapping, mapped.pid)


def _is_mapped_file(path: Path, mapped: ModuleMapped) -> bool:
    """
    Return True if ``path`` leads to the file with the device and inode number in a process's ``maps``.

    On some file systems (btrfs, overlayfs), these numbers differ from those of stat(2). Then the file is mapped into
    this process, and the numbers in its own ``maps`` are compared.
    """
    status = path.stat()
    if status.st_ino != mapped.inode:
        return False
    if status.st_dev == mapped.device:
        return True
    before = _times_shown(mapped)
    with open(path, "rb", opener=without_waiting) as file, mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ):
        return _times_shown(mapped) > before


def _times_shown(mapped: ModuleMapped) -> int:
    maps = mappings_of(os.getpid())
    return sum((m.device, m.inode) == (mapped.device, mapped.inode) for m in maps)
