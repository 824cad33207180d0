"""Rules of instructions that access the outside: registers, memory, ports, system variables."""

# ruff: noqa: ARG001 - all rules have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.arch.usdt_arguments import Argument, RegisterPart
from dprobes.rpn.instruction_set import PROCESS_NAME_SIZE, ExceptionCode
from dprobes.vm.rpn_machine import Raised, read_string
from dprobes.vm.world_context import AddressFault, SelectorFault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.arch import Architecture, Register
    from dprobes.arch.usdt_arguments import MemoryPlace
    from dprobes.vm.rpn_machine import Machine
    from dprobes.vm.world_context import Context

__all__ = ["RULES", "argument_value"]

# The definition of the value of a USDT probe's argument; compiled handlers compute the same value.


def argument_value(arguments: Sequence[Argument], number: int, context: Context, architecture: Architecture) -> int:
    """
    Return argument ``number`` (from 1) of a USDT probe as a word.

    The value is zero- or sign-extended as the probe's ELF note specifies. A wider value is truncated to its low word.
    Raise ``AddressFault`` for memory that cannot be read. If there is no such argument, the fault has the address 0.
    """
    if not 1 <= number <= len(arguments) or (operand := (argument := arguments[number - 1]).operand) is None:
        raise AddressFault(0)
    bits = 8 * argument.size
    if isinstance(operand, int):
        value = operand
    elif isinstance(operand, RegisterPart):
        value, bits = _register(operand.name, context, architecture) >> operand.shift, operand.bits
    else:
        address = _address(operand, context, architecture)
        value = int.from_bytes(context.read(address, argument.size), architecture.byte_order)
    value &= (1 << bits) - 1
    if argument.signed and value >> (bits - 1):
        value -= 1 << bits
    return value & architecture.word_mask


def _register(name: str, context: Context, architecture: Architecture) -> int:
    register = architecture.register(name)
    assert register is not None
    return context.register(register.index, user=False)


def _address(place: MemoryPlace, context: Context, architecture: Architecture) -> int:
    address = place.displacement
    if place.symbol:
        address += context.symbol_address(place.symbol)
    if place.base:
        address += _register(place.base, context, architecture)
    if place.index:
        address += _register(place.index, context, architecture) * place.scale
    return address & architecture.word_mask


if TYPE_CHECKING:
    Rule = Callable[[Machine, Any], None]


# The operand of these rules is the register. It is None if the processor has no register with that index, or does not
# allow the access. ``check`` reports both; in a damaged or forged file, a push gives 0 and a pop changes nothing.


def _push_register(user: bool) -> Rule:
    def rule(machine: Machine, register: Register | None) -> None:
        if register is None:
            machine.push(0)
        elif register.memory_offset is not None:
            stack_pointer = machine.architecture.register("sp")
            assert stack_pointer is not None
            address = machine.context.register(stack_pointer.index, user=user) + register.memory_offset
            machine.push(_number(machine, machine.context.read(address & machine.mask, machine.word_size)))
        elif register.parts or register.selector_cells:
            selector = machine.pop() if register.selector_cells else 0
            for value in machine.context.selected_register(register.index, selector):
                machine.push_wide(value, machine.bits if register.parts else register.bits)
        elif register.bits <= machine.bits:
            machine.push(machine.context.register(register.index, user=user))
        else:
            machine.push_wide(machine.context.register(register.index, user=user), register.bits)

    return rule


def _pop_register(user: bool) -> Rule:
    def rule(machine: Machine, register: Register | None) -> None:
        value = machine.pop()
        if register is not None:
            machine.context.set_register(register.index, value, user=user)

    return rule


def _number(machine: Machine, data: bytes) -> int:
    return int.from_bytes(data, machine.architecture.byte_order)


def _push_memory(size: int) -> Rule:
    def rule(machine: Machine, operand: int) -> None:
        data = machine.context.read(machine.pop(), size)
        machine.push_wide(_number(machine, data), 8 * size)

    return rule


