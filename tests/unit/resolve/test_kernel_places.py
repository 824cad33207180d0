"""Places in a made-up kernel: what is said of instructions where its memory, its files, or nothing shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.errors import SourceError
from dprobes.resolve.kernel_places import ResolvedKernel, kernel_module_of, resolve_kernel
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile
from dprobes.target.kernel.kernel_files import is_patched_form
from dprobes.target.kernel.kernel_symbols import Kallsyms
from dprobes.target.kernel.running_kernel import KernelText, RunningKernel

if TYPE_CHECKING:
    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.kernel.running_kernel import Text

BASE = 0xFFFFFFFF9A000000
SHIFT = 0x19000000
SYMBOLS = f"{BASE:x} T _text\n{BASE + 0x40:x} T work\n{BASE + 0x80:x} T other\n{BASE + 0x100:x} T _etext\n".encode()

# nopl 0(%rax,%rax,1); push %rbp; mov %rsp,%rbp; call; pop %rbp; ret
CODE = bytes.fromhex("0f1f440000 55 4889e5 e800000000 5d c3")


class FileOf:
    """The text of a kernel by its image, in which calls and what stands for them are patched."""

    shift = SHIFT

    def read(self, address: int, size: int) -> bytes:
        start = address - BASE - 0x40
        return CODE[start : start + size] if 0 <= start < len(CODE) else b""

    def problem_at(self, _address: int) -> str | None:
        return None

    def origin_of(self, _address: int) -> str:
        return "/boot/vmlinuz"

    def is_patched(self, instruction: DecodedInstruction) -> bool:
        return is_patched_form(instruction)


class Memory(FileOf):
    """The text of a kernel that shows its memory."""

    def origin_of(self, _address: int) -> str:
        return ""

    def is_patched(self, _instruction: DecodedInstruction) -> bool:
        return False


def resolved(definition: str, text: Text) -> tuple[ResolvedKernel, list[str]]:
    """Return the places of a program, and what was said."""
    diagnostics = Diagnostics()
    source = SourceFile("kernel.rpn", f"name = vmlinux\nmodtype = kernel\n{definition}\nexit\n")
    program = parse_source(source, diagnostics)
    module = kernel_module_of(program, RunningKernel(Kallsyms(SYMBOLS), text))
    found = resolve_kernel(program, module, architecture("x86_64"), diagnostics)
    diagnostics.raise_if_errors()
    return found, [f"{each.severity.value}: {each.message}" for each in diagnostics]


def error_of(definition: str, text: Text) -> tuple[str, str | None]:
    with pytest.raises(SourceError) as caught:
        resolved(definition, text)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic.message, diagnostic.hint


@pytest.mark.parametrize("text", [FileOf(), Memory()])
def test_an_opcode_is_verified(text: Text) -> None:
    found, said = resolved("offset = work + 5\nopcode = 0x55", text)
    assert ([probe.state for probe in found.probepoints], said) == ([ProbeState.COMPILED], [])


@pytest.mark.parametrize("text", [FileOf(), Memory()])
def test_another_opcode_is_a_mismatch(text: Text) -> None:
    found, said = resolved("offset = work + 5\nopcode = 0x56", text)
    assert [probe.state for probe in found.probepoints] == [ProbeState.MISMATCH]
    assert said == ["warning: MISMATCH: opcode 0x55 (push rbp) is there, not 0x56; not inserted"]


def test_what_is_patched_is_no_mismatch_by_a_file() -> None:
    found, said = resolved("offset = work\nopcode = 0xe8", FileOf())
    assert [probe.state for probe in found.probepoints] == [ProbeState.COMPILED]
    (message,) = said
    assert message == (
        "warning: the opcode is not verified: the kernel patches such code when it runs, and /boot/vmlinuz has "
        "'nop [rax+rax]' there"
    )
    found, _ = resolved("offset = work\nopcode = 0xe8", Memory())
    assert [probe.state for probe in found.probepoints] == [ProbeState.MISMATCH]


@pytest.mark.parametrize("text", [FileOf(), Memory()])
def test_a_place_inside_an_instruction_is_an_error(text: Text) -> None:
    assert error_of("offset = work + 7", text) == (
        "work+0x7 is inside an instruction",
        "instructions start at work+0x6 and work+0x9",
    )


def test_a_place_inside_an_instruction_that_is_patched_is_the_kernels_business() -> None:
    found, said = resolved("offset = work + 11", FileOf())
    assert [probe.instruction.raw for probe in found.probepoints] == [b""]
    (message,) = said
    assert message == (
        "note: only the kernel checks that an instruction starts there: the kernel patches such code when it runs, and "
        "/boot/vmlinuz has 'call 0xffffffff9a00004e' there"
    )
    assert error_of("offset = work + 11", Memory())[0] == "work+0xb is inside an instruction"


def test_a_place_inside_an_instruction_may_be_one_of_the_file_of_a_kernel_that_was_moved_a_little() -> None:
    class Near(Memory):
        shift = 0x40

    assert error_of(f"address = {BASE + 0x47:#x}", Near()) == (
        "work+0x7 is inside an instruction",
        "this kernel runs 0x40 bytes above where it was linked for: write 'offset = other + 0x7'",
    )
    assert error_of("offset = work + 7", Near())[1] == "instructions start at work+0x6 and work+0x9"


def test_the_reason_why_nothing_is_verified_is_said() -> None:
    problem = "/proc/kcore cannot be opened: Operation not permitted"
    _, said = resolved("offset = work + 7\nopcode = 0x55", KernelText(None, problem=problem))
    assert said == [f"warning: the opcode is not verified: {problem}"]


def test_an_address_of_the_file_gets_a_hint() -> None:
    linked = BASE - SHIFT + 0x45
    assert error_of(f"address = {linked:#x}", FileOf()) == (
        f"{linked:#x} is not in the code of 'vmlinux'",
        "this kernel runs 0x19000000 bytes above where it was linked for: write 'offset = work + 0x5'",
    )
    assert error_of(f"address = {BASE - 0x5000:#x}", FileOf()) == (
        f"{BASE - 0x5000:#x} is not in the code of 'vmlinux'",
        None,
    )
