"""
Registers that callers of a function expect it to preserve, although the calling convention lets it change them.

gcc with ``-fipa-ra``, a part of ``-O2``, knows which registers the functions of a compilation unit change, and keeps
values in the others during a call. A patch that changes more registers destroys these values.

::

    D  = registers that the patch changes, without those that the function and what it calls change
    for each direct call or jump to the function:
        a register of D that is read after it, before it is written  ─► the caller expects it
        D without what the caller itself changes                     ─► the same for the callers of the caller

A call of unknown code changes all registers. A caller whose code is unknown may expect anything. Arguments of a later
call, and the value that the caller returns, are read only possibly: the number of arguments is not known here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from iced_x86 import FlowControl, InstructionInfoFactory, OpAccess, Register, RegisterExt

from dprobes.errors import TargetError
from dprobes.target.code.function_exits import CallFrames, function_exits
from dprobes.target.code.machine_code import instructions_between

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from iced_x86 import Instruction

    from dprobes.target.probed_module import Module

__all__ = ["Expectation", "RegisterUse", "expectation_of"]

_ARGUMENTS = (Register.RDI,)
"""The register with the first argument, which a call with more arguments takes, too; vectors are rarely arguments."""
_RESULTS = (Register.RAX,)
CHANGEABLE = frozenset(
    {
        Register.RAX, Register.RCX, Register.RDX, Register.RSI, Register.RDI, Register.R8, Register.R9, Register.R10,
        Register.R11, *range(Register.ZMM0, Register.ZMM0 + 32),
    }
)  # fmt: skip
"""Registers that a function may change (AMD64 ABI, "Register Usage")."""

_CALLERS_MAX = 256
_DEPTH_MAX = 32
"""Maximum number of functions whose callers are examined, and maximum depth of calls whose registers are known."""

_READING = frozenset({OpAccess.READ, OpAccess.COND_READ, OpAccess.READ_WRITE, OpAccess.READ_COND_WRITE})
_WRITING = frozenset({OpAccess.WRITE, OpAccess.COND_WRITE, OpAccess.READ_WRITE, OpAccess.READ_COND_WRITE})
_WHOLE = 4
"""Minimum size in bytes of a write that replaces the whole of a general register."""
_NEAR = re.compile(rb"[\xe8\xe9]|\x0f[\x80-\x8f]")
"""First bytes of calls and jumps with a distance of 32 bits."""
_CALLS = (FlowControl.CALL, FlowControl.INDIRECT_CALL)
_COLD = ".cold"
_LEAVING = (FlowControl.RETURN, FlowControl.INTERRUPT, FlowControl.EXCEPTION)


class Expectation(NamedTuple):
    """
    A caller that keeps a value in a ``register`` during its call at ``place``.

    It is not ``is_certain`` if the register may be an argument of a later call, or the caller's result, or if the code
    of the caller is unknown.
    """

    place: str
    register: str
    is_certain: bool


class RegisterUse:
    """The use of registers by the functions of a module."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._frames = CallFrames(module.elf)
        self._factory = InstructionInfoFactory()
        self._changed: dict[int, frozenset[int]] = {}
        self._bodies: dict[int, Mapping[int, Instruction]] = {}
        self._sites: dict[int, list[int]] | None = None

    def changed_by(self, address: int, depth: int = 0) -> frozenset[int]:
        """Return the registers that the function at a link address changes, with what it calls; all if unknown."""
        if (known := self._changed.get(address)) is not None:
            return known
        body = self._body(address) if depth < _DEPTH_MAX else {}
        if not body:
            return CHANGEABLE
        self._changed[address] = frozenset()  # for recursive calls, whose registers are those of the first one
        changed: set[int] = set()
        for instruction in body.values():
            changed |= {register for register, access, _ in self._uses(instruction) if access in _WRITING}
            changed |= self._changed_elsewhere(instruction, body, depth)
            if changed >= CHANGEABLE:
                break
        self._changed[address] = found = frozenset(changed) & CHANGEABLE
        return found

    def _changed_elsewhere(
        self, instruction: Instruction, body: Mapping[int, Instruction], depth: int
    ) -> frozenset[int]:
        """Return the registers that code to which an instruction leads changes, outside of its function."""
        match instruction.flow_control:
            case FlowControl.NEXT | FlowControl.RETURN | FlowControl.EXCEPTION:
                return frozenset()
            case FlowControl.CALL | FlowControl.UNCONDITIONAL_BRANCH | FlowControl.CONDITIONAL_BRANCH:
                target = instruction.near_branch_target
                if target in body and instruction.flow_control != FlowControl.CALL:
                    return frozenset()
                return self.changed_by(target, depth + 1) if self._start_of(target) == target else CHANGEABLE
        return CHANGEABLE

    def expectation(self, address: int, registers: frozenset[int]) -> Expectation | None:
        """
        Return a caller that expects the function at a link address to preserve one of ``registers``; None without one.

        A certain expectation is preferred.
        """
        possible: Expectation | None = None
        todo, examined = [(address, registers)], 0
        seen: dict[int, frozenset[int]] = {}
        while todo and examined < _CALLERS_MAX:
            callee, kept = todo.pop()
            kept -= seen.get(callee, frozenset())
            if not kept:
                continue
            seen[callee] = seen.get(callee, frozenset()) | kept
            examined += 1
            for site in self._callers().get(callee, ()):
                found_caller = self._caller_at(site)
                if found_caller is None:
                    possible = possible or Expectation(self._place(site), _name(min(kept)), is_certain=False)
                    continue
                caller, body = found_caller
                if site not in body:  # it is no instruction
                    continue
                if body[site].flow_control == FlowControl.CALL:
                    found = self._read_after(body, site, kept)
                    if found is not None and found.is_certain:
                        return found
                    possible = possible or found
                if rest := kept - self.changed_by(caller):
                    todo.append((caller, rest))
        return possible

    def _read_after(self, body: Mapping[int, Instruction], site: int, kept: frozenset[int]) -> Expectation | None:
        """Return the expectation of a caller about the registers ``kept`` after its call at ``site``."""
        possible: Expectation | None = None
        todo = [(body[site].next_ip, kept)]
        seen: dict[int, frozenset[int]] = {}
        while todo:
            at, live = todo.pop()
            live -= seen.get(at, frozenset())
            instruction = body.get(at)
            if not live or instruction is None:
                continue
            seen[at] = seen.get(at, frozenset()) | live
            uses = list(self._uses(instruction))
            read = next((register for register, access, _ in uses if access in _READING and register in live), None)
            if read is not None:
                return Expectation(self._place(site), _name(read), is_certain=True)
            live -= {register for register, access, size in uses if access == OpAccess.WRITE and size >= _WHOLE}
            flow = instruction.flow_control
            target = instruction.near_branch_target if flow != FlowControl.NEXT else 0
            leaves = flow == FlowControl.UNCONDITIONAL_BRANCH and target not in body
            if flow in _CALLS or leaves:
                used = next((register for register in _ARGUMENTS if register in live), None)
            elif flow == FlowControl.RETURN:
                used = next((register for register in _RESULTS if register in live), None)
            else:
                used = None
            if used is not None:
                possible = possible or Expectation(self._place(site), _name(used), is_certain=False)
            if flow in (FlowControl.CONDITIONAL_BRANCH, FlowControl.UNCONDITIONAL_BRANCH) and target in body:
                todo.append((target, live))
            if flow in (FlowControl.NEXT, FlowControl.CONDITIONAL_BRANCH):
                todo.append((instruction.next_ip, live))
        return possible

    def _uses(self, instruction: Instruction) -> Iterator[tuple[int, int, int]]:
        """Iterate over the registers of an instruction: the full register, the access, and the accessed bytes."""
        for used in self._factory.info(instruction).used_registers():
            yield RegisterExt.full_register(used.register), used.access, RegisterExt.size(used.register)

    def _body(self, address: int) -> Mapping[int, Instruction]:
        """Return the instructions of the function at a link address by their addresses; empty if it is unknown."""
        if (known := self._bodies.get(address)) is not None:
            return known
        body: dict[int, Instruction] = {}
        covering = self._module.symbols.covering(address)
        size = covering.size if covering is not None and covering.address == address else 0
        try:
            for start, end in function_exits(self._module, self._frames, address, size).ranges:
                body |= {each.ip: each.copy() for each, _, _ in instructions_between(self._module, start, end)}
        except TargetError:
            body = {}
        self._bodies[address] = body
        return body

    def _caller_at(self, site: int) -> tuple[int, Mapping[int, Instruction]] | None:
        """
        Return the start and the instructions of the function with a call at ``site``; None if they are unknown.

        The start of a cold part is that of its function. Of a function whose whole code cannot be determined, the range
        of its symbol is taken.
        """
        covering = self._module.symbols.covering(site)
        if covering is not None and _COLD in covering.name:
            for whole in self._module.symbols.lookup(covering.name.partition(_COLD)[0]):
                if site in (body := self._body(whole.address)):
                    return whole.address, body
        if covering is not None and covering.size:
            start, end = covering.address, covering.address + covering.size
        elif (extent := self._module.elf.frames.extent(self._module.elf, site)) is not None:
            start, end = extent
        else:
            return None
        if body := self._body(start):
            return start, body
        return start, {each.ip: each.copy() for each, _, _ in instructions_between(self._module, start, end)}

    def _start_of(self, address: int) -> int | None:
        covering = self._module.symbols.covering(address)
        return None if covering is None else covering.address

    def _callers(self) -> dict[int, list[int]]:
        """Return the link addresses of direct calls and jumps by their targets; some are no instructions."""
        if self._sites is None:
            self._sites = {}
            elf = self._module.elf
            for segment in elf.load_segments:
                if not segment.executable:
                    continue
                data = bytes(elf.bytes_at(segment.offset, segment.filesz, "a segment"))
                for match in _NEAR.finditer(data):
                    distance = int.from_bytes(data[match.end() : match.end() + 4], "little", signed=True)
                    target = segment.vaddr + match.end() + 4 + distance
                    self._sites.setdefault(target, []).append(segment.vaddr + match.start())
        return self._sites

    def _place(self, address: int) -> str:
        symbol = self._module.symbol_at(self._module.file_offset(address))
        return f"{address:#x}" if symbol is None else f"{symbol[0]}+{symbol[1]:#x}"


def _name(register: int) -> str:
    """Return the name of a full register; a vector register is named as its first 16 bytes."""
    names = {number: name.lower() for name, number in vars(Register).items() if isinstance(number, int)}
    name = names[register]
    return f"x{name[1:]}" if name.startswith("zmm") else name


def expectation_of(patched: Module, address: int, replacement: Module, symbol: str) -> Expectation | None:
    """
    Return what callers of a function expect that its replacement does not do; None if they expect nothing.

    The function is at a link address of the module ``patched``, its replacement is a symbol of the object.
    """
    changed = RegisterUse(replacement).changed_by(replacement.address_of(symbol))
    use = RegisterUse(patched)
    more = changed - use.changed_by(address)
    return use.expectation(address, more) if more else None
