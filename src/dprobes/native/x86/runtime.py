"""
The routines that handlers of a process call: one piece of code, to which all of them are near.

::

    routines for memory and identities │ those of ``native.routines``, for each shape of a map
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Helper
from dprobes.native.code import NativeCode, Surroundings
from dprobes.native.routines.hashtable import hash_routine
from dprobes.native.routines.ring import output_routine
from dprobes.native.runtime import Runtime
from dprobes.native.x86.assembler import X86Assembler
from dprobes.native.x86.identities import write_clock, write_ids, write_name, write_signal, write_user
from dprobes.native.x86.routine import write_routine
from dprobes.native.x86.usermemory import write_read, write_read_string, write_write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.bpf.layout import MapName
    from dprobes.native.faults import Fixup
    from dprobes.native.routines.hashtable import TableShape
    from dprobes.native.routines.ring import RingShape
    from dprobes.native.runtime import ProcessFacts

__all__ = ["make_runtime"]

_HASH_HELPERS = (Helper.MAP_LOOKUP_ELEM, Helper.MAP_UPDATE_ELEM, Helper.MAP_DELETE_ELEM)


def make_runtime(address: int, facts: ProcessFacts, rings: RingShape, tables: Mapping[MapName, TableShape]) -> Runtime:
    """Return the routines for ``address``."""
    asm = X86Assembler(address)
    fixups: list[Fixup] = []
    routines: dict[Helper, int] = {}
    for helper, write in (
        (Helper.PROBE_READ_USER, write_read),
        (Helper.PROBE_READ_USER_STR, write_read_string),
        (Helper.PROBE_WRITE_USER, write_write),
    ):
        routines[helper] = asm.here
        fixups += write(asm)
    routines[Helper.GET_CURRENT_PID_TGID] = asm.here
    write_ids(asm, facts.process_page, facts.tid_place)
    routines[Helper.KTIME_GET_NS] = asm.here
    write_clock(asm, facts.clock_page)
    for helper, write_call in (
        (Helper.GET_CURRENT_UID_GID, write_user),
        (Helper.GET_CURRENT_COMM, write_name),
        (Helper.SEND_SIGNAL, write_signal),
    ):
        routines[helper] = asm.here
        write_call(asm)
    around = Surroundings({}, routines, {}, facts.has_rdpid)
    routines[Helper.RINGBUF_OUTPUT] = write_routine(asm, output_routine(rings), around)
    by_shape: dict[tuple[TableShape, Helper], int] = {}
    map_routines = {}
    for name, shape in tables.items():
        for helper in _HASH_HELPERS:
            if (shape, helper) not in by_shape:
                by_shape[shape, helper] = write_routine(asm, hash_routine(helper, shape), around)
            map_routines[name, helper] = by_shape[shape, helper]
    return Runtime(NativeCode(address, asm.assemble(), tuple(fixups)), routines, map_routines)
