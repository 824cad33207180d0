"""Functions of the kernel that a handler skips: they fail for a chosen process, and work for all others."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from guests.images import BUILT
from guests.initramfs import PYTHON
from kernel.trampoline_calls import run_without

if TYPE_CHECKING:
    from guests.guest import Guest, Process

pytestmark = pytest.mark.shared_guest

HEADER = "name = vmlinux\nmodtype = kernel\nmajor = 7\n"

OPENER = """
import os, sys
print("ready", flush=True)
for number, _ in enumerate(sys.stdin):
    try:
        os.close(os.open("/etc/opened", 0))
        print(number, "opened", flush=True)
    except OSError as error:
        print(number, error.errno, flush=True)
"""

SKIP = """
offset = {function}
minor = 1
    push pid
    push {pid}
    sub
    jnz others
    push {value}
    skip
others:
    abort
"""


def opener(guest: Guest) -> Process:
    """Return a process that opens a file for each line that it gets."""
    guest.put("/etc/opened", "something\n")
    guest.put("/tmp/opener.py", OPENER)
    process = guest.start([str(PYTHON), "-S", "-E", "/tmp/opener.py"])
    process.await_output("ready")
    return process


def opens(process: Process, number: int) -> str:
    """Let it try once more; return what came of it."""
    process.write("\n")
    return process.await_output(f"{number} ").split(f"{number} ")[1].split("\n")[0]


def check_failing(guest: Guest, function: str) -> None:
    """Let a function fail for one of two processes, as long as a program is inserted."""
    chosen, other = opener(guest), opener(guest)
    assert (opens(chosen, 0), opens(other, 0)) == ("opened", "opened")
    guest.put("/tmp/skip.rpn", HEADER + SKIP.format(function=function, pid=chosen.pid, value=-errno.ENOMEM))
    run = guest.start_dprobes("run", "/tmp/skip.rpn", "--allow-write")
    run.await_output("Ctrl-C ends the run")
    assert (opens(chosen, 1), opens(other, 1)) == (str(errno.ENOMEM), "opened")
    assert (opens(chosen, 2), opens(other, 2)) == (str(errno.ENOMEM), "opened")
    run.signal(2)
    summary = run.completed(check=False).stderr
    assert (opens(chosen, 3), opens(other, 3)) == ("opened", "opened"), summary
    for process in (chosen, other):
        process.close_input()
        assert process.wait() == 0
    counted = next(line.split() for line in summary.splitlines() if line.startswith("7,1 "))
    assert counted[3] == "2", summary


@pytest.mark.requires_feature("fentry")
def test_where_a_security_module_decides_a_program_can_fail_for_a_chosen_process(guest: Guest) -> None:
    check_failing(guest, "security_file_open")


@pytest.mark.requires_feature("override_return")
@pytest.mark.parametrize("kernel", [BUILT], indirect=True)
def test_a_system_call_fails_for_a_chosen_process(guest: Guest) -> None:
    check_failing(guest, "__x64_sys_openat")


@pytest.mark.requires_feature("fentry")
def test_a_function_that_nobody_may_skip_is_refused(guest: Guest) -> None:
    guest.put("/tmp/skip.rpn", f"{HEADER}offset = vfs_read\nminor = 1\npush 1\nskip\n")
    done = guest.dprobes("run", "/tmp/skip.rpn", "--allow-write", check=False)
    assert done.returncode == 2
    assert "/tmp/skip.rpn:7:1: error: the kernel does not allow to skip 'vfs_read'\n" in done.stderr
    hint = "with CONFIG_BPF_KPROBE_OVERRIDE those in /sys/kernel/debug/error_injection/list can be skipped, "
    hint += "and with BPF trampolines those in which security modules decide (security_file_open)"
    assert f"hint: {hint}\n" in done.stderr


@pytest.mark.requires_feature("fentry")
def test_the_value_0_lets_the_function_be_executed(guest: Guest) -> None:
    process = opener(guest)
    guest.put("/tmp/skip.rpn", HEADER + SKIP.format(function="security_file_open", pid=process.pid, value=0))
    run = guest.start_dprobes("run", "/tmp/skip.rpn", "--allow-write")
    run.await_output("Ctrl-C ends the run")
    assert opens(process, 0) == "opened"
    run.signal(2)
    said = run.completed(check=False).stderr
    note = "this kernel lets 'security_file_open' be skipped with other values than 0: with 0 it is executed"
    assert f"note: {note}\n" in said


def test_a_kernel_without_both_ways_names_them(guest: Guest) -> None:
    guest.put("/tmp/skip.rpn", f"{HEADER}offset = security_file_open\nminor = 1\npush 1\nskip\n")
    missing = ("OVERRIDE_RETURN", "MODIFY_RETURN")
    status, _, errors = guest.call(run_without, missing, "run", "/tmp/skip.rpn", "--allow-write", timeout=120)
    assert status == 2
    assert "'skip' needs returning at once from functions of the kernel, which the ebpf engine lacks\n" in errors
    hint = "this kernel has neither bpf_override_return (CONFIG_BPF_KPROBE_OVERRIDE) nor BPF trampolines that skip "
    assert f"hint: {hint}functions (fmod_ret): 'dprobes doctor' shows why\n" in errors


@pytest.mark.requires_feature("fentry")
def test_only_a_function_with_a_name_of_its_own_is_skipped(guest: Guest) -> None:
    guest.put("/tmp/skip.rpn", f'{HEADER}offset = "security_file_o*"\nminor = 1\npush 1\nskip\n')
    done = guest.dprobes("run", "/tmp/skip.rpn", "--allow-write", check=False)
    assert done.returncode == 2
    assert "a pattern cannot be skipped: the kernel decides for each function\n" in done.stderr
