"""Tracepoints and system calls on the kernels of guests: the tests of the host hold there as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support import Builder

if TYPE_CHECKING:
    from guests.guest import Guest

pytestmark = pytest.mark.shared_guest

COMPILED = "/programs"
REPOSITORY = Path(__file__).parents[2]
HEADER = "name = vmlinux\nmodtype = tracepoint\nmajor = 9\n"

TESTS = """
import os, sys, pytest
os.environ |= {{"DPROBES_COMPILED_PROGRAMS": {compiled!r}, "DPROBES_TEST_PATIENCE": "5"}}
os.chdir(os.environ["REPOSITORY"])
options = ["-q", "--tb=short", "--noconftest", "-p", "integration.conftest", "-p", "no:cacheprovider"]
chosen = "system_call or word_size or strings or fields_of or followed or null_pointer or sleeper"
sys.exit(pytest.main([*options, "-k", chosen, "tests/integration/ebpf/test_tracepoints.py"]))
"""
"""Not all of them: each start of dprobes takes seconds there, and more where other guests run beside."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile what the tests that run in the guest use, outside."""
    directory = tmp_path_factory.mktemp("programs")
    builder = Builder(directory)
    for i386 in (False, True):
        builder("systemcalls.c", "-pthread", i386=i386)
    return directory


@pytest.mark.timeout(900)
def test_what_holds_on_the_host_holds_on_other_kernels(guest: Guest, programs: Path) -> None:
    for path in programs.rglob("*"):
        if path.is_file():
            guest.put(f"{COMPILED}/{path.relative_to(programs)}", path)
    source = TESTS.format(compiled=COMPILED)
    output = guest.python(source, timeout=800, environment={"REPOSITORY": str(REPOSITORY)}).stdout
    passed = re.search(r"^(\d+) passed", output, re.MULTILINE)
    assert passed is not None, output
    assert int(passed[1]) >= 10


def test_tracepoints_of_modules_appear_with_them(guest: Guest) -> None:
    before = guest.dprobes("locate", "tracepoint:vsock:*", check=False)
    assert before.stderr == "dprobes: error: this kernel has no tracepoint that matches 'vsock:*'\n"
    guest.load_module("vmw_vsock_virtio_transport_common")
    names = guest.dprobes("locate", "tracepoint:vsock:*").stdout.splitlines()
    assert "tracepoint vsock:virtio_transport_alloc_pkt" in names
    shown = guest.dprobes("locate", names[0]).stdout
    assert "// the record:\npush tp, src_cid" in shown
    text = HEADER + "offset = vsock:virtio_transport_alloc_pkt\nminor = 1\npush tp, src_cid\nlog 1\nexit\n"
    guest.put("/tmp/vsock.rpn", text)
    done = guest.dprobes("run", "/tmp/vsock.rpn", "--engine", "ebpf", "--", "/bin/true")
    assert re.search(r"^9,1 +vsock:virtio_transport_alloc_pkt +0 +0 ", done.stderr, re.MULTILINE)


def test_who_is_no_root_is_told_what_is_missing(guest: Guest) -> None:
    guest.put("/tmp/fork.rpn", HEADER + "offset = sched:sched_process_fork\nminor = 1\nexit\n")
    done = guest.dprobes("run", "/tmp/fork.rpn", "--", "/bin/true", check=False, user=65534, directory="/tmp")
    assert done.returncode != 0
    assert "run dprobes as root" in done.stderr
