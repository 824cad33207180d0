"""
Whether a handler may read cells of the RPN stack that it has not written: a state holds what earlier hits left there.

The analysis follows what is certain of the cells from the top on: that the handler wrote them, and which numbers they
hold. Where ways meet, only what all of them agree on is certain. A read of any other cell counts: the answer may be a
needless yes, but never a wrong no.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

_KEPT = 64
"""How many cells are followed: with a limit the analysis of a recursive procedure comes to an end."""

_EXCEPTION: _Cells = (None, None, None)
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
        found: dict[int, _Cells] = {}
        pending: list[tuple[int, _Cells]] = [(self._flow.start, ())]
        while pending:
            offset, cells = pending.pop()
            before = found.get(offset)
            if before is not None:
                cells = tuple(one if one == other else None for one, other in zip(before, cells, strict=False))
                if cells == before:
                    continue
            found[offset] = cells
            pending += self._successors(self._flow.instructions[offset], cells)

    def _successors(self, instruction: EncodedInstruction, cells: _Cells) -> Iterator[tuple[int, _Cells]]:
        row = instruction.row
        if row is None:
            return
        if row.syntax == "sx <label>":
            yield int(instruction.operand), _EXCEPTION
        after = self._after(instruction, cells)[:_KEPT]
        if row.flow in (Flow.NEXT, Flow.BRANCH):
            yield instruction.end, after
        if row.flow in (Flow.JUMP, Flow.BRANCH, Flow.CALL):
            yield int(instruction.operand), after
        if row.flow is Flow.RETURN:
            # Whose return it is, nobody can tell.
            for place in self._flow.returns:
                yield place, after

    def _after(self, instruction: EncodedInstruction, cells: _Cells) -> _Cells:
        """Return what is certain behind an instruction; raise ``_UncertainError`` if it may read something else."""
        row, operand = instruction.row, instruction.operand
        assert row is not None
        match row.syntax:
            case "push <value>":
                return (None if instruction.offset in self._relocated else int(operand), *cells)
            case "xchg":
                return (*reversed(_certain(cells, 2)), *cells[2:])
            case "dup <times>":
                return _certain(cells, 1) * min(int(operand), _KEPT) + cells
            case "dup":
                return (_certain(cells, 2)[0], *cells[2:])
            case "ros <cells>":
                return cells[int(operand) :]
            case "log":
                (count,) = _certain(cells, 1)
                return cells[len(_certain(cells, 1 + _number(count))) :]
            case "push tsp, <n>":
                return (_certain(cells, 1 + _number(int(operand)))[-1], *cells)
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
