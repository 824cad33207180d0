"""
Execution of the instruction under a breakpoint.

Some instructions are emulated. For others, the thread makes a single step without the breakpoint, while all other
threads are stopped. A stub without single steps gets breakpoints at all possible next addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dprobes.engines.gdb.remote_protocol import SIGTRAP, Stopped
from dprobes.errors import EngineError, TargetError
from dprobes.platform.linux.ptrace_calls import Register
from dprobes.platform.x86.instruction_emulation import MemoryMove, emulate, is_emulated, memory_move, plan
from dprobes.target.code.foreign_instructions import (
    FOREIGN_MACHINES,
    LENGTH_MAX,
    MODES,
    Effect,
    effect_of,
    instruction_length,
)
from dprobes.target.code.successors import successors

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Container, Mapping, Sequence

    from dprobes.arch import Architecture
    from dprobes.engines.gdb.remote_protocol import StopReply, ThreadId
    from dprobes.engines.gdb.stub_registers import Registers, StubProcessor
    from dprobes.engines.gdb.stub_target import StubTarget
    from dprobes.target.code.foreign_instructions import Store

__all__ = ["EMULATED", "EffectEmulator", "Emulator", "Stepper"]

# A step costs another stop of the target, which takes QEMU longer than all other requests
# (docs/explanation/gdb.md).


class _Planned(NamedTuple):
    """An effect with the stub's names of registers; ``is_far`` is True if it accesses memory other than the stack."""

    effect: Effect
    is_far: bool


class EffectEmulator:
    """Emulator of instructions of a ``target`` by their known effect; ``names`` maps register indices to its names."""

    def __init__(self, target: StubTarget, architecture: Architecture, names: Mapping[int, str]) -> None:
        self._target = target
        self._machine = architecture.name
        self._mask = (1 << 8 * architecture.word_size) - 1
        portable = {name: architecture.register(name) for name in ("pc", "sp")}
        known = {register.name: register for register in architecture.registers} | portable
        self._names = {
            name: names[each.index] for name, each in known.items() if each is not None and each.index in names
        }
        self._modes = MODES[self._machine]
        self._planned: dict[tuple[bytes, int], _Planned | None] = {}

    def emulate(self, raw: bytes, registers: Registers) -> bool:
        """
        Emulate the instruction of a thread, and return True.

        If that is not possible, change nothing and return False.
        """
        pc = self._names["pc"]
        at = registers[pc]
        if (raw, at) not in self._planned:
            self._planned[raw, at] = self._plan(raw, at)
        planned = self._planned[raw, at]
        if planned is None or (planned.is_far and not self._target.accesses_as_program(at)):
            return False
        if any(registers[self._names[name]] & mask != value for name, mask, value in self._modes):
            return False
        sums, stores, loads = planned.effect
        values = [(name, self._sum(registers, base, addend)) for name, base, addend in sums]
        for name, base, displacement, size, is_signed in loads:
            data = self._target.read(self._sum(registers, base, displacement), size)
            if len(data) < size:
                return False
            values.append((name, int.from_bytes(data, self._target.byte_order, signed=is_signed)))
        if stores and not self._store(stores, registers):
            return False
        for name, value in values:
            if name:
                registers[name] = value & self._mask
        registers[pc] = at + len(raw)
        return True

    def _plan(self, raw: bytes, at: int) -> _Planned | None:
        """Return the effect of an instruction, None if it is unknown or the stub lacks registers for it."""
        effect = effect_of(self._machine, raw, at)
        if effect is None or any(mode.register not in self._names for mode in self._modes):
            return None
        names = self._names | {"": ""}
        sums, stores, loads = effect
        needed = {name for register, base, *_ in (*sums, *stores, *loads) for name in (register, base)}
        if not needed <= names.keys():
            return None
        bases = {each.base for each in stores} | {each.base for each in loads}
        return _Planned(
            Effect(
                [each._replace(register=names[each.register], base=names[each.base]) for each in sums],
                [each._replace(register=names[each.register], base=names[each.base]) for each in stores],
                [each._replace(register=names[each.register], base=names[each.base]) for each in loads],
            ),
            any(names[base] != names["sp"] for base in bases),
        )

    def _sum(self, registers: Registers, base: str, addend: int) -> int:
        return (registers[base] if base else 0) + addend & self._mask

    def _store(self, stores: Sequence[Store], registers: Registers) -> bool:
        """Write the values that an instruction stores, adjacent ones together; return False if a write fails."""
        pieces: list[tuple[int, bytearray]] = []
        for name, base, displacement, size in stores:
            address = self._sum(registers, base, displacement)
            data = (self._sum(registers, name, 0) & (1 << 8 * size) - 1).to_bytes(size, self._target.byte_order)
            if pieces and pieces[-1][0] + len(pieces[-1][1]) == address:
                pieces[-1][1].extend(data)
            else:
                pieces.append((address, bytearray(data)))
        return all(self._target.write(address, bytes(data)) for address, data in pieces)


