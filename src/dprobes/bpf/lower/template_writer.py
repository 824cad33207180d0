"""
Writer of eBPF from blocks of RPN: the code that all templates share.

R6 has the context, R7 the state, and R8 TSP in blocks where the depth is not known. R0-R5 are for the instruction that
is being written, and cache cells within a block. R9 has a single number at a time.

The rules that make the verifier's work linear:

1. Between blocks, everything is in the state. A value loaded from it is an unknown number, so two paths cannot differ,
   and nothing is unrolled.
2. An index or a length is loaded, masked, and added to a base, in consecutive instructions.
3. Every backward jump passes a guard (``Loops``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import LOOPS_MAX, Alu, Helper, Jump, Register, Size
from dprobes.bpf.lower.hosts.handler_host import CONTEXT
from dprobes.bpf.lower.lowering_request import LoopForm
from dprobes.bpf.lower.state.handler_state import (
    ABORT,
    CELLS,
    FRAME_COUNT,
    FRAME_SIZE,
    FRAMES,
    RANGE_SIZE,
    SCRATCH,
    TSP,
    Field,
    Frame,
    Operand,
    VirtualStack,
    store_number,
)
from dprobes.bpf.map_layouts import ProbeField
from dprobes.rpn.instruction_set import HANDLER_DISPATCH_MAX, NON_MASKABLE, RPN_STACK_CELLS, ExceptionCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.arch import Architecture
    from dprobes.bpf.bpf_assembler import Assembler, Label
    from dprobes.bpf.lower.handler_flow import HandlerFlow
    from dprobes.bpf.lower.hosts.handler_host import Host
    from dprobes.bpf.lower.lowering_request import Abilities, Request
    from dprobes.bpf.lower.state.handler_state import StateLayout
    from dprobes.rpn.instruction_encoding import EncodedInstruction
    from dprobes.rpn.rpn_program import Point

__all__ = ["Writer", "frame_address", "ranges_address", "write_dispatch", "write_return"]

# Backward jumps of a handler, by each mechanism that kernels have for them (``LoopForm``).
#
# Every backward jump passes a guard, which aborts a handler that runs for too long. The budgets of the language end
# loops long before. A guard is at the target of the jump, and not at the jump itself. So all paths meet there, and the
# verifier recognises the state that it has seen before.


_R = Register

_ITERATOR = -8
"""Stack offset of the number iterator."""

_PASSING = tuple(register for register in Register if register not in (CONTEXT, SCRATCH, Register.R10))
"""The registers that are live only within a block."""


def loops_of(asm: Assembler, abilities: Abilities, end: Label) -> Loops:
    """Return the writer of a handler's loops for a kernel. The handler goes to ``end`` when it has ended."""
    return Steps(asm, end) if abilities.loops is LoopForm.CALLBACK else Guards(asm, end, abilities)


def switch(asm: Assembler, register: Register, cases: list[tuple[int, Label]], default: Label) -> None:
    """
    Jump to the label of ``cases`` for the number in a register, or else to ``default``.

    The numbers are ascending. Clobbers no register.
    """
    if len(cases) <= 3:
        for value, label in cases:
            asm.jump_if(Jump.JEQ, register, value, label)
        asm.jump(default)
        return
    middle = len(cases) // 2
    upper = asm.label()
    asm.jump_if(Jump.JGE, register, cases[middle][0], upper)
    switch(asm, register, cases[:middle], default)
    asm.place(upper)
    switch(asm, register, cases[middle:], default)


