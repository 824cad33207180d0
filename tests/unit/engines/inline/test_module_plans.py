"""Instructions that several programs probe near each other are planned together, and others are not."""

from __future__ import annotations

from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import Register
from dprobes.engines.inline.handler_code import CodeWriter
from dprobes.engines.inline.handler_pieces import NumberedCode, Order, Piece, PlannedSite, joined
from dprobes.engines.inline.module_plans import ModulePlan, plan_alone, plan_together, sites_together
from dprobes.native.generated_code import ProcessFacts
from dprobes.native.routines.handler_ring import RingShape
from dprobes.platform.x86.patches.branch_targets import CodeRange, ControlFlow, ModuleCode, Spans
from dprobes.platform.x86.patches.trampoline_space import AddressSpace
from dprobes.target.process_maps import Mapping

START, SIZE = 0x7F00_0000_1000, 0x10_0000
RAW = bytes.fromhex("b801000000 b802000000" + "90" * 90 + "b803000000 c3")
FAR = START + 100


def code(number: int) -> Assembled:
    asm = Assembler()
    asm.mov(Register.R0, number)
    asm.exit()
    return asm.assemble()


def site(program: int, probe: int, order: Order = Order.HANDLER, *, bound: tuple[int, ...] = ()) -> PlannedSite:
    groups = ((program, bound[0]),) if bound else ()
    piece = Piece(order, probe, 0, b"", NumberedCode(code(probe), probe), program=program)
    return PlannedSite((piece,), groups, frozenset(bound))


def plan(program: int, rank: int, *addresses: int, bound: tuple[int, ...] = ()) -> ModulePlan:
    module = ModuleCode([CodeRange(0, len(RAW), RAW)], ControlFlow(frozenset(), (0,), Spans()), START, SIZE)
    mappings = [Mapping(START, START + SIZE, "r-xp", 0, 0, 0, "/file", deleted=False)]
    writer = CodeWriter(
        module, AddressSpace(mappings, START, START + SIZE), ProcessFacts(0x1000, 0x2000), {}, RingShape(2, 4096), {}
    )
    assert writer.prepare(START) is None
    return ModulePlan(
        program, rank, 0x1000, {a: site(program, n, bound=bound) for n, a in enumerate(addresses)}, writer
    )


def test_what_is_near_instructions_of_others_is_planned_together() -> None:
    mine, other = plan(1, 1, START, FAR), plan(0, 0, START + 5)
    assert sites_together([START, FAR], [mine]) == frozenset()
    assert sites_together([START, FAR], [mine, other]) == {START, START + 5}
    assert sites_together([FAR], [mine, other]) == frozenset()


def test_with_one_instruction_of_a_group_all_of_it_is() -> None:
    mine, other = plan(1, 1, START, FAR, bound=(START, FAR)), plan(0, 0, START + 5)
    assert sites_together([START], [mine, other]) == {START, START + 5, FAR}


def test_handlers_are_in_the_order_of_programs_and_entries_come_first() -> None:
    both = joined([site(4, 1), site(2, 0, Order.ENTRY, bound=(16, 32)), site(3, 7)])
    assert both.owners == ((2, 0), (4, 1), (3, 7))
    assert (both.groups, set(both.bound)) == (((2, 16),), {16, 32})


def test_a_jump_for_several_programs_can_do_without_each() -> None:
    # The second one has replaced the first one of all.
    mine, other = plan(7, 2, START), plan(9, 0, START, START + 5)
    made = plan_together([mine, other], mine, sites_together([START], [mine, other]), (), 1, [])
    assert made.refused == {}
    first = next(patch for patch in made.patches if START in patch.addresses)
    assert first.sites == ((9, 0, START), (7, 0, START))
    assert {patch.owner for patch in made.patches} == {7}
    assert [switch.sites for switch in first.switches] == [first.sites, first.sites[:1], first.sites[1:]]
    code = next(jump.trampoline.code for jump in made.jumps if START in jump.sites)
    for switch in first.switches:
        at = switch.address - code.address
        assert code.code[at : at + len(switch.on)] == switch.on
        assert switch.address < switch.end <= code.end
    assert mine.writer.new_regions()


def test_a_jump_for_one_program_has_no_switches() -> None:
    mine = plan(7, 2, START, FAR)
    made = plan_alone(mine, [START, FAR], (), 1, [])
    assert [(patch.sites, patch.switches) for patch in made.patches] == [(((7, 1, FAR),), ()), (((7, 0, START),), ())]
