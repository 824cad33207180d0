"""The verifier takes every handler in the form that events need, in all loop forms and for both word sizes."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.bpf.core_stop_layout import STOPS_SIZE
from dprobes.bpf.lower import (
    Abilities,
    Filter,
    Lowered,
    MappedModule,
    Placement,
    Request,
    Tables,
    Watched,
    is_supported,
    lower,
    lower_for_word_sizes,
)
from dprobes.bpf.map_layouts import PROBE_ENTRY_SIZE, SAMPLE_SIZE, SCOPE_VALUE, STATUS_SIZE, MapName
from dprobes.engines.ebpf.attach.module_watch import (
    arrival_program,
    departure_program,
    exec_program,
    fork_program,
    leave_program,
)
from dprobes.engines.ebpf.kernel.bpf_links import attach_typed_tracepoint
from dprobes.engines.ebpf.kernel.bpf_objects import ArrayMap, HashMap, KernelTables, RingBuffer, load
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features, KernelTypes
from dprobes.engines.keyed_table_maps import zeros_size
from dprobes.platform.linux.bpf_calls import ProgramFlag, ProgramType
from dprobes.record.log_record import ABOUT_RECORDS, Item
from dprobes.rpn.instruction_encoding import encode
from dprobes.testing import prepare
from integration.ebpf.kernel import require_bpf
from support.ebpf_abilities import abilities, loop_forms
from support.random_programs import RandomPrograms, random_context

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.arch import Register
    from dprobes.rpn.instruction_set import Row
    from dprobes.rpn.keyed_tables import Table

PROGRAMS = 40
EVERYTHING = ~ABOUT_RECORDS
SCOPES = (
    Filter(),
    Filter(processes=True),
    Filter(uid=0, excluded=1),
    Filter(cgroup=(1 << 40, 2), excluded=5),
)


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()


@pytest.fixture
def maps() -> Iterator[dict[MapName, int]]:
    with contextlib.ExitStack() as stack:
        hashes = {
            MapName.SCOPE: HashMap(4, SCOPE_VALUE.size, 64),
            MapName.MAPPERS: HashMap(4, 8, 64),
            MapName.BIASES: HashMap(8, 4, 64),
        }
        arrays = {
            MapName.CLAIMS: ArrayMap(64 * 8),
            MapName.PROBES: ArrayMap(PROBE_ENTRY_SIZE * 4),
            MapName.STATUS: ArrayMap(STATUS_SIZE),
            MapName.LOCALS: ArrayMap(64),
            MapName.GLOBALS: ArrayMap(64),
            MapName.CPU_VARIABLES: ArrayMap(64 * 64),
            MapName.SAMPLES: ArrayMap(SAMPLE_SIZE * 64),
            MapName.STOPS: ArrayMap(STOPS_SIZE),
        }
        rings = {MapName.RING: RingBuffer(4096), MapName.ARRIVALS: RingBuffer(4096)}
        found = {**hashes, **arrays, **rings}
        for each in found.values():
            stack.enter_context(each)
        yield {name: each.fd for name, each in found.items()}


def is_allowed(row: Row, register: Register | None) -> bool:
    return is_supported(row, register, Abilities())


def is_taken(lowered: Lowered, maps: dict[MapName, int], tables: Sequence[Table]) -> bool:
    """Return whether the kernel takes a handler as the program of an event; it must not want to sleep."""
    assert not lowered.sleepable
    with (
        ArrayMap(lowered.state.size, 64) as scratch,
        ArrayMap(max(64, zeros_size(tables))) as zeros,
        KernelTables(tables, frozenset(), 64) if tables else contextlib.nullcontext() as of_tables,
    ):
        own = {MapName.SCRATCH: scratch.fd, MapName.ZEROS: zeros.fd}
        if of_tables is not None:
            own |= of_tables.descriptors
        try:
            os.close(load(lowered.assembled, {**maps, **own}, ProgramType.PERF_EVENT))
        except OSError:
            return False
    return True


def request_of(random: Random) -> Request:
    """Return what may be asked of an event's handler, at random."""
    base = Request(
        items=random.choice((Item(0), EVERYTHING)),
        abilities=abilities(random.choice(loop_forms())),
        placement=Placement.EVENT,
        filter=random.choice(SCOPES),
        tables=Tables(64, 64, 4),
        probe=1,
        passcount=random.choice((0, 3)),
        maxhits=random.choice((0, 5)),
        vars=4,
        gvars=4,
        cvars=4,
        symbols=dict.fromkeys(("data", "table", "Buffer.cold", "operator new[]"), 0x1010),
    )
    module = MappedModule(tuple((n << 20, n << 33 | 7) for n in range(random.randrange(1, 4))), ((0, 0), (4096, 8192)))
    return random.choice(
        (
            replace(base, module=module),
            replace(base, watched=Watched.SYMBOL, link=0x4040),
            replace(base, watched=Watched.NUMBER),
        )
    )


@pytest.mark.parametrize("name", ["i386", "x86_64"])
@pytest.mark.parametrize("kind", ["defined", "wild"])
def test_handlers_of_events(maps: dict[MapName, int], name: str, kind: str) -> None:
    target = architecture(name)
    refused = []
    for seed in range(PROGRAMS):
        random = Random(seed)
        programs = RandomPrograms(Random(seed), target, is_allowed)
        program = programs.wild() if kind == "wild" else programs.defined()
        image = encode(program, target)
        point = prepare(program, 0, random_context(Random(seed), target))
        if not is_taken(lower(image, target, image.handlers[0], point, request_of(random)), maps, image.tables):
            refused.append(seed)
    assert refused == []


def test_handlers_for_both_word_sizes(maps: dict[MapName, int]) -> None:
    wide, narrow = architecture("x86_64"), architecture("i386")
    refused = []
    for seed in range(PROGRAMS):
        program = RandomPrograms(Random(seed), narrow, is_allowed).defined()
        point = prepare(program, 0, random_context(Random(seed), narrow))
        request = replace(request_of(Random(seed)), module=None, watched=None)
        forms = [(encode(program, target), target) for target in (wide, narrow)]
        if not is_taken(lower_for_word_sizes(forms, 0, point, request), maps, forms[0][0].tables):
            refused.append(seed)
    assert refused == []


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("sleepable", [False, True])
def test_programs_that_keep_mappers(maps: dict[MapName, int], scope: Filter, sleepable: bool) -> None:
    if sleepable and Feature.SLEEPABLE_UPROBE not in Features():
        pytest.skip("this kernel has no sleepable uprobe programs")
    flags = ProgramFlag.SLEEPABLE if sleepable else ProgramFlag.NONE
    offered = abilities(sleepable=sleepable)
    os.close(load(arrival_program(scope, offered), maps, ProgramType.KPROBE, flags=flags))
    os.close(load(departure_program(), maps, ProgramType.KPROBE))
    with KernelTypes() as types:
        for tracepoint, make in {
            "sched_process_fork": fork_program,
            "sched_process_exec": exec_program,
            "sched_process_exit": leave_program,
        }.items():
            os.close(attach_typed_tracepoint(tracepoint, make(types), maps, types))
