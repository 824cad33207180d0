"""``--stop-cpus``, which stubs do anyway, and the watchpoints that none of them has."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from integration.gdb.processors import PROCESSORS, EmulatedProgram
from integration.support import DPROBES, TIMEOUT, environment

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

NOTE = "dprobes: note: --stop-cpus has no effect: probepoints are inserted without stopping the processors"


def said(*arguments: object, status: int = 0) -> list[str]:
    command = [*DPROBES, "run", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    assert result.returncode == status, result.stderr
    return result.stderr.splitlines()


def test_stop_cpus_is_what_a_stub_does(build: Builder, tmp_path: Path) -> None:
    path = PROCESSORS["aarch64"].build(build, "handled.c")
    program = EmulatedProgram(PROCESSORS["aarch64"], tmp_path, str(path))
    text = f'module "{path}"; handle {{ @ = count(); }}'
    assert NOTE not in said("--stop-cpus", "--engine", f"gdb={program.endpoint}", "-e", text)
    program.close()


def test_other_engines_say_that_they_do_not(build: Builder) -> None:
    path = build("handled.c")
    text = f'module "{path}"; handle {{ @ = count(); }}'
    assert NOTE in said("--stop-cpus", "--engine", "ptrace", "-e", text, "--", path)


def test_watchpoints_on_ports_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "ports.rpn"
    source.write_text("name = vmlinux\nmodtype = kernel\naddress = 0x3f8:0x3ff\nwatchpoint = io\nminor = 1\nexit\n")
    needed = "watchpoints on I/O ports of the kernel"
    assert said(source, "--engine", "gdb=/nowhere", status=2) == [
        f"{source}:4:1: error: 'watchpoint = io' needs {needed}, which the gdb engine lacks",
        "    watchpoint = io",
        "    ^~~~~~~~~~~~~~~",
        "hint: use --engine ebpf",
    ]
