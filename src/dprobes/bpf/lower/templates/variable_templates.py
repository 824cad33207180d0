"""
Templates of the heap, and of variables.

The blocks of the heap are contiguous, as in ``vm.rpn_machine``. Each block begins with a word with its size::

    | size + used | data ... | size + used | data ...

``used`` is 1 or 0, because sizes are multiples of the word. ``Field.HEAP_END`` is the end of the last block, or 0
before the first allocation of a hit.
"""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.bpf_instructions import EXISTS, NO_OVERWRITE, Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.lower.state.handler_state import CELLS, SCRATCH, Field
from dprobes.bpf.lower.templates.log_templates import append, begin, check_prefix, end, overflow_if, room, write_prefix
from dprobes.bpf.map_layouts import MapName, power_of_two
from dprobes.rpn.instruction_set import ITEM_PREFIX_SIZE, ExceptionCode, Group, Token

if TYPE_CHECKING:
    from dprobes.bpf.bpf_assembler import Assembler, Label
    from dprobes.bpf.lower.handler_flow import HandlerFlow
    from dprobes.bpf.lower.hosts.handler_host import Host
    from dprobes.bpf.lower.state.handler_state import Operand
    from dprobes.bpf.lower.template_writer import Template, Writer
    from dprobes.rpn.instruction_encoding import EncodedInstruction

__all__ = ["HEAP_TEMPLATES", "VARIABLE_TEMPLATES", "give_variables", "keep_variables", "uses_variables"]

# The variables of the thread that took a hit: a value of a hash (``MapName.THREAD_VARIABLES``).
#
# A thread gets them, all 0, before the first handler that uses them. Programs on the kernel's tracepoints remove them
# when the thread ends.


_KEY = -120
"""Stack offset of the key of the thread: near the top, because callbacks share the stack."""

_BLOCK = -128
"""Stack offset of the address of the variables, until the hit has a state."""

_R = Register


def uses_variables(flow: HandlerFlow) -> bool:
    """Return whether a handler uses per-thread variables."""
    rows = (instruction.row for instruction in flow.instructions.values())
    return any(row is not None and (row.group is Group.THREAD_VARIABLE or row.syntax == "log tv") for row in rows)


def point_to_variables(asm: Assembler, host: Host) -> None:
    """Set R0 to the address of the thread's variables, 0 if it has none. Clobbers R1-R5."""
    known = asm.label()
    host.global_tid()
    asm.jump_if(Jump.JNE, _R.R0, 0, known)
    host.cpu()  # an idle thread: each CPU has one
    asm.alu(Alu.ADD, _R.R0, 1)
    asm.alu(Alu.LSH, _R.R0, 32)
    asm.place(known)
    asm.store(_R.R10, _KEY, _R.R0)
    asm.load_map(_R.R1, MapName.THREAD_VARIABLES)
    _point_to_key(asm)
    asm.call(Helper.MAP_LOOKUP_ELEM)


def give_variables(asm: Assembler, host: Host, full: Label, *, is_kept: bool) -> None:
    """
    Create the thread's variables if it has none; go to ``full`` if there is no room. Clobbers R0-R5.

    With ``is_kept``, their address is left on the stack for ``keep_variables``.
    """
    there = asm.label()
    point_to_variables(asm, host)
    asm.jump_if(Jump.JNE, _R.R0, 0, there)
    asm.load_map(_R.R1, MapName.THREAD_VARIABLES)
    _point_to_key(asm)
    asm.load_value(_R.R3, MapName.ZEROS)
    asm.mov(_R.R4, NO_OVERWRITE)
    asm.call(Helper.MAP_UPDATE_ELEM)
    if not is_kept:
        asm.jump_if(Jump.JEQ, _R.R0, 0, there)
        asm.jump_if(Jump.JNE, _R.R0, EXISTS, full, wide=False)
        asm.place(there)
        return
    point_to_variables(asm, host)
    asm.jump_if(Jump.JEQ, _R.R0, 0, full)
    asm.place(there)
    asm.store(_R.R10, _BLOCK, _R.R0)


