"""Templates of local, global, per-CPU and per-thread variables."""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Atomic, Jump, Register
from dprobes.bpf.layout import MapName, ProbeField, power_of_two
from dprobes.bpf.lower.logbuffer import append, begin, check_prefix, end, overflow_if, room, write_prefix
from dprobes.bpf.lower.state.handlerstate import ABORT, Field
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.bpf.lower.threadvariables import point_to_variables
from dprobes.lazydataclass import dataclass
from dprobes.rpn.isa import ITEM_PREFIX_SIZE, ExceptionCode, Token

if TYPE_CHECKING:
    from dprobes.bpf.lower.state.stack import Operand
    from dprobes.bpf.lower.writer import Template, Writer
    from dprobes.rpn.decoder import EncodedInstruction

__all__ = ["TEMPLATES"]

_R = Register


@dataclass(frozen=True, slots=True)
class _VariableKind:
    """Write the instructions of one kind of variables; ``kind`` is what INVALID_OPERAND calls it."""

    name: str
    kind: int
    map: MapName
    token: Token

    def count(self, w: Writer) -> int:
        """Return how many there are."""
        request = w.request
        return {"lv": request.vars, "gv": request.gvars, "cv": request.cvars, "tv": request.tvars}[self.name]

    def address(self, w: Writer, index: Operand) -> Register | None:
        """Return a register that points to a variable; the stack is flushed. None if there is none of that index."""
        asm, count = w.asm, self.count(w)
        code = ExceptionCode.INVALID_OPERAND
        if isinstance(index, int) and index >= count:
            w.throw(code, self.kind, index)
            w.is_open = False
            return None
        if isinstance(index, Register):
            if count == 0:
                w.throw(code, self.kind, index)
                w.is_open = False
                return None
            w.throw_if(Jump.JGE, index, count, code, self.kind, index)
        size = power_of_two(count)
        if self.name == "cv":
            return self._cpu_address(w, index, size)
        if self.name == "tv":
            return self._thread_address(w, index, size)
        address = w.stack.take()
        if isinstance(index, int):
            asm.load_value(address, self.map, 8 * index)
            return address
        asm.store(SCRATCH, w.work(0), index)  # what the comparison taught the verifier is of no use
        asm.load(index, SCRATCH, w.work(0))
        asm.alu(Alu.AND, index, size - 1)
        asm.alu(Alu.LSH, index, 3)
        asm.load_value(address, self.map)
        asm.alu(Alu.ADD, address, index)
        return address

    def _cpu_address(self, w: Writer, index: Operand, size: int) -> Register:
        """Ask for the CPU: what is in registers is in memory by then."""
        asm = w.asm
        if isinstance(index, Register):
            asm.store(SCRATCH, w.work(0), index)
        w.stack.settle()
        w.host.cpu()
        register, address = w.stack.take(), w.stack.take()
        asm.mov(register, Register.R0)
        asm.alu(Alu.AND, register, w.request.tables.cpus - 1)
        asm.alu(Alu.MUL, register, 8 * size)
        asm.load_value(address, self.map)
        asm.alu(Alu.ADD, address, register)
        if isinstance(index, Register):
            asm.load(register, SCRATCH, w.work(0))
            asm.alu(Alu.AND, register, size - 1)
            asm.alu(Alu.LSH, register, 3)
            asm.alu(Alu.ADD, address, register)
        elif index:
            asm.alu(Alu.ADD, address, 8 * index)
        return address

    def _thread_address(self, w: Writer, index: Operand, size: int) -> Register:
        """Look for the thread's variables: what is in registers is in memory by then."""
        asm = w.asm
        if isinstance(index, Register):
            asm.store(SCRATCH, w.work(0), index)
        w.stack.settle()
        _point_to_thread(w)
        address = w.stack.copy(_R.R0)
        if isinstance(index, Register):
            register = w.field(w.work(0))
            asm.alu(Alu.AND, register, size - 1)
            asm.alu(Alu.LSH, register, 3)
            asm.alu(Alu.ADD, address, register)
        elif index:
            asm.alu(Alu.ADD, address, 8 * index)
        return address

    def load(self, w: Writer, index: Operand) -> None:
        w.stack.flush()
        address = self.address(w, index)
        if address is not None:
            w.asm.load(address, address, 0, w.size)
            w.stack.push(address)

    def store(self, w: Writer, index: Operand, value: Operand) -> None:
        """Store a value, which goes through memory because asking for the CPU takes the registers."""
        if isinstance(value, Register):
            w.asm.store(SCRATCH, w.work(1), value)
        w.stack.flush()
        address = self.address(w, index)
        if address is None:
            return
        value = w.stack.copy(value) if isinstance(value, int) else w.field(w.work(1))
        w.asm.store(address, 0, value, w.size)

    def add(self, w: Writer, index: Operand, amount: int) -> None:
        w.stack.flush()
        address = self.address(w, index)
        if address is not None:
            w.asm.atomic(Atomic.ADD, address, 0, w.stack.copy(amount), size=w.size)

    def templates(self) -> dict[str, Template]:
        """Return the templates, keyed by the syntax of the row."""
        name = self.name

        def pop(w: Writer, i: EncodedInstruction) -> None:
            self.store(w, int(i.operand), w.stack.pop())

        def pop_popped(w: Writer, i: EncodedInstruction) -> None:
            value, index = w.stack.pop(), w.stack.pop()
            self.store(w, index, value)

        def move(w: Writer, i: EncodedInstruction) -> None:
            self.store(w, int(i.operand), w.stack.peek())

        def move_popped(w: Writer, i: EncodedInstruction) -> None:
            index = w.stack.pop()
            self.store(w, index, w.stack.peek())

        return {
            f"push {name}, <{name}>": lambda w, i: self.load(w, int(i.operand)),
            f"push {name}": lambda w, _: self.load(w, w.stack.pop()),
            f"pop {name}, <{name}>": pop,
            f"pop {name}": pop_popped,
            f"move {name}, <{name}>": move,
            f"move {name}": move_popped,
            f"inc {name}, <{name}>": lambda w, i: self.add(w, int(i.operand), 1),
            f"inc {name}": lambda w, _: self.add(w, w.stack.pop(), 1),
            f"dec {name}, <{name}>": lambda w, i: self.add(w, int(i.operand), -1),
            f"dec {name}": lambda w, _: self.add(w, w.stack.pop(), -1),
            f"log {name}": lambda w, _: _log(w, self),
        }


