"""Which functions of the kernel may be skipped, and what is said of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.bpf.lower.lowering_request import Placement
from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.inkernel.kernel_spec import refuse_skips
from dprobes.engines.ebpf.kernel import bpf_links
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.resolve.kernel_places import kernel_module_of, resolve_kernel
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile
from dprobes.target.kernel.kernel_symbols import Kallsyms
from dprobes.target.kernel.running_kernel import KernelText, RunningKernel

if TYPE_CHECKING:
    from dprobes.engines.ebpf.kernel.kernel_features import KernelTypes

SYMBOLS = b"""ffffffff81000000 T _text
ffffffff81000100 T may_fail
ffffffff81000200 T security_work
ffffffff81000300 T must_work
ffffffff81000400 T _etext
"""
OVERRIDES = {Feature.KPROBE: True, Feature.OVERRIDE_RETURN: True, Feature.MODIFY_RETURN: False}
DECIDES = {Feature.KPROBE: True, Feature.OVERRIDE_RETURN: False, Feature.MODIFY_RETURN: True}
BOTH = OVERRIDES | DECIDES | {Feature.OVERRIDE_RETURN: True}


class Kernel(RunningKernel):
    """A kernel whose list of functions that may fail has one, or cannot be read."""

    blacklist = None

    def __init__(self, *, is_listed: bool = True) -> None:
        super().__init__(Kallsyms(SYMBOLS), KernelText(None, problem="none"))
        self._is_listed = is_listed

    @property
    def skippable(self) -> frozenset[str] | None:
        return frozenset({"may_fail"}) if self._is_listed else None


@pytest.fixture(autouse=True)
def _trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel take programs that decide for security modules, and no others."""

    def is_refused(placement: Placement, function: str, _types: KernelTypes) -> bool:
        assert placement is Placement.MODIFY_RETURN
        return not function.startswith("security_")

    monkeypatch.setattr(bpf_links, "is_refused", is_refused)


def said(offset: str, features: dict[Feature, bool], *, is_listed: bool = True) -> list[str]:
    diagnostics, found = Diagnostics(), Diagnostics()
    source = f"name = vmlinux\nmodtype = kernel\noffset = {offset}\npush 1\nskip\n"
    program = parse_source(SourceFile("p", source), diagnostics)
    kernel = Kernel(is_listed=is_listed)
    resolved = resolve_kernel(program, kernel_module_of(program, kernel), architecture("x86_64"), diagnostics)
    diagnostics.raise_if_errors()
    refuse_skips(program, resolved, Features(overrides=features), found)
    lines = (line for each in found for line in each.render().splitlines())
    return [line for line in lines if not line.startswith(" ")]


WITH_0 = "p:5:1: note: this kernel lets 'security_work' be skipped with other values than 0: with 0 it is executed"
LIST = "/sys/kernel/debug/error_injection/list"
REFUSED = "p:5:1: error: the kernel does not allow to skip '{}'"
HINT = (
    f"hint: with CONFIG_BPF_KPROBE_OVERRIDE those in {LIST} can be skipped, and with BPF trampolines those in which "
    "security modules decide (security_file_open)"
)


def test_what_the_kernel_lists_may_be_skipped() -> None:
    assert said("may_fail", OVERRIDES) == []
    assert said("may_fail", BOTH) == []
    assert said("must_work", BOTH) == [REFUSED.format("must_work"), HINT]
    assert said("security_work", OVERRIDES) == [REFUSED.format("security_work"), HINT]


def test_where_security_modules_decide_only_other_values_than_0_skip() -> None:
    assert said("security_work", DECIDES) == [WITH_0]
    assert said("security_work", BOTH) == [WITH_0]
    assert said("may_fail", DECIDES) == [REFUSED.format("may_fail"), HINT]


def test_a_list_that_cannot_be_read_leaves_it_to_the_kernel() -> None:
    note = f"p:5:1: note: the kernel alone checks whether 'must_work' may be skipped: {LIST} cannot be read"
    assert said("must_work", OVERRIDES, is_listed=False) == [note]


def test_a_pattern_is_refused() -> None:
    assert said('"may_*"', BOTH) == [
        "p:3:1: error: a pattern cannot be skipped: the kernel decides for each function",
        "p:5:1: note: 'skip' is here",
        "hint: write the name of one function",
    ]
