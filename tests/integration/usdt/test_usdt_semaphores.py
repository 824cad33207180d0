"""Semaphores of USDT probes: raised as long as a probe is there, and lowered whatever ends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import (
    DPROBES,
    await_line,
    await_traced,
    await_true,
    load_bias,
    read_memory,
    read_result,
    running,
    symbols_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from integration.support import Runner

GUARDED = "name = usdt\noffset = usdt:demo:guarded\nminor = 1\npush usdt, 1\nlog 1\nexit\n"


def test_a_guarded_place_is_passed_while_the_probe_is_there(
    usdt: Callable[..., Path], run: Runner, engine: list[str]
) -> None:
    result = run(GUARDED, ["--", str(usdt("-O2")), "4"], engine)
    assert result.words() == [[0], [1], [2], [3]]
    assert result.stdout.endswith("semaphore 1 passed 4\n")


def test_a_number_there_gets_no_hit_and_a_note_that_says_why(
    usdt: Callable[..., Path], run: Runner, engine: list[str]
) -> None:
    program = usdt("-O2")
    place = place_of_guarded(program)
    text = f'name = "{program}"\noffset = {place:#x}\nminor = 1\nexit\n'
    result = run(text, ["--", str(program), "4"], engine)
    assert result.counts[1].hits == 0
    assert result.stdout.endswith("semaphore 0 passed 0\n")
    listed = subprocess.run(
        [*DPROBES, "locate", f"{program}:{place:#x}"], capture_output=True, text=True, check=True
    ).stdout
    assert (
        "This is a place of 'usdt:demo:guarded', which is guarded by a semaphore: a probe with a number is hit "
        "only while it is raised, as 'offset = usdt:demo:guarded' does.\n"
    ) in listed
    shown = subprocess.run([*DPROBES, "check", "-"], input=text, capture_output=True, text=True, check=False)
    assert (
        "note: the place is guarded by the semaphore of 'usdt:demo:guarded': the program may skip it, without a hit\n"
        in shown.stderr + shown.stdout
    )


def place_of_guarded(program: Path) -> int:
    notes = subprocess.run(["readelf", "-nW", str(program)], check=True, capture_output=True, text=True).stdout
    (place,) = re.findall(r"Name: guarded\n +Location: (0x[0-9a-f]+)", notes)
    return int(place, 16)


def has_jump(pid: int, program: Path) -> bool:
    """Return whether neither the instruction nor a breakpoint is at the guarded place."""
    return read_memory(pid, load_bias(pid, program) + place_of_guarded(program), 1) not in (b"\x90", b"\xcc")


def semaphore_of(pid: int, program: Path) -> int:
    address = load_bias(pid, program) + symbols_of(program)["demo_guarded_semaphore"]
    return int.from_bytes(read_memory(pid, address, 2), "little")


def is_raised(pid: int, program: Path, value: int = 1) -> bool:
    return semaphore_of(pid, program) == value


def test_it_is_lowered_at_the_end_of_the_run(usdt: Callable[..., Path], run: Runner, any_engine: list[str]) -> None:
    program = usdt("-O2")
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        for _ in range(2):
            client, output = run.start(GUARDED, ["-p", str(target.pid)], any_engine)
            await_true(partial(is_raised, target.pid, program), "a raised semaphore")
            _say(target, "call")
            assert "semaphore 1 passed " in await_line(target)
            result = run.end(client, output)
            assert result.words() == [[1]]
            assert semaphore_of(target.pid, program) == 0


def _say(target: subprocess.Popen[str], line: str) -> None:
    assert target.stdin is not None
    target.stdin.write(line + "\n")
    target.stdin.flush()


def test_it_is_lowered_with_the_last_hit_of_maxhits(
    usdt: Callable[..., Path], run: Runner, any_engine: list[str]
) -> None:
    program = usdt("-O2")
    limited = (
        GUARDED.replace("minor = 1\n", "minor = 1\nmaxhits = 2\n") + "offset = usdt:demo:twelve\nminor = 2\nexit\n"
    )
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        client, output = run.start(limited, ["-p", str(target.pid)], any_engine)
        await_true(partial(is_raised, target.pid, program), "a raised semaphore")
        for _ in range(2):
            _say(target, "call")
            await_line(target)
        await_true(partial(is_raised, target.pid, program, 0), "a lowered semaphore")
        assert run.end(client, output).counts[1].hits == 2


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
@pytest.mark.parametrize("who", ["client", "tracer"])
def test_it_is_lowered_when_an_engine_with_a_tracer_is_killed(
    usdt: Callable[..., Path], run: Runner, who: str, engine: str
) -> None:
    program = usdt("-O2")
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        client, output = run.start(GUARDED, ["-p", str(target.pid)], ["--engine", engine])
        tracer = await_traced(target.pid)
        await_true(partial(is_raised, target.pid, program), "a raised semaphore")
        if engine == "inline":
            _say(target, "call")
            await_line(target)
            await_true(lambda: has_jump(target.pid, program), "a jump")
        os.kill(client.pid if who == "client" else tracer, signal.SIGKILL)
        read_result(client, output)
        await_true(partial(is_raised, target.pid, program, 0), "a lowered semaphore")
        _say(target, "call")
        assert await_line(target).startswith("semaphore 0 passed ")


def test_it_is_lowered_whenever_the_tracer_is_killed(usdt: Callable[..., Path], run: Runner) -> None:
    """Kill it at all moments of the insertion and removal."""
    program = usdt("-O2")
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        for attempt in range(12):
            client, output = run.start(GUARDED, ["-p", str(target.pid)], ["--engine", "ptrace"])
            tracer = await_traced(target.pid)
            time.sleep(0.002 * attempt)
            os.kill(tracer, signal.SIGKILL)
            read_result(client, output)
            assert semaphore_of(target.pid, program) == 0, attempt


def test_it_is_lowered_when_the_ebpf_engine_is_killed(usdt: Callable[..., Path], run: Runner) -> None:
    require_bpf()
    require_initial_namespace()
    program = usdt("-O2")
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        client, output = run.start(GUARDED, ["-p", str(target.pid)], ["--engine", "ebpf"])
        await_true(partial(is_raised, target.pid, program), "a raised semaphore")
        client.kill()
        read_result(client, output)
        await_true(partial(is_raised, target.pid, program, 0), "a lowered semaphore")


def test_children_have_it_raised_and_new_programs_anew(
    usdt: Callable[..., Path], run: Runner, engine: list[str]
) -> None:
    program = usdt("-O2")
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        client, output = run.start(GUARDED, ["-p", str(target.pid)], engine)
        await_true(partial(is_raised, target.pid, program), "a raised semaphore")
        _say(target, "fork")
        assert await_line(target) == "semaphore 1 passed 1\n"
        _say(target, "exec")
        assert await_line(target) == "ready\n"
        _say(target, "call")
        assert await_line(target) == "semaphore 1 passed 1\n"
        assert run.end(client, output).words() == [[2], [1]]
        assert semaphore_of(target.pid, program) == 0


def test_a_child_out_of_scope_has_it_lowered(usdt: Callable[..., Path], run: Runner) -> None:
    program = usdt("-O2")
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        client, output = run.start(GUARDED, ["-p", str(target.pid), "--no-follow"], ["--engine", "ptrace"])
        await_true(partial(is_raised, target.pid, program), "a raised semaphore")
        _say(target, "fork")
        assert await_line(target) == "semaphore 0 passed 0\n"
        assert semaphore_of(target.pid, program) == 1
        assert run.end(client, output).words() == []


def test_two_programs_raise_it_together_and_the_last_one_lowers_it(usdt: Callable[..., Path], run: Runner) -> None:
    require_bpf()
    require_initial_namespace()
    program = usdt("-O2")
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        first, first_output = run.start(GUARDED, ["-p", str(target.pid)], ["--engine", "ebpf"])
        await_true(partial(is_raised, target.pid, program), "a raised semaphore")
        second, second_output = run.start(GUARDED, ["-p", str(target.pid)], ["--engine", "ebpf"])
        await_true(partial(_is_hit, target, second_output), "a hit of the second program")
        assert semaphore_of(target.pid, program) == 1
        assert run.end(first, first_output).words()[0] == [1]
        assert semaphore_of(target.pid, program) == 1
        assert run.end(second, second_output).words()[0] == [1]
        assert semaphore_of(target.pid, program) == 0


def _is_hit(target: subprocess.Popen[str], output: Path) -> bool:
    """Let the program come by the guarded place, and return whether there are records."""
    _say(target, "call")
    await_line(target)
    return output.exists() and output.stat().st_size > 0


LIBRARY = """#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>
unsigned short libd_hit_semaphore __attribute__((section(".probes")));
int guarded(int n)
{
    if (*(volatile unsigned short *)&libd_hit_semaphore)
        DTRACE_PROBE1(libd, hit, n);
    return *(volatile unsigned short *)&libd_hit_semaphore;
}
"""

HOST = """#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv)
{
    for (int n = 0; n < 4; n++) {
        void *library = dlopen(argv[argc - 1], RTLD_NOW);
        printf("%d ", ((int (*)(int))dlsym(library, "guarded"))(n));
        dlclose(library);
    }
    return 0;
}
"""


def test_libraries_that_come_and_go_have_it_raised_each_time(
    headers: Path, run: Runner, engine: list[str], tmp_path: Path
) -> None:
    library, host = tmp_path / "libd.so", tmp_path / "host"
    compiler = ["gcc", "-O2", "-isystem", str(headers), "-x", "c", "-"]
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", str(library)], input=LIBRARY, text=True, check=True)
    subprocess.run([*compiler, "-o", str(host), "-ldl"], input=HOST, text=True, check=True)
    text = f'name = "{library}"\noffset = usdt:libd:hit\nminor = 1\npush usdt, 1\nlog 1\nexit\n'
    result = run(text, ["--", str(host), str(library)], engine)
    assert result.stdout == "1 1 1 1 "
    assert result.words() == [[0], [1], [2], [3]]
