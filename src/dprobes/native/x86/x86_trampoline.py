"""
The way from a probed instruction to its handler and back, with everything as it was.

::

    open a frame below the red zone ─► save flags, and what handlers change or look at ─► a trial ─► the handlers
    ─► restore ─► close the frame ─► the displaced instructions ─► jump back

Handlers of several programs are its parts, one after the other; each sees what those before it have changed. A switch
before each, an instruction that does nothing, can be replaced by a jump that leaves it out: so one program can go while
the others stay.

The frame begins with a ``struct pt_regs``, the handler's context; of its words only those are filled that the handler
reads. Handlers use no vector registers, no string instructions, and change no flags but the arithmetic ones: so these
are saved by LAHF and SETO, which take a quarter of the time of PUSHFQ and POPFQ, unless the handler looks at them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.bpf.map_layouts import INLINE_ENDING
from dprobes.native.generated_code import CodeSwitch, NativeCode
from dprobes.native.handler_analysis import check_code, footprint, frame_size, trimmed
from dprobes.native.process_page import HAS_ENDED
from dprobes.native.x86.x86_assembler import FRAME, SCRATCH_1, SCRATCH_2, Condition, Gpr, Memory, X86Assembler, gpr
from dprobes.native.x86.x86_translator import X86Translator, takes_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dprobes.native.generated_code import Part
    from dprobes.native.handler_analysis import Footprint
    from dprobes.native.x86.x86_assembler import Label

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

_NOTHING = b"\x0f\x1f\x44\x00\x00"
"""NOP of five bytes (Intel SDM volume 2, NOP), as many as a jump has."""
_JUMP = b"\xe9"


class Trial(Protocol):
    """What comes before a handler, in its frame, to find out whether the instruction will complete."""

    @property
    def changed(self) -> frozenset[Gpr]:
        """The registers that it changes, besides rax, and loads again."""

    @property
    def tries(self) -> bool:
        """Whether it is about more than the stack."""

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
    parts: Sequence[Part],
    write_rest: Callable[[X86Assembler], None],
    trial: Trial | None = None,
    *,
    has_switches: bool = False,
) -> NativeCode:
    """
    Return the trampoline at ``address`` of the instruction at ``site``, with its handlers one after the other.

    The ``trial`` comes before the first one. ``write_rest`` writes what follows them: the displaced instructions, and
    the way back. It ``has_switches`` for each of several handlers, and for all of them.
    """
    asm = X86Assembler(address)
    for part in parts:
        check_code(part.assembled)
    writer = _Writer(asm, site, parts, trial, has_switches=has_switches)
    writer.write()
    write_rest(asm)
    return NativeCode(address, asm.assemble(), switches=writer.switches())


class _Code:
    """The code of one handler, and what it touches."""

    def __init__(self, part: Part) -> None:
        self.assembled = trimmed(part.assembled)
        self.around = part.around
        self.touched: Footprint = footprint(self.assembled)
        self.frame = frame_size(self.assembled)

    @property
    def changed(self) -> set[Gpr]:
        """The registers that it changes."""
        changed = {gpr(number) for number in self.touched.registers if number != 10} | {Gpr.RAX}
        if takes_scratch(self.assembled):
            changed |= {SCRATCH_1, SCRATCH_2}
        return changed | ({FRAME} if self.frame else set())


class _Writer:
    def __init__(
        self, asm: X86Assembler, site: int, parts: Sequence[Part], trial: Trial | None, *, has_switches: bool
    ) -> None:
        self._asm = asm
        self._trial = trial
        self._site = site
        self._has_switches = has_switches
        self._switches: list[tuple[int, Label, tuple[int, ...]]] = []
        self._codes = codes = [_Code(part) for part in parts]
        assert len(codes) == 1 or trial is None or not trial.has_endings, "what follows depends on one handler alone"
        self._reads = {place for code in codes for place in code.touched.reads}
        self._writes = {place for code in codes for place in code.touched.writes}
        changed = {register for code in codes for register in code.changed}
        self._has_flags = _FLAGS in self._reads or _FLAGS in self._writes
        self._restored = [r for r in _NAMES if r in changed or self._place(r) in self._writes]
        # What the handler writes as well: it may end before.
        tried = frozenset[Gpr]() if trial is None else trial.changed
        self._saved = [r for r in _NAMES if r in self._restored or r in tried or self._place(r) in self._reads]

    @staticmethod
    def _place(register: Gpr) -> int:
        return REGISTER_OFFSETS[_NAMES[register]]

    def _slot(self, place: int) -> Memory:
        return Memory(Gpr.RSP, place)

    def switches(self) -> tuple[CodeSwitch, ...]:
        """Return the switches, once all is written."""
        found = []
        for address, label, parts in self._switches:
            end = self._asm.address_of(label)
            off = _JUMP + (end - address - len(_NOTHING)).to_bytes(4, "little", signed=True)
            found.append(CodeSwitch(address, _NOTHING, off, end, parts))
        return tuple(found)

    def write(self) -> None:
        asm, trial, codes = self._asm, self._trial, self._codes
        ended, diverted, rest = asm.label(), asm.label(), asm.label()
        self._switch(range(len(codes)), rest)
        asm.lea(Gpr.RSP, Memory(Gpr.RSP, -FRAME_SIZE))
        if trial is not None:
            trial.touch_stack(asm)
        self._save(FRAME_SIZE)
        if len(codes) == 1:
            self._look_for_life(codes[0], ended)
        elif trial is not None and trial.tries:
            self._look_for_any_life(ended)
        if trial is not None:
            trial.write(asm, keeps_flags=self._has_flags)
        for number, code in enumerate(codes):
            following = asm.label()
            if len(codes) > 1:
                self._switch([number], following)
                self._look_for_life(code, following)
            self._write_handler(code)
            asm.place(following)
        has_endings = trial is not None and trial.has_endings
        if has_endings:
            asm.load(Gpr.RAX, self._slot(INLINE_ENDING))
            asm.compare(Gpr.RAX, 0)
            asm.jump_if(Condition.NE, diverted)
        asm.place(ended)
        self._restore()
        asm.lea(Gpr.RSP, Memory(Gpr.RSP, FRAME_SIZE))
        if trial is not None and has_endings:
            asm.jump(rest)
            asm.place(diverted)
            trial.write_endings(asm, self._restore, rest)
        asm.place(rest)

    def _write_handler(self, code: _Code) -> None:
        asm, out = self._asm, self._asm.label()
        if code.touched.reads or code.touched.writes:
            asm.mov(_CONTEXT, Gpr.RSP)
        if code.frame:
            asm.mov(FRAME, Gpr.RSP)
            asm.lea(Gpr.RSP, Memory(Gpr.RSP, -code.frame))
        X86Translator(asm, code.assembled, code.around, out).write()
        asm.place(out)
        if code.frame:
            asm.mov(Gpr.RSP, FRAME)

    def _switch(self, parts: Iterable[int], end: Label) -> None:
        """Write a switch that leaves out what comes before a label, if there are any."""
        if self._has_switches:
            self._switches.append((self._asm.here, end, tuple(parts)))
            self._asm.raw(_NOTHING)

    def _look_for_life(self, code: _Code, ended: Label) -> None:
        """Write a jump to a label for when nobody is there any more who has a handler."""
        asm = self._asm
        if code.around.life_mark is not None:
            asm.raw(_LOAD_EAX + code.around.life_mark.to_bytes(8, "little"))
            asm.test(Gpr.RAX, HAS_ENDED, wide=False)
            asm.jump_if(Condition.NE, ended)

    def _look_for_any_life(self, ended: Label) -> None:
        """Write a jump to a label for when there is nobody who has any of the handlers: then nothing is tried."""
        asm, alive = self._asm, self._asm.label()
        for number, code in enumerate(self._codes):
            following = asm.label()
            self._switch([number], following)
            self._look_for_life(code, following)
            asm.jump(alive)
            asm.place(following)
        asm.jump(ended)
        asm.place(alive)

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
