"""How probepoints in the kernel are served; what it does not let a handler do, or takes too long, is refused."""

from __future__ import annotations

import pytest

from dprobes.arch import architecture
from dprobes.bpf.lower.lowering_request import Placement
from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.inkernel.kernel_spec import SINGLE_KPROBES_MAX, plan_kernel, refuse_reading
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.resolve.kernel_places import kernel_module_of, resolve_kernel
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile
from dprobes.target.kernel.kernel_symbols import Kallsyms
from dprobes.target.kernel.running_kernel import KernelText, LoadedModule, RunningKernel

COPIED = b"""0000000000000000 A __per_cpu_start
000000000001f0a8 A this_cpu_off
0000000000037000 A __per_cpu_end
ffffffff81000000 T _text
ffffffff81000100 T vfs_read
ffffffff82000000 D __per_cpu_offset
ffffffff82001000 D jiffies
"""
"""Symbols of a kernel before 6.15."""

HEADER = "name = vmlinux\nmodtype = kernel\noffset = vfs_read\n"


@pytest.mark.parametrize(
    ("handler", "line"),
    [
        ("push r, esp\npush mem, u64\nlog 1\nexit\n", "5:1"),
        ("push 9\npush r, arg1\nlog str\nexit\n", "6:1"),
        ("push this_cpu_off\nlog 1\nexit\n", "4:1"),
        ("push r, esp\nlog 1\nexit\n", None),
    ],
)
def test_reading_memory_is_refused_where_no_program_may(handler: str, line: str | None) -> None:
    kernel = RunningKernel(Kallsyms(COPIED), KernelText(None, problem="none"))
    program = parse_source(SourceFile("p", HEADER + handler), Diagnostics())
    resolved = resolve_kernel(program, kernel_module_of(program, kernel), architecture("x86_64"), Diagnostics())
    diagnostics = Diagnostics()
    refuse_reading(program, resolved, Features(overrides={Feature.READ_KERNEL: False}), diagnostics)
    said = [each.render().splitlines()[0] for each in diagnostics]
    expected = (
        f"p:{line}: error: the ebpf engine cannot read the kernel's memory here: "
        "bpf_probe_read_kernel (kernel lockdown forbids it): switched off"
    )
    assert said == ([] if line is None else [expected])
    refuse_reading(program, resolved, Features(overrides={Feature.READ_KERNEL: True}), diagnostics)
    assert len(list(diagnostics)) == len(said)


class TraceableKernel(RunningKernel):
    """A kernel with many functions, all of which ftrace can redirect, or nobody knows."""

    blacklist = None

    def __init__(self, *, is_known: bool = True) -> None:
        symbols = b"".join(b"%x T work_%d\n" % (0xFFFFFFFF81000000 + 16 * n, n) for n in range(SINGLE_KPROBES_MAX + 1))
        super().__init__(Kallsyms(b"ffffffff81000000 T _text\n" + symbols), KernelText(None, problem="none"))
        self._is_known = is_known

    def is_traceable(self, _address: int) -> bool | None:
        return True if self._is_known else None


class Text(KernelText):
    """Code without landing pads."""

    def read(self, _address: int, size: int) -> bytes:
        return b"\x90" * size


class WaitingModule(RunningKernel):
    """A module with many functions, which is not loaded."""

    blacklist = None
    is_loaded = False

    def __init__(self) -> None:
        lines = (b"%x t work_%d\t[work]\n" % (0xFFFFFFFFC0000000 + 16 * n, n) for n in range(SINGLE_KPROBES_MAX + 1))
        symbols = Kallsyms(b"ffffffff81000000 T _text\n" + b"".join(lines))
        modules = {"work": LoadedModule("work", 0xFFFFFFFFC0000000, 0x2000)}
        super().__init__(symbols, Text(None, problem="none"), modules=modules)


TOO_MANY = "257 functions are too many for kprobes, which are attached and removed one by one: "
KERNEL = "name = vmlinux\nmodtype = kernel\n"


def planned(
    definition: str, kernel: RunningKernel, features: Features, header: str = KERNEL
) -> tuple[set[Placement], list[str]]:
    """Return how the probepoints of a definition are served, and the errors and hints."""
    diagnostics = Diagnostics()
    program = parse_source(SourceFile("p", f"{header}{definition}\nexit\n"), diagnostics)
    resolved = resolve_kernel(program, kernel_module_of(program, kernel), architecture("x86_64"), diagnostics)
    diagnostics.raise_if_errors()
    plan = plan_kernel(program, resolved, features, diagnostics)
    errors = [
        line for each in diagnostics for line in each.render().splitlines() if "error:" in line or "hint:" in line
    ]
    return {site.placement for _, sites in plan.probes for site in sites}, errors


