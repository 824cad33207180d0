"""Where memory of devices is mapped, and what that means for trials."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import Register
from dprobes.engines.inline import module_plans
from dprobes.engines.inline.handler_pieces import NumberedCode, Order, Piece, PlannedSite, planned_sites, site_groups
from dprobes.engines.inline.handler_trials import Trial, trial_of
from dprobes.engines.inline.module_plans import has_device_memory, process_trials
from dprobes.target.process_maps import Mapping, parse_maps, read_maps

if TYPE_CHECKING:
    from collections.abc import Callable

LOAD = bytes.fromhex("488b07")


def mapping(start: int, path: str) -> Mapping:
    return Mapping(start, start + 4096, "rw-s", 0, 0, 1, path, deleted=False)


def planned(bias: int, *pieces: Piece) -> dict[int, PlannedSite]:
    return planned_sites(site_groups(pieces), 0, bias)


def flags_of(start: int) -> frozenset[str]:
    return module_plans._flags_of(Path("/proc/self/smaps").read_text(), start)


def test_this_process_has_no_device_but_zeros() -> None:
    with Path("/dev/zero").open("rb") as zero, mmap.mmap(zero.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ):
        assert not has_device_memory(os.getpid(), parse_maps(read_maps(os.getpid())))


def test_the_kernel_says_what_is_no_memory() -> None:
    found = {m.path: m.start for m in parse_maps(read_maps(os.getpid()))}
    assert "pf" in flags_of(found["[vvar]"])
    assert "rd" in flags_of(found["[stack]"])
    assert not flags_of(found["[stack]"]) & {"io", "pf"}
    assert flags_of(8) == frozenset()
    # What is suspected for its path is looked up.
    assert has_device_memory(os.getpid(), [mapping(found["[vvar]"], "/dev/mem")])
    assert not has_device_memory(os.getpid(), [mapping(found["[stack]"], "/dev/mem")])
    assert not has_device_memory(os.getpid(), [mapping(found["[vvar]"], "/dev/shm/a")])


def test_of_who_is_gone_it_is_assumed() -> None:
    assert has_device_memory(1 << 22, [mapping(4096, "/dev/mem")])
    assert not has_device_memory(1 << 22, [mapping(4096, "/lib/a")])


def test_then_there_are_no_trials() -> None:
    trial, code = trial_of(LOAD), NumberedCode(Assembled((), (), (), ()), 0)
    assert isinstance(trial, Trial)
    pieces = [Piece(Order.HANDLER, 0, 16, LOAD, code, trial), Piece(Order.HANDLER, 1, 32, b"\x55", code)]
    sites = planned(0x1000, *pieces)
    stack = next(m for m in parse_maps(read_maps(os.getpid())) if m.path == "[stack]")
    vvar = next(m for m in parse_maps(read_maps(os.getpid())) if m.path == "[vvar]")
    assert process_trials(sites, os.getpid(), [stack]) == {0x1010: trial}
    assert process_trials(sites, os.getpid(), [vvar._replace(path="/dev/mem")]) == {
        0x1010: "its instruction may fault, which cannot be tested where device memory is mapped"
    }


def test_a_handler_that_ends_otherwise_is_alone_at_its_instruction() -> None:
    code = NumberedCode(Assembled((), (), (), ()), 0)
    ending = Piece(Order.HANDLER, 3, 16, b"\x55", code, diverts=True)
    other = Piece(Order.HANDLER, 4, 16, b"\x55", code)
    trial = trial_of(LOAD)
    assert isinstance(trial, Trial)
    tried = Piece(Order.HANDLER, 3, 16, LOAD, code, trial, diverts=True)
    assert process_trials(planned(0, ending), 1, []) == {16: Trial(b"", ends=3)}
    assert process_trials(planned(0, tried), 1, []) == {16: trial._replace(ends=3)}
    assert process_trials(planned(0, ending, other), 1, []) == {
        16: "its handler may stop the thread or skip the function, and it is there for another probepoint as well"
    }
    # That needs no memory, whatever is mapped.
    vvar = next(m for m in parse_maps(read_maps(os.getpid())) if m.path == "[vvar]")
    device = [vvar._replace(path="/dev/mem")]
    assert process_trials(planned(0, ending), os.getpid(), device) == {16: Trial(b"", ends=3)}


def handler(write: Callable[[Assembler], None]) -> Assembled:
    asm = Assembler()
    asm.mov(Register.R6, Register.R1)
    write(asm)
    asm.mov(Register.R0, 0)
    asm.exit()
    return asm.assemble()


def looking(place: int) -> Assembled:
    return handler(lambda asm: asm.load(Register.R2, Register.R6, place))


def setting(place: int) -> Assembled:
    return handler(lambda asm: asm.store(Register.R6, place, 7))


def test_no_handler_sees_what_an_earlier_one_has_changed() -> None:
    def found(*handlers: Assembled) -> dict[int, Trial | str]:
        codes = [NumberedCode(code, number) for number, code in enumerate(handlers)]
        pieces = [Piece(Order.HANDLER, number, 16, b"\x55", code) for number, code in enumerate(codes)]
        return process_trials(planned(0, *pieces), 1, [])

    refused = {16: "it is there for another probepoint as well, whose handler changes registers that this one looks at"}
    assert found(setting(8), looking(8)) == refused
    assert found(looking(8), setting(8)) == found(setting(8), looking(16)) == found(setting(8), setting(8)) == {}
    assert found(setting(8), looking(16), looking(8)) == refused


def test_nothing_is_tried_that_another_handler_may_change() -> None:
    trial = trial_of(LOAD)
    assert isinstance(trial, Trial)
    tried = Piece(Order.HANDLER, 0, 16, LOAD, NumberedCode(looking(8), 0), trial)
    changing = Piece(Order.HANDLER, 1, 16, LOAD, NumberedCode(setting(16), 1))
    assert process_trials(planned(0, tried, changing), 1, []) == {
        16: "its instruction may fault, which may depend on what another handler there changes"
    }
    assert process_trials(planned(0, tried, changing._replace(code=NumberedCode(looking(16), 1))), 1, []) == {16: trial}
