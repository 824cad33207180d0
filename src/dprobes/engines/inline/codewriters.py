"""Who writes code for the modules of processes: each writer knows what is there already in those of a family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.layout import MapName
from dprobes.engines.inline.handlercode import CodeWriter
from dprobes.engines.inline.threadids import tid_place_in
from dprobes.engines.linux.procfs import first_stack_of
from dprobes.engines.x86.patches.addressspace import AddressSpace
from dprobes.engines.x86.patches.codebytes import ModuleCode
from dprobes.native.memory import MapPlace
from dprobes.native.processpage import PROCESS_SIZE
from dprobes.native.runtime import ProcessFacts
from dprobes.target.processmaps import growth_of, run_time_address

if TYPE_CHECKING:
    from dprobes.engines.inline.borrowed import Borrowed
    from dprobes.engines.inline.handlermaps import HandlerMaps
    from dprobes.engines.ptrace.client.answers import Answers
    from dprobes.engines.ptrace.reports import MemoryShared
    from dprobes.target.processmaps import Mapping

__all__ = ["CodeWriters", "ModuleKey"]

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
