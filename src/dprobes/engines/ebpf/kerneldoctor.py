"""What the machine allows for programs about the kernel and its modules, found out by trying."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.kernel.features import Feature
from dprobes.engines.findings import Finding
from dprobes.errors import TargetError, reason_of, reason_of_number
from dprobes.target.kernel.runningkernel import RunningKernel
from dprobes.target.kernel.tracepoints import KernelTracepoints

if TYPE_CHECKING:
    from dprobes.engines.ebpf.kernel.features import Features

__all__ = ["examine_kernel"]

_TYPES = Path("/sys/kernel/btf")
_KERNEL = "vmlinux"


def examine_kernel(features: Features, lockdown: str) -> list[Finding]:
    """Return what was found; ``lockdown`` is a clause on it, empty where there is none."""
    kernel = RunningKernel()
    return [
        _kprobes(features, lockdown),
        _feature(
            features,
            Feature.KPROBE_MULTI,
            "probe thousands of functions of the kernel at once (kprobe_multi)",
            "Linux 5.18 or newer has it, with CONFIG_FPROBE; until then each function has a kprobe of its own",
        ),
        _feature(
            features,
            Feature.READ_KERNEL,
            "read the kernel's memory in handlers",
            "boot with kernel lockdown 'none' or 'integrity'",
            lockdown,
        ),
        _feature(
            features,
            Feature.TRAMPOLINE,
            "probe functions of the kernel without kprobes (fentry, fexit)",
            "boot a kernel with CONFIG_DEBUG_INFO_BTF and CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS that permits them",
            lockdown,
        ),
        _feature(
            features,
            Feature.OVERRIDE_RETURN,
            "skip functions of the kernel that its source says may fail (bpf_override_return)",
            "boot a kernel with CONFIG_BPF_KPROBE_OVERRIDE",
        ),
        _feature(
            features,
            Feature.MODIFY_RETURN,
            "skip functions of the kernel in which security modules decide (fmod_ret)",
            "boot a kernel with CONFIG_DEBUG_INFO_BTF and CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS that permits them",
        ),
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
    return _feature(features, Feature.KPROBE, "probe instructions of the kernel (kprobes)", remedy, lockdown)


def _feature(features: Features, feature: Feature, what: str, remedy: str, detail: str = "") -> Finding:
    error = features.error(feature)
    if error is None:
        return Finding(what, works=True, detail=detail)
    reason = reason_of_number(error.errno or 0)
    return Finding(what, works=False, detail=f"{reason}; {detail}" if detail else reason, remedy=remedy)


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
    what = "tell beforehand what nobody may probe in the kernel (kprobe blacklist)"
    if kernel.blacklist is None:
        remedy = "mount debugfs on /sys/kernel/debug; without it the kernel refuses such places at insertion"
        return Finding(what, works=False, detail="/sys/kernel/debug/kprobes/blacklist is not there", remedy=remedy)
    return Finding(what, works=True, detail=f"{len(kernel.blacklist)} entries")


def _tracepoints() -> Finding:
    what = "read the records of tracepoints (tracefs)"
    try:
        count = len(KernelTracepoints().subsystems())
    except OSError as error:
        remedy = "run dprobes as root; where lockdown closes tracefs, tracepoints have arguments only (BTF)"
        return Finding(what, works=False, detail=reason_of(error), remedy=remedy)
    return Finding(what, works=True, detail=f"{count} subsystems")


def _types() -> Finding:
    what = "follow arguments of tracepoints, and recognise system calls (BTF)"
    try:
        names = sorted(path.name for path in _TYPES.iterdir())
    except OSError as error:
        return Finding(what, works=False, detail=reason_of(error), remedy="use a kernel with CONFIG_DEBUG_INFO_BTF")
    modules = len([name for name in names if name != _KERNEL])
    if _KERNEL not in names:
        return Finding(what, works=False, detail=f"{_TYPES} is empty", remedy="use a kernel with CONFIG_DEBUG_INFO_BTF")
    return Finding(what, works=True, detail=f"of the kernel and {modules} modules")
