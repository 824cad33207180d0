"""Templates of access to the outside: registers, memory, identities, the clock, USDT arguments, string comparison."""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch.usdt_arguments import RegisterPart
from dprobes.bpf.bpf_instructions import Alu, Jump, Register, Size
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.bpf.lower.hosts.vma_lookup import BUSY, VM_WRITE
from dprobes.bpf.lower.state.handler_state import KEPT, SCRATCH
from dprobes.bpf.map_layouts import COUNTER_UNREAD
from dprobes.errors import NotSupportedError
from dprobes.rpn.instruction_set import PROCESS_NAME_SIZE, UNSEEN_ENTRY, ExceptionCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.arch import Register as CpuRegister
    from dprobes.arch.usdt_arguments import MemoryPlace
    from dprobes.bpf.bpf_assembler import Label
    from dprobes.bpf.lower.hosts.handler_host import Host
    from dprobes.bpf.lower.template_writer import Template, Writer
    from dprobes.rpn.instruction_encoding import EncodedInstruction

__all__ = [
    "MATCH_TEMPLATES",
    "PAGE",
    "USDT_TEMPLATES",
    "WORLD_TEMPLATES",
    "clear",
    "next_page",
    "read_byte",
    "read_string",
    "read_value",
    "throw_fault",
]

PAGE = 4096
_R = Register


def accessed_register(w: Writer, i: EncodedInstruction) -> CpuRegister | None:
    """Return the register that an instruction names, or None if it does not exist or does not allow the access."""
    assert i.row is not None
    register = w.architecture.register(i.operand)
    allowed = register is not None and register.may_be(i.row.syntax.partition(",")[0])
    return register if allowed else None


def _push_register(w: Writer, i: EncodedInstruction) -> None:
    register = accessed_register(w, i)
    if register is None:
        w.stack.push(0)
    elif register.memory_offset is not None:
        address = w.stack.take()
        w.host.register(address, "esp")
        w.asm.alu(Alu.ADD, address, register.memory_offset, wide=w.wide)
        _read(w, address, w.word_size)
    else:
        value = w.stack.take()
        w.host.register(value, register.name)
        w.stack.push(value)


def _push_user_register(w: Writer, i: EncodedInstruction) -> None:
    register = accessed_register(w, i)
    if register is None or not w.host.has_user_context:
        _push_register(w, i)
        return
    nothing = nobody(w)
    if register.memory_offset is None:
        w.host.user_register(register.name, nothing)
        w.stack.push(w.stack.copy(_R.R0))
    else:
        w.host.user_register("esp", nothing)
        address = w.stack.copy(_R.R0)
        w.asm.alu(Alu.ADD, address, register.memory_offset, wide=w.wide)
        _read(w, address, w.word_size)


def nobody(w: Writer, address: int = 0) -> Label:
    """
    Settle the stack, and return the label to go to if a value does not exist.

    The code there raises INVALID_ADDR for ``address``.
    """
    nothing = w.asm.label()
    w.stack.settle()
    w.defer(lambda: w.throw(ExceptionCode.INVALID_ADDR, address), nothing)
    return nothing


def _push_traced_field(w: Writer, i: EncodedInstruction) -> None:
    w.host.traced_field(str(i.operand), nobody(w))
    value = w.stack.copy(_R.R0)
    if not w.wide:
        w.asm.mov(value, value, wide=False)
    w.stack.push(value)


def _pop_register(w: Writer, i: EncodedInstruction) -> None:
    value = w.stack.pop_register()
    register = accessed_register(w, i)
    if register is not None:
        assert register.name in REGISTER_OFFSETS
        w.host.set_register(register.name, value)


