"""Fixtures: a manager of the test's own, and a program that calls functions on demand."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.manager.probe_manager import Manager
from dprobes.ppdf.ppdf_file import encode
from dprobes.resolve.portable_program import build_ppdf
from dprobes.rpn.compilation_passes import CompileOptions, parse_file
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.manager.sandbox import Sandbox, service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.manager.sandbox import Service
    from integration.support import Builder


PROGRAM = """name = "{library}"
major = 5
vars = 2
gvars = 3
groupdef = files
typedef = enter

offset = write_file
minor = 1
group = files
type = enter
exit
"""


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path)
    yield made
    made.close()


@pytest.fixture
def target(build: Builder) -> Iterator[Service]:
    with service(build) as started:
        yield started


@pytest.fixture(params=["ptrace", "ebpf"])
def engine(request: pytest.FixtureRequest) -> str:
    """The name of each engine that works here."""
    if request.param == "ebpf":
        require_bpf()
        require_initial_namespace()
    return str(request.param)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A manager in this process."""
    with Manager(tmp_path / "trace.dpt") as made:
        yield made


@pytest.fixture
def insertion(tmp_path: Path, target: Service) -> dict[str, Any]:
    """The arguments of an insertion that is fine."""
    source = tmp_path / "p.rpn"
    source.write_text(PROGRAM.format(library=target.library))
    diagnostics = Diagnostics()
    program = parse_file(source, diagnostics, CompileOptions())
    ppdf = encode(build_ppdf(program, [target.library], diagnostics))
    scope = {"pid": target.pid}
    return {"ppdf": base64.b64encode(ppdf).decode(), "scope": scope, "engine": "ptrace", "as": "svc"}
