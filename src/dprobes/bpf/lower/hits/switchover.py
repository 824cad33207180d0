"""
The switch-over: each hit runs the handler of exactly one of two programs while one takes the place of the other.

Both are attached for a moment, the new one later, so that the kernel runs it first at each hit (uprobes run their
consumers from the newest to the oldest). The new one finds NOT_OURS, and does nothing, or CROSSING: then the hit is
its own, and it sets the bit of the thread in CROSSED. The old one, REPLACED, runs unless the thread has such a bit. It
stays attached until those hits are over at which the new one found NOT_OURS: else they would not come to it any more.

So the new one alone decides, at whatever moment it reads CROSSING: both programs look at the bit of the thread that
they run on, and a thread without one has never been hit since. A bit is never cleared, because a switch-over is never
undone: at all later hits the new program runs first and takes the hit. The same applies to a later thread with the
same id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.layout import CROSSED_SIZE, MapName, Status, SwitchOver
from dprobes.bpf.lower.request import Placement

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembler, Label
    from dprobes.bpf.lower.request import Request

__all__ = ["write_switch_over"]

_KEY = -4
_WORD_BITS = 6  # a 64-bit word has so many bits of a number
_R = Register


def write_switch_over(asm: Assembler, request: Request, outside: Label) -> None:
    """Go on only if the hit is this program's. Takes R0-R5, R8 and R9."""
    if not (request.replaceable or request.replaces):
        return
    ours, replaced = asm.label(), asm.label()
    asm.load_value(_R.R1, MapName.STATUS, Status.SWITCH_OVER)
    asm.load(_R.R9, _R.R1, 0)
    asm.jump_if(Jump.JEQ, _R.R9, SwitchOver.OURS, ours)
    if request.placement is Placement.EVENT:
        # Two events: which of the programs comes first is not known, and nothing tells that they belong together.
        asm.jump_if(Jump.JNE, _R.R9, SwitchOver.CROSSING, outside)
    else:
        asm.jump_if(Jump.JEQ, _R.R9, SwitchOver.NOT_OURS, outside)
        if request.replaces:
            asm.jump_if(Jump.JEQ, _R.R9, SwitchOver.REPLACED, replaced)
            asm.load_value(_R.R8, MapName.CROSSED)
            _find_bit(asm)
            asm.atomic(Atomic.OR, _R.R8, 0, _R.R2)
            asm.jump(ours)
        asm.place(replaced)
        if request.replaceable:
            _find_successor(asm, ours)
            _find_bit(asm)
            asm.load(_R.R3, _R.R8, 0)
            asm.alu(Alu.AND, _R.R3, _R.R2)
            asm.jump_if(Jump.JNE, _R.R3, 0, outside)
    asm.place(ours)


def _find_successor(asm: Assembler, none: Label) -> None:
    """Let R8 point to the bits of the program that replaces this one."""
    asm.store(_R.R10, _KEY, 0, Size.W)
    asm.load_map(_R.R1, MapName.SUCCESSOR)
    for number in range(2):
        if number:
            asm.mov(_R.R1, _R.R0)
        asm.mov(_R.R2, _R.R10)
        asm.alu(Alu.ADD, _R.R2, _KEY)
        asm.call(Helper.MAP_LOOKUP_ELEM)
        asm.jump_if(Jump.JEQ, _R.R0, 0, none)
    asm.mov(_R.R8, _R.R0)


def _find_bit(asm: Assembler) -> None:
    """Let R8, which points to bits, point to the word with that of the thread, and R2 be the bit."""
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.mov(_R.R1, _R.R0, wide=False)
    asm.mov(_R.R2, 1)
    asm.alu(Alu.LSH, _R.R2, _R.R1)  # modulo 64
    asm.alu(Alu.RSH, _R.R1, _WORD_BITS)
    asm.alu(Alu.AND, _R.R1, CROSSED_SIZE // 8 - 1)
    asm.alu(Alu.LSH, _R.R1, 3)
    asm.alu(Alu.ADD, _R.R8, _R.R1)