def keep_variables(asm: Assembler) -> None:
    """
    Store the address of the thread's variables in the state of the hit, so that it is looked up once.

    Clobbers R1.
    """
    asm.copy_from(_R.R10, _BLOCK, SCRATCH, Field.THREAD)


def _point_to_key(asm: Assembler) -> None:
    asm.add(_R.R2, _R.R10, _KEY)


# Templates of local, global, per-CPU and per-thread variables.


class _VariableKind(NamedTuple):
    """Writer of the instructions of one kind of variables. ``kind`` is its number in INVALID_OPERAND."""

    name: str
    kind: int
    map: MapName
    token: Token

    def _is_known(self, w: Writer) -> bool:
        """Return whether the state has the address of the variables, so that no access needs a call."""
        return self.name == "tv" and not w.request.abilities.verified

    def count(self, w: Writer) -> int:
        """Return the number of variables of this kind that the program has."""
        request = w.request
        return {"lv": request.vars, "gv": request.gvars, "cv": request.cvars, "tv": request.tvars}[self.name]

    def address(self, w: Writer, index: Operand) -> Register | None:
        """
        Return a register with the address of a variable. The stack is flushed.

        An invalid index raises INVALID_OPERAND. Return None if the index is known to be invalid.
        """
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
        if self.name in ("cv", "tv"):
            return self._address_by_call(w, index, size)
        address = w.stack.take()
        if isinstance(index, int):
            asm.load_value(address, self.map, 8 * index)
            return address
        asm.store(SCRATCH, w.work(0), index)  # bounds that the verifier learned from the comparison are of no use
        asm.load(index, SCRATCH, w.work(0))
        asm.point_to_element(address, self.map, index, size, 8)
        return address

    def _address_by_call(self, w: Writer, index: Operand, size: int) -> Register:
        """
        Return the address of a per-CPU or per-thread variable, which takes a helper call.

        Registers are written to memory first.
        """
        asm = w.asm
        if self._is_known(w):
            address = w.stack.take()
            asm.load(address, SCRATCH, Field.THREAD)
            if isinstance(index, Register):
                asm.alu(Alu.LSH, index, 3)
                asm.alu(Alu.ADD, address, index)
            elif index:
                asm.alu(Alu.ADD, address, 8 * index)
            return address
        if isinstance(index, Register):
            asm.store(SCRATCH, w.work(0), index)
        w.stack.settle()
        if self.name == "cv":
            w.host.cpu()
            register, address = w.stack.take(), w.stack.take()
            asm.derive(Alu.AND, register, Register.R0, w.request.tables.cpus - 1)
            asm.alu(Alu.MUL, register, 8 * size)
            asm.load_value(address, self.map)
            asm.alu(Alu.ADD, address, register)
        else:
            _point_to_thread(w)
            address = w.stack.copy(_R.R0)
        if isinstance(index, Register):
            if self.name == "tv":
                register = w.stack.take()
            asm.load(register, SCRATCH, w.work(0))
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
        """Store a value, via memory where a call clobbers the registers."""
        if isinstance(value, Register) and not self._is_known(w):
            w.asm.store(SCRATCH, w.work(1), value)
        w.stack.flush()
        address = self.address(w, index)
        if address is None:
            return
        if isinstance(value, int):
            value = w.stack.copy(value)
        elif not self._is_known(w):
            value = w.field(w.work(1))
        w.asm.store(address, 0, value, w.size)

    def add(self, w: Writer, index: Operand, amount: int) -> None:
        w.stack.flush()
        address = self.address(w, index)
        if address is not None:
            w.asm.atomic(Atomic.ADD, address, 0, w.stack.copy(amount), size=w.size)

    def templates(self) -> dict[str, Template]:
        """Return the templates, keyed by the syntax of the row."""
        name = self.name

        def pop_popped(w: Writer, i: EncodedInstruction) -> None:
            value, index = w.stack.pop(), w.stack.pop()
            self.store(w, index, value)

        def move_popped(w: Writer, i: EncodedInstruction) -> None:
            index = w.stack.pop()
            self.store(w, index, w.stack.peek())

        return {
            f"push {name}, <{name}>": lambda w, i: self.load(w, int(i.operand)),
            f"push {name}": lambda w, _: self.load(w, w.stack.pop()),
            f"pop {name}, <{name}>": lambda w, i: self.store(w, int(i.operand), w.stack.pop()),
            f"pop {name}": pop_popped,
            f"move {name}, <{name}>": lambda w, i: self.store(w, int(i.operand), w.stack.peek()),
            f"move {name}": move_popped,
            f"inc {name}, <{name}>": lambda w, i: self.add(w, int(i.operand), 1),
            f"inc {name}": lambda w, _: self.add(w, w.stack.pop(), 1),
            f"dec {name}, <{name}>": lambda w, i: self.add(w, int(i.operand), -1),
            f"dec {name}": lambda w, _: self.add(w, w.stack.pop(), -1),
            f"log {name}": lambda w, _: _log(w, self),
        }


