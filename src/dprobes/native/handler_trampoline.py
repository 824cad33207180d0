"""
Trampolines: code that a jump at a probed instruction leads to, with its handlers, and that restores the thread's state.

::

    open a frame ─► save flags, and the registers that handlers change or read ─► a trial ─► the handlers
    ─► restore ─► close the frame ─► the displaced instructions ─► jump back

Handlers of several programs are its parts, one after the other; each sees the changes of those before it. A switch
before each, an instruction that does nothing, can be replaced by a jump that leaves the handler out: so one program can
be removed while the others stay.

The frame begins with the registers of the hit, the handler's context; only words that the handler reads are filled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dprobes.bpf.map_layouts import INLINE_ENDING
from dprobes.native.ebpf_translator import Translator
from dprobes.native.generated_code import CodeSwitch, NativeCode
from dprobes.native.handler_analysis import check_code, footprint, frame_size, trimmed
from dprobes.native.virtual_assembler import VirtualAssembler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dprobes.native.generated_code import Part
    from dprobes.native.virtual_assembler import Label

__all__ = ["Trial", "make_trampoline"]

_Asm = TypeVar("_Asm", bound=VirtualAssembler)
_Asm_contra = TypeVar("_Asm_contra", contravariant=True)


class Trial(Protocol[_Asm_contra]):
    """Writer of the trial: code in the trampoline's frame that tests whether the probed instruction will complete."""

    @property
    def changed(self) -> frozenset[int]:
        """The numbers of the registers that the trial changes and reloads, except ``ContextLayout.free``."""

    @property
    def tries(self) -> bool:
        """True if ``write`` writes a test, in addition to ``touch_stack``."""

    @property
    def has_endings(self) -> bool:
        """True if the handler may end with ``skip`` or another way after which the instruction is not executed."""

    def write_endings(self, asm: _Asm_contra, restore: Callable[[], None], rest: Label) -> None:
        """
        Write the code for the endings of a handler after which the instruction is not executed.

        The number of the ending is in the free register. ``restore`` writes code that restores all registers except the
        stack pointer. If the instruction must be executed after all, the code jumps to ``rest``.
        """

    def touch_stack(self, asm: _Asm_contra) -> None:
        """Write accesses that fault if the stack has too little room; so far, only the stack pointer has changed."""

    def write(self, asm: _Asm_contra, *, keeps_flags: bool) -> None:
        """Write the rest of the trial, after registers are saved; with ``keeps_flags`` the frame has all flags."""


def make_trampoline(
    asm: _Asm,
    site: int,
    parts: Sequence[Part],
    write_rest: Callable[[_Asm], None],
    trial: Trial[_Asm] | None = None,
    *,
    has_switches: bool = False,
) -> NativeCode:
    """
    Return the trampoline of the instruction at the address ``site``, with the handlers of ``parts`` in their order.

    The ``trial`` is executed before the first handler; None: there is none. ``write_rest`` writes the displaced
    instructions and the jump back. With ``has_switches``, there is a switch for each of several handlers, and one for
    all of them. Raise ``NotSupportedError`` for handlers that cannot be translated.
    """
    for part in parts:
        check_code(part.assembled)
    writer = _Writer(asm, site, parts, trial, has_switches=has_switches)
    writer.write()
    write_rest(asm)
    return NativeCode(asm.address, asm.assemble(), switches=writer.switches())


class _Code:
    """eBPF code of one handler in a trampoline, without dead code, and the registers that it reads and changes."""

    def __init__(self, asm: VirtualAssembler, part: Part) -> None:
        self.assembled = trimmed(part.assembled)
        self.around, self.varying = part.around, part.varying
        is_trimmed = len(self.assembled.code) == len(part.assembled.code)
        assert is_trimmed or not self.varying, "indices of instructions are those of trimmed code"
        footprints = footprint(self.assembled, asm.layout.words)
        self.reads, self.writes = footprints.reads, footprints.writes
        self.touched = asm.touched_by(self.assembled, part.around)
        self.frame = frame_size(self.assembled)


