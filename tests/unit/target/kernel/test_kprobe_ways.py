"""How the kernel comes to kprobes, in made-up functions; those of kernels are in ``tests/kernel``."""

from __future__ import annotations

from dprobes.target.kernel.kernel_symbols import Kallsyms, KernelSymbol
from dprobes.target.kernel.kprobe_ways import KprobeWay, KprobeWays
from dprobes.target.kernel.running_kernel import KernelText, RunningKernel

BASE = 0xFFFFFFFF81000000
THUNK = b"%x T __x86_indirect_thunk_rax\n" % (BASE + 0x1000)

FTRACE, JUMP, JUMP_SINCE, EMULATED, MOVED, MOVED_SINCE, STEPPED = KprobeWay


class Kernel(RunningKernel):
    """A kernel with one function, which ftrace may redirect."""

    blacklist = None

    def __init__(self, code: bytes, *, is_traced: bool = True, symbols: bytes = b"") -> None:
        size = len(code)
        lines = b"%x T _text\n%x T work\n%x T _etext\n" % (BASE - 16, BASE, BASE + size)
        super().__init__(Kallsyms(lines + symbols), Text(code))
        self._is_traced = is_traced

    def is_traceable(self, address: int) -> bool:
        return self._is_traced and address == BASE


class Text(KernelText):
    """The code, and nothing else."""

    def __init__(self, code: bytes) -> None:
        super().__init__(None, problem="no memory")
        self._code = code

    def read(self, address: int, size: int) -> bytes:
        return self._code[address - BASE : address - BASE + size] if address >= BASE else b""


def ways(code: str, *, optimizes: bool = True, is_traced: bool = True, symbols: bytes = THUNK) -> list[KprobeWay]:
    kernel = Kernel(bytes.fromhex(code), is_traced=is_traced, symbols=symbols)
    found = KprobeWays(kernel, optimizes=optimizes).ways(KernelSymbol("work", BASE, "T"))
    return [way for _, way in sorted(found.items())]


ENTRY = "0f1f440000"
ENDBR = "f30f1efa"
PUSH, MOV, ADD, RET = "55", "4889e5", "4883c001", "c3"


def test_the_place_of_ftrace_and_the_landing_pad_before_it() -> None:
    assert ways(ENTRY + MOV + MOV + RET)[0] is FTRACE
    assert ways(ENDBR + ENTRY + MOV + MOV + RET)[:2] == [FTRACE, FTRACE]
    assert ways(ENTRY + MOV + MOV + RET, is_traced=False)[0] is JUMP


def test_five_bytes_that_nobody_jumps_to_become_a_jump() -> None:
    assert ways(ENTRY + MOV + MOV + RET) == [FTRACE, JUMP, MOVED, EMULATED]
    assert ways(ENTRY + MOV + MOV + RET, optimizes=False) == [FTRACE, MOVED, MOVED, EMULATED]


def test_what_is_jumped_to_does_not() -> None:
    # jmp back to the second mov
    assert ways(ENTRY + MOV + MOV + MOV + "ebf8" + RET)[1:4] == [MOVED, JUMP, MOVED]


def test_the_place_itself_may_be_jumped_to() -> None:
    assert ways(ENTRY + MOV + MOV + MOV + "ebf5" + RET)[1] is JUMP


def test_what_cannot_be_moved_ends_it() -> None:
    assert ways(ENTRY + MOV + "e800000000" + RET)[1:] == [MOVED, EMULATED, EMULATED]


def test_what_only_newer_kernels_move_makes_a_jump_there() -> None:
    # inc gs:[rip]
    assert ways(ENTRY + "65ff0500000000" + MOV + MOV + RET)[1:3] == [JUMP_SINCE, JUMP]


def test_an_indirect_jump_forbids_it_in_code_without_thunks() -> None:
    code = ENTRY + MOV + MOV + "ffe0"
    assert ways(code) == [FTRACE, JUMP, JUMP, EMULATED]
    assert ways(code, symbols=b"") == [FTRACE, MOVED, MOVED, EMULATED]


def test_how_what_is_under_a_breakpoint_is_executed() -> None:
    for code, way in (
        ("e800000000", EMULATED),
        ("7400", EMULATED),
        ("0f8400000000", EMULATED),
        ("9d", EMULATED),
        ("ffd0", EMULATED),
        ("ff10", STEPPED),
        ("f4", STEPPED),
        ("4889e5", MOVED),
        ("0fb6c0", MOVED),
        ("0f01f8", STEPPED),
        ("660f3a0fc008", STEPPED),
        ("2e4889e5", STEPPED),
        ("48d1e0", MOVED_SINCE),
        ("48d1f0", STEPPED),
        ("48f7d8", MOVED_SINCE),
        ("65ff0500000000", MOVED_SINCE),
        ("ff20", MOVED),
    ):
        assert ways(ENTRY + code + RET, optimizes=False)[1] is way, code


def test_code_that_cannot_be_read_has_no_ways() -> None:
    kernel = Kernel(b"")
    assert KprobeWays(kernel, optimizes=True).ways(KernelSymbol("work", BASE, "T")) == {}