MANY = Features(overrides={Feature.KPROBE: True, Feature.KPROBE_MULTI: True})
FEW = Features(overrides={Feature.KPROBE: True, Feature.KPROBE_MULTI: False})


@pytest.mark.parametrize("is_known", [True, False])
def test_a_pattern_is_served_by_ftrace(is_known: bool) -> None:
    kernel = TraceableKernel(is_known=is_known)
    assert planned('offset = "work_*"', kernel, MANY) == ({Placement.ENTRY}, [])
    assert planned('offset = "work_*"\nreturn = yes', kernel, MANY) == ({Placement.ENTRY_RETURN}, [])


def test_the_return_of_a_single_function_has_a_kprobe() -> None:
    assert planned("offset = work_1\nreturn = yes", TraceableKernel(), MANY) == ({Placement.KRETPROBE}, [])


def test_few_functions_of_a_pattern_get_kprobes_where_there_is_nothing_better() -> None:
    kernel = TraceableKernel()
    assert planned('offset = "work_1*"', kernel, FEW) == ({Placement.KPROBE}, [])
    assert planned('offset = "work_1*"\npush r, r15', kernel, MANY) == ({Placement.KPROBE}, [])


def test_too_many_kprobes_are_refused() -> None:
    kernel = TraceableKernel()
    _, said = planned('offset = "work_*"', kernel, FEW)
    assert said == [
        f"p:3:1: error: {TOO_MANY}this kernel has no kprobe_multi links",
        "hint: use a pattern of at most 256 functions, or a kernel with CONFIG_FPROBE (Linux 5.18)",
    ]
    _, said = planned('offset = "work_*"\npush r, r15', kernel, MANY)
    reason = "the handler reads registers that ftrace does not save, or ftrace is not known to reach them"
    assert said == [
        f"p:3:1: error: {TOO_MANY}{reason}",
        "hint: let it read those of arguments and the return value only (push r, arg0)",
    ]


def test_too_many_kprobes_in_a_module_that_is_not_loaded_are_refused() -> None:
    features = Features(overrides=dict.fromkeys((Feature.KPROBE, Feature.KPROBE_MULTI, Feature.KPROBE_EVENTS), True))
    _, said = planned('offset = "work_*"', WaitingModule(), features, "name = work\nmodtype = kmod\n")
    assert said == [
        f"p:3:1: error: {TOO_MANY}the module 'work' is not loaded",
        "hint: load the module first, or use a pattern of at most 256 functions",
    ]


@pytest.mark.parametrize(
    "symbols",
    [COPIED, COPIED.replace(b"00000000000", b"ffffffff830").replace(b" A ", b" D ")],
    ids=["from 0", "in the image"],
)
def test_which_variables_each_cpu_has_a_copy_of(symbols: bytes) -> None:
    kernel = RunningKernel(Kallsyms(symbols), KernelText(None, problem="none"))
    program = parse_source(SourceFile("p", HEADER + "push this_cpu_off\npush jiffies\nlog 2\nexit\n"), Diagnostics())
    resolved = resolve_kernel(program, kernel_module_of(program, kernel), architecture("x86_64"), Diagnostics())
    offsets, copied = resolved.per_cpu
    assert offsets == 0xFFFFFFFF82000000
    assert copied == {dict(resolved.symbols)["this_cpu_off"]}


def test_a_variable_of_which_each_cpu_has_a_copy_cannot_be_watched_by_its_name() -> None:
    kernel = RunningKernel(Kallsyms(COPIED), KernelText(None, problem="none"))
    source = "name = vmlinux\nmodtype = kernel\naddress = this_cpu_off : this_cpu_off + 7\nwatchpoint = w\nexit\n"
    program = parse_source(SourceFile("p", source), Diagnostics())
    diagnostics = Diagnostics()
    resolve_kernel(program, kernel_module_of(program, kernel), architecture("x86_64"), diagnostics)
    (said, *_) = diagnostics
    assert said.message == "each CPU has a copy of 'this_cpu_off' at another address"
    assert said.hint == "'push this_cpu_off' gives the address of the copy of the CPU that was hit"
