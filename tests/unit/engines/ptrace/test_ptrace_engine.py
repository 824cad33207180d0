"""The client's side of the ptrace engine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.engine_interface import Scope
from dprobes.engines.ptrace.ptrace_engine import PtraceEngine
from dprobes.errors import EngineError
from dprobes.rpn.rpn_program import Program
from support.attachments import attached, job_of

if TYPE_CHECKING:
    from pathlib import Path


def test_a_python_that_cannot_be_executed_again_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = str(tmp_path / "python")
    monkeypatch.setattr(sys, "executable", missing)
    with pytest.raises(EngineError) as caught, attached(PtraceEngine(), job_of(Program("x"), Scope(command=("true",)))):
        pass
    assert caught.value.message == f"the tracer cannot be started: '{missing}': no such file or directory"
    assert caught.value.hint == "this user must be able to execute the Python that runs dprobes"
