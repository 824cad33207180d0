"""
The way from a probed instruction to its handler and back, with everything as it was.

::

    open a frame below the red zone ─► save flags, and what the handler changes or looks at ─► a trial ─► the handler
    ─► restore ─► close the frame ─► the displaced instructions ─► jump back

The frame begins with a ``struct pt_regs``, the handler's context; of its words only those are filled that the handler
reads. Handlers use no vector registers, no string instructions, and change no flags but the arithmetic ones: so these
are saved by LAHF and SETO, which take a quarter of the time of PUSHFQ and POPFQ, unless the handler looks at them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.bpf.layout import INLINE_ENDING
from dprobes.bpf.lower.hosts.ptregs import REGISTER_OFFSETS
from dprobes.native.code import NativeCode
from dprobes.native.footprint import footprint
from dprobes.native.frame import frame_size
from dprobes.native.lifemark import HAS_ENDED
from dprobes.native.trim import trimmed
from dprobes.native.wellformed import check_code
from dprobes.native.x86.assembler import Condition, Gpr, Memory, X86Assembler
from dprobes.native.x86.registers import FRAME, SCRATCH_1, SCRATCH_2, gpr
from dprobes.native.x86.translator import X86Translator, takes_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.native.code import Surroundings
    from dprobes.native.x86.assembler import Label

__all__ = ["FRAME_SIZE", "SPARE_WORD", "Trial", "make_trampoline", "saved_at"]

_RED_ZONE = 128
"""Bytes below the stack pointer that belong to the function (System V ABI, section 3.2.2)."""

SPARE_WORD = 168
"""Where the frame has a word for whoever needs one: behind ``struct pt_regs``."""
_CONTEXT_SIZE = SPARE_WORD + 8
FRAME_SIZE = _RED_ZONE + _CONTEXT_SIZE
"""How far below the program's the stack pointer is while a handler runs, but for its own frame."""

_NAMES = {
    Gpr.RAX: "eax", Gpr.RCX: "ecx", Gpr.RDX: "edx", Gpr.RBX: "ebx", Gpr.RBP: "ebp", Gpr.RSI: "esi", Gpr.RDI: "edi",
    Gpr.R8: "r8", Gpr.R9: "r9", Gpr.R10: "r10", Gpr.R11: "r11", Gpr.R12: "r12", Gpr.R13: "r13", Gpr.R14: "r14",
    Gpr.R15: "r15",
}  # fmt: skip
_IP, _CS, _FLAGS, _SP, _SS = (REGISTER_OFFSETS[name] for name in ("eip", "cs", "eflags", "esp", "ss"))
_USER_CS, _USER_SS = 0x33, 0x2B
"""Selectors of 64-bit programs (arch/x86/include/asm/segment.h)."""

_LAHF, _SAHF = b"\x9f", b"\x9e"
_LOAD_EAX = b"\xa1"
"""MOV EAX from an address of eight bytes (Intel SDM volume 2, MOV)."""
_SETO_AL, _ADD_AL_7F = b"\x0f\x90\xc0", b"\x04\x7f"
_CONTEXT = Gpr.RDI
"""The register of eBPF's first argument."""


class Trial(Protocol):
    """What comes before a handler, in its frame, to find out whether the instruction will complete."""

    @property
    def changed(self) -> frozenset[Gpr]:
        """The registers that it changes, besides rax, and loads again."""

    @property
    def has_endings(self) -> bool:
        """Whether the handler may end so that the instruction does not follow."""

    def write_endings(self, asm: X86Assembler, restore: Callable[[], None], rest: Label) -> None:
        """
        Write what follows if it has, rax being how; ``restore`` writes what restores registers but the stack pointer.

        If the instruction follows after all it goes on at ``rest``.
        """

    def touch_stack(self, asm: X86Assembler) -> None:
        """Write what finds out whether there is enough of the stack; nothing but the stack pointer has changed."""

    def write(self, asm: X86Assembler, *, keeps_flags: bool) -> None:
        """Write it where the frame is; with ``keeps_flags`` that has all flags, as PUSHFQ pushes them."""


def saved_at(register: Gpr) -> Memory:
    """Return where the frame has a register of the program, if it has it."""
    return Memory(Gpr.RSP, REGISTER_OFFSETS[_NAMES[register]])


def make_trampoline(
    address: int,
    site: int,
    handlers: Sequence[Assembled],
    around: Surroundings,
    write_rest: Callable[[X86Assembler], None],
    trial: Trial | None = None,
) -> NativeCode:
    """
    Return the trampoline at ``address`` of the instruction at ``site``, with its handlers one after the other.

    The ``trial`` comes before the first one. ``write_rest`` writes what follows them: the displaced instructions, and
    the way back.
    """
    asm = X86Assembler(address)
    for assembled in handlers:
        check_code(assembled)
        _Writer(asm, site, trimmed(assembled), around, trial).write()
        trial = None
    write_rest(asm)
    return NativeCode(address, asm.assemble())


