"""A handler as a function, which takes the registers of the hit in x0; it keeps what functions in C keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.native.a64.assembler import A64Assembler
from dprobes.native.a64.routine import write_function
from dprobes.native.code import NativeCode
from dprobes.native.trim import trimmed
from dprobes.native.wellformed import check_code

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.native.code import Surroundings

__all__ = ["handler_function"]


def handler_function(address: int, assembled: Assembled, around: Surroundings) -> NativeCode:
    """Return a handler at ``address``; raise ``NotSupportedError`` for what there is no machine code for."""
    check_code(assembled)
    asm = A64Assembler(address)
    write_function(asm, trimmed(assembled), around, is_shared=False)
    return NativeCode(address, asm.assemble())