def _point_to_thread(w: Writer) -> None:
    """Set R0 to the thread's variables, which the prologue has created; clobbers R1-R5."""
    if not w.request.abilities.verified:
        w.asm.load(_R.R0, SCRATCH, Field.THREAD)
        return
    asm, missing = w.asm, w.asm.label()
    point_to_variables(asm, w.host)
    asm.jump_if(Jump.JEQ, _R.R0, 0, missing)
    w.defer(w.give_up, missing)  # the thread is ending, and its variables are gone


def _log(w: Writer, variables: _VariableKind) -> None:
    """Write ``log lv|gv|cv|tv``: as many from the first one on as are requested, exist, and fit."""
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
    asm.copy(SCRATCH, kept, count)
    asm.load(_R.R2, SCRATCH, existing)
    asm.jump_if(Jump.JLE, _R.R1, _R.R2, existing_least)
    asm.store(SCRATCH, kept, _R.R2)
    asm.place(existing_least)
    room(w, _R.R2, w.word_size, ITEM_PREFIX_SIZE)
    asm.jump_if_word(Jump.JLE, SCRATCH, kept, _R.R2, fitting_least)
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
    """
    Write a loop that logs variables from the index in ``start`` on. The field ``kept`` has their number.

    They fit.
    """
    asm, rest, index = w.asm, w.work(0), w.work(1)
    size = power_of_two(variables.count(w))
    asm.copy(SCRATCH, rest, kept)
    asm.copy(SCRATCH, index, start)
    if variables.map is MapName.CPU_VARIABLES:
        w.host.cpu()
        asm.store(SCRATCH, w.work(7), _R.R0)
    with w.repeat(rest):
        asm.take_next(_R.R1, SCRATCH, index, by=_R.R2)
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


VARIABLE_TEMPLATES: dict[str, Template] = {
    **_VariableKind("lv", 1, MapName.LOCALS, Token.LOCAL_VARIABLES).templates(),
    **_VariableKind("gv", 2, MapName.GLOBALS, Token.GLOBAL_VARIABLES).templates(),
    **_VariableKind("cv", 5, MapName.CPU_VARIABLES, Token.CPU_VARIABLES).templates(),
    **_VariableKind("tv", 7, MapName.THREAD_VARIABLES, Token.THREAD_VARIABLES).templates(),
}


def _usable(w: Writer) -> int:
    """Return the size in bytes of the only block of an empty heap."""
    return (w.point.heap - w.word_size) // w.word_size * w.word_size


def _header(w: Writer, register: Register, position: int) -> None:
    """Set a register to the header at the position in a field."""
    w.asm.load(register, SCRATCH, position)
    w.pointer(register, w.state.heap_start, w.state.heap_mask)


def _next(w: Writer, register: Register, position: int, size: Register) -> None:
    """Load the position after a block of ``size`` bytes whose header is at the position in a field."""
    w.asm.load(register, SCRATCH, position)
    w.asm.alu(Alu.ADD, register, size)
    w.asm.alu(Alu.ADD, register, w.word_size)