def _point_to_thread(w: Writer) -> None:
    """Let R0 point to the thread's variables, which the prologue has seen to; takes R1-R5."""
    asm, missing = w.asm, w.asm.label()
    point_to_variables(asm, w.host)
    asm.jump_if(Jump.JEQ, _R.R0, 0, missing)

    def miss() -> None:
        """Give the hit up: the thread is ending, and its variables have gone."""
        asm.place(missing)
        w.host.count(ProbeField.MISSED)
        asm.store(SCRATCH, Field.ENDING, ABORT)
        asm.jump(w.end_label)

    w.defer(miss)


def _log(w: Writer, variables: _VariableKind) -> None:
    """Write ``log lv|gv|cv|tv``: so many from the first one on as are asked for, exist, and fit."""
    asm, start, count, kept, existing = w.asm, w.work(4), w.work(3), w.work(2), w.work(5)
    existing_least, fitting_least, done = asm.label(), asm.label(), asm.label()
    values = variables.count(w)
    w.lp = None
    asm.store(SCRATCH, count, w.stack.pop_register())
    asm.store(SCRATCH, start, w.stack.pop_register())
    w.open_loop()
    begin(w)
    check_prefix(w, done)
    # existing = max(0, values - start)
    asm.store(SCRATCH, existing, 0)
    none = asm.label()
    asm.load(_R.R1, SCRATCH, start)
    asm.mov(_R.R2, values)
    asm.jump_if(Jump.JGE, _R.R1, _R.R2, none)
    asm.alu(Alu.SUB, _R.R2, _R.R1)
    asm.store(SCRATCH, existing, _R.R2)
    asm.place(none)
    # kept = min(count, existing, fitting)
    asm.load(_R.R1, SCRATCH, count)
    asm.store(SCRATCH, kept, _R.R1)
    asm.load(_R.R2, SCRATCH, existing)
    asm.jump_if(Jump.JLE, _R.R1, _R.R2, existing_least)
    asm.store(SCRATCH, kept, _R.R2)
    asm.place(existing_least)
    room(w, _R.R2, w.word_size, ITEM_PREFIX_SIZE)
    asm.load(_R.R1, SCRATCH, kept)
    asm.jump_if(Jump.JLE, _R.R1, _R.R2, fitting_least)
    asm.store(SCRATCH, kept, _R.R2)
    asm.place(fitting_least)
    asm.store(SCRATCH, w.work(6), _R.R2)
    write_prefix(w, variables.token, kept)
    if values:
        _copy(w, variables, start, kept)
    w.close_loop()
    complete = asm.label()
    asm.load(_R.R1, SCRATCH, kept)
    asm.load(_R.R2, SCRATCH, count)
    asm.jump_if(Jump.JEQ, _R.R1, _R.R2, complete)
    asm.load(_R.R1, SCRATCH, existing)
    asm.load(_R.R2, SCRATCH, w.work(6))
    asm.load(_R.R3, SCRATCH, start)
    asm.alu(Alu.ADD, _R.R3, _R.R1, wide=w.wide)
    w.throw_if(Jump.JLE, _R.R1, _R.R2, ExceptionCode.INVALID_OPERAND, variables.kind, _R.R3, wide=True)
    overflow_if(w, Jump.JGT, _R.R1, _R.R2, done)
    asm.place(complete)
    end(w)
    asm.place(done)


