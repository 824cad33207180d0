"""What ``doctor`` says of the kernel: measured, and with a reason where something is missing."""

from __future__ import annotations

import errno
import os
import subprocess
from typing import NoReturn

import pytest

from dprobes.engines.ebpf.attach import handler_objects
from dprobes.engines.ebpf.ebpf_doctor import examine
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from integration.ebpf.kernel import require_bpf
from integration.support import DPROBES, TIMEOUT


def test_each_finding_is_what_a_trial_shows() -> None:
    require_bpf()
    findings = {finding.what: finding for finding in examine()}
    features = Features()
    for what, feature in {
        "insert thousands of probepoints at once (uprobe_multi)": Feature.UPROBE_MULTI,
        "read memory that is not present (sleepable programs)": Feature.SLEEPABLE_UPROBE,
        "change memory in kernel handlers": Feature.WRITE_USER,
        "change registers in kernel handlers": Feature.WRITE_REGISTERS,
    }.items():
        assert findings[what].works == (feature in features)
        assert findings[what].works or findings[what].remedy


def test_a_probepoint_costs_the_page_that_it_is_in() -> None:
    require_bpf()
    finding = next(f for f in examine() if f.what == "insert a probepoint into a program")
    expected = "each page with probepoints costs 4 KiB in each process that uses it"
    assert (finding.works, finding.detail) == (True, expected)


def test_a_probepoint_that_cannot_be_inserted_has_the_systems_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, offset: int) -> NoReturn:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    require_bpf()
    monkeypatch.setattr(handler_objects, "attach_nothing", refuse)
    finding = next(f for f in examine() if f.what == "insert a probepoint into a program")
    assert (finding.works, finding.detail) == (False, "operation not permitted")
    assert finding.remedy == "allow perf_event_open(2) and bpf(2) in this container"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to give up")
def test_without_privileges_it_says_which_are_missing() -> None:
    drop = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    done = subprocess.run([*drop, *DPROBES, "doctor"], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    lines = done.stdout.splitlines()
    start = lines.index(next(line for line in lines if "run handlers in the kernel (eBPF engine)" in line))
    assert lines[start].startswith("no ")
    assert "this user lacks CAP_BPF and CAP_PERFMON (kernel.unprivileged_bpf_disabled is " in lines[start]
    assert lines[start + 1] == (
        "     remedy: run dprobes as root, or give it CAP_BPF and CAP_PERFMON; --engine ptrace needs neither"
    )