class Loops(ABC):
    """Loops of a handler. Only R6 and R7 are live at heads and junctions, and at jumps to a head."""

    def __init__(self, asm: Assembler, end: Label) -> None:
        self._asm = asm
        self._end = end

    @abstractmethod
    def write_inside(self, body: Callable[[], None]) -> None:
        """Write the code of the main function that runs the handler. ``body`` writes the handler itself."""

    @abstractmethod
    def write_behind(self, body: Callable[[], None]) -> None:
        """Write the code after the main function: the handler, if it is a separate function."""

    @abstractmethod
    def head(self, label: Label) -> None:
        """Place a label that is the target of backward jumps by ``goto``."""

    @abstractmethod
    def goto(self, label: Label) -> None:
        """Jump to a label, whether it is a head that is placed already or not."""

    @abstractmethod
    def junction(self) -> None:
        """Write a place at which paths meet before a jump to any of several labels."""

    def _note_exhaustion(self) -> None:
        """Store JMP_MAX as the exception of a handler that a guard ends."""
        self._asm.store(SCRATCH, Field.UNHANDLED, ExceptionCode.JMP_MAX)


class Guards(Loops):
    """Loops by backward jumps, with ``may_goto`` or a number iterator as guard."""

    def __init__(self, asm: Assembler, end: Label, abilities: Abilities) -> None:
        super().__init__(asm, end)
        self._iterator = abilities.iterator if abilities.loops is LoopForm.ITERATOR else None
        self._exhausted = asm.label()

    def write_inside(self, body: Callable[[], None]) -> None:
        """Write the handler, and around it the setup and the release of the iterator."""
        asm = self._asm
        if self._iterator is not None:
            asm.mov(_R.R2, 0)
            asm.mov(_R.R3, LOOPS_MAX)
            self._call(self._iterator[0])
        body()
        asm.place(self._exhausted)
        self._note_exhaustion()
        asm.place(self._end)
        if self._iterator is not None:
            self._call(self._iterator[2])

    def write_behind(self, body: Callable[[], None]) -> None:
        """Write nothing, because ``write_inside`` has written the handler."""

    def head(self, label: Label) -> None:
        """Place a label for backward jumps, and after it the guard that ends the handler after too many jumps."""
        self._asm.place(label)
        self.junction()

    def goto(self, label: Label) -> None:
        """Jump to a label, forwards or backwards."""
        self._asm.jump(label)

    def junction(self) -> None:
        """Write a guard: ``may_goto``, or the next number of the iterator, which ends the handler at its limit."""
        asm = self._asm
        # Before 6.15 the verifier compares these registers although no instruction reads them.
        for register in _PASSING:
            asm.mov(register, 0, wide=False)
        if self._iterator is None:
            asm.may_goto(self._exhausted)
            return
        self._call(self._iterator[1])
        asm.jump_if(Jump.JEQ, _R.R0, 0, self._exhausted)
        asm.mov(_R.R0, 0)

    def _call(self, function: int) -> None:
        """Call a function on the iterator, with its address in R1."""
        self._asm.add(_R.R1, _R.R10, _ITERATOR)
        self._asm.call_kfunc(function)


