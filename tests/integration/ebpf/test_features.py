"""What the running kernel answers to trials, compared with other sources where there are any."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dprobes.engines.ebpf.kernel.kernel_features import KERNEL_BTF, Feature, Features, KernelTypes
from dprobes.target.btf import Kind
from integration.ebpf.kernel import descriptors, require_bpf


@pytest.fixture(autouse=True)
def _needs_bpf() -> None:
    require_bpf()


def test_trials_leave_no_descriptor_behind_and_give_a_feature_or_an_error_of_the_kernel() -> None:
    before = descriptors()
    with KernelTypes() as types:
        features = Features(types)
        for feature in Feature:
            error = features.error(feature)
            assert (feature in features) == (error is None)
            # EINVAL, EACCES, ENOTSUPP and the like; never that the trial itself was wrong about memory.
            assert error is None or error.errno not in (errno.EFAULT, errno.ENOMEM, errno.EBADF)
    assert descriptors() == before


def test_a_kernel_that_runs_other_programs_runs_these_too() -> None:
    features = Features()
    assert Feature.BPF in features
    assert Feature.PERF_EVENT in features
    assert Feature.RAW_TRACEPOINT in features


def test_type_information_is_there_when_the_kernel_shows_it() -> None:
    with KernelTypes() as types:
        assert (Feature.BTF in Features(types)) == Path(KERNEL_BTF).exists()


def test_without_type_information_what_needs_it_is_missing() -> None:
    features = Features(KernelTypes("/nonexistent/btf"))
    for feature in (Feature.BTF, Feature.ITERATORS, Feature.TYPED_TRACEPOINT):
        error = features.error(feature)
        assert error is not None
        assert error.errno == errno.ENOENT


def test_the_members_of_the_kernels_registers_lie_as_its_headers_say() -> None:
    if not Path(KERNEL_BTF).exists():
        pytest.skip(f"this kernel has no {KERNEL_BTF}")
    # struct pt_regs of arch/x86/include/asm/ptrace.h, which never changes: it is what signal frames and ptrace show.
    names = ("r15", "r14", "r13", "r12", "bp", "bx", "r11", "r10", "r9", "r8", "ax", "cx", "dx", "si", "di", "orig_ax")
    with KernelTypes() as types:
        offsets = [types.member_offset("pt_regs", name) for name in (*names, "ip", "cs", "flags", "sp", "ss")]
        assert types.find(Kind.STRUCT, "task_struct") > 0
    assert offsets == [8 * number for number in range(21)]


def test_without_uprobe_multi_no_program_knows_which_function_returns() -> None:
    features = Features()
    assert Feature.UPROBE_MULTI in features or Feature.FUNC_IP not in features
