"""Several programs at one stub, and programs for several modules: one target that stops for all of them."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

import dprobes
from integration.gdb.processors import PROCESSORS
from integration.support import DPROBES, TIMEOUT, await_true, environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from integration.gdb.processors import EmulatedProgram, Processor
    from integration.support import Builder

    Starter = Callable[..., EmulatedProgram]

COUNT = 40


@pytest.fixture
def processor() -> Processor:
    """The processor of these programs."""
    return PROCESSORS["aarch64"]


@pytest.fixture
def path(build: Builder, processor: Processor) -> Path:
    return processor.build(build, "handled.c")


MODULES = """static long calls; global long all;
"%s":handle(request, n) { calls++; all++; @calls["handle"] = count(); printf("handle %%d %%d", n, calls); }
"%s":usleep(usec) { calls++; @calls["usleep"] = count(); printf("usleep %%d %%d", usec, calls); }
return "%s":handle { @returned = count(); }
"""


def test_a_program_for_several_modules(path: Path, start: Starter) -> None:
    """Hits come in the order of the program's own steps, and what they count is one."""
    program = start(path, 4, 1000)
    text = MODULES % (path, f"{PROCESSORS['aarch64'].root}/lib/libc.so.6", path)
    command = [*DPROBES, "run", "--engine", f"gdb={program.endpoint}", "-e", text, "--format", "json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    assert result.returncode == 0, result.stderr
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    fields = [each["fields"] for each in objects if "fields" in each]
    assert [each["calls"] for each in fields] == list(range(1, 9))
    assert [each.get("n", each.get("usec")) for each in fields] == [0, 1000, 1, 1000, 2, 1000, 3, 1000]
    tables = {(each["table"], *each["keys"]): each["value"] for each in objects if "table" in each}
    assert tables == {("calls", "handle"): 4, ("calls", "usleep"): 4, ("returned",): 4}
    assert program.output() == "50\n"


def counted(path: Path, place: str, minor: int) -> dprobes.ProgramBuilder:
    program = dprobes.ProgramBuilder(str(path), major=minor)
    program.probe(place, minor=minor).push_r("arg1").log(1).exit()
    return program


def test_programs_come_and_go_while_others_stay(path: Path, start: Starter) -> None:
    """One is inserted where another one has its breakpoint, and the first one is removed before the others."""
    program = start(path, COUNT, 50000)
    with dprobes.attach(engine=f"gdb={program.endpoint}") as session:
        first = session.insert(counted(path, "handle", 1))
        await_true(lambda: first.counts(1).hits > 2, "hits of the first program")
        second = session.insert(counted(path, "handle", 2))
        third = session.insert(counted(path, "main", 3))
        await_true(lambda: second.counts(2).hits > 2, "hits of the second program")
        first.remove()
        hits = first.counts(1).hits
        await_true(lambda: second.counts(2).hits > hits, "hits of the second program alone")
        assert session.wait(TIMEOUT) == 0
        records = list(session.records(TIMEOUT))
        seen = {minor: [r.words()[0] for r in records if r.minor == minor] for minor in (1, 2, 3)}
        assert seen[1] == list(range(hits))
        assert seen[2] == list(range(COUNT - second.counts(2).hits, COUNT))
        assert seen[3] == []
        assert third.counts(3).hits == 0
        shared = set(seen[1]) & set(seen[2])
        both = [r.minor for r in sorted(records, key=lambda r: (r.words(), r.time)) if r.words()[0] in shared]
        assert both == [1, 2] * (len(both) // 2)
        assert len(both) > 4
    assert program.output() == f"{sum((9 if n % 2 else 7) * n for n in range(COUNT))}\n"


def test_a_program_that_cannot_be_inserted_leaves_the_others(path: Path, start: Starter) -> None:
    program = start(path, COUNT, 20000)
    with dprobes.attach(engine=f"gdb={program.endpoint}") as session:
        first = session.insert(counted(path, "handle", 1))
        refused = dprobes.ProgramBuilder(str(path), major=2)
        refused.probe("handle", minor=2).push("0").push_phys_u8().log(1).exit()
        with pytest.raises(dprobes.SourceError, match="needs physical memory, which processes behind a stub do not"):
            session.insert(refused)
        assert session.wait(TIMEOUT) == 0
        assert first.counts(1).hits == COUNT
    assert program.output() == f"{sum((9 if n % 2 else 7) * n for n in range(COUNT))}\n"


def test_a_process_that_is_left_to_a_debugger_is_left_by_all(path: Path, start: Starter) -> None:
    """Both handlers have run before, and no program has probepoints any more."""
    program = start(path, COUNT, 20000)
    with dprobes.attach(engine=f"gdb={program.endpoint}", allow_write=True) as session:
        first = session.insert(counted(path, "handle", 1))
        leaving = dprobes.ProgramBuilder(str(path), major=2)
        leaving.probe("handle", minor=2).push_r("arg1").log(1).exit(1)
        second = session.insert(leaving)
        await_true(lambda: second.has_ended, "the end of the program that has left the process")
        # The two programs are followed by threads of their own.
        await_true(lambda: any("the process is stopped at 0x" in each for each in first.notices()), "the notice")
        records = session.collect(timeout=0)
        (last,) = [each.words()[0] for each in records if each.minor == 2]
        assert [each.words()[0] for each in records if each.minor == 1] == list(range(last + 1))
    assert program.output() == f"{sum((9 if n % 2 else 7) * n for n in range(COUNT))}\n"
