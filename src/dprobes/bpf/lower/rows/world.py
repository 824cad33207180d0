"""Templates of what the probed world shows: registers, memory, identities, the clock."""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Jump, Register, Size
from dprobes.bpf.layout import ProbeField
from dprobes.bpf.lower.hosts.ptregs import REGISTER_OFFSETS
from dprobes.bpf.lower.hosts.vma import BUSY, VM_WRITE
from dprobes.bpf.lower.state.handlerstate import ABORT, KEPT, Field
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.rpn.isa import UNSEEN_ENTRY, ExceptionCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.arch import Register as CpuRegister
    from dprobes.bpf.asm.assembler import Label
    from dprobes.bpf.lower.hosts.host import Host
    from dprobes.bpf.lower.writer import Template, Writer
    from dprobes.rpn.decoder import EncodedInstruction

__all__ = ["PAGE", "TEMPLATES", "accessed_register", "next_page", "nobody", "read_byte", "read_value", "throw_fault"]

PAGE = 4096
_R = Register


def accessed_register(w: Writer, i: EncodedInstruction) -> CpuRegister | None:
    """Return the register that an instruction names; None if the processor has none that may be accessed so."""
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
    """Settle, and return the place to go to where there is nothing to push: INVALID_ADDR at ``address`` is raised."""
    nothing = w.asm.label()
    w.stack.settle()

    def throw() -> None:
        w.asm.place(nothing)
        w.throw(ExceptionCode.INVALID_ADDR, address)

    w.defer(throw)
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
    """Push ``size`` bytes of memory at an address."""
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

    def arguments() -> None:
        asm.mov(_R.R1, SCRATCH)
        asm.alu(Alu.ADD, _R.R1, w.work(1))
        asm.mov(_R.R2, size)
        asm.load(_R.R3, SCRATCH, w.work(0))

    w.host.read_memory(arguments)
    fault = asm.label()
    asm.jump_if(Jump.JNE, _R.R0, 0, fault)
    w.defer(lambda: throw_fault(w, fault, size, w.work(0)))


def throw_fault(w: Writer, label: int, size: int, address: int, *, in_loop: bool = False) -> None:
    """Raise INVALID_ADDR for the first byte that is not there, of up to a page of bytes at the address in a field."""
    asm = w.asm
    asm.place(label)
    if in_loop:
        w.close_loop()
    if size > 1:
        # It is the second page that is not there only if the access reaches into it, and the first one can be read.
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
    """Load the address of the page behind that of the address in a field; behind the largest address comes 0."""
    w.asm.load(register, SCRATCH, field)
    w.asm.alu(Alu.OR, register, PAGE - 1)
    w.asm.alu(Alu.ADD, register, 1, wide=w.wide)


def read_byte(w: Writer, field: int) -> None:
    """Read the byte at the address that a field holds; R0 is 0 if it could be read."""
    asm = w.asm

    def arguments() -> None:
        asm.mov(_R.R1, SCRATCH)
        asm.alu(Alu.ADD, _R.R1, w.work(15))
        asm.mov(_R.R2, 1)
        asm.load(_R.R3, SCRATCH, field)

    w.host.read_memory(arguments)


def _push_memory(size: int) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        _read(w, w.stack.pop_register(), size)

    return template


def _pop_memory(size: int) -> Template:
    def template(w: Writer, i: EncodedInstruction) -> None:
        asm = w.asm
        for cell in range(-(-size // w.word_size)):
            asm.store(SCRATCH, w.work(1) + cell * w.word_size, w.stack.pop_register(), w.size)
            w.stack.release()
        asm.store(SCRATCH, w.work(0), w.stack.pop_register())
        w.stack.settle()
        asm.load(_R.R1, SCRATCH, w.work(0))
        asm.mov(_R.R2, SCRATCH)
        asm.alu(Alu.ADD, _R.R2, w.work(1))
        asm.mov(_R.R3, size)
        w.host.write_memory()
        fault = asm.label()
        asm.jump_if(Jump.JNE, _R.R0, 0, fault)
        w.defer(lambda: throw_fault(w, fault, size, w.work(0)))

    return template


def _vfyr(w: Writer, i: EncodedInstruction) -> None:
    w.asm.store(SCRATCH, w.work(0), w.stack.pop_register())
    w.stack.settle()
    read_byte(w, w.work(0))
    value = w.stack.copy(_R.R0)
    w.asm.alu(Alu.RSH, value, 63)  # an error is negative
    w.stack.push(value)


_VERIFICATION_TRIES = 4
"""How often the kernel is asked for a mapping while somebody else changes the process's mappings."""


def _vfyrw(w: Writer, i: EncodedInstruction) -> None:
    """Write it without a write: a byte can be written if it can be read and its mapping allows writes."""
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

    def miss() -> None:
        asm.place(busy)
        w.host.count(ProbeField.MISSED)
        asm.store(SCRATCH, Field.ENDING, ABORT)
        asm.jump(w.end_label)

    w.defer(miss)


def _ask(question: Callable[[Host], None], *, bits: int = 32) -> Template:
    """Return the template that pushes the answer to a question of so many bits."""

    def template(w: Writer, i: EncodedInstruction) -> None:
        w.stack.settle()
        question(w.host)
        _push_answer(w, bits)

    return template


def _push_answer(w: Writer, bits: int) -> None:
    """Push so many bits of R0."""
    value = w.stack.copy(_R.R0)
    if bits > 32 and not w.wide:
        if bits == 64:
            high = w.stack.copy(value)
            w.asm.alu(Alu.RSH, high, 32)
            w.stack.push(high)
        w.asm.mov(value, value, wide=False)
    w.stack.push(value)


def _push_elapsed(w: Writer, i: EncodedInstruction) -> None:
    if _is_entered(w):  # where the prologue has put the time since then
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
    """Write the exception for a call whose entry was not seen; return False if that is so for all calls."""
    if not w.state.entry_words or not is_kept:
        w.stack.flush()
        w.throw(ExceptionCode.INVALID_ADDR, UNSEEN_ENTRY)
        w.is_open = False
        return False
    unseen = nobody(w, UNSEEN_ENTRY)
    w.asm.load(_R.R1, SCRATCH, KEPT)
    w.asm.jump_if(Jump.JEQ, _R.R1, 0, unseen)
    return True


def _push_width(w: Writer, i: EncodedInstruction) -> None:
    w.stack.push(-w.bits)  # eBPF is compiled for little endian machines


TEMPLATES: dict[str, Template] = {
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
    "push time": _ask(lambda host: host.time(), bits=64),
    "push wid": _push_width,
}
