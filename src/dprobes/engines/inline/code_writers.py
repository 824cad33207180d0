"""Who writes code for the modules of processes: each writer knows what is there already in those of a family."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.bpf.map_layouts import MapName
from dprobes.engines.inline.handler_code import CodeWriter
from dprobes.errors import DprobesError, TargetError
from dprobes.native.generated_code import MapPlace, ProcessFacts
from dprobes.native.process_page import PROCESS_SIZE
from dprobes.platform.linux.procfs import first_stack_of, without_waiting
from dprobes.platform.x86.patches.branch_targets import ModuleCode
from dprobes.platform.x86.patches.trampoline_space import AddressSpace
from dprobes.target.process_maps import growth_of, run_time_address

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.inline.memory.handler_maps import Borrowed, HandlerMaps
    from dprobes.engines.ptrace.client.site_answers import Answers
    from dprobes.engines.ptrace.tracer_messages import MemoryShared
    from dprobes.target.probed_module import Module
    from dprobes.target.process_maps import Mapping

__all__ = ["CodeWriters", "Families", "ModuleKey", "Postponed", "tid_place_in", "tid_place_of"]

# Where the C library of a process has the id of a thread.
#
# glibc says so for debuggers (nptl_db): ``_thread_db_pthread_tid`` in libc.so.6 describes the member ``tid`` of
# ``struct pthread``: bits, number of elements, and the offset from the thread pointer, a 32-bit number each
# (nptl_db/db_info.c). musl, since 1.2.2, has it where its ``gettid`` takes it from (src/linux/gettid.c). These are the
# ids of the process's own PID namespace; if that is a nested one, ``native.process_page`` has those of ours.


_SYMBOL = "_thread_db_pthread_tid"
_FIELD = struct.Struct("<III")

_LIBRARIES = ("libc.so", "libc-", "libpthread", "ld-musl-")
_LINKER = ("ld-", "ld.so")
"""How names of dynamic linkers begin: a program without one has its C library in itself."""
_GETTID = re.compile(rb"(?:\xf3\x0f\x1e\xfa)?\x64\x48\x8b\x04\x25\0{4}\x8b(?:\x40(.)|\x80(.{4}))\xc3", re.DOTALL)
"""``mov rax, fs:[0]``, ``mov eax, [rax + N]`` and ``ret``, perhaps behind an ``endbr64``."""
_GETTID_SIZE = 20


def tid_place_in(pid: int, mappings: list[Mapping]) -> int | None:
    """Return where threads of a process have their id, in bytes from the thread pointer; None if nobody knows."""
    files = {mapping.path: mapping.inode for mapping in mappings if mapping.is_file}
    libraries = [path for path in files if Path(path).name.startswith(_LIBRARIES)]
    for path in libraries:
        if (place := _place(f"/proc/{pid}/root{path}", files[path])) is not None:
            return place
    is_dynamic = libraries or any(Path(path).name.startswith(_LINKER) for path in files)
    return None if is_dynamic or not files else _place(f"/proc/{pid}/exe", _inode_of(f"/proc/{pid}/exe"))


def _inode_of(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


@lru_cache(16)
def _place(path: str, inode: int) -> int | None:  # noqa: ARG001 - another file at the same path is another answer
    with contextlib.suppress(DprobesError, OSError, struct.error):
        return tid_place_of(Path(path))
    return None


def tid_place_of(path: Path) -> int | None:
    """Return where a C library has the id of a thread; None if it does not say so; raises as ``Module.load``."""
    from dprobes.target.probed_module import Module

    module = Module.load(path)
    with contextlib.suppress(TargetError):
        bits, _, place = _FIELD.unpack(_read(path, module, _SYMBOL, _FIELD.size))
        return int(place) if bits == 32 else None
    found = _GETTID.match(_read(path, module, "gettid", _GETTID_SIZE))
    return None if found is None else int.from_bytes(found[1] or found[2], "little", signed=True)


def _read(path: Path, module: Module, symbol: str, size: int) -> bytes:
    """Return the first bytes of what a symbol is about."""
    with open(path, "rb", opener=without_waiting) as file:
        file.seek(module.file_offset(module.address_of(symbol)))
        return file.read(size)


# Probepoints whose jumps have to wait: until a process has mapped its C library, which says where threads have their
# ids.
#
# A program is probed as soon as it begins, and that is before its libraries are there. The tracer asks again when the
# program's loader says that it has mapped something; a program that nobody hears of that from is looked at now and
# then.


_FIRST_DELAY, _LAST_DELAY = 0.01, 20.0
"""Seconds until it is looked again, twice as long each time, and after which nobody waits any more."""


@dataclass(slots=True)
class _Waiting:
    """The probepoints that wait in a process."""

    probes: set[int] = field(default_factory=set)
    delay: float = _FIRST_DELAY
    due: float = 0.0


class Postponed:
    """What waits, by process."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}

    def add(self, pid: int, probes: Iterable[int]) -> bool:
        """Let probepoints wait; return whether it makes sense."""
        waiting = self._waiting.setdefault(pid, _Waiting())
        if waiting.delay > _LAST_DELAY:
            return False
        waiting.probes.update(probes)
        if not waiting.due:
            waiting.due = time.monotonic() + waiting.delay
            waiting.delay *= 2
        return True

    @property
    def is_due(self) -> bool:
        """Whether something is to be tried again now."""
        waiting = tuple(self._waiting.values())
        return bool(waiting) and any(each.probes and time.monotonic() >= each.due for each in waiting)

    def take_due(self) -> tuple[int, set[int]] | None:
        """Return a process and those of its probepoints that have waited, and are to be tried again; None if none."""
        if not self._waiting:
            return None
        now = time.monotonic()
        for pid, waiting in self._waiting.items():
            if waiting.probes and now >= waiting.due:
                probes, waiting.probes, waiting.due = waiting.probes, set(), 0.0
                return pid, probes
        return None

    def drop(self, pid: int, probes: Iterable[int]) -> None:
        """Let probepoints wait no longer."""
        if (waiting := self._waiting.get(pid)) is not None:
            waiting.probes.difference_update(probes)
            if not waiting.probes:
                waiting.due = 0.0

    def forget(self, pid: int) -> None:
        """Begin anew with a process."""
        self._waiting.pop(pid, None)


