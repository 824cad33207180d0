"""Jumps belong together, and come back only if the breakpoints in whose place they were are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from dprobes.engines.ptrace.site_patches import PatchSwitch, SitePatch
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.native.jump_patcher import adapted, fitting, groups_of, obstacle_to
from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint
from dprobes.platform.x86.instruction_relocation import CodeCopy

if TYPE_CHECKING:
    from dprobes.engines.ptrace.breakpoint_sites import Site
    from dprobes.engines.ptrace.tracer.tracer_programs import Probe
    from dprobes.vm import Point


class Program(NamedTuple):
    number: int


class Owner(NamedTuple):
    number: int
    program: Program


def jump(site: int, *probes: tuple[int, int], groups: tuple[tuple[int, int], ...] = ()) -> SitePatch:
    sites = tuple((program, probe, site) for program, probe in probes)
    return SitePatch(sites, site, bytes(5), (0, b""), ((site, b"\xe9abcd"),), (bytes(5),), groups=groups)


def space(**breakpoints: tuple[tuple[int, int], ...]) -> AddressSpace:
    """Return a space with breakpoints at addresses ``aNUMBER``, for (program, probepoint) each."""
    made = AddressSpace.closed(8)
    for name, probes in breakpoints.items():
        owners = [Owner(probe, Program(program)) for program, probe in probes]
        handlers = tuple((cast("Probe", owner), cast("Point", None)) for owner in owners)
        address = int(name[1:])
        made.breakpoints[address] = Breakpoint(address, 0, cast("Site", None), handlers)
    return made


def test_a_jump_is_for_all_probepoints_of_its_breakpoint() -> None:
    made = space(a16=((0, 1), (1, 5)))
    assert obstacle_to(made, jump(16, (0, 1), (1, 5))) is None
    assert obstacle_to(made, jump(16, (0, 1))) == "several programs use it"
    assert obstacle_to(made, jump(16, (1, 5), (0, 2))) == "the breakpoint is needed for another probepoint as well"
    assert obstacle_to(made, jump(32, (0, 1))) == "the breakpoint no longer exists"


def test_jumps_whose_breakpoints_are_for_others_by_now_do_not_come_back() -> None:
    made = space(a16=((0, 1),), a32=((0, 2), (1, 0)))
    fits, shared = jump(16, (0, 1)), jump(32, (0, 2))
    assert fitting(made, [shared, fits]) == [fits]


def test_the_last_jump_in_memory_comes_back_first_whose_bytes_others_rely_on() -> None:
    made = space(a16=((0, 1),), a18=((0, 2),), a32=((0, 3),))
    spread = [replace(jump(site, (0, probe)), code=b"\0") for probe, site in enumerate((16, 18, 32), 1)]
    apart = [replace(each, writes=((each.start, b"\xe9"),), originals=(b"\0",)) for each in spread]
    assert [each.start for each in fitting(made, apart)] == [32, 18, 16]


def test_what_belongs_to_such_a_jump_stays_away_as_well() -> None:
    made = space(a16=((0, 1),), a32=((0, 2),), a48=((0, 3),), a64=((0, 4),))
    bound = [jump(16, (0, 1), groups=((0, 16),)), jump(32, (0, 2), groups=((0, 16), (0, 32)))]
    far, alone = jump(48, (0, 9), groups=((0, 32),)), jump(64, (0, 4))
    assert fitting(made, [*bound, far, alone]) == [alone]
    assert [len(each) for each in groups_of([*bound, far, alone])] == [3, 1]


def shared(site: int, place: int, *probes: tuple[int, int]) -> SitePatch:
    """Return a jump with a switch for each of its probepoints."""
    made = jump(site, *probes)
    switches = tuple(PatchSwitch(place, b"on", b"of", place, (each,)) for each in made.sites)
    return replace(made, copies=(CodeCopy(place, site, exact=True),), owner=probes[-1][0], switches=switches)


def test_a_jump_for_several_programs_is_for_those_that_are_there() -> None:
    made = space(a16=((0, 1), (2, 3)))
    whole = shared(16, 0x900, (0, 1), (1, 5), (2, 3))
    assert obstacle_to(made, whole) is not None
    rest = adapted(made, whole)
    assert (rest.probes, obstacle_to(made, rest)) == (((0, 1), (2, 3)), None)
    # What is known of it has all, when it comes again.
    made.patches.learn([whole])
    made.patches.learn([rest])
    made.breakpoints.update(space(a16=((0, 1), (1, 5))).breakpoints)
    assert adapted(made, rest).probes == ((0, 1), (1, 5))


def test_of_several_jumps_at_a_place_the_first_one_that_fits_comes() -> None:
    made = space(a16=((0, 1),))
    alone, both = (
        replace(jump(16, (0, 1)), copies=(CodeCopy(0x800, 16, exact=True),)),
        shared(16, 0x900, (0, 1), (1, 5)),
    )
    assert [each.place for each in fitting(made, [both, alone])] == [0x900]
    assert [each.place for each in fitting(made, [alone, both])] == [0x800]
    assert fitting(space(a16=((0, 1), (7, 7))), [both, alone]) == []


def test_a_jump_stays_for_others_while_a_program_joins_them() -> None:
    made = space(a16=((0, 1), (1, 5)))
    made.joining[16] = frozenset({(1, 5)})
    assert obstacle_to(made, jump(16, (0, 1))) is None
    assert obstacle_to(made, jump(16, (0, 1), (1, 5))) is None
    made.end_joining({16: {(1, 5)}})
    assert (made.joining, obstacle_to(made, jump(16, (0, 1)))) == ({}, "several programs use it")


def test_a_group_that_cannot_be_whole_leaves_its_place_to_other_jumps() -> None:
    made = space(a16=((0, 1),), a32=((0, 2),))
    torn = replace(jump(16, (0, 1), groups=((0, 16),)), copies=(CodeCopy(0x800, 16, exact=True),))
    other, plain = jump(48, (0, 9), groups=((0, 16),)), jump(16, (0, 1))
    assert fitting(made, [torn, other, plain]) == [plain]
