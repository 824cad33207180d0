"""Sessions of the Python API on real programs, written as users write them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dprobes
from dprobes import Item, ProbeState
from integration.ebpf.insessions import on_demand
from integration.support import TIMEOUT, await_true, code_is_original, is_traced, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.support import Builder

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the ebpf engine needs root")
ENGINES = ["ptrace", pytest.param("ebpf", marks=needs_root)]


@pytest.fixture(scope="module")
def path(build: Builder) -> Path:
    return build("ondemand.c", "-pthread")


def arguments_of(path: Path, function: str = "stepped") -> dprobes.ProgramBuilder:
    program = dprobes.ProgramBuilder(str(path), major=7, vars=2, gvars=3)
    with program.probe(function, minor=1) as handler:
        handler.inc_lv(1).inc_gv(2)
        handler.push_r("arg0").log(1).exit()
    return program


@pytest.mark.parametrize("engine", ENGINES)
def test_records_counts_and_variables_of_a_process(path: Path, engine: str) -> None:
    with on_demand(path) as target:
        with dprobes.attach(target.process.pid, engine=engine) as session:
            inserted = session.insert(arguments_of(path))
            assert [probe.state for probe in inserted.probepoints] == [ProbeState.ACTIVE]
            assert (inserted.engine, inserted.reason) == (engine, None)
            target.say("call 5")
            records = list(itertools.islice(session.records(), 5))
            assert [record.words() for record in records] == [(n,) for n in range(5)]
            first = records[0]
            assert (first.major, first.minor, first.pid) == (7, 1, target.process.pid)
            assert first.place == dprobes.Place(str(path), "stepped")
            assert first.process_name == path.name[:15]
            assert session.counts()[7, 1].hits == inserted.counts(minor=1).hits == 5
            assert inserted.local_variables() == [0, 5]
            assert session.global_variables() == [0, 0, 5]
            session.set_global_variable(0, 40)
            assert session.global_variables() == [40, 0, 5]
            inserted.reset_variables()
            assert inserted.local_variables() == [0, 0]
            inserted.remove()
            assert inserted.has_ended
            target.say("call 5")
            assert list(session.records()) == []
        assert session.counts()[7, 1].hits == 5
        assert session.global_variables() == [40, 0, 5]
        assert code_is_original(target.process.pid, path)
        assert not is_traced(target.process.pid)
        assert target.end() == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_command_is_probed_from_its_start_to_its_end(path: Path, engine: str) -> None:
    program = dprobes.ProgramBuilder("libc.so.6")
    program.probe("_exit", minor=2).push_r("arg0").log(1).exit()
    with dprobes.launch(["sh", "-c", "exit 3"], engine=engine, items=Item.PID) as session:
        session.insert(program)
        assert session.wait(60) == 3
        (record,) = session.records()
        assert record.words() == (3,)
        assert record.pid is not None
        assert record.time is None
        assert session.programs[0].exit_status == session.exit_status == 3
        with pytest.raises(dprobes.EngineError, match="the command 'sh' has ended"):
            session.insert(program)
    assert session.exit_status == 3


LOADER = Path("/lib64/ld-linux-x86-64.so.2")


def entry_of(path: Path) -> int:
    """Return ``e_entry`` of an ELF file, which is an offset in the loader's as well."""
    return int.from_bytes(path.read_bytes()[24:32], "little")


def exits() -> dprobes.ProgramBuilder:
    program = dprobes.ProgramBuilder("libc.so.6", major=9)
    program.probe("_exit", minor=1).push_r("arg0").log(1).exit()
    return program


def starts(path: Path) -> dprobes.ProgramBuilder:
    program = dprobes.ProgramBuilder(str(path), major=8)
    program.probe("_start", minor=1).exit()
    program.probe("main", minor=2).push_r("arg0").log(1).exit()
    return program


MIXED = [
    ("ptrace", "ptrace"),
    pytest.param("ebpf", "ebpf", marks=needs_root),
    pytest.param("ptrace", "ebpf", marks=needs_root),
    pytest.param("ebpf", "ptrace", marks=needs_root),
]


