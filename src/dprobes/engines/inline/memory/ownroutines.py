"""Routines of ``native.routines`` as functions of this process: the tool runs the very code that handlers call."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from dprobes.engines.linux.machinecode import map_code
from dprobes.native.code import Surroundings
from dprobes.native.x86.assembler import X86Assembler
from dprobes.native.x86.routine import write_routine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.asm.isa import Helper

__all__ = ["own_function"]

_ARGUMENTS = 5


def own_function(assembled: Assembled, calls: Mapping[Helper, Assembled] | None = None) -> Callable[..., int]:
    """
    Return a routine, which ``calls`` others, as a function of five words to a word.

    Its code does not depend on where it stands, and stays mapped.
    """
    asm = X86Assembler()
    plain = Surroundings({}, {}, {})
    called = {helper: write_routine(asm, routine, plain) for helper, routine in (calls or {}).items()}
    start = write_routine(asm, assembled, Surroundings({}, called, {}))
    kind = ctypes.CFUNCTYPE(ctypes.c_uint64, *[ctypes.c_uint64] * _ARGUMENTS)
    function: Callable[..., int] = kind(map_code(asm.assemble()) + start)
    return lambda *arguments: function(*arguments, *(0,) * (_ARGUMENTS - len(arguments)))
