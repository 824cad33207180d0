"""
The instruction under a breakpoint, which has to be executed although the breakpoint is there.

Some are carried out here; else the thread makes a step without the breakpoint, while all others stand still. A stub
that makes no steps gets breakpoints wherever the instruction may lead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.steps.effectemulator import EffectEmulator
from dprobes.engines.gdb.steps.emulation import EMULATED, Emulator
from dprobes.engines.gdb.stopreplies import Stopped
from dprobes.errors import EngineError, TargetError
from dprobes.target.code.effects.instructions import MODES
from dprobes.target.code.foreigncode import FOREIGN_MACHINES, LENGTH_MAX, instruction_length
from dprobes.target.code.successors import successors

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from dprobes.arch import Architecture
    from dprobes.engines.gdb.processors import StubProcessor
    from dprobes.engines.gdb.registers import Registers
    from dprobes.engines.gdb.stopreplies import StopReply, ThreadId
    from dprobes.engines.gdb.target import StubTarget

__all__ = ["Stepper"]

_TRAP = 5
"""How GDB numbers SIGTRAP (include/gdb/signals.def)."""
_X86_LENGTH_MAX = 15


class Stepper:
    """
    Have instructions of a target executed that are under breakpoints; ``names`` are its registers by our index.

    ``is_exact`` is whether a step always executes an instruction.
    """

    def __init__(
        self,
        target: StubTarget,
        processor: StubProcessor,
        architecture: Architecture,
        names: Mapping[int, str],
        *,
        is_exact: bool = True,
    ) -> None:
        self._target = target
        self._is_exact = is_exact
        self._processor = processor
        self._architecture = architecture
        self._names = names
        self._steps_through: bool | None = None
        """Whether the stub makes steps from breakpoints, None as long as that is not known."""
        self.sees_accesses = False
        """Whether the target's accesses to memory are to be made by itself, as some of it is watched."""
        self._emulator: Emulator | EffectEmulator | None = None
        if architecture.name in EMULATED:
            self._emulator = Emulator(target, architecture.word_size)
        elif architecture.name in MODES:
            self._emulator = EffectEmulator(target, architecture, names)

    def carries_out(self, raw: bytes | None, registers: Registers) -> bool:
        """Carry out an instruction here, where that can be done; return whether it was."""
        emulator = None if self.sees_accesses else self._emulator
        return raw is not None and emulator is not None and emulator.carry_out(raw, registers)

    def step_over(
        self, at: int, raw: bytes | None, thread: ThreadId | None, registers: Registers, needed: Container[int]
    ) -> StopReply:
        """
        Have the instruction at a breakpoint executed, which stays if it is among the ``needed``.

        ``raw`` are its bytes if they are known.
        """
        instruction, size = self._processor.breakpoint, len(self._processor.breakpoint)
        self._target.write_back(thread, registers)
        if self._target.stub.has_steps():
            if (through := self._step_through(at, raw, thread, registers, needed)) is not None:
                return through
            self._target.remove(at, size)
            reply = self._target.step(thread, at, self._processor.pc, is_exact=self._is_exact)
        else:
            places = self._places_after(at, raw, registers) - self._target.inserted
            self._target.remove(at, size)
            reply = self._target.run_to(places, thread, instruction)
            self._correct_pc(reply, places)
        if isinstance(reply, Stopped) and at in needed:
            self._target.insert_again(at, size, instruction)
        return reply

    def return_place(self, registers: Registers) -> tuple[int | None, int]:
        """Return where a function that has just begun returns, if that can be read, and the stack pointer then."""
        frame, size = registers[self._processor.sp], self._architecture.word_size
        if self._processor.link:
            return registers[self._processor.link], frame
        return self._target.word(frame, size), frame + size

    def leave_function(self, value: int, thread: ThreadId | None, registers: Registers) -> StopReply:
        """Have a thread return a value from a function that has just begun; raise ``EngineError`` if it cannot."""
        address, top = self.return_place(registers)
        result = self._architecture.register("retval")
        if address is None or result is None:
            raise EngineError(f"the return address at {registers[self._processor.sp]:#x} cannot be read for 'skip'")
        registers[self._names[result.index]] = value
        registers[self._processor.pc], registers[self._processor.sp] = address, top
        self._target.write_back(thread, registers)
        return Stopped(_TRAP, thread, {})

    def _step_through(
        self, at: int, raw: bytes | None, thread: ThreadId | None, registers: Registers, needed: Container[int]
    ) -> StopReply | None:
        """
        Have a thread make a step from a breakpoint that is not taken out; None if the stub does not do that.

        QEMU does, and so is twice as fast: it translates the code anew for each breakpoint that comes or goes. Whether
        a stub does is seen at the first instruction that cannot lead to itself.
        """
        if self._steps_through is False or at not in needed or not self._target.stub.knows_breakpoints:
            return None
        is_known = self._steps_through is not None
        if not is_known and (not self._is_exact or at in self._places_after(at, raw, registers)):
            return None
        reply = self._target.step(thread, at, self._processor.pc, is_exact=True)
        if not is_known:
            is_at_it = isinstance(reply, Stopped) and reply.signal == _TRAP
            self._steps_through = not is_at_it or self._target.registers(thread)[self._processor.pc] != at
        return reply if self._steps_through else None

    def _correct_pc(self, reply: StopReply, places: Container[int]) -> None:
        """Let a thread that has run into one of our breakpoints be at the instruction there."""
        if isinstance(reply, Stopped) and self._processor.moved and reply.reason != "swbreak":
            registers, name = self._target.registers(reply.thread), self._processor.pc
            before = registers[name] - self._processor.moved
            if registers[name] not in places and before in places:
                registers[name] = before
                self._target.write_back(reply.thread, registers)

    def _places_after(self, at: int, raw: bytes | None, registers: Registers) -> frozenset[int]:
        """Return where the thread can be after an instruction; raise ``EngineError`` if that is not known."""
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
