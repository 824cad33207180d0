"""
From blocks of RPN to eBPF: what all templates share.

The registers: R6 holds the context, R7 the state, R8 TSP in blocks where the depth is not known; R0-R5 belong to the
instruction that is being written, and cache cells within a block; R9 is for a single number at a time.

The rules that make the verifier's work linear:

1. Between blocks everything is in the state. What is loaded from it is an unknown number, so nothing could differ
   between two paths, and there is nothing to unroll.
2. An index or a length is loaded, masked, and added to a base, in consecutive instructions.
3. Every way back passes a guard (``loops``).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Jump, Register, Size
from dprobes.bpf.lower.loops import loops_of, switch
from dprobes.bpf.lower.state.handlerstate import ABORT, Field
from dprobes.bpf.lower.state.stack import SCRATCH, TSP, Operand, VirtualStack, store_number
from dprobes.rpn.isa import NON_MASKABLE, RPN_STACK_CELLS, ExceptionCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.arch import Architecture
    from dprobes.bpf.asm.assembler import Assembler, Label
    from dprobes.bpf.lower.flow import HandlerFlow
    from dprobes.bpf.lower.hosts.host import Host
    from dprobes.bpf.lower.request import Request
    from dprobes.bpf.lower.state.handlerstate import StateLayout
    from dprobes.rpn.decoder import EncodedInstruction
    from dprobes.rpn.point import Point

    Template = Callable[["Writer", EncodedInstruction], None]

__all__ = ["Routine", "Writer"]

_SIZE_MAX = 1 << 16
"""The size at which nothing more is written: no jump reaches over so many instructions."""


class Routine:
    """A piece of code for all places that call it; where it returns to is a number in ``Field.RETURN``."""

    def __init__(self, asm: Assembler) -> None:
        self._asm = asm
        self._start = asm.label()
        self._returns: list[Label] = []

    def call(self) -> None:
        """Write a call; nothing is in registers, neither before nor behind it."""
        label = self._asm.label()
        self._returns.append(label)
        self._asm.store(SCRATCH, Field.RETURN, len(self._returns))
        self._asm.jump(self._start)
        self._asm.place(label)

    def write(self, body: Callable[[], None], writer: Writer) -> None:
        """Write the routine, and the returns from it, if anything calls it."""
        if not self._returns:
            return
        self._asm.place(self._start)
        body()
        writer.loops.junction()
        self._asm.load(Register.R1, SCRATCH, Field.RETURN)
        switch(self._asm, Register.R1, list(enumerate(self._returns, 1)), writer.end_label)


class Writer:
    """Write the code of one handler; templates are functions of the writer and an instruction."""

    def __init__(
        self,
        asm: Assembler,
        flow: HandlerFlow,
        architecture: Architecture,
        point: Point,
        request: Request,
        state: StateLayout,
        host: Host,
    ) -> None:
        self.asm = asm
        self.flow = flow
        self.architecture = architecture
        self.point = point
        self.request = request
        self.state = state
        self.host = host
        self.word_size = architecture.word_size
        self.bits = architecture.word_bits
        self.mask = architecture.word_mask
        self.wide = self.word_size == 8
        self.size = Size.DW if self.wide else Size.W
        self.stack = VirtualStack(asm, self.word_size, None)
        self.lp: int | None = None
        """LP, if it is known."""
        self.endings: set[tuple[int, int | None]] = set()
        """How the code ends that has been written, each with LP, if that is known."""
        self.raises = False
        """Whether the code that has been written raises exceptions."""
        self.is_small = False
        """Whether the state is to be moved to the stack (``smallstate``)."""
        self.log_mask = state.log_mask
        """The mask of the length of what is logged."""
        self.cleared: list[int] = []
        """The instructions that clear the log buffer of a small state, so that no part of a record is unknown."""
        self.is_open = False
        """Whether control can reach the next instruction to be written."""
        self.end_label = asm.label()
        self.raise_label = asm.label()
        self.reraise_label = asm.label()
        self.masked_label = asm.label()
        self.return_label = asm.label()
        self.counts_jumps = flow.has_cycle or flow.jumps > point.jmpmax
        self.reads_unwritten = False
        """Whether cells may be read that the handler has not written."""
        self.relocated: dict[int, int] = {}
        """Link addresses by the place in the encoded program where their run-time addresses belong."""
        self.trace = Routine(asm)
        self.loops = loops_of(asm, request.abilities, self.end_label)
        self._blocks: dict[int, Label] = {}
        self._looped = flow.loop_heads()
        self._deferred: list[tuple[int, int | None, int, Callable[[], None]]] = []

    # Blocks

    def write_blocks(self, templates: dict[str, Template], invalid: Template) -> None:
        """Write all blocks, in the order of the program; control comes in at the handler's first instruction."""
        order = sorted(self.flow.leaders)
        if order[0] != self.flow.start:
            self.asm.jump(self.block(self.flow.start))
        for number, offset in enumerate(order):
            following = self._write_block(offset, templates, invalid)
            if following is not None and (number + 1 == len(order) or order[number + 1] != following):
                self.asm.jump(self.block(following))
            self._write_deferred(following)
        self.asm.origin = -1

    def _write_block(self, offset: int, templates: dict[str, Template], invalid: Template) -> int | None:
        """Write a block; return the offset of the one that follows it, if one does."""
        self.asm.origin = offset
        if offset in self._looped:
            self.loops.head(self.block(offset))
        else:
            self.asm.place(self.block(offset))
        depth, self.lp = self.flow.known[offset]
        tsp = None if depth is None else RPN_STACK_CELLS - depth
        self.stack = VirtualStack(self.asm, self.word_size, tsp)
        if tsp is None:
            self.asm.load(TSP, SCRATCH, Field.TSP)
        self.is_open = True
        while True:
            instruction = self.flow.instructions[offset]
            self.asm.origin = offset
            if len(self.asm) > _SIZE_MAX:
                raise OverflowError(f"it has more than {_SIZE_MAX} eBPF instructions")
            row = instruction.row
            template = invalid if row is None else templates[row.syntax]
            template(self, instruction)
            self.stack.release()
            if not self.is_open:
                return None
            offset = instruction.end
            if offset in self.flow.leaders:
                self.settle_for(offset)
                return offset

    def _write_deferred(self, following: int | None) -> None:
        """Write what was deferred, behind a jump over it if control runs on."""
        if not self._deferred:
            return
        if following is not None and following in self.flow.leaders:
            self.asm.jump(self.block(following))
        while self._deferred:
            origin, tsp, top, write = self._deferred.pop(0)
            self.asm.origin = origin
            self.stack = VirtualStack(self.asm, self.word_size, tsp)
            self.stack.top = top
            write()

    def block(self, offset: int) -> Label:
        """Return the label of the block at an offset of the program."""
        if offset not in self._blocks:
            self._blocks[offset] = self.asm.label()
        return self._blocks[offset]

    def defer(self, write: Callable[[], None]) -> None:
        """Write something behind the block; the stack is in memory then and TSP what it is now."""
        self._deferred.append((self.asm.origin, self.stack.tsp, self.stack.top, write))

    # Control

    def settle_for(self, *targets: int) -> None:
        """Bring everything into the state that the blocks at ``targets`` presume."""
        self.stack.settle()
        if any(self.flow.known[target].depth is None for target in targets):
            self.stack.store_tsp()

    def goto_block(self, offset: int) -> None:
        """Go to a block; all is settled for it."""
        self.loops.goto(self.block(offset))

    def end(self, ending: int) -> None:
        """End the handler."""
        if self.request.keeps_stack:
            self.stack.settle()
            self.stack.store_tsp()
        self.endings.add((ending, self.lp))
        if ending:
            self.asm.store(SCRATCH, Field.ENDING, ending)
        self.asm.jump(self.end_label)
        self.is_open = False

    @property
    def logged(self) -> int | None:
        """How much the code that has been written logs before each of its ends, where that is known."""
        ends = {lp for ending, lp in self.endings if ending != ABORT}
        return ends.pop() if self.is_small and not self.raises and len(ends) == 1 else None

    # Exceptions

    def is_enabled(self, code: ExceptionCode) -> bool:
        """Return whether an exception goes to a handler."""
        return bool(code & self.point.exception_mask)

    def is_ignored(self, code: ExceptionCode) -> bool:
        """Return whether a handler goes on after an exception as if there were none."""
        return not self.is_enabled(code) and not code & NON_MASKABLE

    @cached_property
    def may_overflow(self) -> bool:
        """Whether the log may lack room for an item, or there may not be a position that LP or STP is set to."""
        bound = self.flow.log_bound(self.word_size)
        is_once = not self.flow.has_cycle and not self.flow.uses("pop lp", "pop stp")
        return bound is None or not is_once or bound > self.point.logmax

    @property
    def may_cut(self) -> bool:
        """Whether the log may lack room for an item after which the handler goes on."""
        return self.may_overflow and self.is_ignored(ExceptionCode.LOG_OVERFLOW)

    def throw_if(
        self,
        condition: Jump,
        register: Register,
        operand: Operand,
        code: ExceptionCode,
        parm1: Operand = 0,
        parm2: Operand = 0,
        *,
        wide: bool | None = None,
    ) -> None:
        """Raise an exception if a register compares so; the stack has been flushed. Not for one that is ignored."""
        label = self.asm.label()

        def throw() -> None:
            self.asm.place(label)
            self.throw(code, parm1, parm2)

        self.asm.jump_if(condition, register, operand, label, wide=self.wide if wide is None else wide)
        self.defer(throw)

    def throw(self, code: ExceptionCode, parm1: Operand = 0, parm2: Operand = 0) -> None:
        """Raise an exception, whose parameters may be in registers; the stack has been flushed."""
        asm = self.asm
        self.raises = True
        if self.is_enabled(code):
            for field, value in ((Field.PARM1, parm1), (Field.PARM2, parm2)):
                store_number(asm, SCRATCH, field, value & self.mask if not isinstance(value, Register) else value)
            asm.store(SCRATCH, Field.CODE, code)
        asm.store(SCRATCH, Field.RAISED, code)
        self.stack.store_tsp()
        asm.jump(self.raise_label if self.is_enabled(code) else self.masked_label)

    def charge_jump(self) -> None:
        """Take one from the jump budget, if it can be used up at all; the stack has been flushed."""
        if not self.counts_jumps:
            return
        register = self.stack.take()
        self.asm.load(register, SCRATCH, Field.JUMPS)
        limit = self.point.jmpmax
        self.throw_if(Jump.JEQ, register, limit, ExceptionCode.JMP_MAX, limit, wide=True)
        self.asm.alu(Alu.ADD, register, 1)
        self.asm.store(SCRATCH, Field.JUMPS, register)

    # Loops within an instruction

    def open_loop(self) -> None:
        """Get ready for a loop, from whose passes only memory, R6 and R7 are left; R8 is TSP from now on."""
        self.stack.settle()
        if self.stack.tsp is None:
            self.stack.store_tsp()
            self.reload_tsp()

    def close_loop(self) -> None:
        """Get TSP back behind a loop."""
        if self.stack.tsp is None:
            self.reload_tsp()

    def reload_tsp(self) -> None:
        """Take TSP from its field; nothing else is known of the stack any more."""
        self.stack.settle()
        self.stack.tsp, self.stack.top = None, 0
        self.asm.load(TSP, SCRATCH, Field.TSP)

    # Fields of the state

    def field(self, which: int) -> Register:
        """Return a new register with a field."""
        register = self.stack.take()
        self.asm.load(register, SCRATCH, which)
        return register

    def work(self, number: int) -> int:
        """Return the offset of a word that the instruction may use."""
        return Field.WORK + 8 * number

    def cell(self, register: Register) -> None:
        """Turn a position on the RPN stack into the address of the cell, as counted from ``CELLS``."""
        self.asm.alu(Alu.AND, register, RPN_STACK_CELLS - 1)
        self.asm.alu(Alu.LSH, register, 3)
        self.asm.alu(Alu.ADD, register, SCRATCH)

    def pointer(self, register: Register, area: int, mask: int) -> None:
        """Turn a freshly loaded position into the address in an area of the state; positions are at most ``mask``."""
        self.asm.alu(Alu.AND, register, mask)
        self.asm.alu(Alu.ADD, register, SCRATCH)
        if area:
            self.asm.alu(Alu.ADD, register, area)
