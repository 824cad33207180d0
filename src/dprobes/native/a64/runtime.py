"""The routines for AArch64."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Helper
from dprobes.native.a64.assembler import A64Assembler
from dprobes.native.a64.identities import write_clock, write_ids, write_signal, write_stack_end
from dprobes.native.a64.routine import write_routine
from dprobes.native.a64.usermemory import write_read, write_read_string, write_write
from dprobes.native.runtime import RoutineWriters, written_runtime

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.bpf.layout import MapName
    from dprobes.native.routines.hashtable import TableShape
    from dprobes.native.routines.ring import RingShape
    from dprobes.native.runtime import ProcessFacts, Runtime

__all__ = ["make_runtime"]


def make_runtime(address: int, facts: ProcessFacts, rings: RingShape, tables: Mapping[MapName, TableShape]) -> Runtime:
    """Return the routines for ``address``."""
    writers = RoutineWriters(
        {
            Helper.PROBE_READ_USER: write_read,
            Helper.PROBE_READ_USER_STR: write_read_string,
            Helper.PROBE_WRITE_USER: write_write,
        },
        {Helper.SEND_SIGNAL: write_signal},
        write_ids,
        write_clock,
        write_stack_end,
        write_routine,
    )
    return written_runtime(A64Assembler(address), writers, facts, rings, tables)