class _Writer(Generic[_Asm]):
    def __init__(
        self, asm: _Asm, site: int, parts: Sequence[Part], trial: Trial[_Asm] | None, *, has_switches: bool
    ) -> None:
        self._asm = asm
        self._trial = trial
        self._site = site
        self._has_switches = has_switches
        self._switches: list[tuple[int, Label, tuple[int, ...]]] = []
        self._codes = codes = [_Code(asm, part) for part in parts]
        self._has_endings = trial is not None and trial.has_endings
        assert len(codes) == 1 or not self._has_endings, "what follows depends on one handler alone"
        self._reads = frozenset[int]().union(*(code.reads for code in codes))
        self._writes = frozenset[int]().union(*(code.writes for code in codes))
        self._needs_all_flags = asm.layout.flags in self._reads | self._writes
        self._saves_flags = self._needs_all_flags or self._has_endings or any(code.touched.flags for code in codes)
        places = asm.layout.registers.items()
        changed = self._changed()
        self._restored = [register for register, place in places if register in changed or place in self._writes]
        # Registers that the handler writes are included: it may end before it writes them.
        needed = {*self._restored, *(trial.changed if trial is not None else ())}
        self._saved = [register for register, place in places if register in needed or place in self._reads]

    def _changed(self) -> frozenset[int]:
        """Return the numbers of the registers that the handlers change, or that code needs to fill their context."""
        layout, changed = self._asm.layout, frozenset[int]().union(*(code.touched.registers for code in self._codes))
        is_watched = any(code.around.life_mark is not None for code in self._codes)
        takes_free = self._saves_flags or is_watched or self._reads & {layout.ip, layout.sp}
        return changed | {layout.free} if takes_free else changed

    def switches(self) -> tuple[CodeSwitch, ...]:
        """Return the switches, after the whole trampoline has been written."""
        asm, found = self._asm, []
        for address, label, parts in self._switches:
            end = asm.address_of(label)
            found.append(CodeSwitch(address, asm.nothing, asm.jump_code(address, end), end, parts))
        return tuple(found)

    def write(self) -> None:
        asm, trial, codes, frame = self._asm, self._trial, self._codes, self._asm.layout.frame
        ended, diverted, rest = asm.label(), asm.label(), asm.label()
        self._switch(range(len(codes)), rest)
        asm.move_stack(-frame)
        if trial is not None:
            trial.touch_stack(asm)
        self._save()
        if len(codes) == 1:
            self._look_for_life(codes[0], ended)
        elif trial is not None and trial.tries:
            self._look_for_any_life(ended)
        if trial is not None:
            trial.write(asm, keeps_flags=self._needs_all_flags)
        for number, code in enumerate(codes):
            following = asm.label()
            if len(codes) > 1:
                self._switch([number], following)
                self._look_for_life(code, following)
            self._write_handler(code)
            asm.place(following)
        if self._has_endings:
            asm.branch_if_set(INLINE_ENDING, diverted)
        asm.place(ended)
        self._restore()
        asm.move_stack(frame)
        if trial is not None and self._has_endings:
            asm.jump(rest)
            asm.place(diverted)
            trial.write_endings(asm, self._restore, rest)
        asm.place(rest)

    def _write_handler(self, code: _Code) -> None:
        asm, out = self._asm, self._asm.label()
        asm.open_handler(code.frame, has_context=bool(code.reads or code.writes))
        Translator(asm, code.assembled, code.around, out, varying=code.varying).write()
        asm.place(out)
        asm.close_handler(code.frame)

    def _switch(self, parts: Iterable[int], end: Label) -> None:
        """With switches, write one for ``parts``; if it is off, execution continues at the label ``end``."""
        if self._has_switches:
            self._switches.append((self._asm.here, end, tuple(parts)))
            self._asm.raw(self._asm.nothing)

    def _look_for_life(self, code: _Code, ended: Label) -> None:
        """Write a test of the life mark of a handler: jump to ``ended`` if the tool has ended."""
        if code.around.life_mark is not None:
            self._asm.branch_if_ended(code.around.life_mark, ended)

    def _look_for_any_life(self, ended: Label) -> None:
        """Write a jump to ``ended``, over the trial, that is taken unless an enabled handler has a living tool."""
        asm, alive = self._asm, self._asm.label()
        for number, code in enumerate(self._codes):
            following = asm.label()
            self._switch([number], following)
            self._look_for_life(code, following)
            asm.jump(alive)
            asm.place(following)
        asm.jump(ended)
        asm.place(alive)

    def _save(self) -> None:
        asm, layout = self._asm, self._asm.layout
        for register in self._saved:
            asm.save(register)
        if self._saves_flags:
            asm.save_flags(is_whole=self._needs_all_flags)
        if layout.ip in self._reads:
            asm.save_number(layout.ip, self._site)
        if layout.sp in self._reads:
            asm.save_stack_pointer()
        for place, number in layout.fixed.items():
            if place in self._reads:
                asm.save_number(place, number)

    def _restore(self) -> None:
        if self._saves_flags:
            self._asm.restore_flags(is_whole=self._needs_all_flags)
        for register in self._restored:
            self._asm.restore(register)
