"""
Expressions in unwind tables: a stack machine that says where something is, or what it is (DWARF 5, 2.5 and 6.4.2).

Linkers write them for the stubs of the procedure linkage table, C libraries for signal frames. Operations of other
places, such as those with the frame base of a function, raise ValueError.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from dprobes.target.unwind.framebytes import FrameBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.target.unwind.frameentries import FrameImage

__all__ = ["evaluate"]

_STEPS_MAX = 256
_STACK_MAX = 64

_CONSTANTS = {
    0x08: (1, False), 0x09: (1, True), 0x0A: (2, False), 0x0B: (2, True),
    0x0C: (4, False), 0x0D: (4, True), 0x0E: (8, False), 0x0F: (8, True),
}  # fmt: skip
"""const1u to const8s: size, and whether they have a sign."""

_BINARY: dict[int, Callable[[int, int], int]] = {
    0x1A: operator.and_, 0x1C: operator.sub, 0x1E: operator.mul, 0x21: operator.or_, 0x22: operator.add,
    0x24: operator.lshift, 0x25: operator.rshift, 0x27: operator.xor,
}  # fmt: skip
_COMPARISONS: dict[int, Callable[[int, int], bool]] = {
    0x29: operator.eq, 0x2A: operator.ge, 0x2B: operator.gt, 0x2C: operator.le, 0x2D: operator.lt, 0x2E: operator.ne,
}  # fmt: skip
"""They compare signed numbers."""

_SHIFTS = (0x24, 0x25, 0x26)


def evaluate(expression: bytes, registers: Mapping[int, int], image: FrameImage, initial: int | None = None) -> int:
    """
    Return what an expression leaves on top of its stack, which begins with ``initial``.

    Raise ValueError or IndexError for an expression that cannot be understood, ``TargetError`` for memory that is not
    there.
    """
    machine = _Machine(expression, registers, image)
    if initial is not None:
        machine.stack.append(initial)
    return machine.run()


class _Machine:
    def __init__(self, expression: bytes, registers: Mapping[int, int], image: FrameImage) -> None:
        self._expression = expression
        self._order = "<" if image.byte_order == "little" else ">"
        self._data = FrameBytes(expression, self._order)
        self._registers = registers
        self._image = image
        self._mask = (1 << 8 * image.word_size) - 1
        self.stack: list[int] = []

    def run(self) -> int:
        steps = 0
        while not self._data.is_at_end:
            steps += 1
            if steps > _STEPS_MAX or len(self.stack) > _STACK_MAX:
                raise ValueError("an expression that does not end")
            self._step(self._data.number(1))
        return self.stack[-1]

    def _step(self, operation: int) -> None:
        stack, data = self.stack, self._data
        match operation:
            case _ if 0x30 <= operation < 0x50:  # lit0 to lit31
                stack.append(operation - 0x30)
            case _ if 0x70 <= operation < 0x90:  # breg0 to breg31
                self._push(self._register(operation - 0x70) + data.signed())
            case 0x92:  # bregx
                number = data.unsigned()
                self._push(self._register(number) + data.signed())
            case 0x03:  # addr
                stack.append(data.number(self._image.word_size))
            case _ if operation in _CONSTANTS:
                size, is_signed = _CONSTANTS[operation]
                self._push(data.number(size, is_signed=is_signed))
            case 0x10:  # constu
                self._push(data.unsigned())
            case 0x11:  # consts
                self._push(data.signed())
            case 0x23:  # plus_uconst
                self._push(stack.pop() + data.unsigned())
            case 0x06:  # deref
                stack.append(self._load(stack.pop(), self._image.word_size))
            case 0x94:  # deref_size
                size = data.number(1)
                stack.append(self._load(stack.pop(), size))
            case 0x12:  # dup
                stack.append(stack[-1])
            case 0x13:  # drop
                stack.pop()
            case 0x14:  # over
                stack.append(stack[-2])
            case 0x15:  # pick
                stack.append(stack[-1 - data.number(1)])
            case 0x16:  # swap
                stack[-1], stack[-2] = stack[-2], stack[-1]
            case 0x17:  # rot
                stack[-1], stack[-2], stack[-3] = stack[-2], stack[-3], stack[-1]
            case 0x96:  # nop
                pass
            case _:
                self._calculate_or_jump(operation)

    def _calculate_or_jump(self, operation: int) -> None:
        stack, data = self.stack, self._data
        match operation:
            case 0x19:  # abs
                self._push(abs(self._signed(stack.pop())))
            case 0x1F:  # neg
                self._push(-stack.pop())
            case 0x20:  # not
                self._push(~stack.pop())
            case 0x2F:  # skip
                self._jump(data.number(2, is_signed=True))
            case 0x28:  # bra
                distance = data.number(2, is_signed=True)
                if stack.pop():
                    self._jump(distance)
            case _:
                right, left = stack.pop(), stack.pop()
                self._push(self._binary(operation, left, right))

    def _binary(self, operation: int, left: int, right: int) -> int:
        if operation in _SHIFTS and right >= 8 * self._image.word_size:
            right = 8 * self._image.word_size  # all bits are out, and no number grows without limit
        if operation in _BINARY:
            return _BINARY[operation](left, right)
        if operation in _COMPARISONS:
            return int(_COMPARISONS[operation](self._signed(left), self._signed(right)))
        match operation:
            case 0x26:  # shra
                return self._signed(left) >> right
            case 0x1B if right:  # div, signed, towards zero
                signed, by = self._signed(left), self._signed(right)
                return abs(signed) // abs(by) * (1 if (signed < 0) == (by < 0) else -1)
            case 0x1D if right:  # mod
                return left % right
        raise ValueError(f"operation {operation:#x}")

    def _jump(self, distance: int) -> None:
        place = self._data.position + distance
        if not 0 <= place <= len(self._expression):
            raise ValueError("a jump out of an expression")
        self._data = FrameBytes(self._expression, self._order)
        self._data.skip(place)

    def _push(self, value: int) -> None:
        self.stack.append(value & self._mask)

    def _register(self, number: int) -> int:
        if number not in self._registers:
            raise ValueError(f"register {number} is not known")
        return self._registers[number]

    def _load(self, address: int, size: int) -> int:
        if not 1 <= size <= self._image.word_size:
            raise ValueError(f"{size} bytes of memory")
        return int.from_bytes(self._image.read(address, size), self._image.byte_order)

    def _signed(self, value: int) -> int:
        return value - self._mask - 1 if value >> 8 * self._image.word_size - 1 else value
