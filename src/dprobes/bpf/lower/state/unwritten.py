"""
Whether a handler may read cells of the RPN stack that it has not written: a state holds what earlier hits left there.

The analysis follows what is certain of the cells from the top on: that the handler wrote them, which numbers they
hold, and how many cells are on the stack. Where ways meet, only what all of them agree on is certain. A read of any
other cell counts: the answer may be a needless yes, but never a wrong no.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.lower.flow import LOSES_DEPTH
from dprobes.lazynamedtuple import NamedTuple
from dprobes.rpn.arithmetic import signed
from dprobes.rpn.isa import Flow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.arch import Architecture
    from dprobes.bpf.lower.flow import HandlerFlow
    from dprobes.rpn.decoder import EncodedInstruction
    from dprobes.rpn.encoder import CodeImage

__all__ = ["may_read_unwritten"]

_Cells = tuple[int | None, ...]
"""The cells that are certainly written, the top one first: their numbers, or None."""


class _Stack(NamedTuple):
    """The known part of the stack: cells from the top on, and the depth in cells, None if unknown."""

    cells: _Cells
    depth: int | None

    def base_index(self, n: int) -> int:
        """Return how far below the top the cell at SBP + ``n`` is, in a handler that keeps SBP."""
        if self.depth is None:
            raise _UncertainError
        return self.depth + n

    def meet(self, other: _Stack) -> _Stack:
        """Return what is certain of both."""
        cells = tuple(one if one == two else None for one, two in zip(self.cells, other.cells, strict=False))
        return _Stack(cells, self.depth if self.depth == other.depth else None)


_KEPT = 64
"""How many cells are followed: with a limit the analysis of a recursive procedure comes to an end."""

_EXCEPTION = _Stack((None, None, None), None)
"""What the handler of an exception finds: code and parameters."""

_READS_ANY = frozenset({"push sbp", "push sbp, <n>", "trace pv", "callk", "callk <name>"})
"""What may read any cell; extensions have a view of all."""

_WRITES_ANY = frozenset(
    f"{verb} {base}{n}" for verb in ("pop", "copy") for base in ("sbp", "tsp") for n in ("", ", <n>")
)


class _UncertainError(Exception):
    pass


def may_read_unwritten(image: CodeImage, architecture: Architecture, flow: HandlerFlow) -> bool:
    """Return whether a handler may read a cell that it has not written in the same hit."""
    walk = _Walk(image, architecture, flow)
    try:
        walk.run()
    except _UncertainError:
        return True
    return False


class _Walk:
    def __init__(self, image: CodeImage, architecture: Architecture, flow: HandlerFlow) -> None:
        self._architecture = architecture
        self._flow = flow
        self._relocated = {relocation.offset - 1 for relocation in image.relocations}

    def run(self) -> None:
        found: dict[int, _Stack] = {}
        pending: list[tuple[int, _Stack]] = [(self._flow.start, _Stack((), 0))]
        while pending:
            offset, stack = pending.pop()
            before = found.get(offset)
            if before is not None:
                stack = before.meet(stack)
                if stack == before:
                    continue
            found[offset] = stack
            pending += self._successors(self._flow.instructions[offset], stack)

    def _successors(self, instruction: EncodedInstruction, stack: _Stack) -> Iterator[tuple[int, _Stack]]:
        row = instruction.row
        if row is None:
            return
        if row.syntax == "sx <label>":
            yield int(instruction.operand), _EXCEPTION
        after = _Stack(self._cells_after(instruction, stack)[:_KEPT], self._depth_after(instruction, stack.depth))
        if row.flow in (Flow.NEXT, Flow.BRANCH):
            yield instruction.end, after
        if row.flow in (Flow.JUMP, Flow.BRANCH, Flow.CALL):
            yield int(instruction.operand), after
        if row.flow is Flow.RETURN:
            # Whose return it is, nobody can tell.
            for place in self._flow.returns:
                yield place, after

    def _depth_after(self, instruction: EncodedInstruction, depth: int | None) -> int | None:
        row = instruction.row
        assert row is not None
        if depth is None or row.syntax in LOSES_DEPTH:
            return None
        effect = self._flow.effect(instruction, self._architecture)
        return depth + effect.pushed - effect.popped

    def _cells_after(self, instruction: EncodedInstruction, stack: _Stack) -> _Cells:
        """Return what is certain after an instruction; raise ``_UncertainError`` if it may read something else."""
        cells, row, operand = stack.cells, instruction.row, instruction.operand
        assert row is not None
        match row.syntax:
            case "push <value>":
                return (None if instruction.offset in self._relocated else int(operand), *cells)
            case "xchg":
                return (*reversed(_certain(cells, 2)), *cells[2:])
            case "dup <times>":
                return _certain(cells, 1) * min(int(operand), _KEPT) + cells
            case "dup":
                value, times = _certain(cells, 2)
                if times is None:
                    return (value, *[None] * len(cells[2:]))
                return (value,) * min(times + 1, _KEPT) + cells[2:]
            case "ros <cells>":
                return cells[int(operand) :]
            case "log":
                (count,) = _certain(cells, 1)
                return cells[len(_certain(cells, 1 + _number(count))) :]
            case "push tsp, <n>":
                return (_certain(cells, 1 + _number(int(operand)))[-1], *cells)
            case "push sbp, <n>" if self._flow.keeps_base:
                return (_certain(cells, 1 + _number(stack.base_index(int(operand))))[-1], *cells)
            case "push sbp" if self._flow.keeps_base:
                (n,) = _certain(cells, 1)
                if n is None:
                    raise _UncertainError
                index = stack.base_index(signed(n, self._architecture.word_bits))
                return (_certain(cells, 1 + _number(index))[-1], *cells[1:])
            case "push tsp":
                (n,) = _certain(cells, 1)
                return (_certain(cells, 2 + _number(n))[-1], *cells[1:])
            case "restore tsp":
                _certain(cells, 1)
                return ()
            case syntax if syntax in _READS_ANY:
                raise _UncertainError
        if row.flow is Flow.BRANCH and row.operator != "loop":
            _certain(cells, 1)
            return cells
        effect = self._flow.effect(instruction, self._architecture)
        if not effect.exact:
            raise _UncertainError
        kept = cells[len(_certain(cells, effect.popped)) :]
        if row.syntax in _WRITES_ANY:
            kept = (None,) * len(kept)
        return (None,) * effect.pushed + kept


def _certain(cells: _Cells, count: int) -> _Cells:
    """Return the ``count`` top cells, which are read."""
    if count > len(cells):
        raise _UncertainError
    return cells[:count]


def _number(value: int | None) -> int:
    """Return a number of cells, or how far down one is."""
    if value is None or value < 0:
        raise _UncertainError
    return value
