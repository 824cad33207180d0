"""
The operations on virtual registers of which handlers' code consists on every processor.

The translator, the routines and the trampoline are written once, with a ``VirtualAssembler``. Each processor has an
assembler of its instructions, and a class that implements the operations with the assembler.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.bpf.bpf_instructions import Alu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.native.generated_code import Surroundings

__all__ = [
    "CALL_KEPT",
    "ContextLayout",
    "Label",
    "LabeledCode",
    "MemoryWord",
    "SystemCall",
    "Touched",
    "VirtualAssembler",
    "VirtualRegister",
]

Label = int


class VirtualRegister(enum.IntEnum):
    """
    The registers of operations: R0 to R10 of eBPF, and two scratch registers.

    The translation of any eBPF instruction may change S1 and S2, and so may calls.
    """

    R0 = 0
    R1 = 1
    R2 = 2
    R3 = 3
    R4 = 4
    R5 = 5
    R6 = 6
    R7 = 7
    R8 = 8
    R9 = 9
    R10 = 10
    S1 = 11
    S2 = 12


CALL_KEPT = (VirtualRegister.R6, VirtualRegister.R7, VirtualRegister.R8, VirtualRegister.R9)
"""The registers that calls preserve, besides R10."""


class MemoryWord(NamedTuple):
    """
    An operand in memory: the 64 bits at ``base`` plus ``place`` bytes.

    The load is ordered before all later accesses.
    """

    base: VirtualRegister
    place: int


Operand = VirtualRegister | MemoryWord | int


class SystemCall(enum.Enum):
    """System calls that the routines of handlers make."""

    GETPID = "getpid"
    GETTID = "gettid"
    TGKILL = "tgkill"


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """
    The layout of a trampoline's frame, which begins with the kernel's struct of a thread's registers (ptrace(2)).

    ``registers`` has the offset of each general register of the processor, by the register's number; ``words`` has the
    offsets of all words. ``ip``, ``sp`` and ``flags`` are offsets, too. The trampoline saves the register ``free``
    first, and may then change it. ``fixed`` has the constant words, by offset. The frame begins ``frame`` bytes below
    the probed program's stack pointer.
    """

    registers: Mapping[int, int]
    words: range
    free: int
    ip: int
    sp: int
    flags: int
    frame: int
    fixed: Mapping[int, int] = field(default_factory=dict)


class Touched(NamedTuple):
    """The general registers that code changes, by number; ``flags`` is true if the flags must be saved."""

    registers: frozenset[int]
    flags: bool


class LabeledCode:
    """Base of assemblers: code to be executed at ``address``, and labels in the code."""

    def __init__(self, address: int = 0) -> None:
        self.address = address
        self._places: list[int | None] = []

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def here(self) -> int:
        """The address of the next instruction."""
        return self.address + len(self)

    def label(self) -> Label:
        """Return a new label, which is not placed yet."""
        self._places.append(None)
        return len(self._places) - 1

    def place(self, label: Label) -> None:
        """Define a label as the address of the next instruction."""
        assert self._places[label] is None, "a label is placed twice"
        self._places[label] = len(self)

    def address_of(self, label: Label) -> int:
        """Return the address of a label that is placed."""
        return self.address + self._place_of(label)

    def _place_of(self, label: Label) -> int:
        place = self._places[label]
        assert place is not None, "a label is used that was never placed"
        return place


class VirtualAssembler(Protocol):
    """
    Assembler of operations on virtual registers, each of which a processor's class writes as instructions.

    With ``wide`` they work on 64 bits, otherwise on 32 bits, and clear the upper half of ``dst``.

    An operation clobbers only the flags and the registers that its docstring names. With ``is_shared``, other threads
    access the memory at the same time: stores become visible in program order.
    """

    address: int
    layout: ContextLayout
    nothing: bytes
    """A NOP as long as the jump of ``jump_code``."""
    fault_place: int
    """Offset in bytes of the instruction pointer in ``ucontext_t``."""

    @property
    def here(self) -> int:
        """The address of the next instruction."""

    def label(self) -> Label:
        """Return a new label, which is not placed yet."""

    def place(self, label: Label) -> None:
        """Define a label as the address of the next instruction."""

    def address_of(self, label: Label) -> int:
        """Return the address of a label, which must have been placed."""

    def raw(self, data: bytes) -> None:
        """Append ``data``, encoded instructions, to the code unchanged."""

    def assemble(self) -> bytes:
        """Return the bytes of the machine code; all labels must have been placed."""

    # Values

    def alu(self, operation: int, dst: VirtualRegister, operand: Operand, *, wide: bool = True) -> None:
        """
        Set ``dst`` to an operation of ``Alu`` on ``dst`` and ``operand``; 32 bits without ``wide``.

        A MemoryWord is allowed for ADD and SUB.
        """

    def add(self, dst: VirtualRegister, src: VirtualRegister, number: int) -> None:
        """Set a register to another one plus a number, which must fit into an immediate of the processor's addition."""

    def read(
        self, dst: VirtualRegister, base: VirtualRegister, place: int, size: int = 8, *, is_shared: bool = False
    ) -> None:
        """
        Load ``size`` bytes, 1, 2, 4 or 8, at ``base`` plus ``place`` into ``dst``; the rest of ``dst`` is cleared.

        ``is_shared``: other threads write the memory, so the load has acquire semantics.
        """

    def write(
        self, base: VirtualRegister, place: int, src: VirtualRegister, size: int = 8, *, is_shared: bool = False
    ) -> None:
        """
        Store the low ``size`` bytes of ``src`` at ``base`` plus ``place``.

        ``is_shared``: other threads read the memory, so the store has release semantics.
        """

    def write_number(
        self, base: VirtualRegister, place: int, value: int, size: int = 8, *, is_shared: bool = False
    ) -> None:
        """Store a number, which for 8 bytes is sign-extended from 32 bits."""

    def atomic(self, operation: int, base: VirtualRegister, place: int, src: VirtualRegister, size: int) -> None:
        """Perform an operation of ``Atomic`` with the operand ``src`` on 4 or 8 bytes at ``base`` plus ``place``."""

    # Control

    def jump(self, target: Label) -> None:
        """Append an unconditional jump to a label."""

    def branch(
        self, condition: int, register: VirtualRegister, operand: Operand, target: Label, *, wide: bool = True
    ) -> None:
        """
        Compare a register with an operand, and jump to ``target`` if the condition of ``Jump`` is met.

        Without ``wide`` only the low 32 bits count. A MemoryWord is allowed for JNE.
        """

    def count_down(self, register: VirtualRegister, step: int, again: Label) -> None:
        """Subtract ``step`` from a register, and jump to ``again`` if the result is not 0."""

    def count_pass(self, place: int, target: Label) -> None:
        """Jump to ``target`` if the word at R10 + ``place`` is 0; subtract 1 from it in either case. Clobbers S1."""

    def call_at(self, address: int) -> None:
        """Call the routine at an address, which must be in reach of a direct call."""

    def jump_far(self, address: int) -> None:
        """Jump to any address. Clobbers R0."""

    def ret(self) -> None:
        """Append a return to the caller of the function."""

    # Operations that depend on the processor

    def read_cpu(self, around: Surroundings) -> None:
        """Load the number of the current CPU to R0; R1 to R5 are unchanged."""

    def read_thread(self, dst: VirtualRegister, place: int) -> None:
        """Load 4 bytes at the thread pointer plus ``place`` into ``dst``."""

    def read_thread_pointer(self, dst: VirtualRegister) -> None:
        """Load the thread pointer into ``dst`` with one instruction, which may fault if the thread has none."""

    def read_counter(self) -> None:
        """Load the processor's counter, on which the clock page is based, to R0. Clobbers R3."""

    def scale(self, base: VirtualRegister, place: int) -> None:
        """Multiply R0 by the signed word at ``base`` plus ``place``, and divide it by 2**32. Clobbers R3."""

    def enter_kernel(self, call: SystemCall) -> None:
        """Make a system call with the arguments R1 to R3; R0 is its result. Clobbers R1, R4 and S2."""

    # Functions

    def open_function(self, kept: Sequence[VirtualRegister], frame: int) -> None:
        """Begin a function that saves ``kept``; if ``frame`` is not 0, allocate as many bytes below R10."""

    def close_function(self, kept: Sequence[VirtualRegister], frame: int) -> None:
        """Free the frame, restore ``kept``, and return; the arguments are those of ``open_function``."""

    # Trampolines

    def touched_by(self, assembled: Assembled, around: Surroundings) -> Touched:
        """
        Return the registers that translated code changes.

        They include R10 if the code has a frame, and R1 if it reads its context.
        """

    def move_stack(self, distance: int) -> None:
        """Add ``distance`` bytes to the stack pointer; flags are unchanged."""

    def save(self, register: int) -> None:
        """Store a general register at its offset in the frame."""

    def restore(self, register: int) -> None:
        """Load a general register from its offset in the frame."""

    def save_flags(self, *, is_whole: bool) -> None:
        """Store the arithmetic flags, or with ``is_whole`` all flags, in the frame. Clobbers the free register."""

    def restore_flags(self, *, is_whole: bool) -> None:
        """Load the flags that ``save_flags`` stored. Clobbers the free register."""

    def save_number(self, place: int, number: int) -> None:
        """Store a number at the offset ``place`` of the frame. May clobber the free register."""

    def save_stack_pointer(self) -> None:
        """Store the probed program's stack pointer in the frame. Clobbers the free register."""

    def branch_if_ended(self, life_mark: int, target: Label) -> None:
        """
        Jump to ``target`` if the life mark at the address ``life_mark`` shows that the tool has ended.

        Clobbers the free register and flags.
        """

    def branch_if_set(self, place: int, target: Label) -> None:
        """Load the word at the frame's offset ``place`` to the free register, and jump to ``target`` unless it is 0."""

    def open_handler(self, frame: int, *, has_context: bool) -> None:
        """With ``has_context``, set R1 to the address of the frame; if ``frame`` is not 0, allocate bytes below R10."""

    def close_handler(self, frame: int) -> None:
        """Free the ``frame`` bytes below R10."""

    def jump_code(self, start: int, end: int) -> bytes:
        """Return the code of a jump from the address ``start`` to ``end``."""


def move(asm: VirtualAssembler, dst: VirtualRegister, operand: VirtualRegister | int, *, wide: bool = True) -> None:
    """Copy a register, or set one to a number of 64 bits."""
    asm.alu(Alu.MOV, dst, operand, wide=wide)
