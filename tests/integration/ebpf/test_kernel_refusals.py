"""Programs about the kernel on machines that lack what they need: one refusal for each cause."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import DPROBES, TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Sequence

KERNEL = "name = vmlinux\nmodtype = kernel\n"
TRACEPOINT = "name = vmlinux\nmodtype = tracepoint\n"
PROGRAMS = {
    "function": KERNEL + "offset = vfs_read\nminor = 1\nexit\n",
    "watchpoint": KERNEL + "address = _text : _text + 3\nwatchpoint = w\nminor = 1\nexit\n",
    "sampler": KERNEL + "sampler = 99hz\nminor = 1\nexit\n",
    "record": TRACEPOINT + "offset = sched:sched_switch\nminor = 1\npush tp, prev_pid\nlog 1\nexit\n",
    "arguments": TRACEPOINT + "offset = sched:sched_switch\nminor = 1\npush tp, prev.pid\nlog 1\nexit\n",
    "system call": TRACEPOINT + "offset = syscall:openat\nminor = 1\npush tp, dfd\nlog 1\nexit\n",
}
FORBID = """
import ctypes, os, struct, sys
numbers = [int(number) for number in sys.argv[1].split(",")]
rules = b"".join(struct.pack("HBBI", 0x15, 0, 1, n) + struct.pack("HBBI", 6, 0, 0, 0x50001) for n in numbers)
code = struct.pack("HBBI", 0x20, 0, 0, 0) + rules + struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)
buffer = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program) == 0, os.strerror(ctypes.get_errno())
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""A seccomp filter with which system calls end with EPERM (linux/seccomp.h, linux/filter.h)."""

BPF, PERF_EVENT_OPEN = 321, 298

PERF_REMEDY = "run as root, or with the capabilities CAP_BPF and CAP_PERFMON; a container must allow perf_event_open(2)"


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def refused(
    directory: Path, name: str, within: Sequence[str], scope: Sequence[str] = ("--", "/bin/true")
) -> tuple[int, str]:
    """Run a program where that is refused; return the status and what is said."""
    if within is WITHOUT_TYPES and not Path("/sys/kernel/btf").is_dir():
        pytest.skip("this kernel shows no type information (BTF) anyway")
    (directory / "program.rpn").write_text(PROGRAMS[name])
    words = [*within, *DPROBES, "run", "program.rpn", "--format", "csv", *scope]
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory)}  # features may be known of a richer machine
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=TIMEOUT, check=False, cwd=directory, env=environment
    )
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    return done.returncode, done.stderr


def in_mounts(*commands: str) -> list[str]:
    """Return how a command runs behind other mounts, which nobody else sees."""
    return ["unshare", "-m", "sh", "-c", " && ".join((*commands, 'exec "$@"')), "sh"]


def forbidding(*numbers: int) -> list[str]:
    """Return how a command runs without some system calls."""
    return [DPROBES[0], "-c", FORBID, ",".join(map(str, numbers))]


WITHOUT_TYPES = in_mounts("mount -t tmpfs none /sys/kernel/btf")


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    ("within", "said"),
    [
        (
            ["unshare", "-Urpf", "--mount-proc"],
            """\
dprobes: error: the ebpf engine cannot work here: the kernel permits no BPF programs to processes in a user namespace
hint: run dprobes as root of the machine; a container must not have its own user namespace
""",
        ),
        (
            ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"],
            """\
dprobes: error: the ebpf engine cannot work here: this user lacks CAP_BPF and CAP_PERFMON
hint: run dprobes as root, or with CAP_BPF and CAP_PERFMON
""",
        ),
        (
            forbidding(BPF),
            """\
dprobes: error: the ebpf engine cannot work here: the kernel does not permit BPF programs to this process
hint: run dprobes as root; in a container, allow the bpf(2) and perf_event_open(2) system calls
""",
        ),
        (
            WITHOUT_TYPES,
            """\
dprobes: error: the ebpf engine cannot follow the processes of -c and -p here: this kernel shows no type information \
(BTF)
hint: leave out -c and -p, or use a kernel with CONFIG_DEBUG_INFO_BTF
""",
        ),
    ],
    ids=["user namespace", "no capabilities", "seccomp", "no types"],
)
def test_what_the_whole_engine_lacks(tmp_path: Path, name: str, within: list[str], said: str) -> None:
    assert refused(tmp_path, name, within) == (1, said)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "arguments",
            """\
program.rpn:5:10: error: 'sched:sched_switch' has no field 'prev.pid'; its arguments are not shown here \
(/sys/kernel/btf/vmlinux: no such file or directory)
    push tp, prev.pid
             ^~~~~~~~
hint: there are prev_comm, prev_pid, prev_prio, prev_state, next_comm, next_pid, next_prio
""",
        ),
        (
            "system call",
            """\
program.rpn:3:1: error: system calls cannot be recognised: the kernel shows no types \
(/sys/kernel/btf/vmlinux: no such file or directory)
    offset = syscall:openat
    ^~~~~~~~~~~~~~~~~~~~~~~
hint: a kernel with CONFIG_DEBUG_INFO_BTF is needed
""",
        ),
    ],
)
def test_fields_without_types(tmp_path: Path, name: str, said: str) -> None:
    assert refused(tmp_path, name, WITHOUT_TYPES, scope=()) == (2, said)


def test_hidden_addresses(tmp_path: Path) -> None:
    shown = tmp_path / "kallsyms"
    shown.write_text("0000000000000000 T _text\n0000000000000000 T vfs_read\n")
    hidden = in_mounts(f"mount --bind {shlex.quote(str(shown))} /proc/kallsyms")
    said = """\
dprobes: error: the kernel hides its addresses: /proc/kallsyms shows 0 for all of them
hint: run dprobes as root, or with CAP_SYSLOG, and set kernel.kptr_restrict to 0 or 1
"""
    for name in ("watchpoint", "function") if Feature.KPROBE in Features() else ("watchpoint",):
        assert refused(tmp_path, name, hidden) == (1, said)


def test_no_kprobes(tmp_path: Path) -> None:
    if Feature.KPROBE in Features() or Feature.TRAMPOLINE in Features():
        pytest.skip("older kernel: with kprobes")
    assert refused(tmp_path, "function", ()) == (
        2,
        """\
program.rpn:2:1: error: 'modtype = kernel' needs probes in the kernel or a kernel module, which the ebpf engine lacks
    modtype = kernel
    ^~~~~~~~~~~~~~~~
hint: this kernel has no kprobes (CONFIG_KPROBES and CONFIG_KPROBE_EVENTS), or lockdown forbids them, and no BPF \
trampolines (fentry) in their place: 'dprobes doctor' shows which
""",
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("watchpoint", "the kernel does not permit perf events to this process: operation not permitted"),
        ("sampler", "the kernel does not permit perf events to this process: operation not permitted"),
        ("record", "the kernel does not permit to attach to the tracepoint 'sched_switch'"),
    ],
)
def test_perf_events_that_a_container_forbids(tmp_path: Path, name: str, said: str) -> None:
    status, found = refused(tmp_path, name, forbidding(PERF_EVENT_OPEN))
    assert status == 1
    assert found.splitlines()[-2:] == [
        f"dprobes: error: {said}",
        f"hint: {PERF_REMEDY}",
    ]
