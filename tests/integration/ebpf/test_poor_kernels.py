"""Kernels that lack what the eBPF engine would like to have: it does without, or says what is missing."""

from __future__ import annotations

import errno
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.ebpf_engine import EbpfEngine
from dprobes.engines.ebpf.kernel import bpf_objects
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.engines.engine_interface import Counts, Finished, Notice, RecordBatch, Scope
from dprobes.errors import EngineError, NotSupportedError
from dprobes.platform.linux.bpf_calls import Program, create_map, load_program
from dprobes.record.log_record import Item, LogRecord, decode_record
from dprobes.resolve.local_module import resolve
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile
from dprobes.target.probed_module import Module
from integration.ebpf.kernel import descriptors, require_bpf, require_initial_namespace
from integration.support import DPROBES, TIMEOUT
from support.attachments import attached, job_of

if TYPE_CHECKING:
    from integration.support import Builder

TICK = "name = hotloop\noffset = tick\nminor = 1\npush r, arg0\nlog 1\nexit\n"
SLEEPING = TICK.replace("push r, arg0", "push r, esp\npush mem, u64")
SUM = """name = hotloop
jmpmax = 1000
offset = tick
minor = 1
        push 0
        push 100
next:   xchg
        push 3
        add
        xchg
        push 1
        xchg
        sub
        dup 0
        jnz next
        ros 1
        log 1
        exit
"""


ONE_BY_ONE = (
    "this kernel has no uprobe_multi links: the breakpoint has a separate perf event, and takes 0.1 s to remove"
)


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


@dataclass
class Outcome:
    counts: tuple[Counts, ...]
    records: list[LogRecord]
    notices: list[str]

    @property
    def logs(self) -> list[bytes]:
        return [record.data for record in self.records]


ITEMS = Item.MAJOR | Item.MINOR


def run(source: str, command: tuple[str, ...], *missing: Feature, items: Item = ITEMS) -> Outcome:
    """Run a program on a command, on a kernel without some features; nothing may be left open."""
    engine = EbpfEngine(features=Features(overrides=dict.fromkeys(missing, False)))
    program = parse_source(SourceFile("test.rpn", source), Diagnostics(), CompileOptions())
    resolved = resolve(program, Module.load(command[0]), Diagnostics())
    before = descriptors()
    logs, notices = [], []
    try:
        with attached(engine, job_of(program, Scope(command=command), items=items, resolved=resolved)) as session:
            for event in session.poll():
                match event:
                    case RecordBatch(records):
                        logs += [decode_record(record) for _, record in records]
                    case Notice():
                        notices.append(event.message)
                    case Finished(counts):
                        found = counts
    finally:
        assert descriptors() == before
    return Outcome(found, logs, notices)


@pytest.mark.parametrize(
    "missing",
    [(), (Feature.FIND_VMA,), (Feature.SLEEPABLE_UPROBE,), (Feature.FIND_VMA, Feature.UPROBE_MULTI)],
    ids=lambda missing: "+".join(feature.name for feature in missing) or "none",
)
@pytest.mark.parametrize(
    "source", [TICK, TICK.replace("push r, arg0", "push r, esp\npush mem, u64")], ids=["", "sleeps"]
)
def test_records_say_who_was_hit_however_the_kernel_is_asked(
    build: Builder, source: str, missing: tuple[Feature, ...]
) -> None:
    program = build("hotloop.c")
    items = ITEMS | Item.PID | Item.TID | Item.UID | Item.PROCESS_NAME | Item.CPU | Item.TIME
    found = run(source, (str(program), "20"), *missing, items=items)
    assert len(found.records) == 20
    assert {record.process_name for record in found.records} == {"hotloop"}
    assert {record.uid for record in found.records} == {os.getuid()}
    (pid,) = {record.pid for record in found.records}
    assert {record.tid for record in found.records} == {pid}
    assert pid not in (None, os.getpid())
    times = [record.time or 0 for record in found.records]
    assert times == sorted(times)


@pytest.mark.parametrize(
    "missing",
    [
        (),
        (Feature.MAY_GOTO,),
        (Feature.MAY_GOTO, Feature.ITERATORS),
        (Feature.SLEEPABLE_UPROBE,),
        (Feature.UPROBE_MULTI,),
        (Feature.UPROBE_MULTI, Feature.SLEEPABLE_UPROBE, Feature.MAY_GOTO, Feature.ITERATORS),
    ],
    ids=lambda missing: "+".join(feature.name for feature in missing) or "none",
)
def test_an_older_kernel_gives_the_same_records(build: Builder, missing: tuple[Feature, ...]) -> None:
    program = str(build("hotloop.c"))
    found = run(TICK, (program, "200"), *missing)
    assert [int.from_bytes(log, "little") for log in found.logs] == list(range(200))
    assert (found.counts[0].hits, found.counts[0].records) == (200, 200)
    assert found.notices == ([ONE_BY_ONE] if Feature.UPROBE_MULTI in missing else [])
    looped = run(SUM, (program, "20"), *missing)
    assert [int.from_bytes(log, "little") for log in looped.logs] == [300] * 20


