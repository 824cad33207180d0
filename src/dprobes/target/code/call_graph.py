"""
The functions of a file that calls from one of its functions can reach.

::

    direct call or jump ─► function of the file
                        ─► entry of the procedure linkage table (PLT) ─► slot ─► exported function of the file
                                                                              ─► function of another file
    call through a slot ─► the same
    any other call through a register or memory: what it calls is known at run time only; it is counted

Libraries call their own exported functions through the PLT: without its slots most of their graph would be missing.
The dynamic linker may fill a slot with a function of another file, such as a preloaded library; this function is then
no part of the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import TargetError
from dprobes.target.code.function_exits import ExitKind, function_exits
from dprobes.target.code.machine_code import instructions_between
from dprobes.target.elf.dynamic_relocations import GLOB_DAT, JUMP_SLOT, STT_GNU_IFUNC, dynamic_relocations
from dprobes.target.matching_functions import Function
from dprobes.target.module_symbols import familiarity, is_cold_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from iced_x86 import Instruction

    from dprobes.target.code.function_exits import CallFrames
    from dprobes.target.module_symbols import Symbol
    from dprobes.target.probed_module import Module

__all__ = ["CallGraph", "Reached"]

_STUB_SIZE = 16
"""Maximum size in bytes of an entry of the PLT."""


class Reached(NamedTuple):
    """
    The functions that calls from some functions can reach, these included, in order of addresses.

    ``indirect`` is the number of instructions in them whose targets are known at run time only, ``indirect_callers``
    the number of functions with such instructions. ``elsewhere`` are the names of the called functions of other files.
    """

    functions: tuple[Function, ...]
    indirect: int
    indirect_callers: int
    elsewhere: frozenset[str]


class _Calls(NamedTuple):
    """The calls in the code of one function: the addresses of called code, slots, and the number of other calls."""

    addresses: set[int]
    slots: set[int]
    indirect: int


class CallGraph:
    """
    The calls between the functions of a file for x86-64.

    A function is the code at a symbol, or at an entry of the unwind table for a function whose symbol was stripped.
    The constructor raises ``TargetError`` for a file for another processor.
    """

    def __init__(self, module: Module, frames: CallFrames) -> None:
        if module.elf.machine != "x86_64":
            raise TargetError(f"--callees needs code for x86_64; '{module.path.name}' is for {module.elf.machine}")
        self._module = module
        self._frames = frames
        self._symbols: dict[int, list[Symbol]] = {}
        for symbol in module.symbols.functions():
            if symbol.kind != "ifunc" and not is_cold_part(symbol.name):
                self._symbols.setdefault(symbol.address, []).append(symbol)
        self._starts = frozenset(module.elf.frames.starts)
        self._own, self._foreign = _slots_of(module)

    def reached_from(self, roots: Iterable[Function]) -> Reached:
        """Return the functions that calls from ``roots`` can reach."""
        found = {root.address: root for root in roots}
        waiting = list(found.values())
        indirect = callers = 0
        elsewhere: set[str] = set()
        while waiting:
            calls = self._calls_in(waiting.pop())
            indirect += calls.indirect
            callers += bool(calls.indirect)
            slots, targets = set(calls.slots), set[int]()
            for address in calls.addresses:
                if not self._is_code(address):
                    continue  # address 0 of a weak symbol that is not defined
                slot = None if address in self._symbols else self._slot_of_stub(address)
                if slot is None:
                    targets.add(address)
                else:
                    slots.add(slot)
            targets |= {self._own[slot] for slot in slots if slot in self._own}
            elsewhere |= {self._foreign[slot] for slot in slots if slot in self._foreign}
            for address in targets - found.keys():
                function = self._function_at(address)
                if function is not None:
                    found[address] = function
                    waiting.append(function)
        in_order = tuple(function for _, function in sorted(found.items()))
        return Reached(in_order, indirect, callers, frozenset(elsewhere))

    def _is_code(self, address: int) -> bool:
        """Return whether a link address is in the code of the file."""
        offset = self._module.elf.file_offset(address)
        return offset is not None and self._module.elf.is_executable_offset(offset)

    def _function_at(self, address: int) -> Function | None:
        """Return the function that begins at a link address; None if no function is known to begin there."""
        offset = self._module.elf.file_offset(address)
        if offset is None or not self._is_code(address):
            return None
        symbols = self._symbols.get(address)
        if symbols:
            return Function(min(symbols, key=familiarity).name, address, max(each.size for each in symbols), offset)
        if address not in self._starts:
            return None
        return Function(f"{self._module.path.name}+{offset:#x}", address, 0, offset)

    def _calls_in(self, function: Function) -> _Calls:
        from iced_x86 import FlowControl

        ranges, jumps = self._ranges_of(function)
        calls = _Calls(set(), set(), 0)
        indirect = 0
        for instruction in self._instructions(ranges):
            flow = instruction.flow_control
            if flow == FlowControl.CALL:
                calls.addresses.add(int(instruction.near_branch_target))
            elif flow in (FlowControl.UNCONDITIONAL_BRANCH, FlowControl.CONDITIONAL_BRANCH):
                target = int(instruction.near_branch_target)
                if not any(start <= target < end for start, end in ranges):
                    calls.addresses.add(target)
            elif flow in (FlowControl.INDIRECT_CALL, FlowControl.INDIRECT_BRANCH):
                slot = int(instruction.memory_displacement) if instruction.is_ip_rel_memory_operand else None
                if slot in self._own or slot in self._foreign:
                    calls.slots.add(slot)
                elif flow == FlowControl.INDIRECT_CALL or instruction.ip in jumps:
                    indirect += 1
        return calls._replace(indirect=indirect)

    def _ranges_of(self, function: Function) -> tuple[tuple[tuple[int, int], ...], frozenset[int]]:
        """
        Return the ranges of a function's code, and the addresses of the jumps by which it may leave.

        If its exits are not known, its code is that of its symbol, or of its entry in the unwind table.
        """
        start, size = function.address, function.size
        try:
            exits = function_exits(self._module, self._frames, start, size)
        except TargetError:
            extent = self._module.elf.frames.extent(self._module.elf, start)
            end = start + size if size else start if extent is None else extent[1]
            return ((start, end),), frozenset()
        return exits.ranges, frozenset(each.address for each in exits.exits if each.kind is ExitKind.JUMP)

    def _instructions(self, ranges: tuple[tuple[int, int], ...]) -> Iterator[Instruction]:
        for start, end in ranges:
            for instruction, _, _ in instructions_between(self._module, start, end):
                yield instruction

    def _slot_of_stub(self, address: int) -> int | None:
        """Return the link address of the slot through which an entry of the PLT jumps; None for other code."""
        from iced_x86 import FlowControl, Mnemonic

        for instruction, _, _ in instructions_between(self._module, address, address + _STUB_SIZE):
            if instruction.mnemonic in (Mnemonic.ENDBR64, Mnemonic.NOP):
                continue
            is_stub = instruction.flow_control == FlowControl.INDIRECT_BRANCH and instruction.is_ip_rel_memory_operand
            slot = int(instruction.memory_displacement) if is_stub else None
            return slot if slot in self._own or slot in self._foreign else None
        return None


def _slots_of(module: Module) -> tuple[dict[int, int], dict[int, str]]:
    """
    Return the slots of a file through which it calls functions, by their link addresses.

    The first mapping has the addresses of functions of the file itself, the second the names of others. A function
    that is chosen at run time (IFUNC) is in neither.
    """
    own: dict[int, int] = {}
    foreign: dict[int, str] = {}
    for relocation in dynamic_relocations(module.elf):
        symbol = relocation.symbol
        if symbol is None or relocation.kind not in (GLOB_DAT, JUMP_SLOT) or symbol.kind == STT_GNU_IFUNC:
            continue
        if symbol.section:
            own[relocation.place] = symbol.value
        else:
            foreign[relocation.place] = symbol.name
    return own, foreign