# A step over a breakpoint takes four packets more, and the target stops twice. For x86, the emulated instructions are
# those of the ptrace engine (``platform.x86.instruction_emulation``), and moves from and to memory.


EMULATED = ("i386", "x86_64")
"""Architectures whose instructions ``Emulator`` carries out."""

_NAMES = {word: word.name.lower() for word in Register}
_NAMES_OF_I386 = {
    **{word: name.replace("r", "e", 1) for word, name in _NAMES.items() if len(name) == 3 and name.startswith("r")},
    **{word: name for word, name in _NAMES.items() if not name.startswith("r")},
}


class _Words:
    """Registers of a stub as words of ``struct user_regs_struct``, which the emulation of instructions uses."""

    def __init__(self, registers: Registers, names: dict[Register, str]) -> None:
        self._registers = registers
        self._names = names

    def __getitem__(self, word: int) -> int:
        return self._registers[self._names[Register(word)]]

    def __setitem__(self, word: int, value: int) -> None:
        self._registers[self._names[Register(word)]] = value


class Emulator:
    """Emulator of instructions of an x86 ``target``, on a local copy of its registers; ``word_size`` is in bytes."""

    def __init__(self, target: StubTarget, word_size: int) -> None:
        self._target = target
        self._word_size = word_size
        self._names = _NAMES if word_size == 8 else _NAMES_OF_I386
        self._plans: dict[bytes, tuple[tuple[Any, ...], MemoryMove | None]] = {}

    def emulate(self, raw: bytes, registers: Registers) -> bool:
        """Emulate the instruction that a thread is at; return whether that was done."""
        if raw not in self._plans:
            self._plans[raw] = plan(raw, self._word_size), memory_move(raw, self._word_size)
        planned, move = self._plans[raw]
        words = _Words(registers, self._names)
        if move is not None:
            is_near = move.base == Register.RSP or self._target.accesses_as_program(words[Register.RIP])
            return is_near and self._move(move, words, len(raw))
        return is_emulated(planned) and emulate(planned, cast("ctypes.Array[ctypes.c_ulong]", words), self)

    def _move(self, move: MemoryMove, words: _Words, length: int) -> bool:
        """
        Emulate a move between a register and memory; other engines execute a copy of the instruction.

        Return False, and change nothing, if the memory cannot be accessed.
        """
        address = move.displacement
        address += words[move.base] if move.base >= 0 else 0
        address += words[move.other] * move.scale if move.other >= 0 else 0
        address &= (1 << 8 * self._word_size) - 1
        try:
            if move.is_load:
                words[move.register] = self.read_word(address, move.size)
            else:
                self.write_word(address, move.size, words[move.register])
        except OSError:
            return False
        words[Register.RIP] += length
        return True

    def read_word(self, address: int, size: int) -> int:
        """Return a word of ``size`` bytes of memory; raise OSError if it cannot be read."""
        word = self._target.word(address, size)
        if word is None:
            raise OSError
        return word

    def write_word(self, address: int, size: int, value: int) -> None:
        """Write a word of ``size`` bytes to memory; raise OSError if the program could not."""
        if not self._target.write(address, (value & (1 << 8 * size) - 1).to_bytes(size, "little")):
            raise OSError


_X86_LENGTH_MAX = 15


