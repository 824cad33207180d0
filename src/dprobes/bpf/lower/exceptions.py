"""
What happens when an exception is raised: the code that all places share (recovered reference 1.7).

A place that raises has put code and parameters into the state and TSP into its field. It goes to ``raise_label``, or to
``reraise_label`` if the three cells are on the stack already (``rx``), or to ``masked_label`` if the exception is not
enabled and ends the handler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Jump, Register
from dprobes.bpf.lower.loops import switch
from dprobes.bpf.lower.state.handlerstate import CELLS, FRAME_COUNT, FRAME_SIZE, FRAMES, RANGE_SIZE, Field, Frame
from dprobes.bpf.lower.state.stack import SCRATCH, TSP
from dprobes.rpn.isa import HANDLER_DISPATCH_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.lower.writer import Writer

__all__ = ["frame_address", "ranges_address", "write_dispatch", "write_return"]

_R = Register


def frame_address(w: Writer, dst: Register, depth: Register) -> None:
    """Let ``dst`` point to the frame of a freshly loaded depth, which is changed; they may be one."""
    asm = w.asm
    if dst != depth:
        asm.mov(dst, depth)
    asm.alu(Alu.AND, dst, FRAME_COUNT - 1)
    asm.alu(Alu.LSH, dst, FRAME_SIZE.bit_length() - 1)
    asm.alu(Alu.ADD, dst, SCRATCH)


def ranges_address(w: Writer, register: Register) -> None:
    """Turn a freshly loaded depth into the address of what traces of its frame show, as counted from ``RANGES``."""
    w.asm.alu(Alu.AND, register, FRAME_COUNT - 1)
    w.asm.alu(Alu.LSH, register, RANGE_SIZE.bit_length() - 1)
    w.asm.alu(Alu.ADD, register, SCRATCH)


def write_dispatch(w: Writer, take_trace: Callable[[], None] | None) -> None:
    """Write the way of an exception to its handler; ``take_trace`` writes the taking of a stack trace."""
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
            asm.load(_R.R1, SCRATCH, field)
            asm.store(SCRATCH, last, _R.R1)
    if take_trace is not None:
        take_trace()
    if flow.catches:
        _find_handler(w, ends)
    asm.place(ends)
    asm.load(_R.R1, SCRATCH, Field.RAISED)
    asm.store(SCRATCH, Field.UNHANDLED, _R.R1)
    asm.jump(w.end_label)
    asm.place(w.masked_label)
    if take_trace is not None:
        take_trace()
    asm.load(_R.R1, SCRATCH, Field.RAISED)
    asm.store(SCRATCH, Field.UNHANDLED, _R.R1)
    asm.jump(w.end_label)


def _push_triple(w: Writer) -> None:
    """Push parameter 2, parameter 1 and the code."""
    asm = w.asm
    asm.load(TSP, SCRATCH, Field.TSP)
    for position, field in ((-1, Field.PARM2), (-2, Field.PARM1), (-3, Field.CODE)):
        asm.load(_R.R1, SCRATCH, field)
        asm.mov(_R.R0, TSP)
        asm.alu(Alu.ADD, _R.R0, position)
        w.cell(_R.R0)
        asm.store(_R.R0, CELLS, _R.R1)
    asm.alu(Alu.ADD, TSP, -3)
    asm.store(SCRATCH, Field.TSP, TSP)


def _find_handler(w: Writer, ends: int) -> None:
    """Write the search for a handler: frames without one are left."""
    asm = w.asm
    search, found = asm.label(), asm.label()
    if w.flow.returns:
        w.loops.head(search)
        asm.load(_R.R1, SCRATCH, Field.DEPTH)
        frame_address(w, _R.R2, _R.R1)
        asm.load(_R.R3, _R.R2, FRAMES + Frame.HANDLER)
        asm.jump_if(Jump.JNE, _R.R3, 0, found)
        asm.jump_if(Jump.JEQ, _R.R1, 0, ends)
        asm.load(_R.R3, _R.R2, FRAMES + Frame.SBP)
        asm.store(SCRATCH, Field.SBP, _R.R3)
        asm.alu(Alu.SUB, _R.R1, 1)
        asm.store(SCRATCH, Field.DEPTH, _R.R1)
        w.loops.goto(search)
    else:
        asm.mov(_R.R2, SCRATCH)
        asm.load(_R.R3, _R.R2, FRAMES + Frame.HANDLER)
        asm.jump_if(Jump.JEQ, _R.R3, 0, ends)
    asm.place(found)
    asm.load(_R.R1, SCRATCH, Field.DISPATCHES)
    asm.jump_if(Jump.JEQ, _R.R1, HANDLER_DISPATCH_MAX, ends)
    asm.alu(Alu.ADD, _R.R1, 1)
    asm.store(SCRATCH, Field.DISPATCHES, _R.R1)
    asm.mov(_R.R1, 0)
    asm.store(_R.R2, FRAMES + Frame.HANDLER, _R.R1)
    asm.store(SCRATCH, Field.CODE, _R.R3)  # free now: what is chosen by must come from memory
    _choose(w, sorted(w.flow.catches), 1, ends)


def write_return(w: Writer) -> None:
    """Write the way of ``ret`` to the place behind the call, whose offset is in ``Field.CODE``."""
    w.asm.place(w.return_label)
    _choose(w, sorted(w.flow.returns), 0, w.end_label)


def _choose(w: Writer, offsets: list[int], bias: int, default: int) -> None:
    """Write a way to the block whose offset plus ``bias`` is in ``Field.CODE``."""
    w.loops.junction()
    w.asm.load(_R.R1, SCRATCH, Field.CODE)
    switch(w.asm, _R.R1, [(offset + bias, w.block(offset)) for offset in offsets], default)
