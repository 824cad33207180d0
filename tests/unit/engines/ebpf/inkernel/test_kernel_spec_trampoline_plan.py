"""What trampolines can serve, and what they know; all else is refused where it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from dprobes.arch import architecture
from dprobes.bpf.lower.lowering_request import Placement
from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.inkernel.kernel_spec import plan_kernel
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.errors import TargetError
from dprobes.resolve.kernel_places import kernel_module_of, resolve_kernel
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile
from dprobes.target.btf import Signature
from dprobes.target.kernel.kernel_symbols import Kallsyms
from dprobes.target.kernel.running_kernel import KernelText, LoadedModule, RunningKernel

if TYPE_CHECKING:
    from dprobes.engines.ebpf.inkernel.kernel_spec import PlannedKernel
    from dprobes.engines.ebpf.kernel.kernel_features import KernelTypes

SYMBOLS = b"""ffffffff81000000 T _text
ffffffff81000100 T read_two
ffffffff81000200 T read_none
ffffffff81000300 T print_any
ffffffff81000400 t twice
ffffffff81000500 t twice
ffffffff81000600 T untyped
ffffffff81000700 T untraced
ffffffff81000800 T read_many
ffffffff81000900 T _etext
ffffffffc0000000 t work\t[other]
"""

SIGNATURES = {
    "read_two": Signature(2, has_result=True),
    "read_none": Signature(0, has_result=False),
    "print_any": None,
    "twice": Signature(1, has_result=True),
    "untraced": Signature(1, has_result=True),
    "read_many": Signature(8, has_result=True),
    "work": Signature(1, has_result=True),
}


class Types:
    """The types of a kernel with a few functions."""

    def signature(self, function: str) -> Signature | None:
        if function not in SIGNATURES:
            raise TargetError(f"the kernel's type information has no FUNC '{function}'")
        return SIGNATURES[function]


class Kernel(RunningKernel):
    """A kernel of whose functions ftrace redirects all but one."""

    blacklist = None

    def __init__(self) -> None:
        modules = {"other": LoadedModule("other", 0xFFFFFFFFC0000000, 0x1000)}
        super().__init__(Kallsyms(SYMBOLS), KernelText(None, problem="none"), modules=modules)

    def is_traceable(self, address: int) -> bool:
        return address != 0xFFFFFFFF81000700


WITHOUT_KPROBES = {
    Feature.KPROBE: False,
    Feature.KPROBE_MULTI: False,
    Feature.KPROBE_EVENTS: False,
    Feature.TRAMPOLINE: True,
}


def planned(text: str, header: str = "name = vmlinux\nmodtype = kernel\n") -> tuple[PlannedKernel, list[str]]:
    diagnostics = Diagnostics()
    program = parse_source(SourceFile("p", f"{header}{text}\nexit\n"), diagnostics)
    resolved = resolve_kernel(program, kernel_module_of(program, Kernel()), architecture("x86_64"), diagnostics)
    diagnostics.raise_if_errors()
    features = Features(cast("KernelTypes", Types()), WITHOUT_KPROBES)
    plan = plan_kernel(program, resolved, features, diagnostics)
    lines = (line for each in diagnostics for line in each.render().splitlines())
    return plan, [line for line in lines if "error:" in line]


@pytest.mark.parametrize(
    ("text", "placement", "words"),
    [
        ("offset = read_two\npush r, arg0\npush r, arg1\npush r, pc", Placement.FENTRY, 2),
        ("offset = read_two\nreturn = yes\npush r, retval\npush r, rdi", Placement.FEXIT, 2),
        ("offset = read_none\nreturn = yes\npush u, rsp", Placement.FEXIT, 0),
        ("offset = read_many\npush r, arg5", Placement.FENTRY, 6),
    ],
)
def test_a_function_has_a_trampoline_that_knows_its_arguments(text: str, placement: Placement, words: int) -> None:
    plan, errors = planned(text)
    assert errors == []
    ((site,),) = [sites for _, sites in plan.probes]
    assert (site.placement, site.executed, site.arguments) == (placement, placement.value, words)


UNKNOWN = "a trampoline does not know this register of the kernel"
ONLY = "without kprobes a probe can only be where a function begins, or at its return"
UNTRACED = "ftrace cannot redirect 'untraced' (it is not among available_filter_functions)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("offset = read_two\npush r, arg2", "4:1: error: 'push r, arg2': 'read_two' takes 2 arguments only"),
        ("offset = read_two\npush r, retval", f"4:1: error: 'push r, retval': {UNKNOWN}"),
        ("offset = read_two\nreturn = yes\npush r, r15", f"5:1: error: 'push r, r15': {UNKNOWN}"),
        (
            "offset = read_none\nreturn = yes\npush r, retval",
            "5:1: error: 'push r, retval': 'read_none' returns nothing",
        ),
        ("offset = read_two\ncall p\nexit\nproc p\npush r, rsp\nret\nendproc", f"7:1: error: 'push r, rsp': {UNKNOWN}"),
        ("offset = read_two + 4", f"3:1: error: {ONLY}, not at read_two+0x4"),
        ("offset = 0x400", "3:1: error: several functions are called 'twice': a trampoline would be in any of them"),
        ("offset = print_any", "3:1: error: a trampoline cannot be in 'print_any': it takes any number of arguments"),
        ("offset = untyped", "3:1: error: the kernel's type information has no FUNC 'untyped'"),
        ("offset = untraced", f"3:1: error: {UNTRACED}"),
    ],
)
def test_what_a_trampoline_cannot_serve_is_refused_where_it_is_written(text: str, said: str) -> None:
    _, errors = planned(text)
    assert errors == [f"p:{said}"]


def test_functions_of_modules_are_refused() -> None:
    _, errors = planned("offset = work", "name = other\nmodtype = kmod\n")
    assert errors == [
        "p:3:1: error: without kprobes only functions of the kernel itself can carry a probe, none of 'other'"
    ]


def test_what_a_pattern_matches_and_no_trampoline_can_serve_is_left_out() -> None:
    plan, errors = planned('offset = "read_*"\npush r, arg1')
    assert errors == []
    assert [probe.where for probe, sites in plan.probes if sites] == ["read_two", "read_many"]
    assert [(left.name, left.reason) for left in plan.left_out] == [
        ("read_none", "'push r, arg1': 'read_none' takes 0 arguments only")
    ]
