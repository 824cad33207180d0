"""
What the tracer wants to know of files: which sites a file has that a process maps.

Each place that is found becomes a probepoint with a number of its own, so that the copies of a module, for another
processor or at another path, are counted apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics
from dprobes.engines.base import Event, Notice, ProbeState
from dprobes.engines.ptrace.debugregs import Watch
from dprobes.engines.ptrace.plan import plan
from dprobes.engines.ptrace.relocate import copy_of
from dprobes.engines.ptrace.wire import Code, ModuleMapped, Site, Sites, WatchSite
from dprobes.engines.resolve import LeftOutProbe, ResolvedModule, resolve
from dprobes.errors import SourceError, TargetError
from dprobes.rpn.encode import CodeImage
from dprobes.target.insn import decode_at
from dprobes.target.location import Module
from dprobes.target.maps import parse_maps, read_maps
from dprobes.target.modules import matches
from dprobes.vm import Point

if TYPE_CHECKING:
    from dprobes.engines.resolve import Probepoint
    from dprobes.rpn.program import Program

__all__ = ["Answers", "reachable"]

_PAGE = 4096
_LINKER = re.compile(r"ld(-.*)?\.so(\.\d+)*|ld-musl-.*\.so(\.\d+)*")
_LINKER_HOOK = "_dl_debug_state"
"""The function that dynamic linkers call when they have mapped or unmapped something (``r_brk`` in ``<link.h>``)."""


class Answers:
    """Answer the tracer's questions about one program; ``symbols`` is the file that ``--sym`` names."""

    def __init__(self, program: Program, *, allow_write: bool, symbols: Path | None) -> None:
        self._program = program
        self._allow_write = allow_write
        self._symbols = symbols
        self._given: dict[tuple[int, int], Sites] = {}
        self.probes: list[Probepoint] = []
        """The probepoints in the order of their numbers."""
        self.left_out: list[LeftOutProbe] = []

    def sites(self, mapped: ModuleMapped) -> tuple[Sites, list[Event]]:
        """Return the sites in a file that a process has mapped, and what the user should hear of it."""
        name = Path(mapped.path).name
        is_linker = _LINKER.fullmatch(name) is not None
        if not is_linker and not self._may_match(mapped.path):
            return Sites(), []
        try:
            symbols = self._symbols if self._may_match(mapped.path) else None
            module = Module.load(reachable(mapped), symbols)
            if not matches(self._program.name, mapped.path, module.elf.soname):
                return Sites(_linker_sites(module) if is_linker else ()), []
            # The same file by another path, as in a container, has the same probepoints.
            key = (mapped.device, mapped.inode)
            if key not in self._given:
                resolved = resolve(self._program, module, Diagnostics(), allow_write=self._allow_write)
                self._given[key] = self._new_sites(resolved, mapped, _linker_sites(module) if is_linker else ())
        except TargetError as error:
            return Sites(), [Notice(f"{mapped.path}: {error.message}", error.hint)]
        except SourceError as error:
            return Sites(), [Notice(f"{mapped.path}: the program cannot be inserted here\n{error.message}")]
        return self._given[key], []

    def _may_match(self, path: str) -> bool:
        """Return whether a file may be the program's module; false for most without opening them."""
        wanted = self._program.name
        if matches(wanted, path, None):
            return True
        # A library's file may be called otherwise than its soname, but hardly begins otherwise.
        stem = re.split(r"[-.]", Path(wanted).name)[0]
        return "/" not in wanted and ".so" in Path(path).name and Path(path).name.startswith(stem)

    def _new_sites(self, resolved: ResolvedModule, mapped: ModuleMapped, linker: tuple[Site, ...]) -> Sites:
        program = self._program
        sites = []
        for probe in resolved.probes:
            if probe.state is ProbeState.COMPILED:
                raw = probe.instruction.raw
                emulation = plan(raw, resolved.architecture.word_size)
                point = Point.of(program, probe.definition, probe.offset)
                copy = copy_of(raw, resolved.architecture.word_size)
                sites.append(Site(len(self.probes), probe.number, probe.offset, raw, emulation, copy, point))
            # The path as the process knows it: ours may lead through /proc.
            self.probes.append(dataclasses.replace(probe, path=mapped.path))
        self.left_out += [dataclasses.replace(left_out, path=mapped.path) for left_out in resolved.left_out]
        watches = []
        for watchpoint in resolved.watchpoints:
            if watchpoint.state is ProbeState.COMPILED:
                watch = Watch(watchpoint.address, watchpoint.length, watchpoint.access)
                point = Point.of(program, watchpoint.definition, watchpoint.address)
                watches.append(WatchSite(len(self.probes), watchpoint.number, watch, watchpoint.absolute, point))
            self.probes.append(dataclasses.replace(watchpoint, path=mapped.path))
        image = resolved.image
        # The instructions are for people; the tracer runs the bytes.
        code = CodeImage(
            image.data, image.word_size, image.byte_order, image.handlers, image.procedures, (), {}, image.relocations
        )
        segment = next(s for s in resolved.module.elf.load_segments if s.executable)
        return Sites(
            (*sites, *linker),
            Code(resolved.architecture.name, code),
            resolved.symbols,
            (segment.offset, segment.vaddr),
            _padding(resolved.module),
            watches=tuple(watches),
        )


def _linker_sites(module: Module) -> tuple[Site, ...]:
    """Return the engine's own breakpoint in a dynamic linker."""
    try:
        offset = module.file_offset(module.address_of(_LINKER_HOOK))
        raw = decode_at(module, offset).raw
    except TargetError:
        return ()
    return (Site(-1, -1, offset, raw, plan(raw, module.word_size), copy_of(raw, module.word_size)),)


def _padding(module: Module) -> tuple[tuple[int, int], ...]:
    """Return what lies unused between the ends of code segments and those of their last pages."""
    ends = [s.offset + s.filesz for s in module.elf.load_segments if s.executable and s.memsz == s.filesz]
    return tuple((end, -end % _PAGE) for end in ends)


def reachable(mapped: ModuleMapped) -> Path:
    """Return a path that leads to the very file that is mapped; raise ``TargetError`` if none does."""
    candidates = [
        Path(mapped.path),
        Path(f"/proc/{mapped.pid}/root{mapped.path}"),
        Path(f"/proc/{mapped.pid}/exe"),
    ]
    for candidate in candidates:
        with contextlib.suppress(OSError, ValueError):
            if _is_mapped_file(candidate, mapped):
                return candidate
    raise TargetError(
        "MISMATCH: the file that the process runs is not there any more",
        hint="it was replaced while the process runs; restart the process",
    )


def _is_mapped_file(path: Path, mapped: ModuleMapped) -> bool:
    """
    Return whether ``path`` is the file with the device and inode that a process's memory map shows.

    Some file systems (btrfs, overlayfs) have other device numbers there than in ``stat``: so the file is mapped by us,
    to see how the kernel shows it.
    """
    status = path.stat()
    if status.st_ino != mapped.inode:
        return False
    if status.st_dev == mapped.device:
        return True
    before = _times_shown(mapped)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ):
        return _times_shown(mapped) > before


def _times_shown(mapped: ModuleMapped) -> int:
    maps = parse_maps(read_maps(os.getpid()))
    return sum((m.device, m.inode) == (mapped.device, mapped.inode) for m in maps)