class _Writer:
    def __init__(
        self, asm: X86Assembler, site: int, assembled: Assembled, around: Surroundings, trial: Trial | None
    ) -> None:
        self._asm = asm
        self._trial = trial
        self._site = site
        self._assembled = assembled
        self._around = around
        self._touched = touched = footprint(assembled)
        self._frame = frame_size(assembled)
        self._has_context = bool(touched.reads or touched.writes)
        changed = {gpr(number) for number in touched.registers if number != 10} | {Gpr.RAX}
        if takes_scratch(assembled):
            changed |= {SCRATCH_1, SCRATCH_2}
        if self._frame:
            changed.add(FRAME)
        self._reads, self._writes = touched.reads, touched.writes
        self._has_flags = _FLAGS in touched.reads or _FLAGS in touched.writes
        self._restored = [r for r in _NAMES if r in changed or self._place(r) in self._writes]
        # What the handler writes as well: it may end before.
        tried = frozenset[Gpr]() if trial is None else trial.changed
        self._saved = [r for r in _NAMES if r in self._restored or r in tried or self._place(r) in self._reads]

    @staticmethod
    def _place(register: Gpr) -> int:
        return REGISTER_OFFSETS[_NAMES[register]]

    def _slot(self, place: int) -> Memory:
        return Memory(Gpr.RSP, place)

    def write(self) -> None:
        asm, out = self._asm, self._asm.label()
        asm.lea(Gpr.RSP, Memory(Gpr.RSP, -FRAME_SIZE))
        if self._trial is not None:
            self._trial.touch_stack(asm)
        self._save(FRAME_SIZE)
        ended = self._look_for_life()
        if self._trial is not None:
            self._trial.write(asm, keeps_flags=self._has_flags)
        if self._has_context:
            asm.mov(_CONTEXT, Gpr.RSP)
        if self._frame:
            asm.mov(FRAME, Gpr.RSP)
            asm.lea(Gpr.RSP, Memory(Gpr.RSP, -self._frame))
        X86Translator(asm, self._assembled, self._around, out).write()
        asm.place(out)
        if self._frame:
            asm.mov(Gpr.RSP, FRAME)
        trial = self._trial
        diverted, rest = asm.label(), asm.label()
        if trial is not None and trial.has_endings:
            asm.load(Gpr.RAX, self._slot(INLINE_ENDING))
            asm.compare(Gpr.RAX, 0)
            asm.jump_if(Condition.NE, diverted)
        asm.place(ended)
        self._restore()
        asm.lea(Gpr.RSP, Memory(Gpr.RSP, FRAME_SIZE))
        if trial is not None and trial.has_endings:
            asm.jump(rest)
            asm.place(diverted)
            trial.write_endings(asm, self._restore, rest)
            asm.place(rest)

    def _look_for_life(self) -> Label:
        """Write a jump to the label that is returned, for when nobody is there any more."""
        asm, ended = self._asm, self._asm.label()
        if self._around.life_mark is not None:
            asm.raw(_LOAD_EAX + self._around.life_mark.to_bytes(8, "little"))
            asm.test(Gpr.RAX, HAS_ENDED, wide=False)
            asm.jump_if(Condition.NE, ended)
        return ended

    def _save(self, size: int) -> None:
        asm = self._asm
        for register in self._saved:
            asm.store(self._slot(self._place(register)), register)
        if self._has_flags:
            asm.pushfq()
            asm.raw(b"\x8f\x84\x24" + _FLAGS.to_bytes(4, "little"))  # pop [rsp + flags], rsp as it is afterwards
        else:
            asm.raw(_LAHF + _SETO_AL)
            asm.store(self._slot(_FLAGS), Gpr.RAX)
        if _IP in self._reads:
            asm.mov_number(Gpr.RAX, self._site)
            asm.store(self._slot(_IP), Gpr.RAX)
        if _SP in self._reads:
            asm.lea(Gpr.RAX, Memory(Gpr.RSP, size))
            asm.store(self._slot(_SP), Gpr.RAX)
        for place, number in ((_CS, _USER_CS), (_SS, _USER_SS)):
            if place in self._reads:
                asm.store_number(self._slot(place), number)

    def _restore(self) -> None:
        asm = self._asm
        if self._has_flags:
            asm.raw(b"\xff\xb4\x24" + _FLAGS.to_bytes(4, "little"))  # push [rsp + flags]
            asm.popfq()
        else:
            asm.load(Gpr.RAX, self._slot(_FLAGS))
            asm.raw(_ADD_AL_7F + _SAHF)
        for register in self._restored:
            asm.load(register, self._slot(self._place(register)))
