"""Call stacks of a machine behind QEMU's stub: of its kernel, beside those that it prints itself, and of programs."""

from __future__ import annotations

import re
import subprocess
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.rpn.instruction_set import StackEnd
from guests.initramfs import PYTHON
from integration.conftest import build, run
from kernel.observed_machine import observed

if TYPE_CHECKING:
    from pathlib import Path

    from guests.guest import Guest
    from integration.support import Builder, Runner

__all__ = ["build", "run"]

OWN_STACK = "print(open('/proc/self/stack').read())"
TOKEN, USER_TOKEN, HEAD = 9, 10, 3
"""What stacks of the kernel and of programs begin with: a token, and a count of two bytes."""


def program(offset: str, *keywords: str) -> str:
    lines = "".join(f"{each}\n" for each in keywords)
    return f"name = vmlinux\nmodtype = kernel\noffset = {offset}\nminor = 1\n{lines}log kstack, 60\nexit\n"


class Names:
    """The functions of a guest's kernel, by its own list."""

    def __init__(self, guest: Guest) -> None:
        listed = re.findall(r"^([0-9a-f]{16}) [tTwW] (\S+)", guest.get("/proc/kallsyms").decode(), re.MULTILINE)
        names: dict[int, set[str]] = {}
        for address, name in listed:
            names.setdefault(int(address, 16), set()).add(name)
        self._names = names
        self._starts = sorted(names)

    def of(self, address: int) -> tuple[set[str], int]:
        """Return what a function is called, and how far in it an address is."""
        start = self._starts[bisect_right(self._starts, address) - 1]
        return self._names[start], address - start


def frames_of(record: dict[str, Any], token: int = TOKEN) -> list[int]:
    data = bytes.fromhex(record["data"])
    count = int.from_bytes(data[1:HEAD], "little")
    assert data[0] == token
    assert len(data) == HEAD + 8 * count
    return [int.from_bytes(data[at : at + 8], "little") for at in range(HEAD, len(data), 8)]


def test_a_stack_is_what_the_kernel_prints_of_it(guest: Guest, run: Runner, tmp_path: Path) -> None:
    with observed(guest, run, program("stack_trace_save_tsk"), tmp_path) as seen:
        seen.await_record([str(PYTHON), "-S", "-c", OWN_STACK])
        before = len(seen.lines)
        printed = guest.run([str(PYTHON), "-S", "-c", OWN_STACK]).stdout
        result = seen.stop()
    assert result.status == 0, result.stderr
    expected = [(name, int(offset, 16)) for name, offset in re.findall(r"\[<0>\] (\S+?)\+0x([0-9a-f]+)/", printed)]
    assert len(expected) > 5
    names = Names(guest)
    (first, *above) = frames_of(result.records[before])
    assert names.of(first) == ({"stack_trace_save_tsk"}, 0)
    found = [names.of(frame) for frame in above]
    assert [offset for _, offset in found] == [offset for _, offset in expected]
    assert all(name in called for (name, _), (called, _) in zip(expected, found, strict=True))


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_a_stack_goes_through_interrupts_to_what_was_interrupted(guest: Guest, run: Runner, tmp_path: Path) -> None:
    """The timer's interrupt has a stack of its own."""
    with observed(guest, run, program("update_process_times", "maxhits = 40"), tmp_path) as seen:
        seen.await_record(["sh", "-c", "for i in 1 2 3; do cat /proc/self/stat /proc/self/maps; done"])
        guest.run("for i in 1 2 3 4 5 6; do cat /proc/self/stat /proc/self/maps; done")
        result = seen.stop()
    assert result.status == 0, result.stderr
    names = Names(guest)
    ends = set()
    for record in result.records:
        called = [names.of(frame)[0] for frame in frames_of(record)]
        assert called[0] == {"update_process_times"}
        entry = called.index({"asm_sysvec_apic_timer_interrupt"})
        assert {"hrtimer_interrupt"} in called[:entry]
        ends.add(min(called[-1]))
    outermost = {"entry_SYSCALL_64_after_hwframe", "common_startup_64", "asm_exc_page_fault", "ret_from_fork_asm"}
    # A program may have been interrupted by the timer, or by another processor.
    assert {end for end in ends if not end.startswith("asm_sysvec_")} <= outermost
    assert len(ends) > 1


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_a_stack_begins_in_a_module(guest: Guest, run: Runner, tmp_path: Path) -> None:
    """Which has tables of its own."""
    guest.load_module("dummy", "numdummies=1")
    text = program("dummy_get_stats64").replace("name = vmlinux\nmodtype = kernel", "name = dummy\nmodtype = kmod")
    with observed(guest, run, text, tmp_path) as seen:
        seen.await_record(["cat", "/proc/net/dev"])
        result = seen.stop()
    assert result.status == 0, result.stderr
    names = Names(guest)
    for record in result.records:
        called = [min(names.of(frame)[0]) for frame in frames_of(record)]
        assert called[:4] == ["dummy_get_stats64", "dev_get_stats", "dev_seq_printf_stats", "dev_seq_show"]
        assert called[-1] == "entry_SYSCALL_64_after_hwframe"


def functions_of(module: Path, frames: list[int]) -> list[str]:
    """Return the functions of a program, "" for what lies elsewhere; the outermost frame is in its start."""
    listed = subprocess.run(["nm", "-n", module], capture_output=True, text=True, check=True).stdout
    symbols = {
        name: int(address, 16) for address, name in re.findall(r"^([0-9a-f]+) [tT] (\w+)$", listed, re.MULTILINE)
    }
    bias = (frames[-1] - symbols["_start"]) & -4096
    starts = sorted((address, name) for name, address in symbols.items())
    end = symbols["answer"] + 4096
    return [
        starts[bisect_right(starts, (frame - bias, "~")) - 1][1] if 0 <= frame - bias < end else "" for frame in frames
    ]


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_stacks_of_programs(guest: Guest, run: Runner, build: Builder, tmp_path: Path) -> None:
    """At a probepoint of the program, and at one of the kernel that the program has called."""
    module = build("asked.c")
    guest.put("/tmp/asked", module)
    text = f'name = "{module}"\nmodtype = user\noffset = answer\nminor = 1\nlog ustack\nexit\n'
    with observed(guest, run, text, tmp_path) as seen:
        seen.await_record(["/tmp/asked"], b"2\n")
        result = seen.stop()
    assert result.status == 0, result.stderr
    for record in result.records:
        frames = frames_of(record, USER_TOKEN)
        assert functions_of(module, frames) == ["answer", "work", "main", "", "", "_start"]
    guest.put("/tmp/answered", module)
    with observed(guest, run, program("ksys_write").replace("kstack", "ustack"), tmp_path) as seen:
        while not [line for line in seen.lines if line["name"] == "asked"]:
            assert seen.client.poll() is None, seen.client.communicate()[1]
            guest.run(["/tmp/asked"], input=b"1\n")
        result = seen.stop()
    assert result.status == 0, result.stderr
    (frames, *_) = [frames_of(record, USER_TOKEN) for record in result.records if record["name"] == "asked"]
    *addresses, end = frames
    assert end == StackEnd.NO_TABLE  # the program's own file is not found here by its name
    listed = subprocess.run(["nm", "-D", "/lib/x86_64-linux-gnu/libc.so.6"], capture_output=True, text=True, check=True)
    (write,) = re.findall(r"^([0-9a-f]+) W write@@", listed.stdout, re.MULTILINE)
    assert (addresses[0] - int(write, 16)) % 4096 < 64
    assert len(addresses) > 4
    assert addresses[-1] < min(addresses[:-1])