class Stepper:
    """Executor of instructions under breakpoints; ``names`` maps register indices to the target's names."""

    runs_ahead = True
    """True if the target may resume while handlers run that need only the registers."""

    def __init__(
        self, target: StubTarget, processor: StubProcessor, architecture: Architecture, names: Mapping[int, str]
    ) -> None:
        self._target = target
        self.processor = processor
        self._architecture = architecture
        self._names = names
        self._steps_through: bool | None = None
        """True if the stub steps from breakpoints without their removal, None until that is known."""
        self.sees_accesses = False
        """True if the target itself must access memory, because watchpoints exist."""
        self._emulator: Emulator | EffectEmulator | None = None
        if architecture.name in EMULATED:
            self._emulator = Emulator(target, architecture.word_size)
        elif architecture.name in MODES:
            self._emulator = EffectEmulator(target, architecture, names)

    def breakpoint_of(self, reply: Stopped, registers: Registers, known: Container[int]) -> int | None:
        """
        Return the breakpoint of ``known`` that a thread has reached, and correct its pc.

        Return None for another stop.
        """
        if reply.signal != SIGTRAP:
            return None
        pc = registers[self.processor.pc]
        if pc in known:
            return pc
        before = pc - self.processor.moved
        if before in known and reply.reason != "swbreak":
            registers[self.processor.pc] = before
            return before
        return None

    def carries_out(self, at: int, raw: bytes | None, registers: Registers) -> bool:  # noqa: ARG002 - for machines
        """
        Emulate the instruction ``raw`` under the breakpoint ``at``, if it is known and can be emulated.

        Return False, with nothing changed, if not.
        """
        emulator = None if self.sees_accesses else self._emulator
        return raw is not None and emulator is not None and emulator.emulate(raw, registers)

    def step_over(
        self, at: int, raw: bytes | None, thread: ThreadId | None, registers: Registers, needed: Container[int]
    ) -> StopReply:
        """
        Execute the instruction under the breakpoint ``at`` in a thread, and return the stop after it.

        ``raw`` has the instruction's bytes, or is None if they are unknown. The breakpoint is inserted again if ``at``
        is in ``needed``.
        """
        self._target.write_back(thread, registers)
        if self._target.stub.has_steps():
            if (through := self._step_through(at, raw, thread, registers, needed)) is not None:
                return through
            self._target.remove(at)
            reply = self._target.step(thread, at, self.processor.pc, is_exact=True)
        else:
            places = self._places_after(at, raw, registers) - self._target.inserted
            self._target.remove(at)
            reply = self._target.run_to(places, thread)
            self._correct_pc(reply, places)
        if isinstance(reply, Stopped) and at in needed:
            self._target.insert_again(at)
        return reply

    def return_place(self, registers: Registers) -> tuple[int | None, int]:
        """
        Return the return address of a function that has just begun, None if unreadable, and its stack pointer.

        The stack pointer is that after the return.
        """
        frame, size = registers[self.processor.sp], self._architecture.word_size
        if self.processor.link:
            return registers[self.processor.link], frame
        return self._target.word(frame, size), frame + size

    def leave_function(self, value: int, thread: ThreadId | None, registers: Registers) -> StopReply:
        """Make a thread return a value from a function that has just begun; raise ``EngineError`` if it cannot."""
        address, top = self.return_place(registers)
        result = self._architecture.register("retval")
        if address is None or result is None:
            raise EngineError(f"the return address at {registers[self.processor.sp]:#x} cannot be read for 'skip'")
        registers[self._names[result.index]] = value
        registers[self.processor.pc], registers[self.processor.sp] = address, top
        self._target.write_back(thread, registers)
        return Stopped(SIGTRAP, thread, {})

    def _step_through(
        self, at: int, raw: bytes | None, thread: ThreadId | None, registers: Registers, needed: Container[int]
    ) -> StopReply | None:
        """
        Single-step a thread from the breakpoint ``at`` without removing it. Return the stop.

        Return None if the stub does not support this. QEMU does, and takes half of the time, because it retranslates
        the code for each breakpoint that is inserted or removed. The first instruction that cannot lead to itself shows
        whether a stub supports it.
        """
        if self._steps_through is False or at not in needed or not self._target.stub.knows_breakpoints:
            return None
        is_known = self._steps_through is not None
        if not is_known and at in self._places_after(at, raw, registers):
            return None
        reply = self._target.step(thread, at, self.processor.pc, is_exact=True)
        if not is_known:
            is_at_it = isinstance(reply, Stopped) and reply.signal == SIGTRAP
            self._steps_through = not is_at_it or self._target.registers(thread)[self.processor.pc] != at
        return reply if self._steps_through else None

    def _correct_pc(self, reply: StopReply, places: Container[int]) -> None:
        """Move the pc of a thread that has hit a temporary breakpoint back to the instruction there."""
        if isinstance(reply, Stopped) and self.processor.moved and reply.reason != "swbreak":
            registers, name = self._target.registers(reply.thread), self.processor.pc
            before = registers[name] - self.processor.moved
            if registers[name] not in places and before in places:
                registers[name] = before
                self._target.write_back(reply.thread, registers)

    def _places_after(self, at: int, raw: bytes | None, registers: Registers) -> frozenset[int]:
        """Return the possible next addresses after an instruction; raise ``EngineError`` if they are unknown."""
        machine, size = self._architecture.name, self._architecture.word_size

        def register(name: str) -> int:
            known = self._architecture.register(name)
            assert known is not None, "the names are those of the table"
            return registers[self._names[known.index]]

        def word(address: int) -> int:
            if (value := self._target.word(address, size)) is None:
                raise TargetError(f"a word at {address:#x} cannot be read")
            return value

        code = raw if raw is not None else self._target.read(at, _X86_LENGTH_MAX)
        if raw is None and machine in FOREIGN_MACHINES:
            code = code[: instruction_length(machine, code[:LENGTH_MAX], at) or 0]
        try:
            return successors(machine, code, at, register, word)
        except (TargetError, KeyError) as error:
            raise EngineError(
                f"the stub {self._target.stub.name} makes no single steps, and the instruction at {at:#x} cannot be "
                f"followed: {error}"
            ) from None
