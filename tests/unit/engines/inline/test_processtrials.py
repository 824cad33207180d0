"""Where memory of devices is mapped, and what that means for trials."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

from dprobes.bpf.asm.assembler import Assembled
from dprobes.engines.inline import processtrials
from dprobes.engines.inline.pieces import Order, Piece
from dprobes.engines.inline.processtrials import has_device_memory, process_trials
from dprobes.engines.inline.sitegroups import site_groups
from dprobes.engines.inline.trials import Trial, trial_of
from dprobes.target.processmaps import Mapping, parse_maps, read_maps

LOAD = bytes.fromhex("488b07")


def mapping(start: int, path: str) -> Mapping:
    return Mapping(start, start + 4096, "rw-s", 0, 0, 1, path, deleted=False)


def flags_of(start: int) -> frozenset[str]:
    return processtrials._flags_of(Path("/proc/self/smaps").read_text(), start)


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
    trial, code = trial_of(LOAD), Assembled((), (), (), ())
    assert isinstance(trial, Trial)
    pieces = [Piece(Order.HANDLER, 0, 16, LOAD, code, trial), Piece(Order.HANDLER, 1, 32, b"\x55", code)]
    groups = list(site_groups(pieces))
    stack = next(m for m in parse_maps(read_maps(os.getpid())) if m.path == "[stack]")
    vvar = next(m for m in parse_maps(read_maps(os.getpid())) if m.path == "[vvar]")
    assert process_trials(groups, 0x1000, os.getpid(), [stack]) == {0x1010: trial}
    assert process_trials(groups, 0x1000, os.getpid(), [vvar._replace(path="/dev/mem")]) == {
        0x1010: "its instruction may fault, which cannot be tried where memory of devices is mapped"
    }


def test_a_handler_that_ends_otherwise_is_alone_at_its_instruction() -> None:
    code = Assembled((), (), (), ())
    ending = Piece(Order.HANDLER, 3, 16, b"\x55", code, diverts=True)
    other = Piece(Order.HANDLER, 4, 16, b"\x55", code)
    trial = trial_of(LOAD)
    assert isinstance(trial, Trial)
    tried = Piece(Order.HANDLER, 3, 16, LOAD, code, trial, diverts=True)
    assert process_trials(list(site_groups([ending])), 0, 1, []) == {16: Trial(b"", ends=3)}
    assert process_trials(list(site_groups([tried])), 0, 1, []) == {16: replace(trial, ends=3)}
    assert process_trials(list(site_groups([ending, other])), 0, 1, []) == {
        16: "its handler may stop the thread or skip the function, and it is there for another probepoint as well"
    }
    # That needs no memory, whatever is mapped.
    vvar = next(m for m in parse_maps(read_maps(os.getpid())) if m.path == "[vvar]")
    device = [vvar._replace(path="/dev/mem")]
    assert process_trials(list(site_groups([ending])), 0, os.getpid(), device) == {16: Trial(b"", ends=3)}
