"""
Instructions of x86 that are carried out here, on the registers that are sent back anyway.

A step over a breakpoint takes four packets more, and the target stops twice. What can be emulated, and how, is what the
ptrace engine emulates (``engines.x86.emulation``), with the registers of a stub, and moves from and to memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from dprobes.engines.linux.ptracecalls import Register
from dprobes.engines.x86.emulation import emulate, is_emulated
from dprobes.engines.x86.plan import MemoryMove, memory_move, plan

if TYPE_CHECKING:
    import ctypes

    from dprobes.engines.gdb.registers import Registers
    from dprobes.engines.gdb.target import StubTarget

__all__ = ["EMULATED", "Emulator"]

EMULATED = ("i386", "x86_64")
"""The processors of which instructions are."""

_NAMES = {word: word.name.lower() for word in Register}
_NAMES_OF_I386 = {
    **{word: name.replace("r", "e", 1) for word, name in _NAMES.items() if len(name) == 3 and name.startswith("r")},
    **{word: name for word, name in _NAMES.items() if not name.startswith("r")},
}


class _Words:
    """Registers of a stub, by their words in ``struct user_regs_struct``."""

    def __init__(self, registers: Registers, names: dict[Register, str]) -> None:
        self._registers = registers
        self._names = names

    def __getitem__(self, word: int) -> int:
        return self._registers[self._names[Register(word)]]

    def __setitem__(self, word: int, value: int) -> None:
        self._registers[self._names[Register(word)]] = value


class Emulator:
    """Carry out instructions of a ``target`` with words of ``word_size`` bytes, as far as that can be done here."""

    def __init__(self, target: StubTarget, word_size: int) -> None:
        self._target = target
        self._word_size = word_size
        self._names = _NAMES if word_size == 8 else _NAMES_OF_I386
        self._plans: dict[bytes, tuple[tuple[Any, ...], MemoryMove | None]] = {}

    def carry_out(self, raw: bytes, registers: Registers) -> bool:
        """Carry out the instruction that a thread is at; return whether that was done."""
        if raw not in self._plans:
            self._plans[raw] = plan(raw, self._word_size), memory_move(raw, self._word_size)
        planned, move = self._plans[raw]
        words = _Words(registers, self._names)
        if move is not None:
            is_near = move.base == Register.RSP or self._target.accesses_as_program(words[Register.RIP])
            return is_near and self._move(move, words, len(raw))
        return is_emulated(planned) and emulate(planned, cast("ctypes.Array[ctypes.c_ulong]", words), self)

    def _move(self, move: MemoryMove, words: _Words, length: int) -> bool:
        """Move a number between a register and memory, which a copy of the instruction in the target does elsewhere."""
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
        """Return a word of the stack; raise OSError if it cannot be read."""
        word = self._target.word(address, size)
        if word is None:
            raise OSError
        return word

    def write_word(self, address: int, size: int, value: int) -> None:
        """Store a word on the stack; raise OSError if the program could not."""
        if not self._target.write(address, (value & (1 << 8 * size) - 1).to_bytes(size, "little")):
            raise OSError
