"""What the kernel's refusals of trampolines mean."""

from __future__ import annotations

import errno
import os

import pytest

from dprobes.engines.ebpf.kernel import bpf_links
from dprobes.engines.ebpf.kernel.bpf_links import attach_trampoline
from dprobes.errors import EngineError, PrivilegeError


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    number: int = request.param

    def refuse(_program: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(bpf_links, "open_raw_tracepoint", refuse)


@pytest.mark.usefixtures("refusal")
@pytest.mark.parametrize("refusal", [errno.EBUSY], indirect=True)
def test_one_of_many_is_left_out_and_a_single_one_is_an_error() -> None:
    reason = "the kernel puts no trampoline there (device or resource busy)"
    assert attach_trampoline(-1, "vfs_read", is_one_of_many=True) == reason
    with pytest.raises(EngineError) as caught:
        attach_trampoline(-1, "vfs_read", is_one_of_many=False)
    assert caught.value.message == "the kernel puts no trampoline at 'vfs_read': device or resource busy"


@pytest.mark.usefixtures("refusal")
@pytest.mark.parametrize("refusal", [errno.EPERM], indirect=True)
def test_what_is_not_permitted_is_no_matter_of_the_function() -> None:
    with pytest.raises(PrivilegeError) as caught:
        attach_trampoline(-1, "vfs_read", is_one_of_many=True)
    assert caught.value.message == "the kernel does not permit a trampoline at 'vfs_read'"
    assert caught.value.hint == "run as root; 'dprobes doctor' shows what this kernel supports"