class Steps(Loops):
    """Handler as a callback of ``bpf_loop``. A backward jump ends a step, and the next step starts at its target."""

    def __init__(self, asm: Assembler, end: Label) -> None:
        super().__init__(asm, end)
        self._callback = asm.label()
        self._heads: set[Label] = set()
        self._resumed: list[Label] = []

    def write_inside(self, body: Callable[[], None]) -> None:  # noqa: ARG002 - it is written after
        """Write the call of ``bpf_loop``, which passes context and state to the callback."""
        asm, ended = self._asm, self._asm.label()
        asm.store(_R.R10, -8, CONTEXT)
        asm.store(_R.R10, -16, SCRATCH)
        asm.store(SCRATCH, Field.RESUME, 0)
        asm.mov(_R.R1, LOOPS_MAX)
        asm.load_function(_R.R2, self._callback)
        asm.add(_R.R3, _R.R10, -16)
        asm.mov(_R.R4, 0)
        asm.call(Helper.LOOP)
        asm.jump_if(Jump.JLT, _R.R0, LOOPS_MAX, ended)
        self._note_exhaustion()
        asm.place(ended)

    def write_behind(self, body: Callable[[], None]) -> None:
        """Write the callback, which starts with a jump to the place where the last step ended."""
        asm, resume = self._asm, self._asm.label()
        asm.function(self._callback)
        asm.load(SCRATCH, _R.R2, 0)
        asm.load(CONTEXT, _R.R2, 8)
        asm.jump_if_word(Jump.JNE, SCRATCH, Field.RESUME, 0, resume)
        body()
        asm.place(self._end)
        asm.exit(1)
        asm.place(resume)
        asm.load(_R.R1, SCRATCH, Field.RESUME)
        switch(asm, _R.R1, [(n, label) for n, label in enumerate(self._resumed, 1)], self._end)

    def head(self, label: Label) -> None:
        """Place a label for backward jumps."""
        self._asm.place(label)
        self._heads.add(label)

    def goto(self, label: Label) -> None:
        """
        Jump to a label that follows.

        For a preceding label, end the step of ``bpf_loop``, so that the next step starts at the label.
        """
        if label in self._heads:
            self._step_to(label)
        else:
            self._asm.jump(label)

    def junction(self) -> None:
        """End the step of ``bpf_loop``. The next step continues here."""
        following = self._asm.label()
        self._step_to(following)
        self._asm.place(following)

    def _step_to(self, label: Label) -> None:
        if label not in self._resumed:
            self._resumed.append(label)
        self._asm.store(SCRATCH, Field.RESUME, self._resumed.index(label) + 1)
        self._asm.exit(0)


if TYPE_CHECKING:
    Template = Callable[["Writer", EncodedInstruction], None]

_SIZE_MAX = 1 << 16
"""Maximum number of instructions of a program: no jump reaches over so many."""


class Routine:
    """Routine for all places that call it. ``Field.RETURN`` has the number of the place to return to."""

    def __init__(self, asm: Assembler) -> None:
        self._asm = asm
        self._start = asm.label()
        self._returns: list[Label] = []

    def call(self) -> None:
        """Write a call. No register is live before or after it."""
        label = self._asm.label()
        self._returns.append(label)
        self._asm.store(SCRATCH, Field.RETURN, len(self._returns))
        self._asm.jump(self._start)
        self._asm.place(label)

    def write(self, body: Callable[[], None], writer: Writer) -> None:
        """Write the routine and the returns from it, if there are calls."""
        if not self._returns:
            return
        self._asm.place(self._start)
        body()
        writer.loops.junction()
        self._asm.load(Register.R1, SCRATCH, Field.RETURN)
        switch(self._asm, Register.R1, list(enumerate(self._returns, 1)), writer.end_label)


