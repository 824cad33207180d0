"""Pass count and max hits of compiled handlers: those of the ptrace engine's probepoints, hit for hit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.bpf.bpf_instructions import Jump, Register
from dprobes.bpf.lower import Request
from dprobes.bpf.map_layouts import ENTRY_HEAD, LIMIT, REMOVE, Entry, MapName, ProbeField
from dprobes.diagnostics import Diagnostics
from dprobes.engines.hits.hit_lifecycle import ProbeLimits
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare
from dprobes.vm import Interpreter
from support.ebpf_backend import EbpfRunner, obstacle
from support.ebpf_world import host_of
from support.ptrace_programs import inserted_program, probe_of

if TYPE_CHECKING:
    from dprobes.bpf.bpf_assembler import Label
    from dprobes.bpf.lower.hosts.handler_host import Host
    from dprobes.vm import Point

HANDLERS = {
    "exit": "exit",
    "abort": "abort",
    "remove at the second": "inc lv, 0; push lv, 0; push 2; sub; jnz on; remove; on: exit",
    "exit 2": "exit 2",
    "exit 3 at the third": "inc lv, 0; push lv, 0; push 3; sub; jnz on; exit 3; on: exit",
}
LIMITS = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 3), (0, 4), (5, 1), (0x7FFF_FFFF, 0), (0x7FFF_FFFF, 0x7FFF_FFFF)]


@pytest.fixture(scope="module", autouse=True)
def can_run() -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)


def runner_of(
    handler: str,
    context: FakeContext,
    passcount: int,
    maxhits: int,
    *,
    by_table: bool,
    note: int | None,
    host: type[Host] | None = None,
) -> tuple[EbpfRunner, int, Point]:
    text = f"name = x; vars = 1\noffset = 0\n{handler}"
    program = parse_source(SourceFile("x.rpn", text), Diagnostics(), CompileOptions(allow_write=True))
    target = architecture("x86_64")
    image = encode(program, target)
    point = prepare(program, 0, context)
    request = Request(probe=None if by_table else 2, passcount=passcount, maxhits=maxhits, note=note)
    return EbpfRunner(image, target, context, request=request, host=host), image.handlers[0], point


BY_TABLE = pytest.mark.parametrize("by_table", [False, True])
NOTES = pytest.mark.parametrize("note", [None, 0, 1])  # with and without tickets that come back


@BY_TABLE
@NOTES
@pytest.mark.parametrize("handler", HANDLERS)
def test_the_same_hits_run_the_handler_and_the_same_one_is_the_last(
    handler: str, by_table: bool, note: int | None
) -> None:
    for passcount, maxhits in LIMITS:
        context = FakeContext("x86_64")
        runner, start, point = runner_of(HANDLERS[handler], context, passcount, maxhits, by_table=by_table, note=note)
        interpreter, traced = Interpreter(runner._image, context.architecture), FakeContext("x86_64")
        traced.local_variables[:] = [0]
        limits = ProbeLimits(passcount, maxhits, keep_on_fault=False, keep_ip=False)
        probe = probe_of(inserted_program(), 2, limits)
        ended = False
        with runner:
            for hit in range(10):
                outcome = None
                if probe.is_active:
                    outcome = interpreter.run(start, point, traced) if probe.counter >= 0 else None
                    probe.count_hit(outcome)
                found = runner.hit(start, point)
                where = (passcount, maxhits, hit)
                assert (found is None) == (outcome is None), where
                if found is None or outcome is None:
                    continue
                assert found[0].ending is outcome.ending, where
                reasons = [ENTRY_HEAD.unpack_from(body)[0] for kind, _, body in found[1].entries if kind is Entry.ENDED]
                ends = probe.state in (ProbeState.DISABLED, ProbeState.REMOVED)
                assert len(reasons) == (ends and not ended), where
                ended = ended or ends
                if reasons:
                    by_limit = probe.state is ProbeState.DISABLED
                    expected = LIMIT if by_limit else REMOVE if not outcome.exit_code else outcome.exit_code
                    assert reasons == [expected], where
            records = runner.count(ProbeField.RECORDS)
        assert records == (0 if handler == "abort" else probe.counts.hits - probe.counts.passed)


@BY_TABLE
@NOTES
def test_the_last_hit_ends_the_probepoint_even_if_no_slot_is_free(by_table: bool, note: int | None) -> None:
    context = FakeContext("x86_64", pid=4711)
    runner, start, point = runner_of("exit", context, 0, 3, by_table=by_table, note=note)
    with runner:
        assert runner.hit(start, point) is not None
        assert runner.miss(start, point) == []
        entries = runner.miss(start, point)
        assert [(kind, body) for kind, _, body in entries] == [(Entry.ENDED, ENTRY_HEAD.pack(LIMIT, 4711))]
        assert (runner.count(ProbeField.MISSED), runner.count(ProbeField.DISABLED)) == (2, note is None)
        assert runner.hit(start, point) is None


@BY_TABLE
def test_a_hit_that_cannot_be_looked_at_is_a_hit_that_is_missed(by_table: bool) -> None:
    """The kernel may not be able to say what is mapped, or have no room for a ticket: limits count all the same."""
    context = FakeContext("x86_64", pid=4711)

    class BusyHost(host_of(context, 2, 0)):  # type: ignore[misc]
        def find_module(self, outside: Label, busy: Label) -> None:
            self._asm.load_value(Register.R1, MapName.STATUS)
            self._asm.load(Register.R1, Register.R1, 0)
            self._asm.jump_if(Jump.JEQ, Register.R1, 0, busy)
            self._asm.jump_if(Jump.JEQ, Register.R1, 1, outside)

    runner, start, point = runner_of("exit", context, 1, 2, by_table=by_table, note=0, host=BusyHost)
    counts = []
    with runner:
        for _ in range(3):
            entries = runner.miss(start, point)
            counts.append((runner.count(ProbeField.HITS), runner.count(ProbeField.MISSED), len(entries)))
        assert counts == [(1, 0, 0), (2, 1, 0), (3, 2, 1)]
        assert [(kind, body) for kind, _, body in entries] == [(Entry.ENDED, ENTRY_HEAD.pack(LIMIT, 4711))]
        assert runner.miss(start, point) == []
        assert runner.count(ProbeField.MISSED) == 2


@pytest.mark.parametrize("name", ["i386", "x86_64"])
@pytest.mark.parametrize(
    "handler",
    [
        "push 5; pop {v}, 65535; push {v}, 65535; log 1; push 65535; push {v}; log 1; push 65536; push {v}",
        "inc {v}, 65535; push 65535; dec {v}; push 65535; push 8; pop {v}; push -1; inc {v}",
        "push 7; pop {v}, 0; push 0; push 65536; log {v}",
        "push 7; pop {v}, 65530; push 65530; push 100; log {v}",
        "push 65536; push 1; log {v}; push 65536; push 0; log {v}; push -1; push 1; log {v}",
    ],
)
@pytest.mark.parametrize("family", ["lv", "gv", "cv"])
def test_there_may_be_65536_variables_of_each_kind(family: str, handler: str, name: str) -> None:
    check_all(f"sx l; {handler.format(v=family)}; exit; l: log 3", name)


@pytest.mark.parametrize("name", ["i386", "x86_64"])
@pytest.mark.parametrize(
    "handler",
    [
        "push 5; pop tv, 1023; push tv, 1023; log 1; push 1023; push tv; log 1; push 1024; push tv",
        "inc tv, 1023; push 1023; dec tv; push 1023; push 8; pop tv; push -1; inc tv",
        "push 7; pop tv, 0; push 0; push 1024; log tv",
        "push 7; pop tv, 1000; push 1000; push 100; log tv",
        "push 1024; push 1; log tv; push 1024; push 0; log tv; push -1; push 1; log tv",
    ],
)
def test_a_thread_may_have_1024_variables(handler: str, name: str) -> None:
    check_all(f"sx l; {handler}; exit; l: log 3", name)


@pytest.mark.parametrize("name", ["i386", "x86_64"])
@pytest.mark.parametrize(
    "handler",
    [
        "push 0; push 65536; trace lv; push 65536; push 0; trace lv; push 1; push 65536; trace lv",
        "push 9; pop lv, 65535; call f; exit; proc f; push 65000; push 536; trace lv; log st; ret; endproc",
        "push 9; pop gv, 0; call f; exit; proc f; push 0; push 65536; trace gv; log st; log st; ret; endproc",
        "call f; exit; proc f; push 3; dup 255; dup 255; save tsp; push 500; trace pv; log st; ret; endproc",
    ],
)
def test_traces_show_as_much(handler: str, name: str) -> None:
    check_all(handler.replace("; proc ", "\nproc "), name)


def check_all(handler: str, name: str) -> None:
    """Compare a handler with all limits at their largest with the interpreter; unwritten cells are not looked at."""
    header = "name = x; vars = 65536; gvars = 65536; cvars = 65536; tvars = 1024; logmax = 65535; ex_logmax = 65535"
    text = f"{header}\noffset = 0; ex_mask = 0x1fff\n{handler}\n"
    program = parse_source(SourceFile("x.rpn", text), Diagnostics(), CompileOptions())
    target = architecture(name)
    image = encode(program, target)
    worlds = [FakeContext(name, cpu=3, tid=77) for _ in range(2)]
    hits = [(image.handlers[0], prepare(program, 0, world)) for world in worlds]
    expected = Interpreter(image, target).run(*hits[0], worlds[0])
    with EbpfRunner(image, target, worlds[1]) as runner:
        found, _ = runner.run(*hits[1])
    assert found == expected
    for values in ("local_variables", "global_variables", "variables_of_cpu", "variables_of_thread"):
        assert getattr(worlds[1], values) == getattr(worlds[0], values)
