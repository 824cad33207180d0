"""
The order in which the kernel runs the programs at one place, found out by a trial in memory of our own.

Replacing a program depends on it (``bpf.lower.hits.switchover``), and no document promises it: the list of a uprobe's
consumers grows at its head (``consumer_add`` in ``kernel/events/uprobes.c``, before and since Linux kernel commit
cc01bd044e6a ("uprobes: travers uprobe's consumer list locklessly under SRCU protection") (in v6.12)).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembler
from dprobes.bpf.asm.isa import Alu, Atomic, Register
from dprobes.bpf.layout import MapName
from dprobes.engines.ebpf.kernel.bpfmaps import ArrayMap
from dprobes.engines.ebpf.kernel.privatesite import PrivateSite

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.engines.ebpf.kernel.features import Features

__all__ = ["runs_newest_first"]

_PROGRAMS = 3


def runs_newest_first(features: Features) -> bool:
    """Return whether a uprobe runs programs that were attached later before others; raise what the kernel answers."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(PrivateSite(features))
        table = stack.enter_context(ArrayMap(8 * (1 + _PROGRAMS), name="dprobes_order"))
        for number in range(_PROGRAMS):
            stack.callback(place.attach(_noting(number), {MapName.STATUS: table.fd}).close)
        place.execute()
        return list(table.words) == [_PROGRAMS, *range(_PROGRAMS, 0, -1)]


def _noting(number: int) -> Assembled:
    """Return a program that counts in the first word, and notes in one of its own how many have run by then."""
    asm = Assembler()
    asm.load_value(Register.R1, MapName.STATUS)
    asm.mov(Register.R2, 1)
    asm.atomic(Atomic.ADD, Register.R1, 0, Register.R2, fetch=True)
    asm.alu(Alu.ADD, Register.R2, 1)
    asm.store(Register.R1, 8 * (1 + number), Register.R2)
    asm.mov(Register.R0, 0)
    asm.exit()
    return asm.assemble()
