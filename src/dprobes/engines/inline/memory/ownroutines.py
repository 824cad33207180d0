"""Routines of ``native.routines`` as functions of this process: the tool runs the very code that handlers call."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

from dprobes.engines.linux.machinecode import map_code, unmap_code
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

    Its code does not depend on where it stands, and is mapped as long as the function is there.
    """
    asm = X86Assembler()
    plain = Surroundings({}, {}, {})
    called = {helper: write_routine(asm, routine, plain) for helper, routine in (calls or {}).items()}
    start = write_routine(asm, assembled, Surroundings({}, called, {}))
    code = asm.assemble()
    address = map_code(code)
    function = ctypes.CFUNCTYPE(ctypes.c_uint64, *[ctypes.c_uint64] * _ARGUMENTS)(address + start)

    def run(*arguments: int) -> int:
        word: int = function(*arguments, *(0,) * (_ARGUMENTS - len(arguments)))
        return word

    weakref.finalize(run, unmap_code, address, len(code)).atexit = False
    return run
