"""Programs that uretprobes would end are known beforehand."""

from __future__ import annotations

import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.attach.site_planner import Trampoline, process_hazard, trampoline, uretprobe_hazard
from dprobes.platform.linux.bpf_calls import UprobeMulti
from dprobes.target.probed_module import Module
from integration.ebpf.kernel import uprobes, waiting
from integration.support import TIMEOUT, Builder

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

EXCEPTIONS = "uses C++ exceptions, and what meets a uretprobe on its way up the stack ends the program"
STACKS = "switches stacks, and a return by way of a uretprobe on another stack ends the program"
CONFINED = "is confined by seccomp, which may refuse the system call of this kernel's uretprobes"


def uretprobe(module: Module, function: str) -> AbstractContextManager[None]:
    return uprobes(module.path, [module.file_offset(module.address_of(function))], UprobeMulti.RETURN)


def run(program: Path) -> tuple[int, str]:
    done = subprocess.run([program], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("source", "flags", "hazard", "status", "output"),
    [
        ("throwing.cc", ("-lstdc++",), EXCEPTIONS, -signal.SIGABRT, "caught 3\n"),
        ("coroutines.c", (), STACKS, -signal.SIGILL, "0\n1\n2\n"),
    ],
)
def test_what_is_called_hazardous_ends_a_program(
    build: Builder, source: str, flags: tuple[str, ...], hazard: str, status: int, output: str
) -> None:
    if source.endswith(".cc") and shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    program = build(source, *flags)
    module = Module.load(program)
    assert uretprobe_hazard(module) == f"it {hazard}"
    assert run(program) == (0, output)
    with uretprobe(module, "passed"):
        probed = run(program)
    if probed[0] == 0:
        pytest.skip("this kernel's uretprobes do not harm such programs")
    assert probed[0] == status


def test_a_library_is_not_safe_where_the_program_throws_through_it(build: Builder) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    program = build("waiting.cc", "-lstdc++")
    libc = Module.load("/lib/x86_64-linux-gnu/libc.so.6")
    with waiting(program) as process:
        assert uretprobe_hazard(libc, [process.pid]) == f"process {process.pid} (waiting) {EXCEPTIONS}"


def test_a_confined_process_bears_uretprobes_only_if_their_call_is_not_filtered(build: Builder) -> None:
    program = build("confined.c")
    module = Module.load(program)
    kind = trampoline()
    with waiting(program) as process:
        assert process_hazard(process.pid, Trampoline.FILTERED_CALL) == CONFINED
        assert process_hazard(process.pid, None) == CONFINED
        assert process_hazard(process.pid, Trampoline.EXEMPT_CALL) is None
        assert process_hazard(process.pid, Trampoline.BREAKPOINT) is None
        expected = f"process {process.pid} (confined) {CONFINED}" if kind is Trampoline.FILTERED_CALL else None
        assert uretprobe_hazard(module) == expected


def test_a_confined_process_lives_on_after_a_uretprobe_that_is_called_safe(build: Builder) -> None:
    if trampoline() is Trampoline.FILTERED_CALL:
        pytest.skip("this kernel's uretprobes make a system call that seccomp filters")
    module = Module.load(build("confined_calls.c"))
    with uretprobe(module, "called"):
        assert run(module.path) == (0, "43\n")


def test_a_process_that_is_gone_is_no_hazard(build: Builder) -> None:
    module = Module.load(build("confined.c"))
    with waiting(module.path) as process:
        pass
    assert uretprobe_hazard(module, [process.pid]) is None
    assert process_hazard(process.pid, None) is None