def _malloc(w: Writer, i: EncodedInstruction) -> None:
    asm, word = w.asm, w.word_size
    asked, size, position = w.work(0), w.work(1), w.work(2)
    ready, enough, head, follow, fits, whole, none, done = (asm.label() for _ in range(8))
    asm.store(SCRATCH, asked, w.stack.pop_register())
    w.open_loop()
    asm.load(_R.R1, SCRATCH, asked)
    w.defer(lambda: _throw_heap(w, ExceptionCode.HEAP_NOMEM, asked), none)
    asm.jump_if(Jump.JGT, _R.R1, max(0, _usable(w)), none)
    asm.alu(Alu.ADD, _R.R1, word - 1)
    asm.alu(Alu.AND, _R.R1, -word)
    asm.store(SCRATCH, size, _R.R1)
    asm.jump_if(Jump.JNE, _R.R1, 0, enough)
    asm.store(SCRATCH, size, word)
    asm.place(enough)
    asm.store(SCRATCH, position, 0)
    asm.jump_if_word(Jump.JNE, SCRATCH, Field.HEAP_END, 0, ready)
    if _usable(w) <= 0:
        asm.jump(none)
    else:
        _header(w, _R.R1, position)
        asm.store(_R.R1, 0, _usable(w), w.size)
        asm.store(SCRATCH, Field.HEAP_END, word + _usable(w))
    asm.place(ready)
    w.loops.head(head)
    asm.load(_R.R1, SCRATCH, position)
    asm.load(_R.R2, SCRATCH, Field.HEAP_END)
    asm.jump_if(Jump.JGE, _R.R1, _R.R2, none)
    _header(w, _R.R1, position)
    asm.load(_R.R2, _R.R1, 0, w.size)
    asm.load(_R.R3, SCRATCH, size)
    asm.derive(Alu.AND, _R.R4, _R.R2, 1)
    asm.jump_if(Jump.JNE, _R.R4, 0, follow)
    asm.jump_if(Jump.JGE, _R.R2, _R.R3, fits)
    asm.place(follow)
    asm.alu(Alu.AND, _R.R2, -2)
    _next(w, _R.R1, position, _R.R2)
    asm.store(SCRATCH, position, _R.R1)
    w.loops.goto(head)
    asm.place(fits)
    # The rest of the block becomes a separate block, if there is room for a header and a word.
    asm.derive(Alu.SUB, _R.R4, _R.R2, _R.R3)
    asm.store(SCRATCH, w.work(3), _R.R4)
    asm.jump_if(Jump.JLT, _R.R4, 2 * word, whole)
    asm.derive(Alu.OR, _R.R5, _R.R3, 1)
    asm.store(_R.R1, 0, _R.R5, w.size)
    _next(w, _R.R5, position, _R.R3)
    asm.store(SCRATCH, w.work(4), _R.R5)
    _header(w, _R.R5, w.work(4))
    asm.load(_R.R4, SCRATCH, w.work(3))
    asm.alu(Alu.SUB, _R.R4, word)
    asm.store(_R.R5, 0, _R.R4, w.size)
    asm.jump(done)
    asm.place(whole)
    asm.store(SCRATCH, size, _R.R2)
    asm.alu(Alu.OR, _R.R2, 1)
    asm.store(_R.R1, 0, _R.R2, w.size)
    asm.place(done)
    asm.load(_R.R1, SCRATCH, position)
    w.pointer(_R.R1, w.state.heap_start + word, w.state.heap_mask)
    asm.load(_R.R2, SCRATCH, size)
    asm.alu(Alu.AND, _R.R2, w.state.heap_mask)
    w.host.clear_memory()
    w.close_loop()
    handle = w.field(position)
    asm.alu(Alu.ADD, handle, word)
    w.stack.push(handle)