class Writer:
    """Writer of the code of one handler. Templates are functions of the writer and an instruction."""

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
        """Ways in which the code so far ends, each with LP, if LP is known."""
        self.raises = False
        """True if the code so far raises exceptions."""
        self.is_small = False
        """True if the state is to be moved to the stack (``small_state``)."""
        self.log_mask = state.log_mask
        """The mask of the length of the log."""
        self.cleared: list[int] = []
        """The instructions that clear the log buffer of a small state, so that no part of a record is uninitialised."""
        self.is_open = False
        """True if control can reach the next instruction to be written."""
        self.end_label = asm.label()
        self.raise_label = asm.label()
        self.reraise_label = asm.label()
        self.masked_label = asm.label()
        self.return_label = asm.label()
        self.counts_jumps = flow.has_cycle or flow.jumps > point.jmpmax
        self.reads_unwritten = False
        """True if cells may be read that the handler has not written."""
        self.relocated: dict[int, int] = {}
        """Link addresses of symbols, keyed by the offset in the encoded program of the operand to relocate."""
        self.trace = Routine(asm)
        self.loops = loops_of(asm, request.abilities, self.end_label)
        self._blocks: dict[int, Label] = {}
        self._looped = flow.loop_heads()
        self._deferred: list[tuple[int, int | None, int, Label | None, Callable[[], None]]] = []

    # Blocks

    def write_blocks(self, templates: dict[str, Template], invalid: Template) -> None:
        """Write all blocks in the order of the program. Control enters at the handler's first instruction."""
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
        """Write a block. Return the offset of the block into which control falls through, or None."""
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
        """Write the deferred code, after a jump over it if control falls through."""
        if not self._deferred:
            return
        if following is not None and following in self.flow.leaders:
            self.asm.jump(self.block(following))
        while self._deferred:
            origin, tsp, top, label, write = self._deferred.pop(0)
            self.asm.origin = origin
            self.stack = VirtualStack(self.asm, self.word_size, tsp)
            self.stack.top = top
            if label is not None:
                self.asm.place(label)
            write()

    def block(self, offset: int) -> Label:
        """Return the label of the block at an offset of the encoded RPN."""
        if offset not in self._blocks:
            self._blocks[offset] = self.asm.label()
        return self._blocks[offset]

    def defer(self, write: Callable[[], None], label: Label | None = None) -> None:
        """
        Arrange that ``write`` writes code after the current block, at ``label`` if given.

        That code has the stack in memory, with the present TSP.
        """
        self._deferred.append((self.asm.origin, self.stack.tsp, self.stack.top, label, write))

    # Control

    def settle_for(self, *targets: int) -> None:
        """Write all cells, and a TSP that is not constant, to memory, as the blocks at ``targets`` expect."""
        self.stack.settle()
        if any(self.flow.known[target].depth is None for target in targets):
            self.stack.store_tsp()

    def goto_block(self, offset: int) -> None:
        """Jump to a block. The caller has settled the stack for it."""
        self.loops.goto(self.block(offset))

    def end(self, ending: int) -> None:
        """Write the end of the handler. ``ending`` is a value of ``Field.ENDING``."""
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
        """The number of bytes that the code so far logs before each of its ends, or None if unknown or different."""
        ends = {lp for ending, lp in self.endings if ending != ABORT}
        return ends.pop() if self.is_small and not self.raises and len(ends) == 1 else None

    # Exceptions

    def is_enabled(self, code: ExceptionCode) -> bool:
        """Return whether the program's exception mask lets an exception of this code reach a handler."""
        return bool(code & self.point.exception_mask)

    def is_ignored(self, code: ExceptionCode) -> bool:
        """Return whether execution continues after an exception as if there were none."""
        return not self.is_enabled(code) and not code & NON_MASKABLE

    @cached_property
    def may_overflow(self) -> bool:
        """True if the log may lack room for an item, or if LP or STP may be beyond its buffer."""
        bound = self.flow.log_bound(self.word_size)
        is_once = not self.flow.has_cycle and not self.flow.uses("pop lp", "pop stp")
        return bound is None or not is_once or bound > self.point.logmax

    @property
    def may_cut(self) -> bool:
        """True if the log may lack room for an item after which the handler continues."""
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
        """
        Raise the exception ``code`` with two parameters if ``condition`` holds for a register and an operand.

        The stack is flushed. Not for exceptions that are ignored.
        """
        label = self.asm.label()
        self.asm.jump_if(condition, register, operand, label, wide=self.wide if wide is None else wide)
        self.defer(lambda: self.throw(code, parm1, parm2), label)

    def throw(self, code: ExceptionCode, parm1: Operand = 0, parm2: Operand = 0) -> None:
        """Raise an exception. The stack is flushed, and the parameters may be in registers."""
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
        """Charge one jump to the jump budget if it may become exhausted. The stack is flushed."""
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
        """Prepare for a loop: only memory, R6 and R7 survive an iteration. R8 is TSP from now on."""
        self.stack.settle()
        if self.stack.tsp is None:
            self.stack.store_tsp()
            self.reload_tsp()

    def close_loop(self) -> None:
        """Load TSP after a loop of ``open_loop`` from the state."""
        if self.stack.tsp is None:
            self.reload_tsp()

    @contextmanager
    def repeat(self, field: int) -> Iterator[None]:
        """Repeat the code that the ``with`` block writes. A field has the number of iterations left. Clobbers R1."""
        head, done = self.asm.label(), self.asm.label()
        self.loops.head(head)
        self.asm.jump_if_word(Jump.JEQ, SCRATCH, field, 0, done)
        self.asm.alu(Alu.SUB, _R.R1, 1)
        self.asm.store(SCRATCH, field, _R.R1)
        yield
        self.loops.goto(head)
        self.asm.place(done)

    def reload_tsp(self) -> None:
        """Load TSP from its field, and drop all other knowledge of the stack."""
        self.stack.settle()
        self.stack.tsp, self.stack.top = None, 0
        self.asm.load(TSP, SCRATCH, Field.TSP)

    # Fields of the state

    def point_to(self, register: Register, place: int) -> None:
        """Set a register to the address of a place in the state."""
        self.asm.add(register, SCRATCH, place)

    def read_to(self, place: int, size: int, address: int) -> None:
        """Read ``size`` bytes at the address in a field to a place in the state; R0 is 0 if all could be read."""

        def arguments() -> None:
            self.point_to(_R.R1, place)
            self.asm.mov(_R.R2, size)
            self.asm.load(_R.R3, SCRATCH, address)

        self.host.read_memory(arguments)

    def give_up(self) -> None:
        """Write the end of a handler whose hit counts as missed, as if no state had been free."""
        self.host.count(ProbeField.MISSED)
        self.asm.store(SCRATCH, Field.ENDING, ABORT)
        self.asm.jump(self.end_label)

    def field(self, which: int) -> Register:
        """Return a new register to which a field of the state is loaded."""
        register = self.stack.take()
        self.asm.load(register, SCRATCH, which)
        return register

    def work(self, number: int) -> int:
        """Return the offset of a word for temporary use by the instruction."""
        return Field.WORK + 8 * number

    def cell(self, register: Register) -> None:
        """Turn a position on the RPN stack into the address of the cell, relative to ``CELLS``."""
        self.asm.alu(Alu.AND, register, RPN_STACK_CELLS - 1)
        self.asm.alu(Alu.LSH, register, 3)
        self.asm.alu(Alu.ADD, register, SCRATCH)

    def pointer(self, register: Register, area: int, mask: int) -> None:
        """Turn a freshly loaded position into the address in an area of the state. ``mask`` limits the position."""
        self.asm.alu(Alu.AND, register, mask)
        self.asm.alu(Alu.ADD, register, SCRATCH)
        if area:
            self.asm.alu(Alu.ADD, register, area)


