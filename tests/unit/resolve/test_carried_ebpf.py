"""The eBPF that a compiled program carries is what the lowering makes, up to a size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.bpf.bpf_instructions import decode
from dprobes.bpf.lower import Abilities, LoopForm, Placement, Request, lower
from dprobes.diagnostics import Diagnostics
from dprobes.resolve import carried_ebpf
from dprobes.resolve.carried_ebpf import ebpf_codes
from dprobes.rpn.compilation_passes import parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.rpn_program import Point
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from dprobes.rpn.rpn_program import Program


@pytest.fixture(scope="module")
def program() -> Program:
    text = "name = a\nvars = 1\noffset = f\nminor = 7\nagain: push (table)\ninc lv, 0\njz again\nlog 1\nexit\n"
    return parse_source(SourceFile("a.rpn", text), Diagnostics())


@pytest.mark.parametrize("machine", ["x86_64", "i386"])
def test_the_code_is_that_of_the_lowering(program: Program, machine: str) -> None:
    target = architecture(machine)
    image, point = encode(program, target), Point.of(program, program.definitions[0], 0)
    codes = ebpf_codes(program, [machine])
    assert [code.loops for code in codes] == [loops.value for loops in LoopForm]
    for code, loops in zip(codes, LoopForm, strict=True):
        abilities = Abilities(loops, writes_memory=True, writes_registers=True)
        lowered = lower(image, target, 0, point, Request(abilities=abilities, symbols={"table": 0}, vars=1))
        assert tuple(decode(code.code)) == lowered.assembled.code
        assert code.origins == lowered.assembled.origins
        assert [(m.index, m.name, m.is_value) for m in code.maps] == [
            (m.index, m.map.value, m.is_value) for m in lowered.assembled.maps
        ]
        assert (code.scratch, code.sleepable, code.problem) == (lowered.state.size, lowered.sleepable, "")


def test_more_code_than_anybody_reads_is_left_out(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    several = replace(program, definitions=program.definitions * 3)
    sizes = [len(code.code) for code in ebpf_codes(several, ["x86_64"])]
    monkeypatch.setattr(carried_ebpf, "EBPF_MAX", sum(sizes[:4]))
    codes = ebpf_codes(several, ["x86_64"])
    assert [len(code.code) for code in codes] == [*sizes[:4], *[0] * 5]
    assert {code.problem for code in codes[4:]} == {"a file carries 1 MiB of eBPF, and there is more"}


def test_the_code_of_a_very_long_handler_is_left_out(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    count = len(program.definitions[0].handler.instructions)
    monkeypatch.setattr(carried_ebpf, "INSTRUCTIONS_MAX", count)
    assert {code.problem for code in ebpf_codes(program, ["x86_64"])} == {""}
    monkeypatch.setattr(carried_ebpf, "INSTRUCTIONS_MAX", count - 1)
    assert {(code.code, code.problem) for code in ebpf_codes(program, ["x86_64"])} == {
        (b"", "a file carries the eBPF of handlers of up to 5000 instructions")
    }


KERNEL = "name = vmlinux\nmodtype = kernel\n"
CODE = "minor = 7\npush u, eax\npush r, eip\npush mem, u64\nlog 2\nexit\n"


@pytest.mark.parametrize(
    ("place", "placement", "addresses"),
    [
        ("offset = f", Placement.KPROBE, None),
        ("offset = f\nreturn = yes", Placement.KRETPROBE, None),
        ("address = table : table + 3\nwatchpoint = w", Placement.EVENT, None),
        ("sampler = 99hz", Placement.EVENT, (1 << 63, (1 << 64) - 1)),
    ],
)
def test_the_code_for_the_kernel_is_that_of_its_own_lowering(
    place: str, placement: Placement, addresses: tuple[int, int] | None
) -> None:
    program = parse_source(SourceFile("a.rpn", f"{KERNEL}{place}\n{CODE}"), Diagnostics())
    target = architecture("x86_64")
    image, point = encode(program, target), Point.of(program, program.definitions[0], 0)
    request = Request(placement=placement, in_kernel=True, kernel_code=addresses)
    lowered = lower(image, target, 0, point, replace(request, abilities=Abilities(LoopForm.MAY_GOTO)))
    code = ebpf_codes(program, ["x86_64"])[0]
    assert (code.problem, tuple(decode(code.code))) == ("", lowered.assembled.code)


@pytest.mark.parametrize(
    ("header", "place", "problem"),
    [
        (
            "name = vmlinux\nmodtype = tracepoint\n",
            "offset = sched:sched_switch\nminor = 1\npush tp, prev_pid\nlog 1\nexit\n",
            "the fields of 'sched:sched_switch' are known only on the running kernel",
        ),
        (
            "name = vmlinux\nmodtype = tracepoint\n",
            "offset = syscall:openat\nminor = 1\nexit\n",
            "the fields of 'syscall:openat' are known only on the running kernel",
        ),
        (
            "name = ext4\nmodtype = kmod\n",
            "sampler = 99hz\nminor = 1\nexit\n",
            "the code of 'ext4' is known only on the running kernel",
        ),
        (
            "name = a\n",
            "offset = 0\nreturn = yes\nminor = 1\npush elapsed\nlog 1\nexit\n",
            "only the running engine can match a return with its entry",
        ),
    ],
)
def test_what_only_a_kernel_that_runs_tells_is_the_reason_for_no_code(header: str, place: str, problem: str) -> None:
    program = parse_source(SourceFile("a.rpn", header + place), Diagnostics())
    codes = ebpf_codes(program, ["x86_64"])
    assert [(code.code, code.problem) for code in codes] == [(b"", problem)] * len(LoopForm)


def test_a_tracepoint_without_fields_has_its_code() -> None:
    text = "name = vmlinux\nmodtype = tracepoint\noffset = sched:sched_switch\nminor = 1\npush u, eax\nlog 1\nexit\n"
    program = parse_source(SourceFile("a.rpn", text), Diagnostics())
    target = architecture("x86_64")
    point = Point.of(program, program.definitions[0], 0)
    lowered = lower(encode(program, target), target, 0, point, Request(placement=Placement.TRACEPOINT, in_kernel=True))
    code = ebpf_codes(program, ["x86_64"])[0]
    assert (code.problem, tuple(decode(code.code))) == ("", lowered.assembled.code)
