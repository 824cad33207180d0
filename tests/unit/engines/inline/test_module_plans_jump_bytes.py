"""Jumps as requests: what is written in which order, and what must be there before."""

from __future__ import annotations

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Register
from dprobes.engines.inline.handler_code import PlacedJump
from dprobes.engines.inline.handler_pieces import NumberedCode, Order, Piece, PlannedSite, SiteGroup, planned_sites
from dprobes.engines.inline.handler_trampolines import Trampoline
from dprobes.engines.inline.module_plans import site_patch
from dprobes.native.generated_code import NativeCode
from dprobes.platform.x86.patches.branch_targets import CodeRange, ControlFlow, ModuleCode
from dprobes.platform.x86.patches.patch_placer import Placement, Write
from dprobes.platform.x86.patches.patch_plans import Method, Plan, Reach

RAW = bytes(range(32))
TRAMPOLINE = Trampoline(NativeCode(0x9000, bytes(40)), ((0x1001, 0x9010),), ())


def site(address: int, *probes: int, is_bound: bool = False) -> PlannedSite:
    asm = Assembler()
    asm.mov(Register.R0, 0)
    asm.exit()
    pieces = [Piece(Order.HANDLER, probe, address, b"", NumberedCode(asm.assemble(), 0)) for probe in probes]
    (planned,) = planned_sites([SiteGroup({address: pieces}, is_bound)], 2, 0x1000).values()
    return planned


SITES = {0x1000: site(0, 7)}


def module(start: int) -> ModuleCode:
    return ModuleCode([CodeRange(0, len(RAW), RAW)], ControlFlow(frozenset()), start, 4096)


def placed(start: int, site: int, sizes: tuple[int, ...], written: int, *writes: Write, relied_on: int) -> PlacedJump:
    plan = Plan(Method.WINDOW, site, start, RAW[: sum(sizes)], sizes, written, (Reach(0, 0, 1),))
    return PlacedJump((site,), Placement(plan, 0x9000, writes, relied_on), TRAMPOLINE)


def test_a_window() -> None:
    jump = placed(0x1000, 0x1000, (1, 3, 4), 5, Write(0x1000, b"\xe9abcd"), relied_on=0x1005)
    patch = site_patch(jump, SITES, module(0x1000), 2)
    assert (patch.sites, patch.start, patch.code) == (((2, 7, 0x1000),), 0x1000, RAW[:8])
    assert (patch.writes, patch.originals) == (((0x1000, b"\xe9abcd"),), (RAW[:5],))
    assert patch.relied_on == (0x1005, b"")
    assert (patch.moves, patch.end, patch.method) == (((0x1001, 0x9010),), 0x9028, "window")


def test_what_a_punned_jump_relies_on_is_what_is_there_now() -> None:
    code = module(0x1000)
    code.ranges[0].write(0x1003, b"\xe9")
    jump = placed(0x1000, 0x1000, (3,), 3, Write(0x1000, b"\xe9ab"), relied_on=0x1005)
    patch = site_patch(jump, SITES, code, 2)
    assert (patch.code, patch.relied_on) == (RAW[:3], (0x1003, b"\xe9\x04"))


def test_the_part_in_the_second_page_comes_first() -> None:
    jump = placed(0x1FFE, 0x1FFE, (5,), 5, Write(0x1FFE, b"\xe9abcd"), relied_on=0x2003)
    patch = site_patch(jump, {0x1FFE: site(0, 7)}, module(0x1FFE), 2)
    assert patch.writes == ((0x2000, b"bcd"), (0x1FFE, b"\xe9a"))
    assert patch.originals == (RAW[2:5], RAW[:2])


def test_a_mark_for_indirect_branches_is_as_in_the_file() -> None:
    code = module(0x0FFC)
    plan = Plan(Method.JUMP, 0x0FFC, 0x1000, RAW[4:9], (5,), 5, (Reach(0, 0, 1),))
    jump = PlacedJump((0x0FFC,), Placement(plan, 0x9000, (Write(0x1000, b"\xe9abcd"),), 0x1005), TRAMPOLINE)
    patch = site_patch(jump, {0x0FFC: site(0, 7)}, code, 2)
    assert (patch.start, patch.code) == (0x0FFC, RAW[:9])
    assert patch.writes == ((0x1000, b"\xe9abcd"), (0x0FFC, RAW[:1]))
    assert patch.originals == (RAW[4:9], RAW[:1])


def test_all_probepoints_of_an_instruction_have_the_jump_and_the_groups_of_all_bind_it() -> None:
    jump = placed(0x1000, 0x1000, (1, 3, 4), 5, Write(0x1000, b"\xe9abcd"), relied_on=0x1005)
    jump = jump._replace(sites=(0x1000, 0x1004))
    sites = {0x1000: site(0, 7, 9, is_bound=True), 0x1004: site(4, 8, is_bound=True)}
    patch = site_patch(jump, sites, module(0x1000), 2)
    assert patch.sites == ((2, 7, 0x1000), (2, 9, 0x1000), (2, 8, 0x1004))
    assert patch.groups == ((2, 0), (2, 4))
    assert site_patch(jump, {**SITES, 0x1004: site(4, 8)}, module(0x1000), 2).groups == ()
