"""Global variables that handlers in the kernel and interpreted ones change at the same time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.ebpf_engine import EbpfEngine
from dprobes.engines.engine_interface import Finished, Scope
from dprobes.engines.ptrace.ptrace_engine import PtraceEngine
from dprobes.engines.shared_globals import GlobalVariables
from dprobes.errors import EngineError
from dprobes.resolve.local_module import resolve
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile
from dprobes.target.probed_module import Module
from integration.ebpf.kernel import require_bpf
from support.attachments import attached, job_of

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.engines.engine_interface import Engine
    from dprobes.rpn.rpn_program import Program
    from integration.support import Builder

PROGRAM = 'name = "{path}"\ngvars = {count}\noffset = tick\ninc gv, 2\npush 3\ndec gv\npush 3\ndec gv\nabort\n'
INTERPRETED, COMPILED = 1_000, 20_000


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()


def probe_program(path: Path, count: int) -> Program:
    return parse_source(SourceFile("gv.rpn", PROGRAM.format(path=path, count=count)), Diagnostics(), CompileOptions())


def run(engine: Engine, program: Program, command: tuple[str, ...], variables: GlobalVariables) -> Finished:
    resolved = resolve(program, Module.load(command[0]), Diagnostics())
    with attached(engine, job_of(program, Scope(command=command), resolved=resolved, globals=variables)) as session:
        *_, last = session.poll()
    assert isinstance(last, Finished)
    return last


def test_no_engine_loses_what_another_one_adds(build: Builder) -> None:
    # Two files: where the kernel has a breakpoint, there is no place for one of the tracer.
    traced, probed = (build("threads.c", "-pthread", name=f"gv_{name}") for name in ("traced", "probed"))
    with GlobalVariables(4) as variables:
        done: list[Finished] = []

        def interpret() -> None:
            command = (str(traced), "2", str(INTERPRETED // 2))
            done.append(run(PtraceEngine(), probe_program(traced, 4), command, variables))

        other = threading.Thread(target=interpret)
        other.start()
        runs = 0
        while other.is_alive() or not runs:
            command = (str(probed), "4", str(COMPILED // 4))
            done.append(run(EbpfEngine(), probe_program(probed, 4), command, variables))
            runs += 1
        other.join()
        hits = sum(finished.counts[0].hits for finished in done)
        cells = variables.cells()
        found = list(cells)
        cells.close()
    assert hits == INTERPRETED + runs * COMPILED
    assert found == [0, 0, hits, -2 * hits & (1 << 64) - 1]


@pytest.mark.parametrize("engine", [EbpfEngine(), PtraceEngine()], ids=["ebpf", "ptrace"])
def test_a_program_that_wants_more_than_there_are_is_refused(build: Builder, engine: Engine) -> None:
    threads = build("threads.c", "-pthread", name="gv_threads")
    with GlobalVariables(4) as variables, pytest.raises(EngineError) as caught:
        run(engine, probe_program(threads, 5), (str(threads), "1", "1"), variables)
    assert caught.value.message == "the program wants 5 global variables, and there are 4"
    assert caught.value.hint == "write 'gvars = 4' or less"
