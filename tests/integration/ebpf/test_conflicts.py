"""Code that differs from the file is found in every process, and uprobes are no conflict."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.attach.code_mappers import PATCHED, Conflict, Place, _Memory, find_conflicts, find_mappers
from dprobes.target.code.machine_code import decode_at
from dprobes.target.probed_module import Module
from dprobes.target.process_maps import run_time_address
from integration.ebpf.kernel import uprobes, waiting
from integration.support import DPROBES, TIMEOUT, Builder, Runner, await_message, await_true, read_memory, tracer_of

if TYPE_CHECKING:
    from collections.abc import Iterator

FUNCTIONS = ("first", "second", "third", "nop_of_5", "across")


@pytest.fixture
def module(build: Builder) -> Module:
    return Module.load(build("patched.c"))


def offset_of(module: Module, name: str) -> int:
    return module.file_offset(module.address_of(name))


def places(module: Module) -> list[Place]:
    decoded = [decode_at(module, offset_of(module, name)) for name in FUNCTIONS]
    return [Place(one.offset, one.raw) for one in decoded]


def conflicts(module: Module) -> tuple[Conflict, ...]:
    return tuple(find_conflicts(str(module.path), places(module)))


@dataclass
class Target:
    """Run the program, patch its memory as another tool would, and let it call its functions."""

    process: subprocess.Popen[str]
    module: Module

    @property
    def pid(self) -> int:
        return self.process.pid

    def address_of(self, name: str) -> int:
        (mapper,) = find_mappers(self.module.path, [self.pid])
        address = run_time_address(mapper.mappings, offset_of(self.module, name))
        assert address is not None
        return address

    def has_breakpoint(self, name: str) -> bool:
        return read_memory(self.pid, self.address_of(name), 1) == b"\xcc"

    def patch(self, name: str, code: bytes, distance: int = 0) -> None:
        # As root, without being the tracer: memory is written through a private copy of the page.
        descriptor = os.open(f"/proc/{self.pid}/mem", os.O_WRONLY)
        try:
            os.pwrite(descriptor, code, self.address_of(name) + distance)
        finally:
            os.close(descriptor)

    def call(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "1\n"


@contextlib.contextmanager
def running(module: Module) -> Iterator[Target]:
    with waiting(module.path) as process:
        yield Target(process, module)


@contextlib.contextmanager
def gdb(pid: int, function: str) -> Iterator[int]:
    """Let gdb hold a breakpoint in a process that runs on; give gdb's process id."""
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    command = ["gdb", "-q", "-nx", "-p", str(pid), "-ex", "set breakpoint pending off", "-ex", f"break *{function}"]
    command += ["-ex", "echo armed\\n", "-ex", "continue"]
    debugger = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert debugger.stdin is not None
    assert debugger.stdout is not None
    try:
        said = []
        for line in debugger.stdout:
            said.append(line)
            if "Continuing" in line:
                break
        else:
            raise AssertionError("".join(said))
        yield debugger.pid
    finally:
        debugger.terminate()
        debugger.wait(TIMEOUT)
        debugger.stdin.close()
        debugger.stdout.close()


@pytest.fixture(autouse=True)
def _root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: memory of other processes is written")


def test_unchanged_code_is_no_conflict(module: Module) -> None:
    assert conflicts(module) == ()
    with running(module), running(module) as target:
        target.call()
        assert conflicts(module) == ()


def test_other_code_is_a_conflict_in_the_process_that_has_it(module: Module) -> None:
    with running(module), running(module) as target:
        target.patch("second", b"\xe9\x00\x01\x00\x00")
        assert conflicts(module) == (Conflict(target.pid, (offset_of(module, "second"),), PATCHED),)
        assert PATCHED == "memory differs from the file: another tool has patched this code"


@pytest.mark.parametrize(
    ("jump", "ends"), [(b"\xe9\x00\x01", 5), (b"\x2e\xe9\x00", 6), (b"\xeb\x02", 2)], ids=["jump", "prefix", "short"]
)
def test_a_jump_that_ends_in_later_instructions_is_a_conflict_at_those(module: Module, jump: bytes, ends: int) -> None:
    code, start = module.elf.data, offset_of(module, "first")
    behind = range(start + 3, start + 8)  # the function is an instruction of three bytes and a return
    wanted = [Place(offset, code[offset : offset + 1], code[offset - 7 : offset]) for offset in behind]
    with running(module) as target:
        target.patch("first", jump)
        found = tuple(find_conflicts(str(module.path), wanted))
    covered = tuple(offset for offset in behind if offset < start + ends)
    assert found == ((Conflict(target.pid, covered, PATCHED),) if covered else ())


def test_a_breakpoint_before_it_is_no_conflict(module: Module) -> None:
    code, start = module.elf.data, offset_of(module, "first")
    place = Place(start + 3, code[start + 3 : start + 4], code[start - 4 : start + 3])
    with running(module) as target:
        target.patch("first", b"\xcc")
        assert find_conflicts(str(module.path), [place]) == []


