"""Programs in a machine behind QEMU's stub: probed from outside, in every process that maps the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.conftest import build, run
from integration.support import TIMEOUT
from kernel.observed_machine import observed, words_of

if TYPE_CHECKING:
    from pathlib import Path

    from guests.guest import Guest, Process
    from integration.support import Builder, Runner
    from kernel.observed_machine import Observed

__all__ = ["build", "run"]

PROGRAM = "/tmp/asked"


def program(module: Path, handler: str, *keywords: str, place: str = "offset = answer") -> str:
    lines = "".join(f"{each}\n" for each in keywords)
    return f'name = "{module}"\nmodtype = user\n{place}\nminor = 1\n{lines}{handler}\n'


def ask(guest: Guest, process: Process, line: str) -> tuple[int, int]:
    """Have a program call the function; return the process that did so, and the sum."""
    before = len(process.stdout)
    process.write(f"{line}\n")
    guest.wait_until(lambda: process.stdout.endswith("\n") and len(process.stdout) > before, "an answer", TIMEOUT)
    pid, total = process.stdout[before:].split()
    return int(pid), int(total)


def started(guest: Guest) -> Process:
    process = guest.start(PROGRAM)
    process.await_output("ready\n")
    return process


def test_every_process_that_maps_the_module(guest: Guest, run: Runner, build: Builder, tmp_path: Path) -> None:
    """One that has not executed the function yet, its children, and those that are started later."""
    module = build("asked.c")
    guest.put(PROGRAM, module)
    before = started(guest)
    handler = "push r, rdi; push total; push mem, u64; push uid; log 3; exit"
    with observed(guest, run, program(module, handler), tmp_path) as seen:
        first = await_breakpoints(seen)
        calls = [ask(guest, before, "5"), ask(guest, before, "f 4"), ask(guest, started(guest), "3")]
        result = seen.stop()
    assert result.status == 0, result.stderr
    assert [total for _, total in calls] == [15, 10, 6]
    assert [(record["name"], record["pid"], words_of(record)) for record in result.records[first:]] == [
        ("asked", pid, [0, n * (n - 1) // 2, n])
        for (pid, _), count in zip(calls, [5, 4, 3], strict=True)
        for n in range(1, count + 1)
    ]
    assert result.counts[1].hits == len(result.records)
    assert ask(guest, before, "2")[1] == 3


def await_second_call(seen: Observed, number: int = 2) -> int:
    """Wait for the record of a second call, whose handler pushes a ``number`` first; return how many there are then."""
    return seen.await_last(lambda record: record["minor"] == 1 and words_of(record)[-1] == number)


def await_breakpoints(seen: Observed, number: int = 2) -> int:
    """Wait until calls are logged; return how many records there are of the calls that were made for that."""
    seen.await_record([PROGRAM], b"1\n")
    seen.guest.run([PROGRAM], input=b"2\n")
    return await_second_call(seen, number)


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_one_process_with_or_without_its_children(guest: Guest, run: Runner, build: Builder, tmp_path: Path) -> None:
    """Others come to the same breakpoints, and are no hits."""
    module = build("asked.c")
    guest.put(PROGRAM, module)
    chosen, other = started(guest), started(guest)
    pid = ask(guest, chosen, "0")[0]
    for options, expected in (([], [2, 3]), (["--no-follow"], [2])):
        with observed(
            guest, run, program(module, "push r, rdi; log 1; exit"), tmp_path, "-p", str(pid), *options
        ) as seen:
            while not seen.lines:
                assert seen.client.poll() is None, seen.client.communicate()[1]
                ask(guest, chosen, "1")
            ask(guest, chosen, "2")
            first = await_second_call(seen)
            ask(guest, other, "4")
            child = ask(guest, chosen, "f 3")[0]
            ask(guest, chosen, "2")
            ask(guest, other, "f 1")
            result = seen.stop()
        assert result.status == 0, result.stderr
        hits = dict.fromkeys((pid, child), 0)
        for record in result.records[first:]:
            hits[record["pid"]] += 1
        assert sorted(filter(None, hits.values())) == expected
        assert result.counts[1].hits == len(result.records)


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_what_is_no_hit_though_it_has_the_address(guest: Guest, run: Runner, build: Builder, tmp_path: Path) -> None:
    """Another program at the same addresses, and another build of the same name."""
    module = build("asked.c", "-no-pie")
    guest.put(PROGRAM, module)
    guest.put("/tmp/double", module)
    guest.put("/tmp/older/asked", build("asked.c", "-no-pie", "-DOLDER", "-O2"))
    other = guest.start("/tmp/double")
    older = guest.start("/tmp/older/asked")
    for process in (other, older):
        process.await_output("ready\n")
    pid = ask(guest, older, "0")[0]
    with observed(guest, run, program(module, "push r, rdi; log 1; exit"), tmp_path) as seen:
        before = await_breakpoints(seen)
        assert ask(guest, other, "3")[1] == 6
        assert ask(guest, older, "3")[1] == 6
        result = seen.stop()
    assert result.status == 0, result.stderr
    assert len(result.records) == before == result.counts[1].hits
    assert f"process {pid} of the machine maps another build of 'asked' than '{module}'" in result.stderr


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_returns_and_watchpoints_of_programs(guest: Guest, run: Runner, build: Builder, tmp_path: Path) -> None:
    module = build("asked.c")
    guest.put(PROGRAM, module)
    returned = "push r, retval; push entry, arg0; push elapsed; log 3; exit"
    watched = "address = total:total + 7\nwatchpoint = w\nminor = 2\npush total; push mem, u64; log 1; exit\n"
    text = program(module, returned, "return = yes") + watched
    before = started(guest)
    with observed(guest, run, text, tmp_path) as seen:
        first = await_breakpoints(seen, 3)
        pid, total = ask(guest, before, "4")
        result = seen.stop()
    assert result.status == 0, result.stderr
    assert total == 10
    found = [(record["minor"], words_of(record)) for record in result.records[first:]]
    assert {record["pid"] for record in result.records[first:]} == {pid}
    assert [words[1:] for minor, words in found if minor == 1 and words[0] > 0] == [[n, n + 1] for n in range(1, 5)]
    assert [words for minor, words in found if minor == 2] == [[0], [1], [3], [6], [10]]


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_a_library_that_is_loaded_later(guest: Guest, run: Runner, build: Builder, tmp_path: Path) -> None:
    library = build("plugin.c", "-shared", "-fPIC", name="libplugin.so")
    guest.put("/tmp/libplugin.so", library)
    guest.put("/tmp/loader", build("loader.c", "-ldl"))
    handler = "push r, rdi; push plugin_value; push mem, u32; log 2; exit"
    with observed(guest, run, program(library, handler, place="offset = plugin_call"), tmp_path) as seen:
        seen.await_record(["/tmp/loader", "/tmp/libplugin.so", "2"])
        result = seen.stop()
    assert result.status == 0, result.stderr
    assert {tuple(words_of(record)) for record in result.records} == {(4711, 1)}
    assert len(result.records) % (2 * 3) == 0
    assert result.counts[1].hits == len(result.records)


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_programs_go_on_when_dprobes_is_killed(guest: Guest, run: Runner, build: Builder, tmp_path: Path) -> None:
    module = build("asked.c")
    guest.put(PROGRAM, module)
    before = started(guest)
    with observed(guest, run, program(module, "exit"), tmp_path) as seen:
        seen.await_record([PROGRAM], b"1\n")
        before.write("30\n")
        seen.client.kill()
        seen.client.communicate(timeout=60)
    guest.wait_until(lambda: "465\n" in before.stdout, "the program", TIMEOUT)
    assert ask(guest, before, "f 2")[1] == 3
