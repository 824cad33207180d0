"""What handlers may ask of the kernel depends on where they run, and on what the kernel offers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dprobes.arch import architecture
from dprobes.bpf.lower import Abilities, Placement, Request, VmaLayout, lower
from dprobes.diagnostics import Diagnostics
from dprobes.errors import NotSupportedError
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.source_text import SourceFile
from dprobes.vm import Point

LAYOUT = VmaLayout(0, 80, 32, 88, 32, 64, 40, 16)
ABLE = Request(abilities=Abilities(writes_memory=True, writes_registers=True, vma=LAYOUT))


def lowered(statements: str, request: Request, header: str = "") -> None:
    diagnostics = Diagnostics()
    source = SourceFile("x.rpn", f"name = x\n{header}offset = 0\n{statements}\nexit\n")
    program = parse_source(source, diagnostics, CompileOptions(allow_write=True))
    target = architecture("x86_64")
    image = encode(program, target)
    lower(image, target, image.handlers[0], Point(), request)


def test_vfyrw_needs_a_look_at_mappings() -> None:
    lowered("push 0; vfyrw", ABLE)
    with pytest.raises(NotSupportedError, match=r"^'vfyrw' at byte \d+ of the program cannot be compiled to eBPF$"):
        lowered("push 0; vfyrw", Request())


@pytest.mark.parametrize("statements", ["push 0; vfyrw", "push 0; pop r, eax"])
def test_in_an_event_registers_are_not_written_and_mappings_not_looked_at_twice(statements: str) -> None:
    lowered(statements, ABLE)
    with pytest.raises(NotSupportedError) as caught:
        lowered(statements, replace(ABLE, placement=Placement.EVENT))
    assert caught.value.hint == "use --engine ptrace"


def test_a_uretprobe_knows_no_addresses_where_the_kernel_does_not_say_which_function_returns() -> None:
    at_return = replace(ABLE, placement=Placement.URETPROBE, symbols={"counter": 0x4000})
    lowered("push counter", at_return)
    old = replace(at_return, abilities=at_return.abilities._replace(function_ip=False))
    with pytest.raises(NotSupportedError) as caught:
        lowered("push counter", old)
    assert caught.value.message == (
        "this kernel does not show a uretprobe which function returns, so 'counter' cannot be found in the process"
    )
    assert caught.value.hint == "use --engine ptrace, or Linux 6.6 or later"
    lowered("push 1", old)


def test_what_is_kept_by_call_stacks_is_not_looked_at_in_the_kernel() -> None:
    header = "table = from, sum, ustack[2]\n"
    lowered("push 1; tally from", ABLE, header)
    with pytest.raises(NotSupportedError) as caught:
        lowered("push table, from", ABLE, header)
    assert caught.value.message == (
        "'push' cannot look at table 'from': its call stacks are followed outside of the kernel"
    )
    assert caught.value.hint == (
        "use --engine ptrace, or addresses of callers as keys, as 'dprobes sets libc.malloc/leaks' shows"
    )