def _copy(w: Writer, variables: _VariableKind, start: int, kept: int) -> None:
    """Write a loop that logs so many variables as a field says, from the index in another one on; they fit."""
    asm, rest, index, head, done = w.asm, w.work(0), w.work(1), w.asm.label(), w.asm.label()
    size = power_of_two(variables.count(w))
    asm.load(_R.R1, SCRATCH, kept)
    asm.store(SCRATCH, rest, _R.R1)
    asm.load(_R.R1, SCRATCH, start)
    asm.store(SCRATCH, index, _R.R1)
    if variables.map is MapName.CPU_VARIABLES:
        w.host.cpu()
        asm.store(SCRATCH, w.work(7), _R.R0)
    w.loops.head(head)
    asm.load(_R.R1, SCRATCH, rest)
    asm.jump_if(Jump.JEQ, _R.R1, 0, done)
    asm.alu(Alu.SUB, _R.R1, 1)
    asm.store(SCRATCH, rest, _R.R1)
    asm.load(_R.R1, SCRATCH, index)
    asm.mov(_R.R2, _R.R1)
    asm.alu(Alu.ADD, _R.R2, 1)
    asm.store(SCRATCH, index, _R.R2)
    asm.alu(Alu.AND, _R.R1, size - 1)
    if variables.map is MapName.CPU_VARIABLES:
        asm.load(_R.R2, SCRATCH, w.work(7))
        asm.alu(Alu.AND, _R.R2, w.request.tables.cpus - 1)
        asm.alu(Alu.MUL, _R.R2, size)
        asm.alu(Alu.ADD, _R.R1, _R.R2)
    if variables.map is MapName.THREAD_VARIABLES:
        asm.store(SCRATCH, w.work(7), _R.R1)
        _point_to_thread(w)
        asm.mov(_R.R2, _R.R0)
        asm.load(_R.R1, SCRATCH, w.work(7))
        asm.alu(Alu.AND, _R.R1, size - 1)
    else:
        asm.load_value(_R.R2, variables.map)
    asm.alu(Alu.LSH, _R.R1, 3)
    asm.alu(Alu.ADD, _R.R2, _R.R1)
    asm.load(_R.R2, _R.R2, 0)
    append(w, _R.R2, w.word_size)
    w.loops.goto(head)
    asm.place(done)


TEMPLATES: dict[str, Template] = {
    **_VariableKind("lv", 1, MapName.LOCALS, Token.LOCAL_VARIABLES).templates(),
    **_VariableKind("gv", 2, MapName.GLOBALS, Token.GLOBAL_VARIABLES).templates(),
    **_VariableKind("cv", 5, MapName.CPU_VARIABLES, Token.CPU_VARIABLES).templates(),
    **_VariableKind("tv", 7, MapName.THREAD_VARIABLES, Token.THREAD_VARIABLES).templates(),
}
