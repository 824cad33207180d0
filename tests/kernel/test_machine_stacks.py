"""Call stacks of a machine behind QEMU's stub, beside those that its kernel prints itself."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import pytest

from guests.initramfs import PYTHON
from integration.conftest import run
from kernel.observedmachine import observed

if TYPE_CHECKING:
    from pathlib import Path

    from guests.guest import Guest
    from integration.support import Runner

__all__ = ["run"]

OWN_STACK = "print(open('/proc/self/stack').read())"
TOKEN, HEAD = 9, 3
"""What a stack of the kernel begins with: its token, and a count of two bytes."""


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


def frames_of(record: dict[str, Any]) -> list[int]:
    data = bytes.fromhex(record["data"])
    count = int.from_bytes(data[1:HEAD], "little")
    assert data[0] == TOKEN
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
    outermost = {"asm_sysvec_apic_timer_interrupt", "entry_SYSCALL_64_after_hwframe", "common_startup_64"}
    outermost |= {"asm_exc_page_fault", "ret_from_fork_asm"}
    assert ends <= outermost
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
