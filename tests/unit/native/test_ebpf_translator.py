"""An entry is copied as it was written: a word at once only where one store has written it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Alu, Helper, Register, Size
from dprobes.bpf.map_layouts import MapName
from dprobes.native.ebpf_translator import pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable

R = Register


def pieces(size: int, write: Callable[[Assembler], None]) -> tuple[int, ...]:
    asm = Assembler()
    write(asm)
    asm.mov(R.R3, size)
    asm.load_map(R.R1, MapName.RING)
    asm.call(Helper.RINGBUF_OUTPUT)
    asm.exit()
    code = asm.assemble().code
    return pieces_of(code, len(code) - 2, size)


def record(asm: Assembler) -> None:
    """Write 20 bytes by halves of words, and two words."""
    for at in range(-40, -20, 4):
        asm.store(R.R10, at, 0, Size.W)
    asm.store(R.R10, -20, R.R4)
    asm.store(R.R10, -12, 5)
    asm.mov(R.R2, R.R10)
    asm.alu(Alu.ADD, R.R2, -40)


def test_words_are_copied_as_words_and_halves_as_halves() -> None:
    assert pieces(36, record) == (4, 4, 4, 4, 4, 8, 8)
    assert pieces(30, record) == (4, 4, 4, 4, 4, 8, 8)
    assert pieces(28, record) == (4, 4, 4, 4, 4, 8)


def test_a_word_that_begins_elsewhere_does_not_count() -> None:
    def write(asm: Assembler) -> None:
        asm.store(R.R10, -16, 0)
        asm.store(R.R10, -8, 0)
        asm.mov(R.R2, R.R10)
        asm.alu(Alu.ADD, R.R2, -12)

    assert pieces(12, write) == (4, 8)


def test_what_is_not_in_the_frame_is_copied_by_words() -> None:
    def elsewhere(asm: Assembler) -> None:
        asm.mov(R.R2, R.R7)
        asm.alu(Alu.ADD, R.R2, -40)

    def unknown(asm: Assembler) -> None:
        asm.load(R.R2, R.R6, 8)

    assert pieces(20, elsewhere) == pieces(20, unknown) == (8, 8, 8)