BEHIND = "name = patched\noffset = first+3\nminor = 2\nexit\n"
AT = "name = patched\noffset = first\nminor = 1\nexit\n"


def test_a_uprobe_in_the_bytes_of_a_jump_is_refused(module: Module, run: Runner) -> None:
    with running(module) as target:
        client, output = run.start(AT, ["-p", str(target.pid)], ["--engine", "inline"])
        await_true(lambda: read_memory(target.pid, target.address_of("first"), 1) == b"\xe9", "a jump")
        refused, _ = run.start(BEHIND, ["-p", str(target.pid)], ["--engine", "ebpf"])
        await_message(
            refused,
            f"CONFLICT in process {target.pid}: a jump of the dprobes of process {client.pid}, which began with a "
            "program for 'patched', needs its bytes",
        )
        target.call()
        result = run.end(client, output)
        assert result.counts[1].hits == 100, result.stderr
        assert "inline (punned jump)" in result.stderr


def test_no_jump_takes_the_bytes_of_a_uprobe(module: Module, run: Runner) -> None:
    with running(module) as target:
        first, written = run.start(BEHIND, ["-p", str(target.pid)], ["--engine", "ebpf"])
        await_true(lambda: read_memory(target.pid, target.address_of("first") + 3, 1) == b"\xcc", "a uprobe")
        second, output = run.start(AT, ["-p", str(target.pid)], ["--engine", "inline"])
        await_true(lambda: read_memory(target.pid, target.address_of("first"), 1) == b"\xcc", "a breakpoint")
        target.call()
        assert run.end(second, output).counts[1].hits == 100
        assert run.end(first, written).counts[2].hits == 100


def test_a_jump_stays_whole_when_a_uprobe_comes_over_it_and_goes(module: Module, run: Runner) -> None:
    with running(module) as target:
        client, output = run.start(AT, ["-p", str(target.pid)], ["--engine", "inline"])
        place, code = target.address_of("first"), module.elf.data[offset_of(module, "first") :][:8]
        await_true(lambda: read_memory(target.pid, place, 1) == b"\xe9", "a jump")
        jump = read_memory(target.pid, place, 8)
        with uprobes(module.path, [offset_of(module, "first")]):
            await_true(lambda: read_memory(target.pid, place, 8) == jump, "the jump again")
        assert read_memory(target.pid, place, 8) == jump
        target.call()
        result = run.end(client, output)
        assert result.counts[1].hits == 100, result.stderr
        assert (
            f"warning: process {target.pid}: another tool has inserted uprobes over jumps of this run, which have been "
            "written again\nhint: hits in between may be missing, and the other tool sees none here: --engine ebpf "
            "shares places\n"
        ) in result.stderr
        assert read_memory(target.pid, place, 8) == code
        target.call()


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_a_run_that_ends_while_a_uprobe_is_over_its_jump_leaves_nothing_of_it(
    module: Module, run: Runner, *, killed: bool
) -> None:
    with running(module) as target:
        client, output = run.start(AT, ["-p", str(target.pid)], ["--engine", "inline"])
        place, code = target.address_of("first"), module.elf.data[offset_of(module, "first") :][:8]
        await_true(lambda: read_memory(target.pid, place, 1) == b"\xe9", "a jump")
        with uprobes(module.path, [offset_of(module, "first")]):
            if killed:
                os.kill(tracer_of(target.pid), signal.SIGKILL)
                client.communicate(timeout=TIMEOUT)
            else:
                run.end(client, output)
            await_true(lambda: read_memory(target.pid, place + 1, 7) == code[1:], "the code of the file")
            target.call()
        assert read_memory(target.pid, place, 8) == code
        target.call()


def test_a_conflict_in_a_process_that_is_not_in_scope_is_said_to_be_one(module: Module) -> None:
    with running(module) as other, running(module) as target:
        other.patch("second", b"\xe9\x00\x01\x00\x00")
        scope = ["-p", str(target.pid)]
        text = f'{module.path}:second {{ printf("second"); }}'
        with subprocess.Popen(
            [*DPROBES, "run", "--engine", "ebpf", "-e", text, *scope], stderr=subprocess.PIPE, text=True
        ) as client:
            said = await_message(client, "hint: ")
            client.send_signal(signal.SIGINT)
            assert client.stderr is not None
            client.stderr.read()
        assert client.returncode == 1
        assert said.endswith(
            f"dprobes: note: process {other.pid} is not in the scope of this run,"
            " but uprobes apply to all processes that execute the file\n"
            "hint: --engine ptrace inserts the probepoints in the processes in scope only\n"
        )


def test_a_change_beside_the_probepoints_is_no_conflict(module: Module) -> None:
    with running(module) as target:
        target.patch("second", b"\x90", 64)
        assert conflicts(module) == ()


