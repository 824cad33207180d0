"""A breakpoint is for many: in the order of insertion, and there as long as somebody needs it."""

from __future__ import annotations

from dprobes.engines.ptrace.breakpoint_sites import Role, Site
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint
from dprobes.vm import Point
from support.ptrace_programs import inserted_program, probe_of


def site(role: Role = Role.PROBE, offset: int = 0) -> Site:
    return Site(0, 0, offset, b"\x55", (0, 1), point=Point(), role=role)


def test_handlers_are_in_the_order_of_insertion_whoever_is_added_first() -> None:
    one, two, three = (inserted_program(number) for number in (1, 2, 3))
    breakpoint_ = Breakpoint(0x1000, 0x55, site())
    probes = {program: probe_of(program) for program in (three, one, two)}
    for program, probe in probes.items():
        breakpoint_.add(program, site(), probe)
        breakpoint_.add(program, site(Role.RETURN), probe)
    assert [probe for probe, _ in breakpoint_.handlers] == [probes[one], probes[two], probes[three]]
    assert [probe for probe, _ in breakpoint_.exits] == [probes[one], probes[two], probes[three]]
    assert breakpoint_.probes() == set(probes.values())


def test_what_is_there_already_is_known() -> None:
    program, other = inserted_program(1), inserted_program(2)
    probe = probe_of(program)
    breakpoint_ = Breakpoint(0x1000, 0x55, site())
    breakpoint_.add(program, site(), probe)
    breakpoint_.add(program, site(Role.LINKER), None)
    assert breakpoint_.serves(program, site(), probe)
    assert breakpoint_.serves(program, site(Role.LINKER), None)
    assert not breakpoint_.serves(other, site(Role.LINKER), None)
    assert not breakpoint_.serves(program, site(Role.UNWINDING), None)
    assert not breakpoint_.serves(program, site(Role.RETURN), probe)
    assert not breakpoint_.serves(other, site(), probe_of(other))


def test_it_is_needed_until_the_last_one_goes() -> None:
    one, two = inserted_program(1), inserted_program(2)
    first, second = probe_of(one), probe_of(two)
    breakpoint_ = Breakpoint(0x1000, 0x55, site(), waiting={first, second})
    for program, probe in ((one, first), (two, second)):
        breakpoint_.add(program, site(), probe)
        breakpoint_.add(program, site(Role.RETURN), probe)
        breakpoint_.add(program, site(Role.LINKER), None)
    breakpoint_.drop(first)
    assert breakpoint_.probes() == {second}
    breakpoint_.drop_program(two)
    assert breakpoint_.is_needed
    assert breakpoint_.own == {Role.LINKER: frozenset({1})}
    breakpoint_.drop_program(one)
    assert not breakpoint_.is_needed


def test_a_copy_goes_its_own_way() -> None:
    program = inserted_program(1)
    probe = probe_of(program)
    original = Breakpoint(0x1000, 0x55, site(), waiting={probe})
    original.add(program, site(), probe)
    original.add(program, site(Role.LINKER), None)
    copy = original.copy()
    original.drop_program(program)
    assert not original.is_needed
    assert (copy.probes(), set(copy.own)) == ({probe}, {Role.LINKER})


def test_a_space_forgets_a_program() -> None:
    one, two = inserted_program(1), inserted_program(2)
    space = AddressSpace(-1, 8, has_shadow_stack=False)
    for address, programs in ((0x1000, (one,)), (0x2000, (one, two)), (0x3000, (two,))):
        breakpoint_ = space.breakpoints[address] = Breakpoint(address, 0x55, site())
        for program in programs:
            breakpoint_.add(program, site(), probe_of(program))
            space.symbols[program.number, (0, 0)] = {}
        space.register(breakpoint_)
    assert [breakpoint_.address for breakpoint_ in space.drop_program(one)] == [0x1000]
    assert list(space.breakpoints) == [0x2000, 0x3000]
    assert {probe.program for probe in space.by_probe} == {two}
    assert list(space.symbols) == [(2, (0, 0))]
    assert space.former == {0x1000: 0x55}
