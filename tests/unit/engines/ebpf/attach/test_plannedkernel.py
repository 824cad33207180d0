"""What a kernel that is locked down does not let a handler do is refused, with the line."""

from __future__ import annotations

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.attach.plannedkernel import refuse_reading
from dprobes.engines.ebpf.kernel.features import Feature, Features
from dprobes.rpn.pipeline import parse_source
from dprobes.source import SourceFile

HEADER = "name = vmlinux\nmodtype = kernel\noffset = vfs_read\n"


@pytest.mark.parametrize(
    ("handler", "line"),
    [
        ("push r, esp\npush mem, u64\nlog 1\nexit\n", "5:1"),
        ("push 9\npush r, arg1\nlog str\nexit\n", "6:1"),
        ("push r, esp\nlog 1\nexit\n", None),
    ],
)
def test_reading_memory_is_refused_where_no_program_may(handler: str, line: str | None) -> None:
    diagnostics = Diagnostics()
    program = parse_source(SourceFile("p", HEADER + handler), diagnostics)
    refuse_reading(program, Features(overrides={Feature.READ_KERNEL: False}), diagnostics)
    said = [each.render().splitlines()[0] for each in diagnostics]
    expected = (
        f"p:{line}: error: the ebpf engine cannot read the kernel's memory here: "
        "bpf_probe_read_kernel (kernel lockdown forbids it): switched off"
    )
    assert said == ([] if line is None else [expected])
    refuse_reading(program, Features(overrides={Feature.READ_KERNEL: True}), diagnostics)
    assert len(list(diagnostics)) == len(said)
