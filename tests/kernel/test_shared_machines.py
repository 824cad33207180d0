"""Several programs at the stub of one machine, through the Python API: about its kernel, and about programs in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dprobes
from guests.initramfs import PYTHON
from integration.conftest import build
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from guests.guest import Guest
    from integration.support import Builder

__all__ = ["build"]

CALLS = 5
WORK = f"""
import ctypes, os
with open("/proc/self/comm", "w") as file: file.write("counted")
for number in range({CALLS}): ctypes.CDLL(None).syscall(110)
print(os.getpid())
"""
pytestmark = pytest.mark.parametrize("kernel", ["6.12"], indirect=True)


def of_kernel(place: str, minor: int) -> dprobes.ProgramBuilder:
    program = dprobes.ProgramBuilder("vmlinux", major=minor, modtype="kernel", cvars=1)
    program.probe(place, minor=minor).push_task().push_pid().inc_cv(0).log(2).exit()
    return program


def hits_of(session: dprobes.ProbeSession, minor: int, name: str) -> list[dprobes.LogRecord]:
    return [each for each in session.collect(timeout=1) if (each.minor, each.process_name) == (minor, name)]


def test_programs_about_a_kernel_and_about_programs(guest: Guest, build: Builder, tmp_path: Path) -> None:
    """Each sees its own hits; what is removed leaves the others."""
    module, stub = build("hotloop.c"), tmp_path / "stub"
    guest.put("/tmp/hotloop", module)
    guest.open_stub(stub)
    with dprobes.attach(engine=f"gdb={stub}") as session:
        first = session.insert(of_kernel("__x64_sys_getppid", 1))
        program = dprobes.ProgramBuilder(str(module), major=2)
        program.probe("tick", minor=2).push_r("arg0").log(1).exit()
        second = session.insert(program)
        third = session.insert(of_kernel("__x64_sys_getppid", 3))
        pid = int(guest.run([str(PYTHON), "-S", "-c", WORK]).stdout)
        assert guest.run(["/tmp/hotloop", str(CALLS)]).stdout == f"{sum(range(CALLS))}\n"
        guest.wait_until(lambda: second.counts(2).hits == CALLS, "hits of the program", TIMEOUT)
        records = session.collect(timeout=2)
        for minor in (1, 3):
            own = [each for each in records if (each.minor, each.process_name) == (minor, "counted")]
            assert [each.words()[0] for each in own] == [pid] * CALLS
            assert len({each.words()[1] for each in own}) == 1
        assert [each.words()[0] for each in records if each.minor == 2] == list(range(CALLS))
        assert sum(cells[0] for cells in first.cpu_variables()) == first.counts(1).hits
        hits = first.counts(1).hits
        first.remove()
        guest.run([str(PYTHON), "-S", "-c", WORK])
        guest.wait_until(lambda: third.counts(3).hits >= hits + CALLS, "hits of the last one alone", TIMEOUT)
        assert first.counts(1).hits == hits
    assert guest.run("true").returncode == 0
