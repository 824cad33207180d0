"""Code for the probepoints of a module: jumps to it that share what is displaced, and reasons where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Helper, Register
from dprobes.engines.inline.handler_code import CodeWriter
from dprobes.engines.inline.handler_pieces import NumberedCode, SiteHandler
from dprobes.native.generated_code import ProcessFacts
from dprobes.native.routines.handler_ring import RingShape
from dprobes.platform.x86.patches.branch_targets import CodeRange, ControlFlow, ModuleCode, Spans
from dprobes.platform.x86.patches.patch_plans import Method
from dprobes.platform.x86.patches.trampoline_space import AddressSpace
from dprobes.target.process_maps import Mapping

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.inline.handler_code import PlacedJump

START, SIZE = 0x7F00_0000_1000, 0x10_0000
HOLE = 1 << 20
CODE = "55 4889e5 488d4707 5d c3 90"
"""push rbp; mov rbp, rsp; lea rax, [rdi+7]; pop rbp; ret; nop"""


def handler(instructions: int = 1) -> list[SiteHandler]:
    asm = Assembler()
    for number in range(instructions):
        asm.mov(Register.R0, number)
    asm.exit()
    return [SiteHandler(NumberedCode(asm.assemble(), 0), 0)]


def writer(
    code: str, targets: Iterable[int] = (), *, near: bool = True, start: int = START, hole: int = HOLE
) -> CodeWriter:
    """Return a writer for a module; with ``near`` nothing is free but a hole behind it."""
    raw = bytes.fromhex(code)
    module = ModuleCode([CodeRange(0, len(raw), raw)], ControlFlow(frozenset(targets), (0,), Spans()), start, SIZE)
    used = [(0x5500_0000_0000, 0x5500_0000_1000), (start, start + SIZE)]
    if near:
        used += [(start - (1 << 32), start), (start + SIZE + hole, start + (1 << 32))]
    mappings = [Mapping(first, last, "r-xp", 0, 0, 0, f"/{first}", False) for first, last in sorted(used)]
    space = AddressSpace(mappings, start, start + SIZE)
    return CodeWriter(module, space, ProcessFacts(0x1000, 0x2000), {}, RingShape(2, 4096), {})


def methods(jumps: Iterable[PlacedJump]) -> dict[tuple[int, ...], Method]:
    return {tuple(site - START for site in jump.sites): jump.placement.plan.method for jump in jumps}


def test_a_window_leads_to_the_handler_and_what_is_displaced() -> None:
    made = writer(CODE)
    (jump,), refused = made.place({START: handler()})
    assert refused == {}
    assert methods([jump]) == {(0,): Method.WINDOW}
    assert [original - START for original, _ in jump.trampoline.moves] == [1, 4]
    code = jump.trampoline.code
    assert code.address == jump.placement.trampoline
    assert len(code.code) <= jump.placement.room
    assert any(start <= code.address < code.end <= end for start, end in made.new_regions())
    assert made.new_regions() == []


def test_what_is_free_takes_a_punned_jump() -> None:
    (jump,), _ = writer(CODE, near=False).place({START: handler()})
    assert methods([jump]) == {(0,): Method.PUN}
    assert jump.trampoline.moves == ()


def test_probes_share_a_window_and_each_has_its_handler() -> None:
    made = writer("b801000000 4889f8 90 4883c009", targets=(9,))
    (jump,), refused = made.place({START + 5: handler(), START + 8: handler(3)})
    assert (methods([jump]), refused) == ({(5, 8): Method.LEAD}, {})
    moves = dict(jump.trampoline.moves)
    assert list(moves) == [START + 5, START + 8]
    # A thread that stands there comes to the handler before the copy.
    copy = next(each.copy for each in jump.trampoline.copies if each.original == START + 8)
    assert jump.trampoline.code.address < moves[START + 8] < copy < jump.trampoline.code.end


def test_a_probe_that_comes_later_gets_the_window_anew() -> None:
    made = writer("b801000000 4889f8 90 4883c009", targets=(9,))
    (first,), _ = made.place({START + 8: handler()})
    (second,), _ = made.place({START + 5: handler(200)})
    assert (first.sites, second.sites) == ((START + 8,), (START + 5, START + 8))
    assert second.placement.plan is first.placement.plan
    assert second.placement.trampoline != first.placement.trampoline
    assert second.trampoline.code.end - second.trampoline.code.address <= second.placement.room


def test_breakpoints_for_something_else_are_not_displaced() -> None:
    _, refused = writer(CODE).place({START: handler()}, others=[START + 1])
    assert list(refused) == [START]
    assert "another probe follows too closely" in refused[START]


def test_a_mark_for_indirect_branches_stays() -> None:
    (jump,), _ = writer("f30f1efa" + CODE).place({START: handler()})
    assert (jump.placement.plan.site, jump.placement.plan.start) == (START, START + 4)
    # Who stands behind the mark has been hit already.
    moves = dict(jump.trampoline.moves)
    assert moves[START + 4] == jump.trampoline.copies[0].copy


def test_a_jump_may_lie_in_two_pages_if_a_breakpoint_is_where_it_begins() -> None:
    start = START + 4096 - 3
    (jump,), refused = writer("b801000000 c3", start=start).place({start: handler()})
    assert (jump.placement.plan.method, refused) == (Method.JUMP, {})
    # It begins before the instruction.
    _, refused = writer("4889f8 4889f8 90 4883c009", targets=(7,), start=start).place({start + 6: handler()})
    assert refused == {start + 6: "its jump would cross a page boundary"}


def test_without_memory_there_is_no_jump() -> None:
    made = writer(CODE, hole=0)
    assert made.place({START: handler()}) == ([], {START: "no memory near it is free"})


def test_what_is_bound_has_jumps_everywhere_or_nowhere() -> None:
    code = CODE + "b802000000 b803000000 4889f8 90 4883c009"
    sites, last, target = (START + 11, START + 24), 24, 25
    made = writer(code, targets=(target,))
    jumps, refused = made.place({site: handler() for site in sites}, [sites])
    assert (len(jumps), refused) == (2, {})
    # A branch leads to one of them as well.
    made = writer(code, targets=(last, target))
    jumps, refused = made.place({site: handler() for site in sites}, [sites])
    assert jumps == []
    assert refused.keys() == set(sites)
    assert len(set(refused.values())) == 1
    # Alone the other one has one.
    jumps, _ = made.place({sites[0]: handler()})
    assert methods(jumps) == {(11,): Method.JUMP}


def test_a_handler_that_is_too_far_from_what_it_calls_has_no_jump() -> None:
    asm = Assembler()
    asm.call(Helper.KTIME_GET_NS)
    asm.exit()
    made = writer("b801000000 b802000000 c3")
    (_,), _ = made.place({START: handler()})
    assert made._runtime is not None
    runtime = made._runtime
    far = {helper: address + (1 << 33) for helper, address in runtime.routines.items()}
    code = runtime.code._replace(address=runtime.code.address + (1 << 33))
    made._runtime, made._assembler = runtime._replace(code=code, routines=far), None
    jumps, refused = made.place({START + 5: [SiteHandler(NumberedCode(asm.assemble(), 0), 0)]})
    assert (jumps, refused) == ([], {START + 5: "no memory near it is free"})