@pytest.mark.parametrize(("one", "other"), MIXED)
def test_several_programs_probe_a_command_from_its_first_instruction(path: Path, one: str, other: str) -> None:
    loader = dprobes.ProgramBuilder(str(LOADER), major=7)
    loader.probe(hex(entry_of(LOADER)), minor=1).exit()  # the first instruction of the process
    with dprobes.launch([str(path), "0"]) as session:
        inserted = [
            session.insert(program, engine=engine)
            for program, engine in ((exits(), one), (starts(path), other), (loader, one))
        ]
        assert [each.engine for each in inserted] == [one, other, one]
        (pid,) = children()
        assert Path(f"/proc/{pid}/exe").readlink() != path  # it waits
        assert all(each.counts().hits == 0 for each in inserted)
        found = [(record.major, record.minor, record.words()) for record in session.records()]
        assert sorted(found) == [(7, 1, ()), (8, 1, ()), (8, 2, (2,)), (9, 1, (0,))]
        assert session.wait(60) == 0
        assert {codes: counts.hits for codes, counts in session.counts().items()} == dict.fromkeys(
            [(7, 1), (8, 1), (8, 2), (9, 1)], 1
        )
    assert children() == set()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_program_is_inserted_into_a_command_that_has_begun(tmp_path: Path, engine: str) -> None:
    go = tmp_path / "go"
    code = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nos.chdir('/'); os._exit(5)"
    changes = dprobes.ProgramBuilder("libc.so.6", major=6)
    changes.probe("chdir", minor=1).exit()
    with dprobes.launch([sys.executable, "-c", code], engine=engine) as session:
        session.insert(exits())
        session.go()
        session.go()
        late = session.insert(changes)
        go.touch()
        assert session.wait(60) == 5
        assert (session.counts()[9, 1].hits, late.counts().hits) == (1, 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_in_a_later_program_leaves_no_process_behind(path: Path, tmp_path: Path, engine: str) -> None:
    ran = tmp_path / "ran"
    wrong = dprobes.ProgramBuilder(str(path))
    wrong.probe("no_such_function").exit()

    def fail() -> None:
        with dprobes.launch(["touch", str(ran)], engine=engine) as session:
            session.insert(exits())
            session.insert(wrong)

    with pytest.raises(dprobes.SourceError, match="no_such_function"):
        fail()
    assert children() == set()
    session = dprobes.launch(["touch", str(ran)], engine=engine)
    with pytest.raises(dprobes.SourceError, match="no_such_function"):
        session.insert(wrong)
    assert children() == set()
    assert session.wait(0) is None
    assert not ran.exists()
    with session:  # and the one that is right can be inserted still
        first = session.insert(exits())
        with pytest.raises(dprobes.SourceError, match="no_such_function"):
            session.insert(wrong)
        assert session.programs == (first,)
        assert session.wait(60) == 0
        assert first.counts().hits == 1
    assert ran.exists()
    assert children() == set()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_command_that_was_not_let_go_never_begins(tmp_path: Path, engine: str) -> None:
    ran = tmp_path / "ran"
    with dprobes.launch(["touch", str(ran)], engine=engine) as session:
        with pytest.raises(dprobes.EngineError, match="no program is inserted: the command 'touch' does not begin"):
            session.go()
        session.insert(exits())
        with dprobes.launch(["true"], engine=engine) as other:  # its child holds what the first one waits for
            other.insert(exits())
            session.close()
        assert (session.wait(), list(session.records())) == (None, [])
    with dprobes.launch(["touch", str(ran)], engine=engine) as session:
        session.insert(exits())
        session.stop()
        assert (session.wait(TIMEOUT), list(session.records())) == (None, [])
    assert children() == set()
    assert not ran.exists()


def test_a_command_that_cannot_be_executed_is_told_where_it_begins(tmp_path: Path) -> None:
    file = tmp_path / "broken"
    file.write_bytes(Path("/bin/true").read_bytes()[:64])
    file.chmod(0o755)
    with dprobes.launch([str(file)], engine="ptrace") as session:
        session.insert(exits())
        with pytest.raises(dprobes.TargetError, match="broken' cannot be started: "):
            session.go()
        assert session.wait(TIMEOUT) is None
    assert children() == set()


def children() -> set[int]:
    """Return our children that are not helpers of dprobes."""
    found = set()
    for pid in map(int, Path("/proc/self/task", str(os.getpid()), "children").read_text().split()):
        with contextlib.suppress(OSError):
            if b"dprobes.engines" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def test_what_was_not_read_can_be_read_behind_the_block(path: Path) -> None:
    with on_demand(path) as target:
        with dprobes.attach(target.process.pid, engine="ptrace") as session:
            session.insert(arguments_of(path))
            target.say("call 3")
        assert [record.words() for record in session.records()] == [(0,), (1,), (2,)]
        assert list(session.records()) == []
        with pytest.raises(dprobes.EngineError, match="the session is closed"):
            session.insert(arguments_of(path))


def test_an_iteration_goes_on_where_the_last_one_stopped(path: Path) -> None:
    with on_demand(path) as target, dprobes.attach(target.process.pid, engine="ptrace") as session:
        session.insert(arguments_of(path))
        target.say("call 4")
        for record in session.records():
            assert record.words() == (0,)
            break
        assert [record.words() for record in itertools.islice(session.records(), 3)] == [(1,), (2,), (3,)]


def test_an_exception_in_the_block_takes_everything_away(path: Path) -> None:
    with on_demand(path) as target:

        def fail() -> None:
            with dprobes.attach(target.process.pid, engine="ptrace") as session:
                session.insert(arguments_of(path))
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert not is_traced(target.process.pid)
        assert code_is_original(target.process.pid, path)
        target.say("call 3")
        assert target.end() == 0


def test_a_program_takes_itself_away(path: Path) -> None:
    program = dprobes.ProgramBuilder(str(path))
    program.probe("both", minor=1).remove()
    with on_demand(path) as target, dprobes.attach(target.process.pid, engine="ptrace") as session:
        inserted = session.insert(program)
        target.say("call 5")
        await_true(lambda: inserted.probepoints[0].state is ProbeState.REMOVED, "the removal")
        assert inserted.counts().hits == 1


def test_single_probepoints_are_removed(path: Path) -> None:
    program = arguments_of(path)
    program.probe("both", minor=2).exit()
    with on_demand(path) as target, dprobes.attach(target.process.pid, engine="ptrace") as session:
        inserted = session.insert(program)
        inserted.remove(minor=2)
        await_true(lambda: inserted.probepoints[1].state is ProbeState.REMOVED, "the removal")
        target.say("call 2")
        await_true(lambda: inserted.counts(minor=1).hits == 2, "two hits")
        assert inserted.counts(minor=2).hits == 0
        with pytest.raises(dprobes.EngineError, match="has no probepoint with minor 3"):
            inserted.remove(minor=3)


@needs_root
def test_several_programs_share_global_variables(path: Path) -> None:
    other = dprobes.ProgramBuilder(str(path), major=8, gvars=3)
    other.probe("both", minor=1).inc_gv(2).exit()
    with on_demand(path) as target, dprobes.attach(target.process.pid, engine="ebpf") as session:
        first, second = session.insert(arguments_of(path)), session.insert(other)
        target.say("call 10")
        await_true(lambda: first.counts().hits == second.counts().hits == 10, "ten hits of each")
        assert session.global_variables() == [0, 0, 20]
        first.remove()
        target.say("call 1")
        await_true(lambda: session.counts()[8, 1].hits == 11, "one hit more")
        assert session.counts()[7, 1].hits == 10
        majors = [record.major for record in session.collect(21, timeout=TIMEOUT)]
        assert (majors.count(7), majors.count(8)) == (10, 11)


@needs_root
def test_a_program_takes_the_place_of_another_one(path: Path) -> None:
    other = dprobes.ProgramBuilder(str(path), major=8)
    other.probe("stepped", minor=1).exit()
    with on_demand(path) as target, dprobes.attach(target.process.pid, engine="ebpf") as session:
        first = session.insert(arguments_of(path))
        target.say("call 2")
        second = session.insert(other, replaces=first)
        target.say("call 3")
        await_true(lambda: second.counts().hits == 3, "three hits")
        assert first.wait(TIMEOUT)
        assert first.counts().hits == 2


@needs_root
def test_all_processes_are_in_scope(path: Path) -> None:
    program = arguments_of(path)
    with dprobes.everywhere(uid=os.geteuid()) as session:
        session.insert(program)
        with on_demand(path) as target:
            target.say("call 2")
            records = list(itertools.islice(session.records(), 2))
            assert {record.pid for record in records} == {target.process.pid}


def test_several_programs_with_ptrace(path: Path) -> None:
    with on_demand(path) as target, dprobes.attach(target.process.pid, engine="ptrace") as session:
        one, two = session.insert(arguments_of(path)), session.insert(arguments_of(path, "both"))
        target.say("call 3")
        records = list(itertools.islice(session.records(), 6))
        assert sorted(record.words() for record in records) == [(n,) for n in range(3) for _ in range(2)]
        one.stop()
        one.wait()
        target.say("call 2")
        await_true(lambda: two.counts().hits == 5, "the hits of the other one")
        assert one.counts().hits == 3
        assert is_traced(target.process.pid)
    with on_demand(path) as target, dprobes.attach(target.process.pid, engine="ptrace") as session:
        session.insert(arguments_of(path))
        with (
            dprobes.attach(target.process.pid, engine="ptrace") as stranger,
            pytest.raises(dprobes.EngineError, match="is already traced by the dprobes of process"),
        ):
            stranger.insert(arguments_of(path))


def test_a_reader_in_a_thread_ends_with_the_session(path: Path) -> None:
    seen: list[int] = []

    def read(records: Iterator[dprobes.LogRecord]) -> None:
        seen.extend(record.words()[0] for record in records)

    with on_demand(path) as target:
        with dprobes.attach(target.process.pid, engine="ptrace") as session:
            session.insert(arguments_of(path))
            reader = threading.Thread(target=read, args=(session.records(),))
            reader.start()
            target.say("call 6")
            await_true(lambda: len(seen) == 6, "six records")
        reader.join(20)
        assert not reader.is_alive()
        assert seen == list(range(6))


def test_records_that_nobody_reads_are_counted(path: Path) -> None:
    with on_demand(path) as target:
        with dprobes.attach(target.process.pid, engine="ptrace", items=Item(0), buffer=100) as session:
            inserted = session.insert(arguments_of(path))
            target.say("call 50")
            await_true(lambda: inserted.counts().records == 50, "fifty records")
        kept = list(session.records())
        assert len(kept) == 100 // (4 + 4 + 4 + 8)  # flags, major, minor, and a word
        assert session.lost == 50 - len(kept)


def test_a_task_that_reads_records_can_be_cancelled_and_loses_none(path: Path) -> None:
    async def read(session: dprobes.ProbeSession, found: list[tuple[int, ...]], limit: int | None = None) -> None:
        async with contextlib.aclosing(session.async_records()) as records:
            async for record in records:
                found.append(record.words())
                if len(found) == limit:
                    return

    async def go_through(session: dprobes.ProbeSession, say: Callable[[str], object]) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        idle = asyncio.create_task(read(session, found))
        await asyncio.sleep(0.05)  # the loop goes on while the task waits
        assert not idle.done()
        idle.cancel()
        with pytest.raises(asyncio.CancelledError):
            await idle
        await asyncio.to_thread(say, "call 100")
        await asyncio.wait_for(read(session, found, 30), 60)
        assert len(found) == 30
        rest = asyncio.create_task(read(session, found))
        session.stop()
        await asyncio.wait_for(rest, 60)
        return found

    with on_demand(path) as target, dprobes.attach(target.process.pid, engine="ptrace") as session:
        session.insert(arguments_of(path))
        assert asyncio.run(go_through(session, target.say)) == [(n,) for n in range(100)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_program_of_which_nothing_could_be_inserted_is_an_error(path: Path, engine: str) -> None:
    program = dprobes.compile_source(f'name = "{path}"\noffset = stepped\nopcode = 0xf1\nminor = 1\nexit\n')
    with dprobes.launch([str(path)], engine=engine) as session:
        inserted = session.insert(program)
        with pytest.raises(dprobes.EngineError) as caught:
            list(session.records(20))
        assert re.fullmatch(
            rf"no probepoint of the program for '{path}' was inserted: "
            r"MISMATCH: opcode 0x[0-9a-f]{2} \(.+\) is there, not 0xf1; not inserted",
            caught.value.message,
        )
        assert [probe.state for probe in inserted.probepoints] == [ProbeState.MISMATCH]
        assert list(session.records(1)) == []  # it has been said


def test_items_that_were_logged_are_numbers(path: Path) -> None:
    with on_demand(path) as target, dprobes.attach(target.process.pid, engine="ptrace", items=Item.PID) as session:
        session.insert(arguments_of(path))
        target.say("call 1")
        (record,) = itertools.islice(session.records(), 1)
        pid: int = record.logged.pid
        assert (pid, record.logged.major, record.logged.minor) == (target.process.pid, 7, 1)
        with pytest.raises(dprobes.FormatError) as caught:
            _ = record.logged.process_name
        assert caught.value.message == "the record carries no item 'process_name'"
        assert caught.value.hint == "have it logged: items=Item.PROCESS_NAME, or --log of the command line"


def test_refusals_come_before_anything_is_done(path: Path) -> None:
    with pytest.raises(dprobes.EngineError, match="there is no process 4194305"):
        dprobes.attach(4194305)
    with pytest.raises(dprobes.TargetError, match="no-such-command"):
        dprobes.launch(["no-such-command"])
    with pytest.raises(dprobes.EngineError, match="there is no engine 'magic'"):
        dprobes.attach(1, engine="magic")
    with pytest.raises(dprobes.EngineError, match="EXCLUDED"):
        dprobes.attach(os.getpid())
    with running("sleep", "60") as target, dprobes.attach(target.pid, engine="ptrace") as session:
        writing = dprobes.ProgramBuilder("libc.so.6")
        writing.probe("malloc").push(0).pop_r("arg0")
        with pytest.raises(dprobes.SourceError, match="--allow-write"):
            session.insert(writing)
        assert session.programs == ()
        assert not is_traced(target.pid)


def test_the_end_of_the_process_ends_the_iteration(path: Path) -> None:
    with on_demand(path) as target, dprobes.attach(target.process.pid, engine="ptrace") as session:
        session.insert(arguments_of(path))
        target.say("call 2")
        os.kill(target.process.pid, signal.SIGKILL)
        assert [record.words() for record in session.records()] == [(0,), (1,)]
        assert session.wait() is None


def test_a_process_that_forgets_to_close_leaves_nothing_behind(path: Path) -> None:
    code = (
        "import dprobes, sys\n"
        "program = dprobes.ProgramBuilder(sys.argv[2])\n"
        "program.probe('stepped').exit()\n"
        "dprobes.attach(int(sys.argv[1]), engine='ptrace').insert(program)\n"
    )
    with on_demand(path) as target:
        subprocess.run([sys.executable, "-c", code, str(target.process.pid), str(path)], check=True, timeout=60)
        await_true(lambda: not is_traced(target.process.pid), "the end of the tracer")
        assert code_is_original(target.process.pid, path)
        assert target.end() == 0


TABLES = """
table = calls, count, word
table = sum, sum
table = stacks, count, ustack[3]
offset = stepped
push r, arg0
tally calls
push r, arg0
tally sum
tally stacks
abort
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_tables_are_cleared_and_go_on_counting(path: Path, tmp_path: Path, engine: str) -> None:
    source = tmp_path / "tables.rpn"
    source.write_text(f'name = "{path}"\n{TABLES}')
    with on_demand(path) as target:
        with dprobes.attach(target.process.pid, engine=engine) as session:
            inserted = session.insert(dprobes.compile_file(source))

            def held() -> list[int]:
                return [sum(number for _, number in table.items()) for table in inserted.tables().values()]

            target.say("call 5")
            await_true(lambda: held() == [5, 10, 5], "five hits in all tables")
            inserted.clear_tables("s*")
            assert held() == [5, 0, 0]
            target.say("call 3")
            await_true(lambda: held() == [8, 3, 3], "three more hits")
            inserted.clear_tables()
            assert held() == [0, 0, 0]
            assert len(inserted.tables()["calls"]) == 0
            target.say("call 2")
            await_true(lambda: held() == [2, 1, 2], "two more hits")
            with pytest.raises(dprobes.EngineError) as caught:
                inserted.clear_tables("clls")
            assert caught.value.message == "no keyed table is called 'clls'"
            assert caught.value.hint == "there are: calls, sum, stacks"
        inserted.clear_tables("calls")
        assert held() == [0, 1, 2]
        assert target.end() == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_records_have_the_names_of_addresses_also_when_the_process_has_ended(
    path: Path, tmp_path: Path, engine: str
) -> None:
    source = tmp_path / "stacks.dpc"
    source.write_text(f'module "{path}";\nstepped(n) {{ printf("%d %s", n, ustack(2)); }}\n')
    addresses = dprobes.ProgramBuilder(str(path), major=7)
    addresses.probe("both", minor=1).push_r("rip").log(1).exit()
    with on_demand(path) as target:
        with dprobes.attach(target.process.pid, engine=engine) as session:
            session.insert(dprobes.compile_file(source))
            session.insert(addresses)
            target.say("call 2")
        assert target.end() == 0
    records = session.collect()
    stacks = [record for record in records.to_dicts() if "ustack" in record]
    for record in stacks:
        names = record["ustack_names"]
        assert isinstance(names, tuple)
        assert [name.partition("+")[0] for name in names] == [f"stepped [{path.name}]", "once"]
    others = [(record["rip"], record["rip_name"]) for record in records.to_dicts() if "rip" in record]
    assert others == [(record.ip, f"both [{path.name}]") for record in records if record.major == 7]
    assert (len(stacks), len(others)) == (2, 2)
