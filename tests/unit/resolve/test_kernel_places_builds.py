"""A program that is compiled for kernels has, in each of them, the places that its symbols gave elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.cli.output.program_listing import ppdf_listing
from dprobes.diagnostics import Diagnostics, Severity
from dprobes.errors import SourceError, TargetError
from dprobes.ppdf.ppdf_file import decode, encode
from dprobes.resolve import kernel_places
from dprobes.resolve.kernel_places import KernelModule, kernel_here, resolve_kernel
from dprobes.resolve.local_module import resolve_here
from dprobes.resolve.portable_program import build_ppdf
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile
from dprobes.target.carried_symbols import CarriedSymbols
from dprobes.target.kernel.kernel_image import KernelFile
from dprobes.target.kernel.kernel_symbols import Kallsyms
from dprobes.target.kernel.running_kernel import KernelText, RunningKernel
from unit.target.conftest import Toolbox
from unit.target.kernel.test_kernel_image_file import KERNEL, LINKED, START

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.ppdf.ppdf_model import Ppdf
    from dprobes.rpn.rpn_program import Program

SLIDE = 0x1F400000
TEXT = 0xFFFFFFFF81000000
PROGRAM = """
name = vmlinux
modtype = kernel
offset = vfs_read
minor = 1
    push jiffies
    push per_cpu_count
    log 2
    exit
offset = vfs_read + 4
minor = 2
    exit
offset = "inn*"
minor = 3
    exit
address = jiffies : jiffies + 3
watchpoint = w
minor = 4
    exit
"""


def parsed(text: str) -> Program:
    return parse_source(SourceFile("kernel.rpn", text), Diagnostics())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two builds of a kernel, in the second of which everything lies elsewhere."""
    tools = Toolbox(tmp_path_factory.mktemp("kernels"))
    first = tools.build("vmlinux-1", {"first.c": KERNEL}, *LINKED, START)
    text = "int more(int x) { return x + 5; }\n" + KERNEL
    second = tools.build("vmlinux-2", {"second.c": text}, *LINKED[:-1], "-Wl,--build-id=0x2222", START)
    return first, second


def built(*files: Path, text: str = PROGRAM) -> Ppdf:
    ppdf = build_ppdf(parsed(text), files, Diagnostics())
    assert decode(encode(ppdf)) == ppdf
    return ppdf


def running(slide: int = SLIDE) -> RunningKernel:
    shown = Kallsyms(f"{TEXT + slide:x} T _text\n".encode())
    return RunningKernel(shown, KernelText(None, problem="memory cannot be read"))


@pytest.mark.parametrize("which", [0, 1])
def test_each_kernel_has_its_own_places(
    kernels: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    ppdf = built(*kernels)
    file = KernelFile(kernels[which], "")
    monkeypatch.setattr(kernel_places, "running_build_id", lambda _: file.identity)
    diagnostics = Diagnostics()
    kernel = kernel_here(ppdf.program, ppdf.kernels, running(), diagnostics)
    x86 = architecture("x86_64")
    there = resolve_kernel(ppdf.program, KernelModule(file.kernel(), ""), x86, Diagnostics())
    here = resolve_kernel(ppdf.program, KernelModule(kernel, ""), x86, diagnostics)
    assert list(diagnostics) == []
    assert [probe.where for probe in here.in_code] == ["vfs_read", "vfs_read+0x4", "inner"]
    for ours, its in zip(here.in_code, there.in_code, strict=True):
        assert (ours.where, ours.offset, ours.state) == (its.where, its.offset, its.state)
        assert ours.instruction.raw == its.instruction.raw
        assert ours.instruction.address == its.instruction.address + SLIDE
    assert dict(here.symbols) == {"jiffies": dict(there.symbols)["jiffies"] + SLIDE, "per_cpu_count": 0x1F000}
    assert [probe.memory.address - SLIDE for probe in here.events] == [probe.memory.address for probe in there.events]
    assert len({kernel.symbols for kernel in ppdf.kernels}) == 2


def test_an_opcode_that_the_kernel_may_have_patched_is_not_verified_by_the_file_where_memory_is_not_read(
    kernels: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ppdf = built(kernels[0], text=PROGRAM.replace("minor = 2", "opcode = 0xf4\nminor = 2"))
    monkeypatch.setattr(kernel_places, "running_build_id", lambda _: "1234abcd")
    diagnostics = Diagnostics()
    kernel = kernel_here(ppdf.program, ppdf.kernels, running(), diagnostics)
    resolve_kernel(ppdf.program, KernelModule(kernel, ""), architecture("x86_64"), diagnostics)
    (said,) = diagnostics
    reason = "the kernel patches such code when it runs, and the file that was built for has 'call "
    assert said.message.startswith(f"the opcode is not verified: {reason}")


def test_another_kernel_finds_the_places_by_their_names(
    kernels: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ppdf = built(kernels[0])
    monkeypatch.setattr(kernel_places, "running_build_id", lambda _: "5555")
    diagnostics, own = Diagnostics(), running()
    assert kernel_here(ppdf.program, ppdf.kernels, own, diagnostics) is own
    (said,) = diagnostics
    assert said.severity is Severity.NOTE
    assert said.message == (
        f"this is build 5555 of the kernel, and the program was built for 1234abcd ('{kernels[0]}'): places are found "
        "by their names"
    )


def test_a_number_is_an_error_in_another_kernel(kernels: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ppdf = built(kernels[0], text="name = vmlinux\nmodtype = kernel\noffset = 1\nexit\n")
    monkeypatch.setattr(kernel_places, "running_build_id", lambda _: "5555")
    monkeypatch.setattr("dprobes.target.kernel.running_kernel.RunningKernel", running)
    with pytest.raises(SourceError) as caught:
        resolve_here(ppdf.program, Diagnostics(), symbols=CarriedSymbols((), "a.ppdf", kernels=ppdf.kernels))
    (error,) = (each for each in caught.value.diagnostics if each.severity is Severity.ERROR)
    assert error.message == "an offset without a symbol is that of one build, and this is another one"
    assert error.hint == "build the program for this kernel too (dprobes build --for FILE)"


def test_what_a_kernel_lacks_is_an_error_where_the_program_is_compiled(kernels: tuple[Path, Path]) -> None:
    text = "name = vmlinux\nmodtype = kernel\noffset = more\nexit\n"
    assert len(built(kernels[1], text=text).kernels) == 1
    with pytest.raises(SourceError) as caught:
        built(*kernels, text=text)
    assert [each.message for each in caught.value.diagnostics] == ["the kernel has no symbol 'more'"]
    with pytest.raises(TargetError, match="is a kernel, and the program is for the module 'dummy'"):
        built(kernels[0], text="name = dummy\nmodtype = kmod\noffset = more\nexit\n")


def test_a_listing_shows_what_is_carried(kernels: tuple[Path, Path]) -> None:
    lines = list(ppdf_listing(built(kernels[0]), None, as_bpf=False))
    assert f"// build 1234abcd of the kernel, from '{kernels[0]}'" in lines
    assert f"//   {TEXT:#x} T _text" in lines
    assert any(line.startswith("// build 1234abcd: vfs_read+0x4 is at 0xffffffff8100") for line in lines)
    none = list(ppdf_listing(built(), None, as_bpf=False))
    assert "// for any build of the kernel: its places are found by name" in none
