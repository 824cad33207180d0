"""Watchpoints on I/O ports in a made-up kernel: the instructions that get a probepoint, and those that are left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.errors import SourceError
from dprobes.resolve.kernel_places import ResolvedKernel, kernel_module_of, resolve_kernel
from dprobes.resolve.probepoints import ProbeKind, Space, space_of
from dprobes.rpn.compilation_passes import parse_source
from dprobes.rpn.program_checker import check
from dprobes.rpn.program_text import print_program
from dprobes.source_text import SourceFile
from dprobes.target.kernel.kernel_symbols import Kallsyms
from dprobes.target.kernel.running_kernel import RunningKernel

if TYPE_CHECKING:
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.code.machine_code import DecodedInstruction

BASE = 0xFFFFFFFF9A000000
FUNCTIONS = {
    "_text": "",
    "inb": "ba70000000 ec c3",  # in al, dx
    "cmos": "e670 e471 c3",  # out 0x70, al; in al, 0x71
    "long": "ef 4883ec08 c3",  # out dx, eax; a byte that looks like in al, dx
    "xen": "0f0b78656e 0fa2 c3",  # the prefix of an emulated cpuid
    "noprobe": "ee c3",  # out dx, al
    "_etext": "",
    "data": "eeeeeeee",
}
SIZE = 0x40
PLACES = {name: BASE + SIZE * number for number, name in enumerate(FUNCTIONS)}
SYMBOLS = "".join(f"{address:x} T {name}\n" for name, address in PLACES.items()).encode()
IMAGE = b"".join(bytes.fromhex(code).ljust(SIZE, b"\x90") for code in FUNCTIONS.values())


class Memory:
    """The text of the kernel, in its memory."""

    shift = 0

    def __init__(self, problem: str | None = None) -> None:
        self.problem = problem

    def read(self, address: int, size: int) -> bytes:
        return b"" if self.problem else IMAGE[address - BASE :][:size]

    def problem_at(self, _address: int) -> str | None:
        return self.problem

    def origin_of(self, _address: int) -> str:
        return ""

    def is_patched(self, _instruction: DecodedInstruction) -> bool:
        return False


class Kernel(RunningKernel):
    """The kernel, with one function on its blacklist."""

    blacklist = ((PLACES["noprobe"], PLACES["noprobe"] + SIZE, "noprobe"),)


def parsed(definition: str) -> Program:
    source = SourceFile("ports.rpn", f"name = vmlinux\nmodtype = kernel\n{definition}exit\n")
    diagnostics = Diagnostics()
    program = parse_source(source, diagnostics)
    check(program, architecture("x86_64"), diagnostics)
    diagnostics.raise_if_errors()
    return program


def resolved(definition: str, problem: str | None = None) -> ResolvedKernel:
    program, diagnostics = parsed(definition), Diagnostics()
    module = kernel_module_of(program, Kernel(Kallsyms(SYMBOLS), Memory(problem)))
    found = resolve_kernel(program, module, architecture("x86_64"), diagnostics)
    diagnostics.raise_if_errors()
    return found


def error_of(definition: str, problem: str | None = None) -> tuple[str, str | None]:
    with pytest.raises(SourceError) as caught:
        resolved(definition, problem)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic.message, diagnostic.hint


@pytest.mark.parametrize(
    ("statements", "places"),
    [
        ("address = 0x70 : 0x71\nwatchpoint = io\n", ["inb+0x5", "cmos", "cmos+0x2", "long"]),
        ("address = 0x70\nwatchpoint = io\n", ["inb+0x5", "cmos", "long"]),
        ("address = 0x71\nwatchpoint = in\n", ["inb+0x5", "cmos+0x2"]),
        ("address = 0x3f8 : 0x3ff\nwatchpoint = out\n", ["long"]),
    ],
)
def test_each_instruction_that_may_access_the_ports_is_a_probepoint(statements: str, places: list[str]) -> None:
    found = resolved(statements)
    assert [probe.where for probe in found.in_code] == places
    assert {probe.kind for probe in found.probepoints} == {ProbeKind.BREAKPOINT}


def test_several_watchpoints_share_instructions() -> None:
    found = resolved("address = 0x70\nwatchpoint = in\nexit\naddress = 0x71\nwatchpoint = in\nminor = 1\n")
    assert [(probe.number, probe.where) for probe in found.in_code] == [
        (0, "inb+0x5"), (1, "inb+0x5"), (1, "cmos+0x2"),
    ]  # fmt: skip


def test_an_instruction_that_carries_no_probe_is_left_out_by_name() -> None:
    (left_out,) = resolved("address = 0x80\nwatchpoint = out\n").left_out
    assert (left_out.name, left_out.reason) == (
        "noprobe (out dx, al)",
        "the kernel allows no probe there: the code may be used by kprobes themselves (kprobe blacklist)",
    )


def test_code_that_cannot_be_read_is_an_error() -> None:
    assert error_of("address = 0x80\nwatchpoint = io\n", "/proc/kcore cannot be opened") == (
        "the port instructions of 'vmlinux' cannot be found: /proc/kcore cannot be opened",
        "watching ports needs the kernel's code: /proc/kcore, or the kernel's files of this build",
    )


def test_a_symbol_is_no_port() -> None:
    with pytest.raises(SourceError) as caught:
        parsed("address = jiffies\nwatchpoint = io\n")
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.message, diagnostic.hint) == (
        "'jiffies' is an address in memory, and a port is a number",
        "write its number",
    )


def test_ports_end_at_64_k() -> None:
    with pytest.raises(SourceError, match="ports are numbers up to 0xffff"):
        parsed("address = 0xfff0 : 0x10000\nwatchpoint = out\n")


@pytest.mark.parametrize("access", ["io", "in", "out"])
def test_ports_are_the_kernels_and_not_addresses_of_every_process(access: str) -> None:
    program = parsed(f"address = 0x70\nwatchpoint = {access}\n")
    assert space_of(program) is Space.KERNEL
    assert f"watchpoint = {access}\n" in print_program(program)
