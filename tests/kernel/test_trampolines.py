"""Without kprobes BPF trampolines serve functions of the kernel, and their returns."""

from __future__ import annotations

import csv
import re
from typing import TYPE_CHECKING

import pytest

from guests.initramfs import PYTHON
from kernel.trampoline_calls import run_without

if TYPE_CHECKING:
    from guests.guest import Guest

pytestmark = [pytest.mark.requires_feature("fentry"), pytest.mark.shared_guest]

HEADER = "name = vmlinux\nmodtype = kernel\nmajor = 7\n"
NO_KPROBES = ("KPROBE", "KPROBE_MULTI", "KPROBE_EVENTS")
SIZES = (7, 300, 4096)
READ = "import os; file = os.open('/dev/zero', 0); " + "; ".join(f"os.read(file, {size})" for size in SIZES)


def run(guest: Guest, program: str, *options: str, missing: tuple[str, ...] = NO_KPROBES) -> tuple[int, str, str]:
    guest.put("/tmp/trampoline.rpn", HEADER + program)
    return guest.call(run_without, missing, "run", "/tmp/trampoline.rpn", *options, timeout=120)


def words(guest: Guest, path: str, minor: int) -> list[list[int]]:
    """Return what was logged with a minor code, as words."""
    rows = csv.DictReader(guest.get(path).decode().splitlines())
    logs = [bytes.fromhex(row["data"]) for row in rows if int(row["minor"]) == minor]
    return [[int.from_bytes(log[n : n + 8], "little") for n in range(0, len(log), 8)] for log in logs]


def test_arguments_and_results_are_those_of_the_calls(guest: Guest) -> None:
    program = "offset = vfs_read\nminor = 1\npush r, arg2\npush r, pc\npush vfs_read\nsub\nlog 2\nexit\n"
    program += "offset = vfs_read\nreturn = yes\nminor = 2\npush r, retval\npush r, arg2\nlog 2\nexit\n"
    options = ("--format", "csv", "-o", "/tmp/out", "--", str(PYTHON), "-S", "-E", "-c", READ)
    status, _, errors = run(guest, program, *options)
    assert (status, "vfs_read" in errors) == (0, True), errors
    entries, returns = (words(guest, "/tmp/out", minor) for minor in (1, 2))
    assert len(entries) == len(returns)
    assert all(words[0] == 0 for words in entries), "the probepoint's address"
    assert [words[1] for words in entries if words[1] in SIZES][-3:] == list(SIZES)
    assert [[n, n] for n in SIZES] == [words for words in returns if words[0] in SIZES][-3:]
    executed = dict(re.findall(r"^7,(\d) .* (\S+)$", errors, re.MULTILINE))
    assert executed == {"1": "fentry", "2": "fexit"}


def test_memory_stacks_and_the_programs_registers_are_there(guest: Guest) -> None:
    program = "offset = vfs_read\nminor = 1\npush u, sp\npush r, arg0\npush mem, u64\nlog 2\nlog kstack, 2\nexit\n"
    options = ("--format", "csv", "-o", "/tmp/out", "--", str(PYTHON), "-S", "-E", "-c", READ)
    status, _, errors = run(guest, program, *options)
    assert status == 0, errors
    rows = list(csv.DictReader(guest.get("/tmp/out").decode().splitlines()))
    assert rows
    for row in rows:
        log = bytes.fromhex(row["data"])
        assert int.from_bytes(log[8:16], "little") >> 47 == 0, "the program's stack"
        assert log[16:19] == b"\x09\x02\x00"


def test_the_functions_of_a_pattern_have_a_trampoline_each(guest: Guest) -> None:
    program = 'offset = "vfs_read*"\nminor = 1\npush r, arg1\nlog 1\nexit\n'
    options = ("--format", "csv", "-o", "/tmp/out", "--", str(PYTHON), "-S", "-E", "-c", READ)
    status, _, errors = run(guest, program, *options)
    assert status == 0, errors
    rows = list(csv.DictReader(guest.get("/tmp/out").decode().splitlines()))
    assert len(rows) >= len(SIZES)
    assert re.search(r"vfs_readlink +0 ", errors), errors
    assert re.search(rf"vfs_read +{len(rows)} ", errors), errors


REFUSED = [
    (
        "offset = vfs_read\npush r, r12\nlog 1\n",
        "'push r, r12': a trampoline does not know this register of the kernel",
    ),
    ("offset = vfs_read\npush r, arg5\nlog 1\n", "'push r, arg5': 'vfs_read' takes 4 arguments only"),
    ("offset = vfs_read\npush r, retval\nlog 1\n", "'push r, retval': a trampoline does not know this register"),
    (
        "offset = kfree\nreturn = yes\npush r, retval\nlog 1\n",
        "'push r, retval': 'kfree' returns nothing",
    ),
    (
        "offset = vfs_read + {instruction}\nexit\n",
        "without kprobes a probe can only be where a function begins, or at its return, not at vfs_read+{instruction}",
    ),
    ("offset = seq_printf\nexit\n", "a trampoline cannot be in 'seq_printf': it takes any number of arguments"),
]


def test_what_trampolines_cannot_do_is_refused_for_its_line(guest: Guest) -> None:
    place = {"6.1": "0x5", "6.12": "0x4"}[guest.machine.kernel]
    for case in REFUSED:
        program, message = (text.replace("{instruction}", place) for text in case)
        status, _, errors = run(guest, program)
        assert (status, message in errors) == (2, True), errors


def test_without_either_the_reason_is_said(guest: Guest) -> None:
    status, _, errors = run(guest, "offset = vfs_read\nexit\n", missing=(*NO_KPROBES, "TRAMPOLINE"))
    assert status == 2
    assert "'modtype = kernel' needs probes in the kernel or a kernel module, which the ebpf engine lacks" in errors
    assert "and no BPF trampolines (fentry) in their place: 'dprobes doctor' shows which" in errors