def _find(w: Writer, handle: int, position: int, missing: Label, previous: int | None = None) -> None:
    """
    Write the search for the allocated block with the handle in a field.

    Store the position of its header in ``position``. In ``previous``, store the position of the preceding block's
    header plus 1, or 0 for the first block. Go to ``missing`` if no allocated block has the handle.
    """
    asm, head, follow, found = w.asm, w.asm.label(), w.asm.label(), w.asm.label()
    asm.store(SCRATCH, position, 0)
    if previous is not None:
        asm.store(SCRATCH, previous, 0)
    w.loops.head(head)
    asm.load(_R.R1, SCRATCH, position)
    asm.load(_R.R2, SCRATCH, Field.HEAP_END)
    asm.jump_if(Jump.JGE, _R.R1, _R.R2, missing)
    asm.load(_R.R3, SCRATCH, handle)
    asm.alu(Alu.ADD, _R.R1, w.word_size)
    asm.jump_if(Jump.JNE, _R.R1, _R.R3, follow)
    _header(w, _R.R1, position)
    asm.load(_R.R2, _R.R1, 0, w.size)
    asm.alu(Alu.AND, _R.R2, 1)
    asm.jump_if(Jump.JNE, _R.R2, 0, found)
    asm.jump(missing)
    asm.place(follow)
    if previous is not None:
        asm.load(_R.R1, SCRATCH, position)
        asm.alu(Alu.ADD, _R.R1, 1)
        asm.store(SCRATCH, previous, _R.R1)
    _header(w, _R.R1, position)
    asm.load(_R.R2, _R.R1, 0, w.size)
    asm.alu(Alu.AND, _R.R2, -2)
    _next(w, _R.R1, position, _R.R2)
    asm.store(SCRATCH, position, _R.R1)
    w.loops.goto(head)
    asm.place(found)


def _free(w: Writer, i: EncodedInstruction) -> None:
    asm, handle, position, previous = w.asm, w.work(0), w.work(1), w.work(2)
    missing, first = asm.label(), asm.label()
    asm.store(SCRATCH, handle, w.stack.pop_register())
    w.open_loop()
    w.defer(lambda: _throw_heap(w, ExceptionCode.HEAP_INVALID_HANDLE, handle), missing)
    _find(w, handle, position, missing, previous)
    _header(w, _R.R1, position)
    asm.load(_R.R2, _R.R1, 0, w.size)
    asm.alu(Alu.AND, _R.R2, -2)
    asm.store(_R.R1, 0, _R.R2, w.size)
    _join(w, position)
    asm.jump_if_word(Jump.JEQ, SCRATCH, previous, 0, first)
    asm.alu(Alu.SUB, _R.R1, 1)
    asm.store(SCRATCH, previous, _R.R1)
    _join(w, previous)
    asm.place(first)
    w.close_loop()


def _join(w: Writer, position: int) -> None:
    """Join the block at the position in a field with the next block, if both are free."""
    asm, apart, following = w.asm, w.asm.label(), w.work(3)
    _header(w, _R.R1, position)
    asm.load(_R.R2, _R.R1, 0, w.size)
    asm.derive(Alu.AND, _R.R3, _R.R2, 1)
    asm.jump_if(Jump.JNE, _R.R3, 0, apart)
    _next(w, _R.R3, position, _R.R2)
    asm.load(_R.R4, SCRATCH, Field.HEAP_END)
    asm.jump_if(Jump.JGE, _R.R3, _R.R4, apart)
    asm.store(SCRATCH, following, _R.R3)
    _header(w, _R.R3, following)
    asm.load(_R.R4, _R.R3, 0, w.size)
    asm.derive(Alu.AND, _R.R5, _R.R4, 1)
    asm.jump_if(Jump.JNE, _R.R5, 0, apart)
    asm.alu(Alu.ADD, _R.R2, _R.R4)
    asm.alu(Alu.ADD, _R.R2, w.word_size)
    asm.store(_R.R1, 0, _R.R2, w.size)
    asm.place(apart)


def _throw_heap(w: Writer, code: ExceptionCode, handle: int, offset: int | None = None) -> None:
    """Raise an exception with one or two fields as parameters."""
    w.close_loop()
    w.asm.load(_R.R1, SCRATCH, handle)
    if offset is None:
        w.throw(code, _R.R1)
        return
    w.asm.load(_R.R2, SCRATCH, offset)
    w.throw(code, _R.R1, _R.R2)


