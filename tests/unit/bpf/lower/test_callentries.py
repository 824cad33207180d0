"""What handlers keep on the stack of their program lies apart from each other."""

from __future__ import annotations

from dprobes.arch.x86 import I386, X86_64
from dprobes.bpf.lower import callentries, dispatch, threadvariables
from dprobes.bpf.lower.callentries import SEEN, entry_size
from dprobes.bpf.lower.hosts import trampolinehost, vma
from dprobes.bpf.lower.request import KeptEntry

STACK = 512
"""Bytes that a program has."""


def kept(registers: int) -> KeptEntry:
    return KeptEntry(tuple((f"r{n}", n, None) for n in range(registers)))


def test_all_that_can_be_kept_has_room_on_the_stack() -> None:
    most = max(sum(r.is_kept_at_entry for r in arch.registers) for arch in (I386, X86_64))
    seen = range(SEEN - 8 * most, SEEN + 8)
    value = range(callentries._SAVED - entry_size(kept(most)), callentries._SAVED)
    key = range(callentries._KEY, callentries._KEY + 32)
    assert max(-seen.start, -value.start) <= STACK
    assert key.stop <= callentries._WORD
    assert value.stop <= callentries._SAVED
    assert key.start >= callentries._SAVED + 8
    assert seen.stop <= callentries._SAVED
    variables = range(threadvariables._KEY, threadvariables._KEY + 8)
    others = (key, seen, range(trampolinehost._RESULT, trampolinehost._RESULT + 8), range(dispatch.COOKIE, 0))
    assert all(set(variables).isdisjoint(other) for other in others)
    assert set(range(vma._ANSWER, 0)).isdisjoint(variables)
    # The handler may be a callback of the program (LoopForm.CALLBACK): both have to have room.
    assert -seen.start - variables.start <= STACK
