"""
Features of the kernels of guests: the version with which each came, and the necessary options.

A test that needs a feature is skipped in a guest whose kernel is older, or was built without the options. In any other
guest it runs, and fails if the feature is not detected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from guests.images import Image

__all__ = ["FEATURES", "KernelFeature", "lack_of"]


@dataclass(frozen=True, slots=True)
class KernelFeature:
    """A feature of the kernel: version and commit in which it came, the commit's subject, and the necessary options."""

    since: tuple[int, int]
    commit: str
    subject: str
    options: tuple[str, ...] = ()


FEATURES = {
    "kprobe_pmu": KernelFeature(
        (4, 17), "e12f03d7031a", "perf/core: Implement the 'perf_kprobe' PMU", ("CONFIG_KPROBE_EVENTS",)
    ),
    "btf": KernelFeature((5, 4), "341dfcf8d78e", "btf: expose BTF info through sysfs", ("CONFIG_DEBUG_INFO_BTF",)),
    "btf_modules": KernelFeature(
        (5, 11), "36e68442d1af", "bpf: Load and verify kernel module BTFs", ("CONFIG_DEBUG_INFO_BTF_MODULES",)
    ),
    "fentry": KernelFeature(
        (5, 5),
        "fec56f5890d9",
        "bpf: Introduce BPF trampoline",
        ("CONFIG_DEBUG_INFO_BTF", "CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS"),
    ),
    "kprobe_multi": KernelFeature((5, 18), "0dcac2725406", "bpf: Add multi kprobe link", ("CONFIG_FPROBE",)),
    "iterators": KernelFeature((6, 4), "6018e1f407cc", "bpf: implement numbers iterator"),
    "uprobe_multi": KernelFeature((6, 6), "89ae89f53d20", "bpf: Add multi uprobe link"),
    "uprobe_multi_process": KernelFeature((6, 6), "b733eeade420", "bpf: Add pid filter support for uprobe_multi link"),
    "func_ip": KernelFeature((6, 6), "686328d80c43", "bpf: Add bpf_get_func_ip helper support for uprobe link"),
    "link_missed": KernelFeature((6, 7), "e2b2cd592adb", "bpf: Add missed value to kprobe_multi link info"),
    "may_goto": KernelFeature((6, 9), "011832b97b31", "bpf: Introduce may_goto instruction"),
    "kprobe_session": KernelFeature(
        (6, 10), "535a3692ba72", "bpf: Add support for kprobe session attach", ("CONFIG_FPROBE",)
    ),
    "write_registers": KernelFeature((6, 18), "7384893d970e", "bpf: Allow uprobe program to change context registers"),
    "override_return": KernelFeature(
        (4, 16), "9802d86585db", "bpf: add a bpf_override_function helper", ("CONFIG_BPF_KPROBE_OVERRIDE",)
    ),
}


def lack_of(feature: str, image: Image) -> str | None:
    """Return the reason why a kernel lacks a feature, from its version and options; None if it must have it."""
    known = FEATURES[feature]
    version = tuple(int(number) for number in image.series.split("."))
    if version < known.since:
        since = ".".join(map(str, known.since))
        return f'{feature} came with Linux {since}, commit {known.commit} ("{known.subject}")'
    missing = [option for option in known.options if option not in image.options]
    return f"{feature} needs {' and '.join(missing)}, and {image.release} was built without" if missing else None
