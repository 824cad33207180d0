"""
The code of handlers that are the same but for the numbers of their probepoints, made without compiling each.

A handler names its probepoint only by numbers that grow with that one's: where its counters are, what is in an entry of
a ring. Which these are is learnt from the first ones that are compiled; if anything else differs, all are compiled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.asm.insn import Insn

__all__ = ["HandlerFamily", "NumberedCode"]

_SAMPLES = 3
_ELSEWHERE = 0x12345


class NumberedCode(NamedTuple):
    """Hold the code for the probepoint ``number``, and (index, growth) of its immediates that grow with the number."""

    assembled: Assembled
    number: int
    places: tuple[tuple[int, int], ...]

    @classmethod
    def learnt(cls, samples: Sequence[tuple[int, Assembled]]) -> NumberedCode | None:
        """Return what all ``samples``, (number, code) each, are made of; None if they differ otherwise."""
        (first, code), (second, other), *rest = samples
        if (code.maps, code.functions) != (other.maps, other.functions) or len(code.code) != len(other.code):
            return None
        places = []
        for index, (a, b) in enumerate(zip(code.code, other.code, strict=True)):
            if a != b:
                growth, remainder = divmod(b.imm - a.imm, second - first)
                if remainder or a != b._replace(imm=a.imm):
                    return None
                places.append((index, growth))
        found = cls(code, first, tuple(places))
        return found if all(found.of(number).code == each.code for number, each in rest) else None

    def of(self, number: int) -> Assembled:
        """Return the code for another probepoint."""
        code: list[Insn] = list(self.assembled.code)
        for index, growth in self.places:
            insn = code[index]
            code[index] = insn._replace(imm=insn.imm + growth * (number - self.number))
        return replace(self.assembled, code=tuple(code))


class HandlerFamily:
    """The handlers of one definition that may differ only by the numbers of their probepoints."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, Assembled]] = []
        self._numbered: NumberedCode | None = None
        self._is_settled = False

    def handler(self, number: int, compiled: Callable[[int], Assembled]) -> Assembled:
        """Return the code for a probepoint; ``compiled`` compiles it as if it were that many bytes further on."""
        if self._numbered is not None:
            return self._numbered.of(number)
        made = compiled(0)
        if not self._is_settled:
            if all(number != known for known, _ in self._samples):
                self._samples.append((number, made))
            if len(self._samples) == _SAMPLES:
                self._is_settled = True
                if compiled(_ELSEWHERE) == made:  # so it does not know where it is
                    self._numbered = NumberedCode.learnt(self._samples)
                self._samples = []
        return made