# Which processes have copies of one memory: a process, and those that it has forked since it mapped memory for
# handlers.
#
# What was planned for one of them holds for all: they have the same code at the same addresses. Nothing of it is needed
# when the last one has ended, or executes another program.


class Families:
    """Processes by family; families have numbers."""

    def __init__(self) -> None:
        self._numbers = count()
        self._of: dict[int, int] = {}

    def of(self, pid: int) -> int:
        """Return the family of a process, which is the first one of a new family if it is not known."""
        if pid not in self._of:
            self._of[pid] = next(self._numbers)
        return self._of[pid]

    def copied(self, pid: int, parent: int) -> None:
        """Take notice that a process has a copy of its parent's memory."""
        if parent in self._of:
            self._of[pid] = self._of[parent]

    def left(self, pid: int) -> int | None:
        """Take notice that a process has its memory no longer; return its family if it was the last one there."""
        family = self._of.pop(pid, None)
        return None if family in self._of.values() else family


ModuleKey = tuple[int, tuple[int, int], int]
"""A module in processes: their family, its file, and how far above its link addresses it is."""


class CodeWriters:
    """The writers of one program's code, by module."""

    def __init__(self, borrowed: Borrowed) -> None:
        self._borrowed = borrowed
        self._writers: dict[ModuleKey, CodeWriter] = {}
        self._modules: dict[tuple[int, int], ModuleCode] = {}
        """The code of modules, by file, where they were mapped last: what is known of it holds elsewhere as well."""

    def find(self, key: ModuleKey) -> CodeWriter | None:
        """Return the writer for a module, None if there is none yet."""
        return self._writers.get(key)

    def forget(self, family: int) -> None:
        """Forget the writers of processes that are not there any more."""
        for key in [key for key in self._writers if key[0] == family]:
            del self._writers[key]

    def writer(
        self,
        family: int,
        memory: MemoryShared,
        probe: int,
        answers: Answers,
        mappings: list[Mapping],
        maps: HandlerMaps,
    ) -> CodeWriter | None:
        """Return the writer for the module of a probepoint in a process, None if that does not map it any more."""
        site, first = answers.compiled[probe], answers.probes[probe].instruction
        mine = [m for m in mappings if (m.device, m.inode) == site.file]
        start = run_time_address(mine, first.offset)
        if start is None:
            return None
        bias = start - first.address
        key = family, site.file, bias
        if key not in self._writers:
            # Before anything in it is asked for its address.
            places = dict(maps.places(memory.region, self._borrowed, memory.others))
            places[MapName.ENTRIES] = MapPlace(memory.page + PROCESS_SIZE)
            known = self._modules.get(site.file)
            code = ModuleCode.of(site.resolved.module, bias) if known is None else known.mapped_at(bias)
            self._modules[site.file] = code
            self._writers[key] = CodeWriter(
                code,
                AddressSpace(
                    mappings, min(m.start for m in mine), max(m.end for m in mine), growth=growth_of(memory.pid)
                ),
                _facts(memory, mappings, maps),
                places,
                maps.rings.shape,
                maps.shapes,
            )
        return self._writers[key]


def _facts(memory: MemoryShared, mappings: list[Mapping], maps: HandlerMaps) -> ProcessFacts:
    tid_place, first_stack = tid_place_in(memory.pid, mappings), first_stack_of(memory.pid)
    return ProcessFacts(
        memory.page, maps.clock.address, tid_place, life_mark=maps.life_mark.address, first_stack=first_stack
    )
