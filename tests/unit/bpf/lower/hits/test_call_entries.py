"""What handlers keep on the stack of their program lies apart from each other."""

from __future__ import annotations

from dprobes.arch.x86_processors import I386, X86_64
from dprobes.bpf.lower.hits import call_entries
from dprobes.bpf.lower.hits.call_entries import SEEN, entry_size
from dprobes.bpf.lower.hosts import handler_host, place_hosts, vma_lookup
from dprobes.bpf.lower.lowering_request import KeptEntry
from dprobes.bpf.lower.templates import variable_templates

STACK = 512
"""Bytes that a program has."""


def kept(registers: int) -> KeptEntry:
    return KeptEntry(tuple((f"r{n}", n, None) for n in range(registers)))


def test_all_that_can_be_kept_has_room_on_the_stack() -> None:
    most = max(sum(r.is_kept_at_entry for r in arch.registers) for arch in (I386, X86_64))
    seen = range(SEEN - 8 * most, SEEN + 8)
    value = range(call_entries._SAVED - entry_size(kept(most)), call_entries._SAVED)
    key = range(call_entries._ENTRY_KEY, call_entries._ENTRY_KEY + 32)
    assert max(-seen.start, -value.start) <= STACK
    assert key.stop <= call_entries._ENTRY_WORD
    assert value.stop <= call_entries._SAVED
    assert key.start >= call_entries._SAVED + 8
    assert seen.stop <= call_entries._SAVED
    variables = range(variable_templates._KEY, variable_templates._KEY + 8)
    others = (key, seen, range(place_hosts._RESULT, place_hosts._RESULT + 8), range(handler_host.COOKIE, 0))
    assert all(set(variables).isdisjoint(other) for other in others)
    assert set(range(vma_lookup._ANSWER, 0)).isdisjoint(variables)
    # The handler may be a callback of the program (LoopForm.CALLBACK): both have to have room.
    assert -seen.start - variables.start <= STACK
