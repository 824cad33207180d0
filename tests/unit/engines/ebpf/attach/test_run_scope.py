"""What handlers are to ask before a hit counts."""

from __future__ import annotations

import os

import pytest

from dprobes.bpf.lower.lowering_request import Filter
from dprobes.engines.ebpf.attach import process_programs
from dprobes.engines.ebpf.attach import run_scope as scope_module
from dprobes.engines.ebpf.attach.run_scope import filter_of
from dprobes.engines.engine_interface import Scope

EVERYWHERE = Scope()


@pytest.mark.parametrize("is_initial", [True, False])
def test_our_own_process_is_left_out_by_its_number_in_the_kernel(
    monkeypatch: pytest.MonkeyPatch, *, is_initial: bool
) -> None:
    monkeypatch.setattr(scope_module, "is_initial_namespace", lambda: is_initial)
    monkeypatch.setattr(process_programs, "own_process", lambda: os.getpid() + 1)
    assert filter_of(EVERYWHERE) == Filter(excluded=os.getpid() if is_initial else os.getpid() + 1)