# The dispatch of exceptions: the code that all places share (recovered reference 1.7).
#
# A place that raises has put code and parameters into the state and TSP into its field. It goes to ``raise_label``, or
# to ``reraise_label`` if the three cells are on the stack already (``rx``), or to ``masked_label`` if the exception is
# not enabled and ends the handler.


def frame_address(w: Writer, dst: Register, depth: Register) -> None:
    """Set ``dst`` to the frame of a freshly loaded depth. Clobbers ``depth``, which may be the same register."""
    asm = w.asm
    if dst != depth:
        asm.mov(dst, depth)
    asm.alu(Alu.AND, dst, FRAME_COUNT - 1)
    asm.alu(Alu.LSH, dst, FRAME_SIZE.bit_length() - 1)
    asm.alu(Alu.ADD, dst, SCRATCH)


def ranges_address(w: Writer, register: Register) -> None:
    """Turn a freshly loaded depth into the address of its frame's ranges for traces, relative to ``RANGES``."""
    w.asm.alu(Alu.AND, register, FRAME_COUNT - 1)
    w.asm.alu(Alu.LSH, register, RANGE_SIZE.bit_length() - 1)
    w.asm.alu(Alu.ADD, register, SCRATCH)


def write_dispatch(w: Writer, take_trace: Callable[[], None] | None) -> None:
    """Write the dispatch of an exception to its handler. ``take_trace`` writes the code that takes a stack trace."""
    asm, flow = w.asm, w.flow
    ends = asm.label()
    asm.place(w.raise_label)
    if flow.catches or take_trace is not None:
        _push_triple(w)
    asm.place(w.reraise_label)
    if flow.uses("push x") or w.state.ex_logmax:
        for last, field in (
            (Field.LAST_CODE, Field.CODE),
            (Field.LAST_PARM1, Field.PARM1),
            (Field.LAST_PARM2, Field.PARM2),
        ):
            asm.copy(SCRATCH, last, field)
    if take_trace is not None:
        take_trace()
    if flow.catches:
        _find_handler(w, ends)
    asm.place(ends)
    asm.copy(SCRATCH, Field.UNHANDLED, Field.RAISED)
    asm.jump(w.end_label)
    asm.place(w.masked_label)
    if take_trace is not None:
        take_trace()
    asm.copy(SCRATCH, Field.UNHANDLED, Field.RAISED)
    asm.jump(w.end_label)


