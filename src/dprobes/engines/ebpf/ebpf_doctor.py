"""Checks of ``doctor`` for the eBPF engine: the kernel's features, and the cost of a probepoint without hits."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.kernel.kernel_features import Feature
from dprobes.engines.engine_interface import Area, Finding, Use
from dprobes.errors import TargetError, reason_of, reason_of_number
from dprobes.platform.linux.procfs import missing_privilege, thread_state
from dprobes.target.kernel.running_kernel import RunningKernel
from dprobes.target.kernel.tracepoints import KernelTracepoints

if TYPE_CHECKING:
    from dprobes.engines.ebpf.kernel.kernel_features import Features

__all__ = ["examine", "examine_kernel"]

_TYPES = Path("/sys/kernel/btf")
_KERNEL = "vmlinux"
_BTF = "use a kernel with CONFIG_DEBUG_INFO_BTF"

_EVERYWHERE = Use(
    "probe all processes, with handlers in the kernel",
    "dprobes run -e 'libc.so.6:malloc(n) { @[comm] = hist(n) }' --duration 5s",
    90,
)
_FUNCTIONS = Use("probe the kernel", "dprobes run -e 'kernel:vfs_read { @[comm] = count() }' --duration 5s", 60)
_CALLS = Use(
    "trace system calls and tracepoints", "dprobes run -e 'syscall openat { @[comm] = count() }' --duration 5s", 50
)
_SAMPLES = Use("sample the CPUs", "dprobes run -e 'sample 99hz { @[comm] = count() }' --duration 5s", 40)


def examine_kernel(features: Features, lockdown: str) -> list[Finding]:
    """
    Return the findings about probepoints in the kernel.

    ``lockdown`` is a clause about it, empty without lockdown.
    """
    kernel = RunningKernel()
    trampolines = (
        "boot a kernel with CONFIG_DEBUG_INFO_BTF and CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS that permits them"
    )
    rows = (
        (
            Feature.KPROBE_MULTI,
            "probe thousands of functions of the kernel at once (kprobe_multi)",
            "Linux 5.18 or newer has it, with CONFIG_FPROBE; until then each function has a separate kprobe",
            "",
        ),
        (
            Feature.READ_KERNEL,
            "read the kernel's memory in handlers",
            "boot with kernel lockdown 'none' or 'integrity'",
            lockdown,
        ),
        (
            Feature.TRAMPOLINE,
            "probe functions of the kernel without kprobes (fentry, fexit)",
            trampolines,
            lockdown,
        ),
        (
            Feature.OVERRIDE_RETURN,
            "skip functions of the kernel that are marked for error injection (bpf_override_return)",
            "boot a kernel with CONFIG_BPF_KPROBE_OVERRIDE",
            "",
        ),
        (
            Feature.MODIFY_RETURN,
            "skip functions of the kernel's security modules (fmod_ret)",
            trampolines,
            "",
        ),
    )
    return [
        _kprobes(features, lockdown),
        *(_feature(features, *row) for row in rows),
        _symbols(kernel),
        _text(kernel),
        _blacklist(kernel),
        _tracepoints(),
        _types(),
    ]


def _kprobes(features: Features, lockdown: str) -> Finding:
    remedy = "boot a kernel with CONFIG_KPROBES and CONFIG_KPROBE_EVENTS; tracepoints, watchpoints and samplers work"
    error = features.error(Feature.KPROBE)
    if error is not None and error.errno in (errno.EPERM, errno.EACCES):
        remedy = "boot without kernel lockdown (lockdown= and secure boot); tracepoints and samplers work"
    found = _feature(features, Feature.KPROBE, "probe instructions of the kernel (kprobes)", remedy, lockdown)
    return found._replace(use=_FUNCTIONS)


def _symbols(kernel: RunningKernel) -> Finding:
    what = "find places in the kernel by name (/proc/kallsyms)"
    try:
        has_data = kernel.symbols.has_data
    except TargetError as error:
        return Finding(what, works=False, detail=error.message, remedy=error.hint or "")
    return Finding(what, works=True, detail="" if has_data else "functions only: CONFIG_KALLSYMS_ALL lists data too")


def _text(kernel: RunningKernel) -> Finding:
    what = "verify instructions of the kernel (/proc/kcore)"
    problem = kernel.memory.problem
    kernel.memory.close()
    if problem is None:
        return Finding(what, works=True)
    remedy = "run dprobes as root; where lockdown closes it, the kernel alone checks where instructions start"
    return Finding(what, works=False, detail=problem, remedy=remedy)


def _blacklist(kernel: RunningKernel) -> Finding:
    what = "list the places of the kernel that cannot be probed (kprobe blacklist)"
    if kernel.blacklist is None:
        remedy = "mount debugfs on /sys/kernel/debug; without it the kernel refuses such places at insertion"
        return Finding(what, works=False, detail="/sys/kernel/debug/kprobes/blacklist does not exist", remedy=remedy)
    return Finding(what, works=True, detail=f"{len(kernel.blacklist)} entries")


def _tracepoints() -> Finding:
    what = "read the records of tracepoints (tracefs)"
    try:
        count = len(KernelTracepoints().subsystems())
    except OSError as error:
        remedy = "run dprobes as root; where lockdown closes tracefs, tracepoints have arguments only (BTF)"
        return Finding(what, works=False, detail=reason_of(error), remedy=remedy, use=_CALLS)
    return Finding(what, works=True, detail=f"{count} subsystems", use=_CALLS)


def _types() -> Finding:
    what = "read arguments of tracepoints and system calls (BTF)"
    try:
        names = sorted(path.name for path in _TYPES.iterdir())
    except OSError as error:
        return Finding(what, works=False, detail=reason_of(error), remedy=_BTF)
    modules = len([name for name in names if name != _KERNEL])
    if _KERNEL not in names:
        return Finding(what, works=False, detail=f"{_TYPES} is empty", remedy=_BTF)
    return Finding(what, works=True, detail=f"of the kernel and {modules} modules")


_ENGINE = "run handlers in the kernel (eBPF engine)"
_LOCKDOWN = Path("/sys/kernel/security/lockdown")
_STARTING_TIME = 1.0  # seconds
_TREES = "follow processes (-c, -p)"
_PERF = "watch memory and take samples of all processes (perf events)"
_OLD = "Linux 5.17 or newer has it; --engine ptrace needs none of it"


def examine() -> list[Finding]:
    """Return the findings, the most important ones first."""
    if (missing := missing_privilege()) is not None:
        disabled = _sysctl("kernel/unprivileged_bpf_disabled")
        detail = f"{missing} (kernel.unprivileged_bpf_disabled is {disabled or 'not there'})"
        remedy = "run dprobes as root, or give it CAP_BPF and CAP_PERFMON; --engine ptrace needs neither"
        return [Finding(_ENGINE, False, detail, remedy, area=Area.ENGINES, use=_EVERYWHERE)]
    from dprobes.engines.ebpf.feature_support import kernel_support
    from dprobes.engines.ebpf.kernel.kernel_features import Features

    features = Features()
    support = kernel_support(features)
    detail, remedy = support.problem or _compiler(), support.remedy or ""
    found = [Finding(_ENGINE, support.problem is None, detail, remedy, area=Area.ENGINES, use=_EVERYWHERE)]
    if support.problem is not None:
        return found
    typed = "drop records of faulting instructions (BTF)"
    if support.tree_problem is None or Feature.BTF not in features:
        typed = f"{_TREES}, and {typed}"
    else:
        found.append(Finding(_TREES, False, support.tree_problem, f"use {support.tree_remedy}, or --engine ptrace"))
    rows = (
        (
            Feature.UPROBE_MULTI,
            "insert thousands of probepoints at once (uprobe_multi)",
            "Linux 6.6 or newer has it; until then up to 16 probepoints are inserted one by one",
        ),
        (
            Feature.SLEEPABLE_UPROBE,
            "read memory that is not present (sleepable programs)",
            "Linux 6.0 or newer has it; until then such memory is a fault for handlers",
        ),
        (Feature.TYPED_TRACEPOINT, typed, _BTF),
        (
            Feature.PERF_EVENT,
            _PERF,
            "allow perf_event_open(2) in this container",
            f"kernel.perf_event_paranoid is {_sysctl('kernel/perf_event_paranoid')}",
        ),
        (
            Feature.FIND_VMA,
            "take samples of one module, and test whether memory is writable (bpf_find_vma)",
            "Linux 5.17 or newer has it",
        ),
        (
            Feature.WRITE_USER,
            "change memory in kernel handlers",
            "use --engine ptrace, or boot without kernel lockdown (lockdown= and secure boot)",
            _lockdown(),
        ),
        (
            Feature.WRITE_REGISTERS,
            "change registers in kernel handlers",
            "use --engine ptrace: this kernel lets uprobe programs only read them",
        ),
        (Feature.ANCESTOR_CGROUP, "probe the processes of a cgroup (--cgroup)", _OLD),
        (Feature.NAMESPACE_PID, "show process ids as in their containers (--pid-namespace)", _OLD),
    )
    found += [_feature(features, *row) for row in rows]
    found = [each._replace(use=_SAMPLES) if each.what == _PERF else each for each in found]
    return [*found, _map_memory(), _cost(), *examine_kernel(features, _lockdown())]


def _feature(features: Features, feature: Feature, what: str, remedy: str, detail: str = "") -> Finding:
    error = features.error(feature)
    if error is None:
        return Finding(what, works=True, detail=detail)
    reason = reason_of_number(error.errno or 0)
    return Finding(what, works=False, detail=f"{reason}; {detail}" if detail else reason, remedy=remedy)


def _sysctl(name: str) -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys", name).read_text().strip()
    return ""


def _compiler() -> str:
    """Return a clause on how the kernel executes BPF programs: JIT or interpreter."""
    if _sysctl("net/core/bpf_jit_enable") == "0":
        return "interpreted, several times slower: set net.core.bpf_jit_enable to 1"
    return f"compiled, Linux {os.uname().release}"


def _lockdown() -> str:
    with contextlib.suppress(OSError):
        if (state := re.search(r"\[(\w+)\]", _LOCKDOWN.read_text())) is not None:
            return f"kernel lockdown is '{state[1]}'"
    return ""


def _map_memory() -> Finding:
    """Test whether the kernel has memory for a ring of the default size."""
    from dprobes.engines.ebpf.ebpf_options import RING_SIZE
    from dprobes.engines.ebpf.kernel.bpf_objects import RingBuffer

    what = f"allocate the buffer of records ({RING_SIZE >> 20} MiB)"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    try:
        RingBuffer(RING_SIZE).close()
    except OSError as error:
        detail = f"{reason_of(error)}; the limit of locked memory is {shown}"
        remedy = "raise ulimit -l, or use a smaller --ring-size"
        return Finding(what, False, detail, remedy, area=Area.RIGHTS)
    return Finding(what, True, f"the limit of locked memory is {shown}", area=Area.RIGHTS)


# here: nop / mov $pause, %eax / syscall / jmp here
_CODE = b"\x90\xb8\x22\0\0\0\x0f\x05\xeb\xf6"
_BASE, _HEADER_SIZE, _ENTRY_SIZE = 0x400000, 64, 56


def _waiting_program() -> bytes:
    """Return an x86-64 ELF executable that waits forever in pause(2)."""
    start = _HEADER_SIZE + _ENTRY_SIZE
    size = start + len(_CODE)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack(
        "<HHIQQQIHHHHHH", 2, 62, 1, _BASE + start, _HEADER_SIZE, 0, 0, _HEADER_SIZE, _ENTRY_SIZE, 1, 0, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return header + segment + _CODE


def _cost() -> Finding:
    """Measure by how much a uprobe increases the private memory of a process that maps the file."""
    from dprobes.engines.ebpf.attach.handler_objects import attach_nothing

    what = "insert a probepoint into a program"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "waiting")
        path.write_bytes(_waiting_program())
        path.chmod(0o700)
        try:
            process = subprocess.Popen([path])
        except OSError as error:
            # Temporary files may be on a file system mounted with noexec.
            return Finding(what, works=True, detail=f"not tried: {reason_of(error)}")
        try:
            _await_sleep(process.pid)
            before = _private_memory(process.pid)
            with attach_nothing(str(path), _HEADER_SIZE + _ENTRY_SIZE):
                cost = _private_memory(process.pid) - before
        except OSError as error:
            remedy = "allow perf_event_open(2) and bpf(2) in this container"
            return Finding(what, works=False, detail=reason_of(error), remedy=remedy)
        finally:
            process.kill()
            process.wait()
    detail = f"each page with probepoints costs {cost} KiB in each process that uses it"
    return Finding(what, works=True, detail=detail)


def _await_sleep(pid: int) -> None:
    """Wait until the executable sleeps in pause(2): before that, its page of code may not be mapped."""
    until = time.monotonic() + _STARTING_TIME
    while thread_state(pid) != "S" and time.monotonic() < until:
        time.sleep(0.001)


def _private_memory(pid: int) -> int:
    """Return the KiB of a process's memory that is private, and so shared with no file and no other process."""
    found = re.findall(r"^Anonymous: +(\d+) kB", Path(f"/proc/{pid}/smaps").read_text(), re.MULTILINE)
    return sum(int(size) for size in found)