def _range(w: Writer, length: int) -> None:
    """
    Find the position in the heap of ``length`` bytes of a block; raise an exception for an invalid handle or offset.

    Handle and offset are in work words 0 and 1. The position replaces the offset.
    """
    asm, handle, offset, position = w.asm, w.work(0), w.work(1), w.work(2)
    missing, outside = asm.label(), asm.label()
    w.defer(lambda: _throw_heap(w, ExceptionCode.HEAP_INVALID_HANDLE, handle, offset), missing)
    w.defer(lambda: _throw_heap(w, ExceptionCode.HEAP_INVALID_OFFSET, handle, offset), outside)
    _find(w, handle, position, missing)
    _header(w, _R.R1, position)
    asm.load(_R.R2, _R.R1, 0, w.size)
    asm.alu(Alu.AND, _R.R2, -2)
    asm.jump_if_word(Jump.JGT, SCRATCH, offset, _R.R2, outside, by=_R.R3)
    asm.alu(Alu.SUB, _R.R2, _R.R3)
    asm.mov(_R.R4, length)
    asm.jump_if(Jump.JLT, _R.R2, _R.R4, outside)
    asm.load(_R.R1, SCRATCH, handle)
    asm.alu(Alu.ADD, _R.R1, _R.R3)
    asm.store(SCRATCH, offset, _R.R1)


def _access(w: Writer, count: int, width: int, *, stores: bool) -> None:
    """
    Write a loop that copies ``count`` values of ``width`` bytes between heap and cells.

    The place in the heap is in work word 1, the position of the cells in work word 5. With ``stores``, cells are copied
    to the heap.
    """
    asm, rest, place, position = w.asm, w.work(6), w.work(1), w.work(5)
    asm.store(SCRATCH, rest, count)
    with w.repeat(rest):
        size = min(width, w.word_size)
        for part in range(-(-width // w.word_size)):
            _header(w, _R.R1, place)
            asm.load(_R.R2, SCRATCH, position)
            if part:
                asm.alu(Alu.ADD, _R.R2, part)
            w.cell(_R.R2)
            if stores:
                asm.load(_R.R3, _R.R2, CELLS)
                asm.store(_R.R1, part * size, _R.R3, Size.of(size))
            else:
                asm.load(_R.R3, _R.R1, part * size, Size.of(size))
                asm.store(_R.R2, CELLS, _R.R3)
        for field, step in ((place, width), (position, -(-width // w.word_size))):
            asm.increase(SCRATCH, field, step)


def _pop_operands(w: Writer) -> None:
    """Pop offset and handle into work words 1 and 0."""
    w.asm.store(SCRATCH, w.work(1), w.stack.pop_register())
    w.asm.store(SCRATCH, w.work(0), w.stack.pop_register())
    w.open_loop()


def _store_position(w: Writer) -> None:
    """Store TSP in work word 5."""
    if w.stack.tsp is None:
        w.stack.store_tsp()
        w.asm.copy(SCRATCH, w.work(5), Field.TSP)
        w.reload_tsp()
    else:
        w.asm.store(SCRATCH, w.work(5), w.stack.tsp + w.stack.top)


def _push_heap(width: int) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        count = int(i.operand)
        _pop_operands(w)
        _range(w, count * width)
        w.close_loop()
        w.stack.drop(-count * -(-width // w.word_size))
        _store_position(w)
        _access(w, count, width, stores=False)
        w.close_loop()

    return template


def _pop_heap(width: int) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        count = int(i.operand)
        _pop_operands(w)
        _store_position(w)
        w.stack.drop(count * -(-width // w.word_size))
        if w.stack.tsp is None:
            w.stack.store_tsp()
            w.reload_tsp()
        _range(w, count * width)
        _access(w, count, width, stores=True)
        w.close_loop()

    return template


HEAP_TEMPLATES: dict[str, Template] = {
    "malloc": _malloc,
    "free": _free,
    **{f"push h, u{8 << n}, <values>": _push_heap(1 << n) for n in range(4)},
    **{f"pop h, u{8 << n}, <values>": _pop_heap(1 << n) for n in range(4)},
}
