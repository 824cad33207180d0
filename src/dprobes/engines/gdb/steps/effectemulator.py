"""
Instructions that are carried out here by what is known of their effect, of processors other than x86.

A step costs another stop of the target, which takes QEMU longer than all that is asked of it (docs/engines.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.code.effects.effect import Effect
from dprobes.target.code.effects.instructions import MODES, effect_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.arch import Architecture
    from dprobes.engines.gdb.registers import Registers
    from dprobes.engines.gdb.target import StubTarget
    from dprobes.target.code.effects.effect import Store

__all__ = ["EffectEmulator"]


class _Planned(NamedTuple):
    """An effect with the stub's names of registers; ``is_far`` says that it accesses memory beside the stack."""

    effect: Effect
    is_far: bool


class EffectEmulator:
    """Carry out instructions of a ``target``, whose registers have ``names`` by our index, as far as they are known."""

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

    def carry_out(self, raw: bytes, registers: Registers) -> bool:
        """Carry out the instruction that a thread is at; return whether that was done, else nothing was."""
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
        """Return what an instruction does, None if that is not known, or on registers that the stub lacks."""
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
        """Store what an instruction stores, neighbours together; return whether the program could."""
        pieces: list[tuple[int, bytearray]] = []
        for name, base, displacement, size in stores:
            address = self._sum(registers, base, displacement)
            data = (self._sum(registers, name, 0) & (1 << 8 * size) - 1).to_bytes(size, self._target.byte_order)
            if pieces and pieces[-1][0] + len(pieces[-1][1]) == address:
                pieces[-1][1].extend(data)
            else:
                pieces.append((address, bytearray(data)))
        return all(self._target.write(address, bytes(data)) for address, data in pieces)
