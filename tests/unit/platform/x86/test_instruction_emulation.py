"""What the tracer carries out itself does to registers and stack exactly what this machine's processor does."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.ptrace_calls import Register
from dprobes.platform.x86.instruction_emulation import Action, MemoryMove, emulate, is_emulated, memory_move, plan
from support.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAP_32BIT = 0x40
_PAGE = 4096
_SIZE = 4 * _PAGE
_STACK_MIDDLE = 3 * _PAGE
_USER_CS_64 = 0x33
_HIDDEN_FLAGS = 0x10100  # trap and resume flag: the debugger's

GENERAL = tuple(
    Register[name]
    for name in "RAX RBX RCX RDX RSI RDI RBP R8 R9 R10 R11 R12 R13 R14 R15".split()  # noqa: SIM905
)
LOW = GENERAL[:7]


class Processor:
    """Let a child of ours execute single instructions in a page of its own, in 64-bit or 32-bit mode."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_32BIT
        self.start: int = libc.mmap(None, _SIZE, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC, flags, -1, 0)
        self.stack = self.start + _STACK_MIDDLE
        self.pid = os.fork()
        if self.pid == 0:
            while True:
                signal.pause()
        ptrace_calls.seize(self.pid)
        ptrace_calls.interrupt(self.pid)
        os.waitpid(self.pid, ptrace_calls.WALL)
        self.registers = ptrace_calls.Registers()
        ptrace_calls.get_registers(self.pid, self.registers)
        self.memory = os.open(f"/proc/{self.pid}/mem", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.memory)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, ptrace_calls.WALL)

    def execute(self, code: bytes, registers: ctypes.Array[ctypes.c_ulong]) -> None:
        """Execute one instruction at the start of the page; change ``registers`` to what they are then."""
        os.pwrite(self.memory, code, self.start)
        ptrace_calls.set_registers(self.pid, registers)
        ptrace_calls.single_step(self.pid)
        status = os.waitpid(self.pid, ptrace_calls.WALL)[1]
        assert os.WIFSTOPPED(status)
        assert os.WSTOPSIG(status) == signal.SIGTRAP
        ptrace_calls.get_registers(self.pid, registers)

    # The stack, as the emulation sees it

    def read_word(self, address: int, size: int) -> int:
        return int.from_bytes(os.pread(self.memory, size, address), "little")

    def write_word(self, address: int, size: int, value: int) -> None:
        os.pwrite(self.memory, (value & ((1 << 8 * size) - 1)).to_bytes(size, "little"), address)

    def fill_stack(self, content: bytes) -> None:
        os.pwrite(self.memory, content, self.stack - len(content) // 2)

    def read_stack(self, size: int) -> bytes:
        return os.pread(self.memory, size, self.stack - size // 2)


@pytest.fixture(scope="module")
def processor() -> Iterator[Processor]:
    made = Processor()
    yield made
    made.close()


def moves(word_size: int) -> st.SearchStrategy[bytes]:
    rex = st.sampled_from([b"", *(bytes([n]) for n in range(0x40, 0x50))]) if word_size == 8 else st.just(b"")
    body = st.tuples(st.sampled_from([0x89, 0x8B]), st.integers(0xC0, 0xFF)).map(bytes)
    return st.tuples(rex, body).map(b"".join)


def pushes(word_size: int) -> st.SearchStrategy[bytes]:
    rex = st.sampled_from([b"", b"\x40", b"\x41", b"\x48", b"\x49"]) if word_size == 8 else st.just(b"")
    return st.tuples(rex, st.integers(0x50, 0x5F).map(lambda n: bytes([n]))).map(b"".join)


NOPS = [
    "90", "6690", "0f1f00", "0f1f4000", "0f1f440000", "660f1f440000", "0f1f8000000000", "0f1f840000000000",
    "660f1f840000000000", "662e0f1f840000000000", "f30f1efa", "f30f1efb",
]  # fmt: skip
RETURNS = ["c3", "c20000", "c20800", "c21000", "c2f001", "f3c3", "f2c3", "f2c20800"]


def numbers_of(size: int) -> st.SearchStrategy[bytes]:
    """Return little-endian numbers of ``size`` bytes, the extreme ones often."""
    edges = [bytes(size), b"\xff" * size, b"\xff" * (size - 1) + b"\x7f", bytes(size - 1) + b"\x80"]
    return st.binary(min_size=size, max_size=size) | st.sampled_from(edges)


def joined(*parts: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.tuples(*parts).map(b"".join)


def addresses(word_size: int) -> st.SearchStrategy[bytes]:
    """Return the forms of lea: every ModRM byte that names memory, with the SIB byte and displacement it calls for."""

    @st.composite
    def form(draw: st.DrawFn) -> bytes:
        rex = draw(st.sampled_from([b"", *(bytes([n]) for n in range(0x40, 0x50))])) if word_size == 8 else b""
        modrm = draw(st.integers(0, 0xBF))
        mode, low = modrm >> 6, modrm & 7
        sib = bytes([draw(st.integers(0, 0xFF))]) if low == 4 else b""
        wide = mode == 2 or (mode == 0 and (low == 5 or (low == 4 and sib[0] & 7 == 5)))
        displacement = draw(numbers_of(4 if wide else 1 if mode == 1 else 0)) if wide or mode == 1 else b""
        return rex + b"\x8d" + bytes([modrm]) + sib + displacement

    return form()


def adjustments(word_size: int) -> st.SearchStrategy[bytes]:
    rex = st.just(b"\x48" if word_size == 8 else b"")
    modrm = st.sampled_from([b"\xc4", b"\xec"])
    return joined(rex, st.just(b"\x83"), modrm, numbers_of(1)) | joined(rex, st.just(b"\x81"), modrm, numbers_of(4))


def jumps() -> st.SearchStrategy[bytes]:
    short = st.sampled_from([b"\xeb", *(bytes([n]) for n in range(0x70, 0x80))])
    near = st.sampled_from([b"\xe8", b"\xe9", *(bytes([0x0F, n]) for n in range(0x80, 0x90))])
    return joined(short, numbers_of(1)) | joined(near, numbers_of(4))


def loops(word_size: int) -> st.SearchStrategy[bytes]:
    # The counter with half of the word's width; 16-bit jumps would leave the page, so no 66.
    return joined(st.sampled_from([b"", b"\x67"]), st.sampled_from([b"\xe0", b"\xe1", b"\xe2", b"\xe3"]), numbers_of(1))


def indirect(word_size: int) -> st.SearchStrategy[bytes]:
    rex = st.sampled_from([b"", b"\x41", b"\x48"]) if word_size == 8 else st.just(b"")
    return joined(
        rex, st.just(b"\xff"), st.sampled_from([bytes([n]) for n in (*range(0xD0, 0xD8), *range(0xE0, 0xE8))])
    )


def instructions(word_size: int) -> st.SearchStrategy[bytes]:
    fixed = st.sampled_from([bytes.fromhex(text) for text in [*NOPS, *RETURNS, "c9"]])
    return st.one_of(
        moves(word_size),
        pushes(word_size),
        addresses(word_size),
        adjustments(word_size),
        jumps(),
        loops(word_size),
        indirect(word_size),
        fixed,
    )


def values(word_size: int) -> st.SearchStrategy[int]:
    top = (1 << 8 * word_size) - 1
    return st.one_of(st.integers(0, top), st.integers(0, 2), st.sampled_from([0, 1, top, top >> 1, (top >> 1) + 1]))


@pytest.mark.parametrize("word_size", [8, 4])
def test_the_emulation_agrees_with_the_processor(processor: Processor, word_size: int) -> None:
    names = GENERAL if word_size == 8 else LOW

    @settings(max_examples=rounds(2000, 200), deadline=None, derandomize=True)
    @given(
        code=instructions(word_size),
        numbers=st.lists(values(word_size), min_size=len(names), max_size=len(names)),
        content=st.binary(min_size=32, max_size=32),
        flags=st.integers(0, 0xFFF),
    )
    def compare(code: bytes, numbers: list[int], content: bytes, flags: int) -> None:
        before = ptrace_calls.Registers(*processor.registers)
        for name, number in zip(names, numbers, strict=True):
            before[name] = number
        before[Register.RIP] = processor.start
        before[Register.RSP] = processor.stack
        before[Register.CS] = _USER_CS_64 if word_size == 8 else ptrace_calls.USER_CS_32
        before[Register.ORIG_RAX] = (1 << 64) - 1
        before[Register.EFLAGS] = 0x202 | flags & 0x8D5  # carry, parity, adjust, zero, sign, overflow
        if code == b"\xc9":
            before[Register.RBP] = processor.stack - 8
        # Something to return to.
        content = content[:16] + (processor.start + 64).to_bytes(word_size, "little") + content[16 + word_size :]

        emulation = plan(code, word_size)
        assert is_emulated(emulation), code.hex()
        if emulation[0] in (Action.JUMP_REGISTER, Action.CALL_REGISTER) and emulation[2] != Register.RSP:
            before[emulation[2]] = processor.start + 64
        processor.fill_stack(content)
        emulated = ptrace_calls.Registers(*before)
        assert emulate(emulation, emulated, processor)
        stack_emulated = processor.read_stack(32)

        processor.fill_stack(content)
        executed = ptrace_calls.Registers(*before)
        processor.execute(code, executed)
        stack_executed = processor.read_stack(32)

        assert shown(emulated, word_size) == shown(executed, word_size), code.hex()
        assert stack_emulated == stack_executed, code.hex()

    compare()


def shown(registers: ctypes.Array[ctypes.c_ulong], word_size: int) -> dict[str, int]:
    names = (*(GENERAL if word_size == 8 else LOW), Register.RIP, Register.RSP, Register.CS)
    return {r.name: registers[r] for r in names} | {"EFLAGS": registers[Register.EFLAGS] & ~_HIDDEN_FLAGS}


NOT_EMULATED = [
    ("f390", 8, Action.STEP),  # pause
    ("4190", 8, Action.STEP),  # xchg r8, rax
    ("4990", 8, Action.STEP),
    ("6650", 8, Action.STEP),  # push ax
    ("6689c8", 8, Action.STEP),  # mov ax, cx
    ("66e200", 8, Action.STEP),  # a 16-bit loop
    ("66c3", 8, Action.STEP),  # a 16-bit return
    ("8900", 8, Action.STEP),  # a move to memory
    ("678d00", 8, Action.STEP),  # lea with a 32-bit address
    ("668d00", 8, Action.STEP),  # lea ax, [rax]
    ("83c408", 8, Action.STEP),  # add esp, 8
    ("4883c008", 8, Action.STEP),  # add rax, 8
    ("4883e4f0", 8, Action.STEP),  # and rsp, -16
    ("3e7400", 8, Action.STEP),  # a branch with a hint
    ("f2eb00", 8, Action.STEP),  # bnd jmp
    ("ff20", 8, Action.STEP),  # jmp [rax]
    ("ffd8", 8, Action.STEP),  # no instruction: a far call to a register
    ("40", 4, Action.STEP),  # inc eax
    ("0f05", 8, Action.SYSTEM_CALL),
    ("cd80", 4, Action.SYSTEM_CALL),
    ("f3aa", 8, Action.REPEAT),
    ("f348a5", 8, Action.REPEAT),
    ("f2ae", 4, Action.REPEAT),
    ("aa", 8, Action.STEP),
]


@pytest.mark.parametrize(("code", "word_size", "action"), NOT_EMULATED)
def test_other_instructions_are_left_to_the_processor(code: str, word_size: int, action: Action) -> None:
    emulation = plan(bytes.fromhex(code), word_size)
    assert emulation[0] is action
    assert not emulate(emulation, ptrace_calls.Registers(), NoMemory())


class NoMemory:
    def read_word(self, address: int, size: int) -> int:
        raise OSError

    def write_word(self, address: int, size: int, value: int) -> None:
        raise OSError


@pytest.mark.parametrize("code", ["55", "5d", "c9", "c3", "c20800", "e800000000"])
def test_unreachable_memory_changes_nothing_and_is_left_to_the_processor(code: str) -> None:
    registers = ptrace_calls.Registers(*range(27))
    before: list[Any] = list(registers)
    assert not emulate(plan(bytes.fromhex(code), 8), registers, NoMemory())
    assert list(registers) == before


def test_a_return_to_an_impossible_address_is_left_to_the_processor() -> None:
    class Memory(NoMemory):
        def read_word(self, address: int, size: int) -> int:
            return 1 << 60

    assert not emulate(plan(b"\xc3", 8), ptrace_calls.Registers(), Memory())


@pytest.mark.parametrize(("code", "word_size"), [("9c", 8), ("669c", 8), ("9c", 4), ("669c", 4)])
@pytest.mark.parametrize("flags", [0x202, 0x246, 0xA97, 0x602])
def test_flags_are_pushed_as_without_a_step(processor: Processor, code: str, word_size: int, flags: int) -> None:
    raw = bytes.fromhex(code)
    before = ptrace_calls.Registers(*processor.registers)
    before[Register.RIP] = processor.start
    before[Register.RSP] = processor.stack
    before[Register.CS] = _USER_CS_64 if word_size == 8 else ptrace_calls.USER_CS_32
    before[Register.ORIG_RAX] = (1 << 64) - 1
    before[Register.EFLAGS] = flags
    processor.fill_stack(bytes(32))
    emulated = ptrace_calls.Registers(*before)
    assert emulate(plan(raw, word_size), emulated, processor)
    pushed = processor.read_stack(32)

    processor.fill_stack(bytes(32))
    executed = ptrace_calls.Registers(*before)
    processor.execute(raw, executed)
    # A step pushes the trap flag that makes it one.
    top = executed[Register.RSP] + 1
    processor.write_word(top, 1, processor.read_word(top, 1) & ~0x01)
    assert shown(emulated, word_size) == shown(executed, word_size)
    assert pushed == processor.read_stack(32)
    assert flags.to_bytes(2, "little") in pushed


@pytest.mark.parametrize(
    ("code", "word_size", "expected"),
    [
        ("488b05b44c0a00", 8, MemoryMove(Register.RAX, True, 8, Register.RIP, -1, 1, 0xA4CBB)),  # mov rax, [rip+...]
        ("4889442408", 8, MemoryMove(Register.RAX, False, 8, Register.RSP, -1, 1, 8)),  # mov [rsp+8], rax
        ("8b4508", 4, MemoryMove(Register.RAX, True, 4, Register.RBP, -1, 1, 8)),  # mov eax, [ebp+8]
        (
            "458b4c8af0",
            8,
            MemoryMove(Register.R9, True, 4, Register.R10, Register.RCX, 4, -16),
        ),  # mov r9d, [r10+rcx*4-16]
        ("8b0d00200000", 4, MemoryMove(Register.RCX, True, 4, -1, -1, 1, 0x2000)),  # mov ecx, [0x2000]
        ("4889e5", 8, None),  # mov rbp, rsp
        ("65488b0425280000", 8, None),  # of a segment with a base
        ("668b4508", 4, None),
        ("8a4508", 4, None),
        ("488d442408", 8, None),  # lea
        ("48", 8, None),
    ],
)
def test_a_move_from_or_to_memory(code: str, word_size: int, expected: MemoryMove | None) -> None:
    assert memory_move(bytes.fromhex(code), word_size) == expected
