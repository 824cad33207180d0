"""What ``doctor`` says of the kernel as something to probe: each finding is what a trial, or a file, shows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dprobes.engines.ebpf.ebpf_doctor import examine_kernel
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from integration.ebpf.kernel import require_bpf
from integration.support import DPROBES, TIMEOUT


def test_each_finding_is_what_this_machine_shows() -> None:
    require_bpf()
    findings = {finding.what: finding for finding in examine_kernel(Features(), "kernel lockdown is 'integrity'")}
    features = Features()
    for what, feature in {
        "probe instructions of the kernel (kprobes)": Feature.KPROBE,
        "probe thousands of functions of the kernel at once (kprobe_multi)": Feature.KPROBE_MULTI,
        "read the kernel's memory in handlers": Feature.READ_KERNEL,
    }.items():
        assert findings[what].works == (feature in features)
    kprobes = findings["probe instructions of the kernel (kprobes)"]
    assert kprobes.detail.endswith("kernel lockdown is 'integrity'")
    types = findings["read arguments of tracepoints and system calls (BTF)"]
    assert types.works == Path("/sys/kernel/btf/vmlinux").exists()
    blacklist = findings["list the places of the kernel that cannot be probed (kprobe blacklist)"]
    assert blacklist.works == Path("/sys/kernel/debug/kprobes/blacklist").exists()
    assert all(finding.works or finding.remedy for finding in findings.values())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide files")
def test_what_is_hidden_has_a_remedy(tmp_path: Path) -> None:
    require_bpf()
    hidden = tmp_path / "kallsyms"
    hidden.write_text("0000000000000000 T _text\n")
    script = 'mount --bind "$0" /proc/kallsyms && mount -t tmpfs none /sys/kernel/btf && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(hidden), *DPROBES, "doctor"],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert (
        "no   find places in the kernel by name (/proc/kallsyms): the kernel hides its addresses: /proc/kallsyms shows "
        "0 for all of them\n"
        "     remedy: run dprobes as root, or with CAP_SYSLOG, and set kernel.kptr_restrict to 0 or 1\n"
    ) in done.stdout
    assert (
        "no   read arguments of tracepoints and system calls (BTF): /sys/kernel/btf is empty\n"
        "     remedy: use a kernel with CONFIG_DEBUG_INFO_BTF\n"
    ) in done.stdout