def _pop_value(machine: Machine, size: int) -> bytes:
    cells = -(-size // machine.word_size)
    value = 0
    for cell in range(cells):
        value |= machine.pop() << (cell * machine.bits)
    return (value & ((1 << 8 * size) - 1)).to_bytes(size, machine.architecture.byte_order)


def _pop_memory(size: int) -> Rule:
    def rule(machine: Machine, operand: int) -> None:
        data = _pop_value(machine, size)
        machine.context.write(machine.pop(), data)

    return rule


def _push_segmented(size: int) -> Rule:
    def rule(machine: Machine, operand: int) -> None:
        offset, selector = machine.pop(), machine.pop()
        address = machine.context.linear_address(selector, offset, size)
        machine.push(_number(machine, machine.context.read(address, size)))

    return rule


def _pop_segmented(size: int) -> Rule:
    def rule(machine: Machine, operand: int) -> None:
        data = _pop_value(machine, size)
        offset, selector = machine.pop(), machine.pop()
        machine.context.write(machine.context.linear_address(selector, offset, size, write=True), data)

    return rule


def _push_physical(size: int) -> Rule:
    def rule(machine: Machine, operand: int) -> None:
        data = machine.context.read_physical(machine.pop(), size)
        machine.push_wide(_number(machine, data), 8 * size)

    return rule


def _pop_physical(size: int) -> Rule:
    def rule(machine: Machine, operand: int) -> None:
        data = _pop_value(machine, size)
        machine.context.write_physical(machine.pop(), data)

    return rule


def _seg2lin(machine: Machine, operand: int) -> None:
    offset, selector = machine.pop(), machine.pop()
    machine.push(machine.context.linear_address(selector, offset))


def _vsa(machine: Machine, operand: int) -> None:
    offset, selector = machine.pop(), machine.pop()
    try:
        address = machine.context.linear_address(selector, offset, 1)
    except SelectorFault:
        machine.push(1)
        return
    machine.push(not machine.context.is_readable(address))


def _push_port(size: int) -> Rule:
    return lambda machine, _: machine.push(machine.context.read_port(machine.pop() & 0xFFFF, size))


def _pop_port(size: int) -> Rule:
    def rule(machine: Machine, operand: int) -> None:
        value, port = machine.pop(), machine.pop()
        machine.context.write_port(port & 0xFFFF, size, value & ((1 << 8 * size) - 1))

    return rule


def _push_argument(machine: Machine, number: int) -> None:
    machine.push(argument_value(machine.point.arguments, number, machine.context, machine.architecture))


def _push_elapsed(machine: Machine, operand: int) -> None:
    if machine.elapsed is None:
        entered = machine.context.entry_time()
        machine.elapsed = machine.context.time() - entered & (1 << 64) - 1
    machine.push_wide(machine.elapsed, 64)


def _push_entry(machine: Machine, register: Register | None) -> None:
    machine.push(0 if register is None else machine.context.entry_register(register.index))


_COUNTER_KIND = 8
"""Parameter 1 of INVALID_OPERAND for a performance counter."""


def _push_counter(machine: Machine, number: int) -> None:
    value = machine.context.counter(number)
    if value is None:
        raise Raised(ExceptionCode.INVALID_OPERAND, _COUNTER_KIND, number)
    machine.push_wide(value, 64)


def _push_counted(machine: Machine, number: int) -> None:
    before = machine.context.entry_counter(number)
    now = machine.context.counter(number)
    if before is None or now is None:
        raise Raised(ExceptionCode.INVALID_OPERAND, _COUNTER_KIND, number)
    machine.push_wide(now - before & (1 << 64) - 1, 64)


def _push_width(machine: Machine, operand: int) -> None:
    machine.push(machine.bits if machine.architecture.byte_order == "big" else -machine.bits)


def _push_process_name(machine: Machine, operand: int) -> None:
    size = machine.word_size
    name = machine.context.process_name()[: PROCESS_NAME_SIZE - 1].ljust(PROCESS_NAME_SIZE, b"\0")
    for start in reversed(range(0, PROCESS_NAME_SIZE, size)):
        machine.push(_number(machine, name[start : start + size]))


def _match_process_name(*, whole: bool) -> Rule:
    def rule(machine: Machine, text: str) -> None:
        name, wanted = machine.context.process_name()[: PROCESS_NAME_SIZE - 1], text.encode()
        machine.push(name != wanted if whole else not name.startswith(wanted))

    return rule


def _match_string(*, whole: bool) -> Rule:
    def rule(machine: Machine, text: str) -> None:
        wanted = text.encode() + b"\0" * whole
        machine.push(read_string(machine.context, machine.pop(), len(wanted), machine.mask) != wanted)

    return rule


RULES: dict[str, Rule] = {
    "push r, <register>": _push_register(user=False),
    "pop r, <register>": _pop_register(user=False),
    "push u, <register>": _push_register(user=True),
    "pop u, <register>": _pop_register(user=True),
    **{f"push mem, u{8 << n}": _push_memory(1 << n) for n in range(4)},
    **{f"pop mem, u{8 << n}": _pop_memory(1 << n) for n in range(4)},
    **{f"push {letter}is": _push_segmented(1 << n) for n, letter in enumerate("bwd")},
    **{f"pop {letter}is": _pop_segmented(1 << n) for n, letter in enumerate("bwd")},
    "seg2lin": _seg2lin,
    **{f"push phys, u{8 << n}": _push_physical(1 << n) for n in range(4)},
    **{f"pop phys, u{8 << n}": _pop_physical(1 << n) for n in range(4)},
    "lin2phys": lambda machine, _: machine.push(machine.context.physical_address(machine.pop())),
    "vsa": _vsa,
    "vfyr": lambda machine, _: machine.push(not machine.context.is_readable(machine.pop())),
    "vfyrw": lambda machine, _: machine.push(not machine.context.is_writable(machine.pop())),
    **{f"push io, u{8 << n}": _push_port(1 << n) for n in range(3)},
    **{f"pop io, u{8 << n}": _pop_port(1 << n) for n in range(3)},
    "push tp, <field>": lambda machine, name: machine.push(machine.context.traced_field(name)),
    "push usdt, <argument>": _push_argument,
    "push task": lambda machine, _: machine.push(machine.context.task()),
    "push pid": lambda machine, _: machine.push(machine.context.pid()),
    "push tid": lambda machine, _: machine.push(machine.context.tid()),
    "push uid": lambda machine, _: machine.push(machine.context.uid()),
    "push comm": _push_process_name,
    "match comm, <text>": _match_process_name(whole=True),
    "match commn, <text>": _match_process_name(whole=False),
    "match str, <text>": _match_string(whole=True),
    "match strn, <text>": _match_string(whole=False),
    "push procid": lambda machine, _: machine.push(machine.context.cpu()),
    "push elapsed": _push_elapsed,
    "push entry, <register>": _push_entry,
    "push pmc, <counter>": _push_counter,
    "push elapsed, <counter>": _push_counted,
    "push time": lambda machine, _: machine.push_wide(machine.context.time(), 64),
    "push wid": _push_width,
}