def test_many_places_are_refused_where_each_would_be_attached_alone(build: Builder) -> None:
    program = str(build("many.c"))
    with pytest.raises(NotSupportedError) as caught:
        run("name = many\noffset = many_1*\nexit\n", (program, "1"), Feature.UPROBE_MULTI)
    assert caught.value.message == (
        f"1111 probepoints in '{program}' are too many for this kernel: it has no uprobe_multi links, attaches them "
        "one by one, and takes 0.1 s to detach each"
    )


def test_without_typed_tracepoints_faults_are_not_seen_and_that_is_said(build: Builder) -> None:
    """The scope's tracepoints are still there: this kernel has them."""
    source = "name = faults\noffset = at_protected\nminor = 1\nexit\n"
    command = (str(build("faults.c")), "protected", "20")
    assert len(run(source, command).logs) == 20
    found = run(source, command, Feature.TYPED_TRACEPOINT)
    assert len(found.logs) == 40
    assert found.notices == [
        "this kernel shows no type information (BTF): records are emitted also where the instruction faults"
    ]


@pytest.mark.parametrize(
    ("feature", "problem"),
    [
        (Feature.RING_BUFFER, "this kernel has no BPF ring buffers (switched off)"),
        (Feature.MMAPABLE_ARRAY, "this kernel has no BPF arrays that can be mapped (switched off)"),
        (Feature.BPF, "this kernel has no BPF programs on uprobes (switched off)"),
    ],
)
def test_what_the_engine_cannot_do_without_is_named(feature: Feature, problem: str) -> None:
    support = EbpfEngine(features=Features(overrides={feature: False})).support
    assert (support.problem, support.remedy) == (problem, "Linux 5.17 and newer has what is needed")


def test_a_kernel_without_loops_is_refused() -> None:
    overrides = dict.fromkeys((Feature.MAY_GOTO, Feature.ITERATORS, Feature.BPF_LOOP), False)
    support = EbpfEngine(features=Features(overrides=overrides)).support
    assert (support.problem, support.remedy) == (
        "this kernel has no loops in BPF programs",
        "Linux 5.17 and newer has them",
    )


WITHOUT_TYPES = 'mount -t tmpfs none /sys/kernel/btf && exec "$@"'


def test_a_kernel_without_types_leaves_trees_to_ptrace(build: Builder, tmp_path: Path) -> None:
    """Its type information is hidden in a mount namespace."""
    program = build("hotloop.c")
    source = tmp_path / "tick.rpn"
    source.write_text(TICK)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}

    def dprobes(engine: str) -> subprocess.CompletedProcess[str]:
        words = [
            "unshare",
            "-m",
            "sh",
            "-c",
            WITHOUT_TYPES,
            "sh",
            *DPROBES,
            "run",
            str(source),
            "-v",
            "--engine",
            engine,
        ]
        words += ["-v", "--", str(program), "20"]
        return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=TIMEOUT, check=False)

    if not Path("/sys/kernel/btf").is_dir():
        pytest.skip("this kernel shows no type information (BTF) anyway")
    taken = dprobes("auto")
    assert taken.returncode == 0, taken.stderr
    assert taken.stderr.startswith(
        "dprobes: note: engine inline: the ebpf engine cannot follow processes here: "
        "this kernel shows no type information (BTF); handlers run in the process\n"
    )
    refused = dprobes("ebpf")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        "dprobes: error: the ebpf engine cannot follow the processes of -c and -p here: "
        "this kernel shows no type information (BTF)\n"
        "hint: use --engine ptrace, or a kernel with CONFIG_DEBUG_INFO_BTF\n"
    )


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOMEM, "a smaller --ring-size needs less, and so do a smaller 'logmax' and fewer variables"),
        (errno.EPERM, "kernels before 5.11 count them as locked memory: raise its limit (ulimit -l unlimited)"),
    ],
)
@pytest.mark.parametrize("which", [1, 2, 5, 8])
def test_maps_that_the_kernel_refuses_are_an_error(
    build: Builder, monkeypatch: pytest.MonkeyPatch, which: int, number: int, hint: str
) -> None:
    """What was made before is given back."""
    made = 0

    def refuse(*arguments: Any, **keywords: Any) -> int:
        nonlocal made
        made += 1
        if made == which:
            raise OSError(number, os.strerror(number))
        return create_map(*arguments, **keywords)

    for module in (bpf_objects, bpf_objects):
        monkeypatch.setattr(module, "create_map", refuse)
    with pytest.raises(EngineError) as caught:
        run(TICK, (str(build("hotloop.c")), "20"))
    reason = os.strerror(number).lower()
    assert caught.value.message == f"the kernel has no memory for the maps of this program: {reason}"
    assert caught.value.hint == hint


def test_a_program_for_trees_that_the_kernel_refuses_is_an_error(
    build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(program: Program) -> int:
        if program.name == "sched_process_fork":
            raise PermissionError(errno.EPERM, "bpf PROG_LOAD: " + os.strerror(errno.EPERM))
        return load_program(program)

    monkeypatch.setattr(bpf_objects, "load_program", refuse)
    with pytest.raises(EngineError) as caught:
        run(TICK, (str(build("hotloop.c")), "20"))
    assert caught.value.message == (
        "the kernel refuses the program that follows a process tree: operation not permitted"
    )
    assert caught.value.hint == "'dprobes doctor' shows what works on this machine"
