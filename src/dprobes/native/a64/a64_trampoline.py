"""
The way from a probed instruction to its handler and back, with everything as it was.

::

    open a frame ─► save what the handler changes or looks at ─► the handler ─► restore ─► close the frame
    ─► the displaced instructions ─► jump back

The frame begins with a ``struct user_pt_regs`` (arch/arm64/include/uapi/asm/ptrace.h), the handler's context; of its
words only those are filled that the handler reads. There is nothing below the stack pointer that belongs to a function
(AAPCS64, section 6.4.5.1). Of the flags only NZCV is there for programs::

    0 regs[31] │ 248 sp │ 256 pc │ 264 pstate, NZCV in its bits 31 to 28
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.native.a64.a64_assembler import FRAME, A64Assembler, Gpr, Memory, Operation, SystemRegister, gpr
from dprobes.native.a64.a64_translator import A64Translator
from dprobes.native.generated_code import NativeCode
from dprobes.native.handler_analysis import check_code, footprint, frame_size, trimmed
from dprobes.native.process_page import HAS_ENDED

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.native.generated_code import Surroundings

__all__ = ["CONTEXT_SIZE", "PC", "PSTATE", "SP", "make_trampoline"]

SP, PC, PSTATE, CONTEXT_SIZE = 248, 256, 264, 272
_CONTEXT_WORDS = range(0, CONTEXT_SIZE, 8)
_CONTEXT = gpr(1)
"""The register of eBPF's first argument."""
_SAVED_FIRST = Gpr.X16
"""What is free for words of the context that are no registers, as soon as it is saved."""


def make_trampoline(
    address: int,
    site: int,
    assembled: Assembled,
    around: Surroundings,
    write_rest: Callable[[A64Assembler], None],
) -> NativeCode:
    """
    Return the trampoline at ``address`` of the instruction at ``site``.

    ``write_rest`` writes what follows the handler: the displaced instruction, and the way back.
    """
    check_code(assembled)
    asm = A64Assembler(address)
    _write(asm, site, trimmed(assembled), around)
    write_rest(asm)
    return NativeCode(address, asm.assemble())


def _write(asm: A64Assembler, site: int, assembled: Assembled, around: Surroundings) -> None:
    trial = A64Assembler(asm.address)
    A64Translator(trial, assembled, around, trial.label()).write()
    touched, frame = footprint(assembled, _CONTEXT_WORDS), frame_size(assembled)
    has_context = bool(touched.reads or touched.writes)
    has_flags = trial.changes_flags or PSTATE in touched.reads or PSTATE in touched.writes
    changed = trial.changed - {Gpr.ZR}
    changed |= ({FRAME} if frame else set()) | ({_CONTEXT} if has_context else set())
    if has_flags or touched.reads & {SP, PC} or around.life_mark is not None:
        changed.add(_SAVED_FIRST)
    # What the handler writes is saved as well: it may end before.
    restored = {register for register in Gpr if register in changed or 8 * register in touched.writes} - {Gpr.SP}
    asm.calculate(Operation.SUB, Gpr.SP, Gpr.SP, CONTEXT_SIZE)
    for register in Gpr:
        if register in restored or (register is not Gpr.SP and 8 * register in touched.reads):
            asm.store(Memory(Gpr.SP, 8 * register), register)
    if has_flags:
        asm.read_system(_SAVED_FIRST, SystemRegister.NZCV)
        asm.store(Memory(Gpr.SP, PSTATE), _SAVED_FIRST)
    if PC in touched.reads:
        asm.mov_number(_SAVED_FIRST, site)
        asm.store(Memory(Gpr.SP, PC), _SAVED_FIRST)
    if SP in touched.reads:
        asm.calculate(Operation.ADD, _SAVED_FIRST, Gpr.SP, CONTEXT_SIZE)
        asm.store(Memory(Gpr.SP, SP), _SAVED_FIRST)
    ended = asm.label()
    if around.life_mark is not None:
        asm.mov_number(_SAVED_FIRST, around.life_mark)
        asm.load(_SAVED_FIRST, Memory(_SAVED_FIRST), 4)
        asm.jump_if_bit(_SAVED_FIRST, HAS_ENDED.bit_length() - 1, ended)
    if has_context:
        asm.calculate(Operation.ADD, _CONTEXT, Gpr.SP, 0)
    if frame:
        asm.calculate(Operation.ADD, FRAME, Gpr.SP, 0)
        asm.calculate(Operation.SUB, Gpr.SP, Gpr.SP, frame)
    out = asm.label()
    A64Translator(asm, assembled, around, out).write()
    asm.place(out)
    if frame:
        asm.calculate(Operation.ADD, Gpr.SP, FRAME, 0)
    asm.place(ended)
    if has_flags:
        asm.load(_SAVED_FIRST, Memory(Gpr.SP, PSTATE))
        asm.write_flags(_SAVED_FIRST)
    for register in sorted(restored):
        asm.load(register, Memory(Gpr.SP, 8 * register))
    asm.calculate(Operation.ADD, Gpr.SP, Gpr.SP, CONTEXT_SIZE)
