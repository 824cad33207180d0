"""
Composer of an extension's code in eBPF.

All values are variables, which are 64-bit words of the state. So in a loop of an extension, the verifier knows no
values, as between blocks of RPN (``template_writer``).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.bpf_instructions import Alu, Jump, Register
from dprobes.bpf.lower.state.handler_state import SCRATCH, store_number
from dprobes.bpf.lower.templates.world_templates import read_value
from dprobes.errors import NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.bpf.bpf_assembler import Label
    from dprobes.bpf.lower.template_writer import Writer
    from dprobes.rpn.instruction_encoding import EncodedInstruction
    from dprobes.rpn.instruction_set import ExceptionCode

__all__ = ["Composer", "Variable", "call_extensions"]

_R = Register
_FIRST, _LAST = 16, 31
"""The first and the last word of the state that are variables of extensions."""


class Variable(NamedTuple):
    """A 64-bit variable of an extension's code, by its offset in the handler's state."""

    offset: int


class Composer:
    """
    Writer of an extension's code for ``callk``.

    A hit executes the code that its methods write, in the same order.
    """

    def __init__(self, writer: Writer) -> None:
        self._w = writer
        self._asm = writer.asm
        self._used = _FIRST

    @property
    def word_size(self) -> int:
        """The size of a cell in bytes, 4 or 8."""
        return self._w.word_size

    # Values

    def variable(self, value: Variable | int = 0) -> Variable:
        """Return a new variable with ``value``; raise ``NotSupportedError`` if the extension needs more than 16."""
        if self._used > _LAST:
            raise NotSupportedError(f"an extension has more than {_LAST - _FIRST + 1} variables")
        variable = Variable(self._w.work(self._used))
        self._used += 1
        self.set(variable, value)
        return variable

    def set(self, variable: Variable, value: Variable | int) -> None:
        """Store another variable's value or a number, modulo 2**64, in a variable."""
        if isinstance(value, Variable):
            self._asm.copy(SCRATCH, variable.offset, value.offset)
        else:
            store_number(self._asm, SCRATCH, variable.offset, value & (1 << 64) - 1)

    def calculate(self, operation: Alu, variable: Variable, operand: Variable | int) -> None:
        """Set a variable to the result of ``operation`` on its value and ``operand``, unsigned numbers of 64 bits."""
        self._asm.load(_R.R1, SCRATCH, variable.offset)
        self._load(_R.R2, operand)
        self._asm.alu(operation, _R.R1, _R.R2)
        self._asm.store(SCRATCH, variable.offset, _R.R1)

    def pop(self) -> Variable:
        """Pop the top cell of the RPN stack, and return a new variable with it."""
        variable = self.variable()
        self._asm.store(SCRATCH, variable.offset, self._w.stack.pop_register())
        self._w.stack.release()
        return variable

    def push(self, value: Variable | int) -> None:
        """Push a variable or a number on the RPN stack, truncated to the size of a cell."""
        if isinstance(value, int):
            self._w.stack.push(value)
            return
        register = self._w.field(value.offset)
        if not self._w.wide:
            self._asm.mov(register, register, wide=False)
        self._w.stack.push(register)
        self._w.stack.release()

    # The hit thread

    def register(self, name: str) -> Variable:
        """
        Return a new variable with the value of a general register, by its name in the appendix of the man page.

        Raise ``NotSupportedError`` for another register, or one that is wider than a cell.
        """
        self._w.stack.settle()
        known = self._w.architecture.register(name)
        if known is None or known.memory_offset is not None or known.bits > self._w.bits:
            raise NotSupportedError(f"an extension asks for the register '{name}'")
        variable = self.variable()
        self._w.host.register(_R.R1, known.name)
        self._asm.store(SCRATCH, variable.offset, _R.R1)
        return variable

    def read(self, address: Variable, size: int) -> Variable:
        """
        Return a new variable with ``size`` (1, 2, 4 or 8) bytes of memory.

        The hit raises INVALID_ADDR if they are unreadable.
        """
        variable = self.variable()
        self.read_into(variable, address, size)
        return variable

    def read_into(self, variable: Variable, address: Variable, size: int) -> None:
        """Read memory into an existing variable, as in a loop."""
        self._w.stack.settle()
        self._asm.load(_R.R1, SCRATCH, address.offset)
        if not self._w.wide:
            self._asm.mov(_R.R1, _R.R1, wide=False)
        read_value(self._w, _R.R1, size)
        self._asm.copy(SCRATCH, variable.offset, self._w.work(1))

    # Control

    @contextmanager
    def loop(self) -> Iterator[Label]:
        """
        Repeat the code that the ``with`` block writes, which must not push or pop.

        The loop ends at ``leave_if`` with the label of the context.
        """
        head, end = self._asm.label(), self._asm.label()
        self._w.open_loop()
        self._w.loops.head(head)
        self._w.close_loop()  # exceptions that are raised within need TSP
        with self._balanced():
            yield end
        self._w.stack.settle()
        self._w.loops.goto(head)
        self._asm.place(end)
        self._w.close_loop()

    def leave_if(self, end: Label, condition: Jump, variable: Variable, operand: Variable | int) -> None:
        """Leave the loop with the end label ``end`` if ``condition`` is true for ``variable`` and ``operand``."""
        self._compare(condition, variable, operand, end)

    @contextmanager
    def when(self, condition: Jump, variable: Variable, operand: Variable | int) -> Iterator[None]:
        """
        Execute the code that the ``with`` block writes only if ``condition`` is true for ``variable`` and ``operand``.

        That code must not push or pop.
        """
        self._w.stack.settle()
        then, behind = self._asm.label(), self._asm.label()
        self._compare(condition, variable, operand, then)
        self._asm.jump(behind)
        self._asm.place(then)
        with self._balanced():
            yield
        self._asm.place(behind)

    @contextmanager
    def _balanced(self) -> Iterator[None]:
        """Refuse pushes and pops in the ``with`` block, because it is unknown how often its code will be executed."""
        top = self._w.stack.top
        yield
        if self._w.stack.top != top:
            raise NotSupportedError("an extension pushes or pops within a loop or under a condition")

    def throw(self, code: ExceptionCode, parm1: Variable | int = 0, parm2: Variable | int = 0) -> None:
        """
        Raise an exception with two parameters.

        Following code is executed only if the program ignores the exception.
        """
        self._w.stack.settle()
        self._load(_R.R1, parm1)
        self._load(_R.R2, parm2)
        if not self._w.is_ignored(code):
            self._w.throw(code, _R.R1, _R.R2)

    def _compare(self, condition: Jump, variable: Variable, operand: Variable | int, label: Label) -> None:
        self._asm.load(_R.R1, SCRATCH, variable.offset)
        self._load(_R.R2, operand)
        self._asm.jump_if(condition, _R.R1, _R.R2, label)

    def _load(self, register: Register, value: Variable | int) -> None:
        if isinstance(value, Variable):
            self._asm.load(register, SCRATCH, value.offset)
        else:
            self._asm.mov(register, value)


def call_extensions(w: Writer, i: EncodedInstruction) -> None:
    """Write ``callk``: the extension of that name, or all in order of registration."""
    forms: dict[str, Callable[[Composer], None]] = dict(w.request.extensions)
    assert i.row is not None
    if i.row.syntax == "callk <name>":
        forms = {str(i.operand): forms[str(i.operand)]}
    w.lp = None
    w.stack.flush()
    for write in forms.values():
        write(Composer(w))
        w.stack.settle()
    w.stack.store_tsp()
    w.reload_tsp()
