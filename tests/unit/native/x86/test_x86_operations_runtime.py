"""The routines of a process are one piece of code, in which each helper has its place."""

from __future__ import annotations

from itertools import pairwise

from iced_x86 import Decoder

from dprobes.bpf.bpf_instructions import Helper
from dprobes.bpf.map_layouts import MapName
from dprobes.native.generated_code import ProcessFacts
from dprobes.native.routines.handler_ring import RingShape
from dprobes.native.routines.shared_hash_table import TableShape
from dprobes.native.runtime_routines import make_runtime
from dprobes.native.x86.x86_operations import X86Operations

HERE = 0x7F00_0000_0000
FACTS = ProcessFacts(0x7E00_0000_0000, 0x7E00_0000_0040)
RINGS = RingShape(4, 1 << 16)


def test_tables_of_one_shape_share_their_routines() -> None:
    small, large = TableShape(8, 8, 10), TableShape(8, 8, 100)
    shapes = {MapName.ENTRIES: small, MapName.SPACES: small, MapName.NOTES: large}
    runtime = make_runtime(X86Operations(HERE), FACTS, RINGS, shapes)
    for helper in (Helper.MAP_LOOKUP_ELEM, Helper.MAP_UPDATE_ELEM, Helper.MAP_DELETE_ELEM):
        of_map = {name: runtime.map_routines[name, helper] for name in shapes}
        assert of_map[MapName.ENTRIES] == of_map[MapName.SPACES] != of_map[MapName.NOTES]
        assert all(HERE < address < runtime.code.end for address in of_map.values())
    assert len(set(runtime.map_routines.values())) == 6


def test_each_routine_begins_with_an_instruction_behind_the_end_of_another() -> None:
    runtime = make_runtime(X86Operations(HERE), FACTS, RINGS, {MapName.ENTRIES: TableShape(32, 40, 64)})
    instructions = list(Decoder(64, runtime.code.code, ip=HERE))
    assert not any(instruction.is_invalid for instruction in instructions)
    before = {following.ip: str(insn) for insn, following in pairwise(instructions)}
    starts = {*runtime.routines.values(), *runtime.map_routines.values()}
    assert len(starts) == len(runtime.routines) + 3
    assert {before[start] for start in starts - {HERE}} == {"ret"}
    assert str(instructions[-1]) == "ret"


def test_fixups_are_of_instructions_that_look_at_the_programs_memory() -> None:
    runtime = make_runtime(X86Operations(HERE), FACTS, RINGS, {})
    instructions = {insn.ip: str(insn) for insn in Decoder(64, runtime.code.code, ip=HERE)}
    assert {instructions[fixup.instruction] for fixup in runtime.code.fixups} == {
        "mov rax,[rdx]", "mov r8,[rdx]", "movzx r8d,byte ptr [rdx]", "movzx eax,byte ptr [rdx]",
        "mov [rdi],r8", "mov [rdi],r8b", "mov rax,fs:[0]",
    }  # fmt: skip
    assert all(fixup.target in instructions for fixup in runtime.code.fixups)


def test_no_routine_makes_a_system_call_but_the_one_for_signals() -> None:
    runtime = make_runtime(X86Operations(HERE), FACTS, RINGS, {MapName.ENTRIES: TableShape(32, 40, 64)})
    start = runtime.routines[Helper.SEND_SIGNAL]
    end = min(address for address in runtime.routines.values() if address > start)
    calls = [insn.ip for insn in Decoder(64, runtime.code.code, ip=HERE) if str(insn) == "syscall"]
    assert calls
    assert all(start <= at < end for at in calls)