def _push_triple(w: Writer) -> None:
    """Push the exception's parameter 2, parameter 1 and code on the RPN stack, for its handler."""
    asm = w.asm
    asm.load(TSP, SCRATCH, Field.TSP)
    for position, field in ((-1, Field.PARM2), (-2, Field.PARM1), (-3, Field.CODE)):
        asm.load(_R.R1, SCRATCH, field)
        asm.add(_R.R0, TSP, position)
        w.cell(_R.R0)
        asm.store(_R.R0, CELLS, _R.R1)
    asm.alu(Alu.ADD, TSP, -3)
    asm.store(SCRATCH, Field.TSP, TSP)


def _find_handler(w: Writer, ends: int) -> None:
    """Write the search for an exception handler, from the innermost frame outwards. Frames without one are left."""
    asm = w.asm
    search, found = asm.label(), asm.label()
    if w.flow.returns:
        w.loops.head(search)
        asm.load(_R.R1, SCRATCH, Field.DEPTH)
        frame_address(w, _R.R2, _R.R1)
        asm.jump_if_word(Jump.JNE, _R.R2, FRAMES + Frame.HANDLER, 0, found, by=_R.R3)
        asm.jump_if(Jump.JEQ, _R.R1, 0, ends)
        asm.copy_from(_R.R2, FRAMES + Frame.SBP, SCRATCH, Field.SBP, by=_R.R3)
        asm.alu(Alu.SUB, _R.R1, 1)
        asm.store(SCRATCH, Field.DEPTH, _R.R1)
        w.loops.goto(search)
    else:
        asm.mov(_R.R2, SCRATCH)
        asm.jump_if_word(Jump.JEQ, _R.R2, FRAMES + Frame.HANDLER, 0, ends, by=_R.R3)
    asm.place(found)
    asm.jump_if_word(Jump.JEQ, SCRATCH, Field.DISPATCHES, HANDLER_DISPATCH_MAX, ends)
    asm.alu(Alu.ADD, _R.R1, 1)
    asm.store(SCRATCH, Field.DISPATCHES, _R.R1)
    asm.mov(_R.R1, 0)
    asm.store(_R.R2, FRAMES + Frame.HANDLER, _R.R1)
    asm.store(SCRATCH, Field.CODE, _R.R3)  # the field is free now: the selector must be loaded from memory
    _choose(w, sorted(w.flow.catches), 1, ends)


def write_return(w: Writer) -> None:
    """Write the jump of ``ret`` to the place after the call, whose offset is in ``Field.CODE``."""
    w.asm.place(w.return_label)
    _choose(w, sorted(w.flow.returns), 0, w.end_label)


def _choose(w: Writer, offsets: list[int], bias: int, default: int) -> None:
    """Write a jump to the block whose offset plus ``bias`` is in ``Field.CODE``."""
    w.loops.junction()
    w.asm.load(_R.R1, SCRATCH, Field.CODE)
    switch(w.asm, _R.R1, [(offset + bias, w.block(offset)) for offset in offsets], default)
