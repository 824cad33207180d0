"""
Instructions of x86 that are carried out here, on the registers that are sent back anyway.

A step over a breakpoint takes four packets more, and the target stops twice. What can be emulated, and how, is what the
ptrace engine emulates (``engines.x86.emulation``); here its registers are those of a stub.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from dprobes.engines.linux.ptracecalls import Register
from dprobes.engines.x86.emulation import emulate, is_emulated
from dprobes.engines.x86.plan import plan

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
        self._plans: dict[bytes, tuple[Any, ...]] = {}

    def carry_out(self, raw: bytes, registers: Registers) -> bool:
        """Carry out the instruction that a thread is at; return whether that was done."""
        planned = self._plans.get(raw)
        if planned is None:
            planned = self._plans[raw] = plan(raw, self._word_size)
        words = cast("ctypes.Array[ctypes.c_ulong]", _Words(registers, self._names))
        return is_emulated(planned) and emulate(planned, words, self)

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
