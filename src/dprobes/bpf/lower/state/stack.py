"""
The RPN stack inside a block: which cells are known numbers, which are in registers, which in memory.

Positions are counted from TSP at the start of the block: a push goes to -1, then to -2. Where the depth is known the
cell of a position has a constant address; else TSP is in R8 and the position is masked::

    r0 = r8;  r0 += position;  r0 &= 1023;  r0 <<= 3;  r0 += r7;  r1 = *(u64 *)(r0 + 0)

A cell is written when something may look at memory: at the end of a block, before an exception, before a helper takes
the registers. Cells that were popped before that are never written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Register
from dprobes.bpf.lower.state.handlerstate import CELLS, Field
from dprobes.lazydataclass import dataclass
from dprobes.rpn.arithmetic import mask_of
from dprobes.rpn.isa import RPN_STACK_CELLS

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembler

__all__ = ["SCRATCH", "TSP", "Operand", "VirtualStack", "store_number"]

ADDRESS = Register.R0
"""The register in which addresses of cells are worked out; it holds nothing else across an instruction."""
SCRATCH = Register.R7
"""The register that points to the state."""
TSP = Register.R8
"""The register that holds TSP where the depth is not known."""

_POOL = (Register.R1, Register.R2, Register.R3, Register.R4, Register.R5)

Operand = Register | int
"""The value of a cell: in a register, or a number."""


@dataclass(slots=True)
class _Cell:
    value: Operand
    is_stored: bool


def store_number(asm: Assembler, base: Register, offset: int, value: Operand) -> None:
    """Store 64 bits: a register, or an unsigned number, which goes through R9 if a store cannot hold it."""
    if isinstance(value, Register) or value < 1 << 31:
        asm.store(base, offset, value)
    elif value >= (1 << 64) - (1 << 31):
        asm.store(base, offset, value - (1 << 64))
    else:
        asm.mov(Register.R9, value)
        asm.store(base, offset, Register.R9)


class VirtualStack:
    """Follow the stack through a block, and hand out R1-R5. ``tsp`` is TSP at its start, None where that is in R8."""

    def __init__(self, asm: Assembler, word_size: int, tsp: int | None) -> None:
        self._asm = asm
        self._word_size = word_size
        self._mask = mask_of(8 * word_size)
        self._cells: dict[int, _Cell] = {}
        self._held: list[Register] = []
        self.tsp = tsp
        self.top = 0
        """The position of the top cell."""

    # Registers

    def take(self) -> Register:
        """Return a register for the rest of the instruction."""
        used = {cell.value for cell in self._cells.values() if isinstance(cell.value, Register)}
        free = next((r for r in _POOL if r not in used and r not in self._held), None)
        if free is None:
            free = self._spill()
        self._held.append(free)
        return free

    def _spill(self) -> Register:
        """Write the oldest cell that is in a register, and return that."""
        for position, cell in self._cells.items():
            if isinstance(cell.value, Register) and cell.value not in self._held:
                self._store(position)
                del self._cells[position]
                return cell.value
        raise AssertionError("an instruction takes all registers")

    def release(self) -> None:
        """End an instruction: registers that it took and did not push are free."""
        self._held.clear()

    # Cells

    def push(self, value: Operand) -> None:
        """Push a number, or a register that was taken."""
        self.top -= 1
        self._put(self.top, value)

    def set(self, index: int, value: Operand) -> None:
        """Set the cell ``index`` below the top to a number, or to a register that was taken."""
        self._put(self.top + index, value)

    def _put(self, position: int, value: Operand) -> None:
        if isinstance(value, Register):
            self._held.remove(value)
        else:
            value &= self._mask
        self._cells[position % RPN_STACK_CELLS] = _Cell(value, is_stored=False)

    def peek(self, index: int = 0) -> Operand:
        """Return the cell ``index`` below the top; a register is only to be read."""
        position = (self.top + index) % RPN_STACK_CELLS
        cell = self._cells.get(position)
        if cell is None:
            register = self.take()
            self._load(register, position)
            self._held.remove(register)
            cell = self._cells[position] = _Cell(register, is_stored=True)
        if isinstance(cell.value, Register) and cell.value not in self._held:
            self._held.append(cell.value)  # so that nothing takes it until the instruction is done
        return cell.value

    def pop(self) -> Operand:
        """Pop a cell; a register may be changed."""
        value = self.peek()
        self._cells.pop(self.top % RPN_STACK_CELLS, None)
        self.top += 1
        return value

    def pop_register(self) -> Register:
        """Pop a cell into a register that may be changed."""
        return self.in_register(self.pop())

    def in_register(self, value: Operand) -> Register:
        """Return a register with a value: itself, or a new one that holds the number."""
        if isinstance(value, Register):
            return value
        register = self.take()
        self._asm.mov(register, value)
        return register

    def copy(self, value: Operand) -> Register:
        """Return a new register with a value."""
        register = self.take()
        self._asm.mov(register, value)
        return register

    def drop(self, count: int) -> None:
        """Drop cells."""
        for position in range(self.top, self.top + min(count, RPN_STACK_CELLS)):
            self._cells.pop(position % RPN_STACK_CELLS, None)
        self.top += count

    # Memory

    def flush(self) -> None:
        """Write all cells that are not in memory yet; registers keep them as well."""
        for position, cell in self._cells.items():
            if not cell.is_stored:
                self._store(position)
                cell.is_stored = True

    def settle(self) -> None:
        """Write all cells and forget what is known: registers are free."""
        self.flush()
        self._cells.clear()
        self._held.clear()

    def address(self, register: Register, position: int) -> int:
        """Let ``register`` (where needed) lead to the cell at a position; return the offset from ``base``."""
        if self.tsp is not None:
            return CELLS + 8 * ((self.tsp + position) % RPN_STACK_CELLS)
        asm = self._asm
        asm.mov(register, TSP)
        if position:
            asm.alu(Alu.ADD, register, position)
        asm.alu(Alu.AND, register, RPN_STACK_CELLS - 1)
        asm.alu(Alu.LSH, register, 3)
        asm.alu(Alu.ADD, register, SCRATCH)
        return CELLS

    def base(self, register: Register) -> Register:
        """Return the register from which ``address`` counts."""
        return SCRATCH if self.tsp is not None else register

    def store_tsp(self) -> None:
        """Write TSP to its field; R8 stays what it was."""
        if self.tsp is not None:
            self._asm.store(SCRATCH, Field.TSP, self.tsp + self.top)
        elif self.top:
            self._asm.mov(ADDRESS, TSP)
            self._asm.alu(Alu.ADD, ADDRESS, self.top)
            self._asm.store(SCRATCH, Field.TSP, ADDRESS)
        else:
            self._asm.store(SCRATCH, Field.TSP, TSP)

    def tsp_value(self) -> Operand:
        """Return TSP as a number, or in a register that was taken."""
        if self.tsp is not None:
            return (self.tsp + self.top) & self._mask
        register = self.take()
        self._asm.mov(register, TSP)
        if self.top:
            self._asm.alu(Alu.ADD, register, self.top)
        if self._word_size == 4:
            self._asm.mov(register, register, wide=False)
        return register

    def _load(self, register: Register, position: int) -> None:
        offset = self.address(ADDRESS, position)
        self._asm.load(register, self.base(ADDRESS), offset)

    def _store(self, position: int) -> None:
        cell = self._cells[position]
        if cell.is_stored:
            return
        offset = self.address(ADDRESS, position)
        store_number(self._asm, self.base(ADDRESS), offset, cell.value)
