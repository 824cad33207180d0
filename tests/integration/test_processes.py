"""Processes: all that a command starts is probed, by whichever way it is started, and so are libraries loaded later."""

from __future__ import annotations

import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.support import (
    TIMEOUT,
    await_line,
    await_traced,
    await_true,
    code_is_original,
    load_bias,
    read_memory,
    read_result,
    running,
    symbols_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

FAMILY = "name = family\noffset = tick\nminor = 1\npush r, arg0\nlog 1\nexit\n"
LIBRARY = (
    'name = "libplugin.so"\noffset = plugin_begin\nminor = 1\npush plugin_value\npush mem, u32\nlog 1\nexit\n'
    "offset = plugin_call\nminor = 2\npush plugin_value\nlog 1\nexit\n"
)


@pytest.mark.parametrize("way", ["spawn", "system", "exec", "thread-exec"])
@pytest.mark.parametrize("kind", ["-pie", "-no-pie"])
def test_programs_started_by_the_program_are_probed(build: Builder, run: Runner, way: str, kind: str) -> None:
    result = run.command(FAMILY, build("family.c", kind), way, 4)
    assert [words[0] for words in result.words()] == [4, 3, 2, 1, 0]
    assert result.counts[1].hits == 5


@pytest.mark.parametrize("way", ["fork", "clone-vm"])
def test_a_child_without_exec_is_probed(build: Builder, run: Runner, way: str) -> None:
    result = run.command(FAMILY, build("family.c"), way, 9)
    assert [words[0] for words in result.words()] == [9, 8]
    assert len({r["pid"] for r in result.records}) == 2


def test_a_vfork_child_is_probed_before_and_after_its_exec(build: Builder, run: Runner) -> None:
    result = run.command(FAMILY, build("family.c"), "vfork", 2)
    assert [words[0] for words in result.words()] == [2, 100, 1, 100, 0]
    assert len({r["pid"] for r in result.records}) == 3


def test_a_record_has_the_name_that_its_thread_has_at_the_hit(build: Builder, run: Runner) -> None:
    source = "name = named_threads\noffset = tick\nminor = 1\npush r, arg0\nlog 1\nexit\n"
    result = run.command(source, build("named_threads.c"))
    found = [(record["name"], words[0]) for record, words in zip(result.records, result.words(), strict=True)]
    assert found == [(f"{letter}{number}", number) for number in range(200) for letter in "tu"]


def test_all_stages_of_a_shell_pipeline_are_probed(build: Builder, run: Runner) -> None:
    program = build("family.c")
    script = f"for n in 1 2 3; do {program} fork 2; done | (cat; {program} exec 1) | {program} exec 0; exit 7"
    result = run(FAMILY, ["--exit-status", "--", "bash", "-c", script])
    assert result.status == 7
    assert sorted(words[0] for words in result.words()) == sorted([2, 1] * 3 + [1, 0] + [0])


def test_a_32_bit_program_started_by_a_64_bit_one_is_probed(build: Builder, run: Runner) -> None:
    program = build("hotloop.c", i386=True)
    source = "name = hotloop\noffset = tick\nminor = 1\npush r, esp\npush 4\nadd\npush mem, u32\nlog 1\nexit\n"
    result = run.command(source, "env", "X=1", program, 50)
    assert [words[0] for words in result.words(size=4)] == list(range(50))


def test_two_processes_of_one_run_have_their_own_addresses(build: Builder, run: Runner) -> None:
    program = build("family.c", "-pie", "-fPIE")
    source = "name = family\noffset = tick\nminor = 1\npush r, rip\npush tick\nlog 2\nexit\n"
    result = run.command(source, program, "spawn", 3)
    assert all(words[0] == words[1] == r["ip"] for words, r in zip(result.words(), result.records, strict=True))
    assert len({r["ip"] for r in result.records}) > 1


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_a_library_is_probed_from_its_constructor_on_each_time_it_is_loaded(
    build: Builder, run: Runner, i386: bool
) -> None:
    library = build("plugin.c", "-shared", "-fPIC", i386=i386, name="libplugin.so")
    loader = build("loader.c", "-ldl", i386=i386)
    result = run.command(LIBRARY, loader, library, 6)
    size = 4 if i386 else 8
    assert [w[0] for w in result.words(1, size)] == [4711] * 6
    values = [w[0] for w in result.words(2, size)]
    assert len(values) == 18
    assert len(set(values)) == int(result.stdout) > 1


def test_a_library_loaded_after_the_attach_is_probed(build: Builder, run: Runner) -> None:
    library = build("plugin.c", "-shared", "-fPIC", name="libplugin.so")
    loader = build("loader.c", "-ldl")
    script = f"read line; exec {loader} {library} 2"
    with running("sh", "-c", script, stdin=subprocess.PIPE) as shell:
        process, output = run.start(LIBRARY, ["-p", str(shell.pid)])
        await_traced(shell.pid)
        assert shell.stdin is not None
        shell.stdin.write("go\n")
        shell.stdin.close()
        shell.wait(TIMEOUT)
        result = read_result(process, output)
    assert result.counts[1].hits == 2
    assert result.counts[2].hits == 6


def test_a_program_that_was_replaced_on_disk_is_probed_as_it_runs(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = tmp_path / "slots"
    shutil.copy(build("slots.c"), program)
    with running(program, "plain", stdin=subprocess.PIPE) as target:
        await_line(target)
        place = load_bias(target.pid, program) + symbols_of(program)["work_load"]
        other = tmp_path / "other"
        shutil.copy(build("family.c"), other)
        other.rename(program)
        client, output = run.start("name = slots\noffset = work_load\nminor = 1\nexit\n", ["-p", str(target.pid)])
        await_true(lambda: read_memory(target.pid, place, 1) == b"\xcc", "the breakpoint")
        assert target.stdin is not None
        target.stdin.write("x")
        target.stdin.flush()
        assert await_line(target) == "31300\n"
        assert run.end(client, output).counts[1].hits == 100


def test_an_attached_process_is_let_go_with_its_code_as_it_was(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    source = (
        "name = torture\noffset = stepped\nminor = 1\npush 1\nlog 1\nexit\n"
        "offset = emulated\nminor = 2\npush 2\nlog 1\nexit\n"
    )
    with running(program, 60, 3) as target:
        await_line(target)
        process, output = run.start(source, ["-p", str(target.pid)])
        await_traced(target.pid)
        await_true(lambda: output.exists() and output.stat().st_size > 10000, "records")
        process.send_signal(signal.SIGINT)
        result = read_result(process, output)
        assert result.status == 0, result.stderr
        assert code_is_original(target.pid, program)
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0
    assert all(c.hits == c.records + c.lost > 0 for c in result.counts.values())
    assert len(result.records) == sum(c.records for c in result.counts.values())