def _read(w: Writer, address: Register, size: int) -> None:
    """Push ``size`` bytes of memory at ``address`` on the RPN stack, or raise INVALID_ADDR."""
    read_value(w, address, size)
    for cell in reversed(range(-(-size // w.word_size))):
        value = w.stack.take()
        w.asm.load(value, SCRATCH, w.work(1) + cell * w.word_size, Size.of(min(size, w.word_size)))
        w.stack.push(value)


def read_value(w: Writer, address: Register, size: int) -> None:
    """Read up to 8 bytes of memory at an address to the start of work word 1, or raise INVALID_ADDR."""
    asm = w.asm
    asm.store(SCRATCH, w.work(0), address)
    asm.store(SCRATCH, w.work(1), 0)
    w.stack.settle()
    w.read_to(w.work(1), size, w.work(0))
    fault = asm.label()
    asm.jump_if(Jump.JNE, _R.R0, 0, fault)
    w.defer(lambda: throw_fault(w, size, w.work(0)), fault)


def throw_fault(w: Writer, size: int, address: int, *, in_loop: bool = False) -> None:
    """Raise INVALID_ADDR for the first unreadable byte, of up to a page of bytes at the address in a field."""
    asm = w.asm
    if in_loop:
        w.close_loop()
    if size > 1:
        # The second page is the unreadable one only if the access reaches into it, and the first one can be read.
        first = asm.label()
        asm.load(_R.R1, SCRATCH, address)
        asm.alu(Alu.AND, _R.R1, PAGE - 1)
        asm.jump_if(Jump.JLE, _R.R1, PAGE - size, first)
        read_byte(w, address)
        asm.jump_if(Jump.JNE, _R.R0, 0, first)
        next_page(w, _R.R1, address)
        asm.store(SCRATCH, address, _R.R1)
        asm.place(first)
    asm.load(_R.R1, SCRATCH, address)
    w.throw(ExceptionCode.INVALID_ADDR, _R.R1)


def next_page(w: Writer, register: Register, field: int) -> None:
    """Load the start of the page after the address in a field. It wraps around to 0."""
    w.asm.load(register, SCRATCH, field)
    w.asm.alu(Alu.OR, register, PAGE - 1)
    w.asm.alu(Alu.ADD, register, 1, wide=w.wide)


def read_byte(w: Writer, field: int) -> None:
    """Read the byte at the address in a field; R0 is 0 if it could be read."""
    w.read_to(w.work(15), 1, field)


def _push_memory(size: int) -> Template:
    return lambda w, _: _read(w, w.stack.pop_register(), size)


def _pop_memory(size: int) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        asm = w.asm
        for cell in range(-(-size // w.word_size)):
            asm.store(SCRATCH, w.work(1) + cell * w.word_size, w.stack.pop_register(), w.size)
            w.stack.release()
        asm.store(SCRATCH, w.work(0), w.stack.pop_register())
        w.stack.settle()
        asm.load(_R.R1, SCRATCH, w.work(0))
        asm.add(_R.R2, SCRATCH, w.work(1))
        asm.mov(_R.R3, size)
        w.host.write_memory()
        fault = asm.label()
        asm.jump_if(Jump.JNE, _R.R0, 0, fault)
        w.defer(lambda: throw_fault(w, size, w.work(0)), fault)

    return template


def _vfyr(w: Writer, i: EncodedInstruction) -> None:
    w.asm.store(SCRATCH, w.work(0), w.stack.pop_register())
    w.stack.settle()
    read_byte(w, w.work(0))
    value = w.stack.copy(_R.R0)
    w.asm.alu(Alu.RSH, value, 63)  # an error is negative
    w.stack.push(value)


_VERIFICATION_TRIES = 4
"""Maximum number of queries for a mapping while another thread changes the process's mappings."""


def _vfyrw(w: Writer, i: EncodedInstruction) -> None:
    """Write ``vfyrw`` without a write: a byte is writable if it can be read and its mapping allows writes."""
    asm, address, answer = w.asm, w.work(0), w.work(1)
    asm.store(SCRATCH, address, w.stack.pop_register())
    w.stack.settle()
    asm.store(SCRATCH, answer, 1)
    known, done, busy = asm.label(), asm.label(), asm.label()
    read_byte(w, address)
    asm.jump_if(Jump.JNE, _R.R0, 0, done)
    for _ in range(_VERIFICATION_TRIES):
        asm.load(_R.R2, SCRATCH, address)
        w.host.vma_flags()
        asm.jump_if(Jump.JNE, _R.R0, BUSY, known)
    asm.jump(busy)
    asm.place(known)
    asm.alu(Alu.RSH, _R.R1, VM_WRITE.bit_length() - 1)
    asm.alu(Alu.AND, _R.R1, 1)
    asm.alu(Alu.XOR, _R.R1, 1)
    asm.store(SCRATCH, answer, _R.R1)
    asm.place(done)
    w.stack.push(w.field(answer))
    w.defer(w.give_up, busy)


def _ask(question: Callable[[Host], None], *, bits: int = 32) -> Template:
    """Return a template that pushes the ``bits`` bits that ``question``, a method of the host, loads to R0."""

    def template(w: Writer, i: EncodedInstruction) -> None:
        w.stack.settle()
        question(w.host)
        _push_answer(w, bits)

    return template


def _push_answer(w: Writer, bits: int) -> None:
    """Push the low ``bits`` bits of R0, the result of a host's query, on the RPN stack."""
    value = w.stack.copy(_R.R0)
    if bits > 32 and not w.wide:
        if bits == 64:
            high = w.stack.copy(value)
            w.asm.alu(Alu.RSH, high, 32)
            w.stack.push(high)
        w.asm.mov(value, value, wide=False)
    w.stack.push(value)


def _push_elapsed(w: Writer, i: EncodedInstruction) -> None:
    if _is_entered(w):  # the prologue has put the time since the entry there
        w.asm.mov(_R.R0, _R.R1)
        _push_answer(w, 64)


def _push_entry(w: Writer, i: EncodedInstruction) -> None:
    register = accessed_register(w, i)
    if register is None:
        w.stack.push(0)
        return
    kept = [] if w.request.entry is None else [index for _, index, _ in w.request.entry.registers]
    if _is_entered(w, is_kept=register.index in kept):
        if w.request.placement.is_trampoline:
            value = w.stack.take()
            w.host.register(value, register.name)
        else:
            value = w.field(KEPT + 8 * (1 + kept.index(register.index)))
        w.stack.push(value)


def _is_entered(w: Writer, *, is_kept: bool = True) -> bool:
    """
    Write code that raises an exception if the entry of the call was not seen.

    Return False if entries are never seen, or do not have the data (``is_kept``): the exception is always raised.
    """
    if not w.state.entry_words or not is_kept:
        w.stack.flush()
        w.throw(ExceptionCode.INVALID_ADDR, UNSEEN_ENTRY)
        w.is_open = False
        return False
    unseen = nobody(w, UNSEEN_ENTRY)
    w.asm.jump_if_word(Jump.JEQ, SCRATCH, KEPT, 0, unseen)
    return True


_COUNTER_KIND = 8
"""Parameter 1 of INVALID_OPERAND for a performance counter (``vm.world_rules``)."""


def _push_counter(w: Writer, i: EncodedInstruction) -> None:
    _load_counter(w, int(i.operand))
    _push_answer(w, 64)


def _load_counter(w: Writer, number: int) -> Label:
    """Load a counter to R0. Return the label to go to if it cannot be read."""
    unread = w.asm.label()
    w.stack.settle()
    w.defer(lambda: w.throw(ExceptionCode.INVALID_OPERAND, _COUNTER_KIND, number), unread)
    w.host.counter(number, (SCRATCH, w.work(0)), unread)
    return unread


def _push_counted(w: Writer, i: EncodedInstruction) -> None:
    number, entry = int(i.operand), w.request.entry
    kept = () if entry is None else entry.counters
    if entry is None or not _is_entered(w, is_kept=number in kept):
        return
    unread = _load_counter(w, number)
    w.asm.load(_R.R1, SCRATCH, KEPT + 8 * (1 + len(entry.registers) + kept.index(number)))
    w.asm.jump_if(Jump.JEQ, _R.R1, COUNTER_UNREAD, unread)
    w.asm.alu(Alu.SUB, _R.R0, _R.R1)
    _push_answer(w, 64)


def _push_width(w: Writer, i: EncodedInstruction) -> None:
    w.stack.push(-w.bits)  # eBPF is compiled for little endian machines


WORLD_TEMPLATES: dict[str, Template] = {
    "push r, <register>": _push_register,
    "push u, <register>": _push_user_register,
    "pop r, <register>": _pop_register,
    "pop u, <register>": _pop_register,
    **{f"push mem, u{8 << n}": _push_memory(1 << n) for n in range(4)},
    **{f"pop mem, u{8 << n}": _pop_memory(1 << n) for n in range(4)},
    "vfyr": _vfyr,
    "vfyrw": _vfyrw,
    "push tp, <field>": _push_traced_field,
    "push task": _ask(lambda host: host.task(), bits=63),
    "push pid": _ask(lambda host: host.pid()),
    "push tid": _ask(lambda host: host.tid()),
    "push uid": _ask(lambda host: host.uid()),
    "push procid": _ask(lambda host: host.cpu()),
    "push elapsed": _push_elapsed,
    "push entry, <register>": _push_entry,
    "push pmc, <counter>": _push_counter,
    "push elapsed, <counter>": _push_counted,
    "push time": _ask(lambda host: host.time(), bits=64),
    "push wid": lambda w, _: w.stack.push(-w.bits),
}


# The template that pushes an argument of a USDT probe; ``vm.world_rules`` defines the value.


def _push_argument(w: Writer, i: EncodedInstruction) -> None:
    arguments, number = w.point.arguments, int(i.operand)
    if not 1 <= number <= len(arguments) or (operand := (argument := arguments[number - 1]).operand) is None:
        nothing = nobody(w)
        w.asm.mov(Register.R1, 0)
        w.asm.jump_if(Jump.JEQ, Register.R1, 0, nothing)  # always taken, but the code after it stays reachable
        w.stack.push(0)
        return
    bits = 8 * argument.size
    if isinstance(operand, int):
        number = operand & ((1 << bits) - 1)
        w.stack.push(number - (1 << bits) if argument.signed and number >> (bits - 1) else number)
        return
    if isinstance(operand, RegisterPart):
        bits = operand.bits
        value = w.stack.take()
        w.host.register(value, operand.name)
        if operand.shift:
            w.asm.alu(Alu.RSH, value, operand.shift)
    else:
        read_value(w, _address(w, operand), argument.size)
        value = w.stack.take()
        w.asm.load(value, SCRATCH, w.work(1), Size.of(argument.size))
    _extend(w, value, bits, signed=argument.signed)
    w.stack.push(value)


def _address(w: Writer, place: MemoryPlace) -> Register:
    """Return a new register with the run-time address of an argument; raise ``NotSupportedError`` if it is unknown."""
    if place.symbol:
        w.stack.settle()
        link = w.request.symbols.get(place.symbol)
        if link is None:
            raise NotSupportedError(f"the address of '{place.symbol}' is not known")
        address = w.stack.take()
        w.host.load_bias(address)
        _add(w, address, link + place.displacement)
    else:
        address = w.stack.copy(place.displacement)
    for name, factor in ((place.base, 1), (place.index, place.scale)):
        if name:
            register = w.stack.take()
            w.host.register(register, name)
            w.asm.alu(Alu.LSH, register, factor.bit_length() - 1)
            w.asm.alu(Alu.ADD, address, register)
    if not w.wide:
        w.asm.mov(address, address, wide=False)
    return address


def _add(w: Writer, register: Register, number: int) -> None:
    constant = w.stack.copy(number & (1 << 64) - 1)
    w.asm.alu(Alu.ADD, register, constant)


def _extend(w: Writer, value: Register, bits: int, *, signed: bool) -> None:
    """Sign-extend or zero-extend the lower ``bits`` bits of a register to a cell."""
    if bits < 64:
        w.asm.alu(Alu.LSH, value, 64 - bits)
        w.asm.alu(Alu.ARSH if signed else Alu.RSH, value, 64 - bits)
    if not w.wide:
        w.asm.mov(value, value, wide=False)


USDT_TEMPLATES: dict[str, Template] = {"push usdt, <argument>": _push_argument}


# Templates that compare a process name or a string with a text, and push a process name.
#
# The name or string is read to a buffer among the work words. It has room for the longest text, its NUL, and one more
# byte, which shows that a string continues. The comparison has no branch, so that the verifier has one path.


_ADDRESS, _LENGTH, _POSITION, _BUFFER = 0, 1, 2, 4
"""Indices of work words: the address of the string, its length with the NUL, the current byte, and the buffer."""

_POSITION_MASK = 255
"""The mask of positions in a string: a power of two above the longest text, minus 1."""


def _load_process_name(w: Writer) -> None:
    w.stack.settle()
    w.point_to(_R.R1, w.work(_BUFFER))
    w.host.process_name()


def _push_process_name(w: Writer, i: EncodedInstruction) -> None:
    _load_process_name(w)
    for start in reversed(range(0, PROCESS_NAME_SIZE, w.word_size)):
        value = w.stack.take()
        w.asm.load(value, SCRATCH, w.work(_BUFFER) + start, w.size)
        w.stack.push(value)


def _match_process_name(*, whole: bool) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        wanted = str(i.operand).encode()
        if len(wanted) >= PROCESS_NAME_SIZE:
            w.stack.push(1)
            return
        _load_process_name(w)
        differs = w.stack.copy(0)
        _compare(w, differs, wanted + b"\0" * whole)
        _push_whether(w, differs)

    return template


def _match_string(*, whole: bool) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        wanted = str(i.operand).encode()
        limit = len(wanted) + whole
        if not limit:
            w.stack.drop(1)
            w.stack.push(0)
            return
        _read_operand(w, limit)
        differs = w.field(w.work(_LENGTH))
        w.asm.alu(Alu.XOR, differs, len(wanted) + 1)
        _compare(w, differs, wanted)
        _push_whether(w, differs)

    return template


def _compare(w: Writer, differs: Register, wanted: bytes) -> None:
    """Set bits of ``differs`` unless the buffer begins with ``wanted``."""
    part = w.stack.take()
    for start in range(0, len(wanted), 8):
        piece = wanted[start : start + 8]
        unused = 64 - 8 * len(piece)
        w.asm.load(part, SCRATCH, w.work(_BUFFER) + start)
        if unused:
            w.asm.alu(Alu.LSH, part, unused)
        w.asm.mov(_R.R9, int.from_bytes(piece, "little") << unused)
        w.asm.alu(Alu.XOR, part, _R.R9)
        w.asm.alu(Alu.OR, differs, part)


def _push_whether(w: Writer, bits: Register) -> None:
    """Push 1 if a register is not 0, else 0: the highest bit of ``bits | -bits``."""
    negative = w.stack.copy(0)
    w.asm.alu(Alu.SUB, negative, bits)
    w.asm.alu(Alu.OR, bits, negative)
    w.asm.alu(Alu.RSH, bits, 63)
    w.stack.push(bits)


def _read_operand(w: Writer, limit: int) -> None:
    """Pop an address, and read the string there to the buffer. Its length with the NUL goes to a work word."""
    w.asm.store(SCRATCH, w.work(_ADDRESS), w.stack.pop_register())
    w.open_loop()
    words = w.work(_ADDRESS), w.work(_LENGTH), w.work(_POSITION)
    read_string(w, w.work(_BUFFER), limit, *words, mask=_POSITION_MASK, nul=1)


def read_string(
    w: Writer, place: int, limit: int, address: int, count: int, position: int, *, mask: int, nul: int
) -> None:
    """
    Read up to ``limit`` bytes of the string at the address in a field to a place in the state. A loop is open.

    A helper reads the whole string, but it reads no pages in, and it accesses all bytes that it may write. If it fails,
    the string is read byte by byte, with ``count`` and ``position`` as fields. With ``nul`` 1, ``count`` is then the
    length with the NUL, or ``limit + 1`` if there is no NUL so far. With ``nul`` 0, zeros follow the string.
    """
    asm, known, slow = w.asm, w.asm.label(), w.asm.label()
    w.point_to(_R.R1, place)
    asm.mov(_R.R2, limit + 1)
    asm.load(_R.R3, SCRATCH, address)
    w.host.read_string()
    asm.jump_if(Jump.JSLT, _R.R0, 1, slow)
    if nul:
        asm.store(SCRATCH, count, _R.R0)
    asm.place(known)

    def by_bytes() -> None:
        if not nul:
            clear(w, place, (limit // 8 + 1) * 8)  # clear the bytes that were read before the helper failed
        asm.store(SCRATCH, count, nul)
        asm.copy(SCRATCH, position, address)
        _read_bytes(w, place, limit, count, position, mask=mask, nul=nul)
        w.loops.goto(known)

    w.defer(by_bytes, slow)


def _read_bytes(w: Writer, place: int, limit: int, count: int, position: int, *, mask: int, nul: int) -> None:
    """Read a string byte by byte, for ``read_string``, whose parameters these are."""
    asm, head, fault, ended = w.asm, w.asm.label(), w.asm.label(), w.asm.label()

    def point_to_byte() -> None:
        asm.load(_R.R1, SCRATCH, count)
        if nul:
            asm.alu(Alu.SUB, _R.R1, nul)
        w.pointer(_R.R1, place, mask)

    def arguments() -> None:
        point_to_byte()
        asm.mov(_R.R2, 1)
        asm.load(_R.R3, SCRATCH, position)

    w.loops.head(head)
    asm.jump_if_word(Jump.JGE, SCRATCH, count, limit + nul, ended)
    w.host.read_memory(arguments)
    asm.jump_if(Jump.JNE, _R.R0, 0, fault)
    point_to_byte()
    asm.load(_R.R1, _R.R1, 0, Size.B)
    asm.jump_if(Jump.JEQ, _R.R1, 0, ended)
    for field in (count, position):
        asm.increase(SCRATCH, field, 1, wide=w.wide)
    w.loops.goto(head)
    asm.place(fault)
    w.close_loop()
    asm.load(_R.R1, SCRATCH, position)
    w.throw(ExceptionCode.INVALID_ADDR, _R.R1)
    asm.place(ended)
    w.close_loop()


def clear(w: Writer, place: int, size: int) -> None:
    """Set ``size`` bytes at ``place`` in the state to zero. Clobbers R1."""
    w.point_to(_R.R1, place)
    for position in range(0, size, 8):
        w.asm.store(_R.R1, position, 0)


MATCH_TEMPLATES: dict[str, Template] = {
    "push comm": _push_process_name,
    "match comm, <text>": _match_process_name(whole=True),
    "match commn, <text>": _match_process_name(whole=False),
    "match str, <text>": _match_string(whole=True),
    "match strn, <text>": _match_string(whole=False),
}
