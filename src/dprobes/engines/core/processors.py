"""
What is peculiar to a processor in core files: identity, words, and where its registers stand in notes.

Pure data. Registers have the names of GDB's descriptions (GDB manual, appendix G.5), of which a stub may have one of
several. Sources: ``elf_gregset_t`` and ``elf_fpregset_t`` in ``arch/*/include/uapi/asm`` of the kernel (ptrace.h,
elf.h), ``e_machine`` in ``include/uapi/linux/elf-em.h``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dprobes.engines.core.notetypes import NoteType
from dprobes.lazydataclass import dataclass
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PROCESSORS", "CoreProcessor", "RegisterField", "image_of"]


class RegisterField(NamedTuple):
    """
    A register of so many bytes, by the names that it may have; padding without any.

    ``is_abridged`` is a tag word of the x87 with one bit for each register instead of two (FXSAVE).
    """

    names: tuple[str, ...]
    size: int
    is_abridged: bool = False


@dataclass(frozen=True, slots=True)
class CoreProcessor:
    """
    Say how core files of a processor are laid out.

    ``number`` is ``e_machine``; ``id_size`` the bytes of a user's id. ``general`` are the registers of NT_PRSTATUS,
    ``more`` those of other notes, by their kinds.
    """

    number: int
    word_size: Literal[4, 8]
    order: Literal["little", "big"]
    general: Sequence[RegisterField]
    more: Sequence[tuple[NoteType, Sequence[RegisterField]]]
    id_size: int = 4

    @property
    def prefix(self) -> str:
        """How formats of ``struct`` begin."""
        return "<" if self.order == "little" else ">"

    @property
    def word(self) -> str:
        """An unsigned word in formats of ``struct``."""
        return "Q" if self.word_size == 8 else "I"

    @property
    def general_size(self) -> int:
        """Bytes of the general registers."""
        return sum(field.size for field in self.general)


def image_of(
    fields: Sequence[RegisterField], order: Literal["little", "big"], read: Callable[[str], int | None]
) -> bytes:
    """Return registers as they stand in a note; ``read`` returns one by its name, None if there is none."""
    image = bytearray()
    for field in fields:
        value = next((found for found in map(read, field.names) if found is not None), 0)
        if field.is_abridged:
            value = sum(1 << n for n in range(8) if value >> 2 * n & 3 != _EMPTY)
        image += (value & (1 << 8 * field.size) - 1).to_bytes(field.size, order)
    return bytes(image)


_EMPTY = 3
"""The tag of a register of the x87 that holds nothing."""


def _fields(text: str, size: int) -> tuple[RegisterField, ...]:
    """Return registers by words of a text: names with strokes between them, and ``-`` for padding."""
    return tuple(RegisterField(() if word == "-" else tuple(word.split("/")), size) for word in text.split())


def _numbered(name: str, count: int) -> str:
    return " ".join(f"{name}{n}" for n in range(count))


def _padding(size: int) -> RegisterField:
    return RegisterField((), size)


def _fxsave(pointers: Sequence[RegisterField], vectors: int) -> tuple[RegisterField, ...]:
    """Return what FXSAVE stores (Intel SDM, volume 1, table 10-2)."""
    head = (*_fields("fctrl fstat", 2), RegisterField(("ftag",), 2, is_abridged=True), *_fields("fop", 2))
    stack = tuple(part for n in range(8) for part in (RegisterField((f"st{n}",), 10), _padding(6)))
    control = (*_fields("mxcsr", 4), _padding(4))
    registers = (*head, *pointers, *control, *stack, *_fields(_numbered("xmm", vectors), 16))
    return (*registers, _padding(_FXSAVE_SIZE - sum(field.size for field in registers)))


_FXSAVE_SIZE = 512
_AMD64 = (
    "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss "
    "fs_base gs_base ds es fs gs"
)
_I386 = "ebx ecx edx esi edi ebp eax ds es fs gs orig_eax eip cs eflags esp ss"
_RISCV = "pc ra sp gp tp t0 t1 t2 fp/s0 s1 a0 a1 a2 a3 a4 a5 a6 a7 s2 s3 s4 s5 s6 s7 s8 s9 s10 s11 t3 t4 t5 t6"
_RISCV_FLOATING = (
    "ft0 ft1 ft2 ft3 ft4 ft5 ft6 ft7 fs0 fs1 fa0 fa1 fa2 fa3 fa4 fa5 fa6 fa7 "
    "fs2 fs3 fs4 fs5 fs6 fs7 fs8 fs9 fs10 fs11 ft8 ft9 ft10 ft11 fcsr"
)
_POWER = f"{_numbered('r', 32)} pc msr orig_r3 ctr lr xer cr - trap {'- ' * 7}"
_POWER_FLOATING = _fields(f"{_numbered('f', 32)} fpscr", 8)


def _zseries(word: int) -> tuple[RegisterField, ...]:
    words, accesses = _fields(f"pswm pswa {_numbered('r', 16)}", word), _fields(_numbered("acr", 16), 4)
    return (*words, *accesses, *_fields("orig_r2", word))


_ZSERIES_FLOATING = (*_fields("fpc", 4), _padding(4), *_fields(_numbered("f", 16), 8))

_VECTORS_LOW = _fields(" ".join(f"v{n}l" for n in range(16)), 8)
_VECTORS_HIGH = _fields(" ".join(f"v{n}" for n in range(16, 32)), 16)
_I387 = (*_fields("fctrl fstat ftag fioff fiseg fooff foseg", 4), *_fields(_numbered("st", 8), 10))
# A vector of SVE begins with the shorter one.
_A64_FLOATING = (*(RegisterField((f"v{n}", f"z{n}"), 16) for n in range(32)), *_fields("fpsr fpcr", 4), _padding(8))

PROCESSORS = {
    "x86_64": CoreProcessor(
        62, 8, "little", _fields(_AMD64, 8), ((NoteType.PRFPREG, _fxsave(_fields("fioff fooff", 8), 16)),)
    ),
    "i386": CoreProcessor(
        3,
        4,
        "little",
        _fields(_I386, 4),
        ((NoteType.PRFPREG, _I387), (NoteType.PRXFPREG, _fxsave(_fields("fioff fiseg fooff foseg", 4), 8))),
        id_size=2,
    ),
    "aarch64": CoreProcessor(
        183,
        8,
        "little",
        _fields(f"{_numbered('x', 31)} sp pc cpsr", 8),
        ((NoteType.PRFPREG, _A64_FLOATING),),
    ),
    "riscv64": CoreProcessor(243, 8, "little", _fields(_RISCV, 8), ((NoteType.PRFPREG, _fields(_RISCV_FLOATING, 8)),)),
    "ppc64": CoreProcessor(21, 8, "big", _fields(_POWER, 8), ((NoteType.PRFPREG, _POWER_FLOATING),)),
    "ppc": CoreProcessor(20, 4, "big", _fields(_POWER, 4), ((NoteType.PRFPREG, _POWER_FLOATING),)),
    "s390x": CoreProcessor(
        22,
        8,
        "big",
        _zseries(8),
        (
            (NoteType.PRFPREG, _ZSERIES_FLOATING),
            (NoteType.VXRS_LOW_S390, _VECTORS_LOW),
            (NoteType.VXRS_HIGH_S390, _VECTORS_HIGH),
        ),
    ),
    "s390": CoreProcessor(22, 4, "big", _zseries(4), ((NoteType.PRFPREG, _ZSERIES_FLOATING),), id_size=2),
}
"""The processors, by the names of architectures."""
