"""Where runs of the eBPF engine place breakpoints: not where others have theirs, nor where they would do harm."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.target.probed_module import Module
from integration.ebpf.kernel import require_bpf, require_initial_namespace, waiting
from integration.ebpf.test_conflicts import Target, gdb, running
from integration.ebpf.test_files import make_root
from integration.support import DPROBES, TIMEOUT, await_true, code_is_original, memory_at, symbols_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.support import Builder, Result, Runner

CALLS = 100  # of each function for a line of input


@pytest.fixture(autouse=True)
def _root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: memory of other processes is written")
    require_bpf()
    require_initial_namespace()


def definitions(*names: str) -> str:
    return "".join(f"offset = {name}\nminor = {n}\nexit\n" for n, name in enumerate(names, 1))


@contextlib.contextmanager
def probing(run: Runner, program: str, target: Target, place: str, records: int) -> Iterator[list[Result]]:
    """
    Run a program on all processes while the body runs; the result is in the list at its end.

    The body begins when ``place`` in ``target`` has a breakpoint, and the run ends when so many records are there.
    """
    client, output = run.start(program, [], ["--engine", "ebpf"])
    results: list[Result] = []
    try:
        await_true(lambda: client.poll() is not None or target.has_breakpoint(place), "the breakpoint")
        yield results
        await_true(lambda: output.exists() and output.read_text().count("\n") >= records, f"{records} records")
    finally:
        results.append(run.end(client, output))


def test_a_debuggers_breakpoint_stays_and_is_named(build: Builder, run: Runner) -> None:
    module = Module.load(build("patched.c"))
    source = f'name = "{module.path}"\n' + definitions("first", "second")
    with running(module) as debugged, running(module) as free, gdb(debugged.pid, "first") as debugger:
        await_true(lambda: memory_at(debugged.pid, module.path, "first", 1) == b"\xcc", "gdb's breakpoint")
        with probing(run, source, free, "second", CALLS) as results:
            free.call()
            assert memory_at(free.pid, module.path, "first", 1) != b"\xcc"
            assert memory_at(free.pid, module.path, "second", 1) == b"\xcc"
        assert memory_at(debugged.pid, module.path, "first", 1) == b"\xcc"
    offset = module.file_offset(module.address_of("first"))
    assert (
        f"CONFLICT in process {debugged.pid}: a breakpoint of process {debugger} (gdb) is there: "
        f"offset {offset:#x} of '{module.path}'; not inserted there" in results[0].stderr
    )
    assert (results[0].counts[1].hits, results[0].counts[2].hits) == (0, CALLS)


def test_patched_code_is_left_alone(build: Builder, run: Runner) -> None:
    module = Module.load(build("patched.c"))
    patch = b"\x89\xf8\xff\xc0\xc3"  # mov eax, edi; inc eax; ret: what the function does in another way
    with running(module) as target, running(module) as free:
        target.patch("first", patch)
        with probing(
            run, f'name = "{module.path}"\n' + definitions("first", "second"), free, "second", 2 * CALLS
        ) as results:
            free.call()
            target.call()
        assert memory_at(target.pid, module.path, "first", len(patch)) == patch
    assert f"CONFLICT in process {target.pid}: memory differs from the file: another tool has" in results[0].stderr
    assert (results[0].counts[1].hits, results[0].counts[2].hits) == (0, 2 * CALLS)


@pytest.mark.alone
def test_the_library_of_a_container_is_probed_as_well(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("patched.c")
    root = make_root(tmp_path / "root", program)
    source = 'name = "libc.so.6"\n' + definitions("fgets")
    with contained(build, Module.load(root / "prog"), root) as inside, running(Module.load(program)) as outside:
        client, output = run.start(source, [], ["--engine", "ebpf"])

        def are_hit() -> bool:
            for target in (inside, outside):
                target.call()
            text = output.read_text() if output.exists() else ""
            return all(f'"pid": {target.pid}' in text or f'"pid":{target.pid}' in text for target in (inside, outside))

        await_true(are_hit, "a hit in both processes")
        result = run.end(client, output)
    assert {inside.pid, outside.pid} <= {record["pid"] for record in result.records}


def test_a_program_that_only_a_container_has_is_found(build: Builder, run: Runner, tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", build("patched.c"))
    name = "only_in_the_container"
    (root / "prog").rename(root / name)
    source = f'name = "{name}"\n' + definitions("first")
    with (
        contained(build, Module.load(root / name), root) as inside,
        probing(run, source, inside, "first", CALLS) as results,
    ):
        inside.call()
    assert 1 in results[0].counts, results[0].stderr
    assert results[0].counts[1].hits == CALLS
    nobody = run(source, [], ["--engine", "ebpf"])
    assert f"there is no module '{name}' on this machine" in nobody.stderr


@contextlib.contextmanager
def contained(build: Builder, module: Module, root: Path) -> Iterator[Target]:
    command = [str(build("container.c")), "pivot", str(root), f"/{module.path.name}"]
    with waiting(*command, skip="no mount namespace can be made here") as process:
        yield Target(process, module)


def test_a_file_that_takes_the_place_of_the_probed_one_is_not_probed(
    build: Builder, run: Runner, tmp_path: Path
) -> None:
    path = tmp_path / "patched"
    shutil.copy(build("patched.c"), path)
    module = Module.load(path)
    source = f'name = "{path}"\n' + "offset = *ir*\nminor = 1\nmaxhits = 50\nexit\noffset = second\nminor = 2\nexit\n"
    with running(module) as old, probing(run, source, old, "second", 2 * CALLS) as results:
        path.unlink()
        shutil.copy(build("patched.c"), path)
        with running(module) as new:
            new.call()
            old.call()  # the limits are reached: the breakpoints of the pattern are taken away
            await_true(lambda: memory_at_deleted(old.pid, module, "first") != 0xCC, "the first breakpoint's end")
            new.call()
            assert code_is_original(new.pid, path)
            old.call()
    assert results[0].counts[2].hits == 2 * CALLS
    assert results[0].status == 0


def memory_at_deleted(pid: int, module: Module, symbol: str) -> int:
    offset = module.file_offset(module.address_of(symbol))
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, permissions, start, *_ = line.split()
        low, _, high = addresses.partition("-")
        if "x" in permissions and str(module.path) in line:
            address = int(low, 16) + offset - int(start, 16)
            if address < int(high, 16):
                with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
                    memory.seek(address)
                    return memory.read(1)[0]
    raise AssertionError(f"{module.path} is not mapped")


RETURNS = "name = returning\noffset = passed\nreturn = yes\nminor = 1\nexit\n"


def test_a_return_is_not_probed_where_a_uretprobe_would_end_the_program(build: Builder, run: Runner) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    program = build("returning.cc", "-O2", "-lstdc++")
    refused = run(RETURNS, ["--", str(program)], ["--engine", "ebpf"])
    assert refused.status == 2
    assert (
        "error: the ebpf engine cannot probe the return of passed: it may hand over to another function, and a "
        "uretprobe would do harm: it uses C++ exceptions, and what meets a uretprobe on its way up the stack ends the "
        "program" in refused.stderr
    )
    assert "hint: use --engine ptrace with -c COMMAND or -p PID" in refused.stderr
    taken = run(RETURNS, ["--exit-status", "--", str(program)], ["--engine", "auto", "-v"])
    assert taken.status == 0, taken.stderr
    assert taken.stdout == "caught 3\n"
    assert "engine ptrace: the ebpf engine cannot probe the return of passed" in taken.stderr
    assert taken.counts[1].hits == 3


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_a_moved_breakpoint_shows_what_the_written_place_shows(build: Builder, run: Runner, i386: bool) -> None:
    program = build("marked.c", "-fcf-protection=full", "-O2", "-no-pie", "-fno-pie", i386=i386)
    size = 4 if i386 else 8
    start = symbols_of(program)["entered"]
    mark = b"\xf3\x0f\x1e\xfb" if i386 else b"\xf3\x0f\x1e\xfa"
    offset = Module.load(program).file_offset(start)
    assert program.read_bytes()[offset : offset + 4] == mark
    source = "name = marked\noffset = entered\nminor = 1\npush r, eip\npush r, sp\nlog 2\nexit\n"
    found = {}
    for options in ((), ("--exact",)):
        result = run(source, ["--exit-status", "--", str(program), "20"], ["--engine", "ebpf", *options])
        assert result.status == 0, result.stderr
        assert result.counts[1].hits == 20
        stack = int(result.stdout.split()[0], 16)
        # The CFA is where the stack pointer was before the call, one word above that at the entry.
        assert (
            result.words(size=size) == [[stack - size, start]] * 20
            or result.words(size=size) == [[start, stack - size]] * 20
        )
        found[options] = result.counts[1].executed
        placed = {record.get("placed") for record in result.records}
        assert placed == ({offset + 4} if not options else {None})
    assert found == {(): "emulated", ("--exact",): "single-stepped"}


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_show_and_locate_say_where_the_kernel_gets_its_breakpoint(build: Builder, tmp_path: Path, i386: bool) -> None:
    program = build("marked.c", "-fcf-protection=full", "-O2", "-no-pie", "-fno-pie", i386=i386)
    source = tmp_path / "marked.rpn"
    source.write_text(f'name = "{program}"\noffset = entered\nexit\noffset = other\nreturn = yes\nexit\n')
    shown = subprocess.run([*DPROBES, "show", source], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    lines = [line for line in shown.stdout.splitlines() if line.startswith("// ebpf:")]
    following = "push ebx" if i386 else "push rbx"
    said = f"placed 0x4 further, at '{following}', which is emulated; single-stepped with --exact"
    assert lines == [f"// ebpf: {said}"]
    located = subprocess.run(
        [*DPROBES, "locate", f"{program}:entered"], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    mark = "endbr32" if i386 else "endbr64"
    assert located.stdout.splitlines()[-1] == f"ebpf: '{mark}' is {said}"


@pytest.mark.alone
def test_host_names_are_seen_wherever_they_are_looked_up(build: Builder, run: Runner, tmp_path: Path) -> None:
    """The example: one process of this machine, and one of a container with a C library of its own."""
    program = build("lookup.c")
    root = make_root(tmp_path / "root", program)
    source = (Path(__file__).parents[3] / "examples" / "host-names.rpn").read_text()
    with contained(build, Module.load(root / "prog"), root) as inside, running(Module.load(program)) as outside:
        client, output = run.start(source, [], ["--engine", "ebpf"])

        def are_seen() -> bool:
            for target in (inside, outside):
                target.call()
            text = output.read_text() if output.exists() else ""
            return text.count("127.0.0.77") > 1

        await_true(are_seen, "the name")
        result = run.end(client, output)
    seen = {(record["pid"], value) for record in result.records for value in record["fields"].values()}
    assert {(inside.pid, "127.0.0.77"), (outside.pid, "127.0.0.77")} <= seen
