"""Where a process has a file in its memory."""

from __future__ import annotations

from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.module_breakpoints import _note_padding
from dprobes.target.process_maps import Mapping


def test_the_unused_end_of_a_code_page_begins_behind_the_last_byte_of_code() -> None:
    space = AddressSpace(-1, 8, has_shadow_stack=False)
    mappings = [Mapping(0x400000, 0x402000, "r-xp", 0x1000, 1, 2, "/bin/app", deleted=False)]
    for _ in range(2):  # known already the second time
        _note_padding(space, ((0x2800, 0x800), (0x3000, 0), (0x5800, 0x800)), mappings)
    assert space.slots.padding == [(0x401800, 0x402000)]