@pytest.mark.parametrize("distance", [0, 1, 2, 4])
def test_an_instruction_may_differ_in_either_of_its_pages(module: Module, distance: int) -> None:
    with running(module) as target:
        target.patch("across", b"\x91", distance)
        assert conflicts(module) == (Conflict(target.pid, (offset_of(module, "across"),), PATCHED),)


def test_the_breakpoint_of_a_debugger_is_a_conflict_that_names_it(module: Module) -> None:
    with running(module) as target, gdb(target.pid, "first") as debugger:
        detail = f"a breakpoint of process {debugger} (gdb) is there"
        assert wait_for_conflicts(module) == (Conflict(target.pid, (offset_of(module, "first"),), detail),)


def test_a_breakpoint_inside_of_an_instruction_is_a_conflict_that_names_who_traces(module: Module) -> None:
    with running(module) as target, gdb(target.pid, "((char *)first+1)") as debugger:
        detail = f"{PATCHED}; process {debugger} (gdb) traces it"
        assert wait_for_conflicts(module) == (Conflict(target.pid, (offset_of(module, "first"),), detail),)


def wait_for_conflicts(module: Module) -> tuple[Conflict, ...]:
    """Return the conflicts when there are some: gdb writes its breakpoints when it lets the program run."""
    for _ in range(10_000):
        if found := conflicts(module):
            return found
    return ()


def test_a_debugger_without_a_breakpoint_there_is_no_conflict(module: Module) -> None:
    with running(module) as target, gdb(target.pid, "main"):
        assert conflicts(module) == ()


def test_uprobes_are_no_conflict(module: Module) -> None:
    offsets = [offset_of(module, name) for name in FUNCTIONS]
    with running(module) as target, uprobes(module.path, offsets):
        target.call()  # from now on the nop of five bytes is a call, where the kernel does that
        with uprobes(module.path, offsets):
            assert conflicts(module) == ()
        target.call()


def test_a_breakpoint_in_a_process_that_nobody_traces_is_no_conflict(module: Module) -> None:
    with running(module) as target:
        target.patch("first", b"\xcc")
        assert conflicts(module) == ()


def test_a_call_that_leads_elsewhere_is_a_conflict(module: Module) -> None:
    with running(module) as target:
        target.patch("nop_of_5", b"\xe8\x00\x00\x00\x00")
        assert conflicts(module) == (Conflict(target.pid, (offset_of(module, "nop_of_5"),), PATCHED),)


def test_a_process_that_has_ended_is_passed_over(module: Module) -> None:
    with running(module) as target:
        pid = target.pid
    assert find_conflicts(str(module.path), places(module), [pid]) == []


def test_memory_that_goes_while_it_is_looked_at_is_no_conflict(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(module) as target:
        target.patch("second", b"\xe9\x00\x01\x00\x00")
        mappers = find_mappers(module.path)

    def look(memory: _Memory, start: int, end: int) -> set[int]:
        return set(range(start, end))

    monkeypatch.setattr(_Memory, "private_copies", look)
    monkeypatch.setattr(_Memory, "_page", lambda *_: b"")
    monkeypatch.setattr("dprobes.engines.ebpf.attach.code_mappers.find_mappers", lambda *_: mappers)
    with running(module) as other:
        stale = mappers[0]._replace(pid=other.pid, thread=other.pid)
        mappers = [stale]
        assert conflicts(module) == ()


def test_a_process_that_executes_another_program_meanwhile_is_looked_at_anew(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(module) as target:
        target.patch("second", b"\xe9\x00\x01\x00\x00")
        answers = [find_mappers(module.path), []]
        monkeypatch.setattr("dprobes.engines.ebpf.attach.code_mappers.find_mappers", lambda *_: answers.pop(0))
        assert conflicts(module) == ()
        assert not answers


def test_a_process_whose_first_thread_has_ended_is_looked_at(build: Builder) -> None:
    module = Module.load(build("leaderless_reader.c"))
    with waiting(module.path) as process:
        (mapper,) = find_mappers(module.path)
        assert mapper.pid == process.pid
        assert mapper.thread != process.pid
        decoded = decode_at(module, offset_of(module, "main"))
        assert find_conflicts(str(module.path), [Place(decoded.offset, decoded.raw)], [process.pid]) == []


def test_pages_that_were_never_touched_stay_out_of_memory(module: Module) -> None:
    with running(module) as target:
        (mapper,) = find_mappers(module.path, [target.pid])
        before = present_pages(target.pid, mapper.mappings[0].start, mapper.mappings[0].end)
        assert conflicts(module) == ()
        after = present_pages(target.pid, mapper.mappings[0].start, mapper.mappings[0].end)
    assert after == before


def present_pages(pid: int, start: int, end: int) -> list[int]:
    descriptor = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
    try:
        data = os.pread(descriptor, (end - start) // mmap.PAGESIZE * 8, start // mmap.PAGESIZE * 8)
    finally:
        os.close(descriptor)
    return [entry >> 63 for entry in memoryview(data).cast("Q")]
