"""A text of ``-e`` is compiled once: the next run takes what was kept, unless what it follows from has changed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf
from integration.support import DPROBES, TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

SITE = """
import atexit, os, sys
def note():
    if "dprobes.cli.runs.programrun" in sys.modules:
        with open({place!r}, "w") as file:
            file.write("\\n".join(name for name in sys.modules if name.startswith("dprobes.")))
atexit.register(note)
"""
"""Has a Python process say at its end which of our modules it has imported."""

COMPILERS = {"dprobes.preprocessor", "dprobes.dpc.compiler", "dprobes.rpn.parser", "dprobes.resolve.resolution"}
ENGINES = ["ebpf", "ptrace"]


class Machine:
    """A user with a cache directory, and a program of his own."""

    def __init__(self, directory: Path, program: Path) -> None:
        self.program = directory / "program"
        shutil.copy2(program, self.program)
        self._modules = directory / "modules"
        (directory / "site").mkdir()
        (directory / "site" / "sitecustomize.py").write_text(SITE.format(place=str(self._modules)))
        path = os.pathsep.join((str(directory / "site"), *filter(None, [os.environ.get("PYTHONPATH")])))
        self.environment = os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(directory / "cache")}
        self.environment.pop("DPROBES_NO_CACHE", None)
        self.entries = directory / "cache" / "dprobes" / "compiled"

    def run(self, engine: str, text: str = "", *options: str) -> tuple[str, set[str]]:
        """Run a text on the program; return what was printed, and which modules were imported."""
        text = text or f'"{self.program}":tick {{ @ = count(); }}'
        command = [*DPROBES, "run", "--engine", engine, "-e", text, *options, "--", str(self.program), "5"]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, set(self._modules.read_text().split())

    def run_everywhere(self) -> set[str]:
        """Run a text on all processes until its probepoint is there; return which modules were imported."""
        command = [*DPROBES, "run", "--engine", "ebpf", "-e", f'"{self.program}":tick {{ @ = count(); }}']
        with subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True) as running:
            assert running.stderr is not None
            printed = []
            for line in running.stderr:
                printed.append(line)
                if "is active" in line:
                    running.send_signal(signal.SIGINT)
        assert any("is active" in line for line in printed), printed
        return set(self._modules.read_text().split())


@pytest.fixture
def machine(tmp_path: Path, build: Builder) -> Machine:
    return Machine(tmp_path, build("hotloop.c"))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_second_run_compiles_nothing_and_counts_the_same(machine: Machine, engine: str) -> None:
    if engine == "ebpf":
        require_bpf()
    first, imported = machine.run(engine)
    assert imported >= COMPILERS
    assert "@: 5" in first
    second, imported = machine.run(engine)
    assert second == first
    assert not imported & (COMPILERS | {"dprobes.bpf.lower.handler", "dprobes.engines.ebpf.attach.siteplanner"})


@pytest.mark.parametrize("engine", ENGINES)
def test_records_and_their_texts_are_the_same(machine: Machine, engine: str) -> None:
    if engine == "ebpf":
        require_bpf()
    text = f'"{machine.program}":tick {{ printf("%d is the argument\\n", arg0); }}'
    records = []
    for _ in range(2):
        printed, imported = machine.run(engine, text, "--log", "PROCNAME")
        records.append([line for line in printed.splitlines() if line.endswith("is the argument")])
    assert len(records[0]) == 5
    assert records[1] == records[0]
    assert not imported & COMPILERS


def test_the_second_run_on_all_processes_compiles_nothing(machine: Machine) -> None:
    require_bpf()
    machine.run_everywhere()
    imported = machine.run_everywhere()
    assert not imported & (COMPILERS | {"dprobes.bpf.lower.handler", "dprobes.engines.ebpf.attach.siteplanner"})


def test_with_other_items_in_records_only_the_code_is_made_anew(machine: Machine) -> None:
    require_bpf()
    text = f'"{machine.program}":tick {{ printf("%d is the argument\\n", arg0); }}'
    machine.run("ebpf", text, "--log", "PROCNAME")
    for is_known in (False, True):
        printed, imported = machine.run("ebpf", text, "--log", "UID")
        assert printed.count("is the argument") == 5
        assert not imported & COMPILERS
        assert ("dprobes.bpf.lower.handler" not in imported) == is_known


def test_another_program_in_the_same_file_is_compiled_for(machine: Machine, build: Builder) -> None:
    machine.run("ptrace")
    shutil.copy2(build("hotloop.c", "-O2", "-falign-functions=256", "-DANOTHER"), machine.program)
    printed, imported = machine.run("ptrace")
    assert "@: 5" in printed
    assert imported >= COMPILERS
    assert not machine.run("ptrace")[1] & COMPILERS


def test_another_text_or_option_is_compiled(machine: Machine) -> None:
    machine.run("ptrace")
    printed, imported = machine.run("ptrace", f'"{machine.program}":tick {{ @[pid > 0] = count(); }}')
    assert "@[1]: 5" in printed
    assert imported >= COMPILERS
    assert machine.run("ptrace", "", "-D", "UNUSED=1")[1] >= COMPILERS
    assert machine.run("ptrace", "", "--filter", "pid > 0")[1] >= COMPILERS
    assert not machine.run("ptrace")[1] & COMPILERS


@pytest.mark.parametrize("damage", ["empty", "cut", "other", "checked"])
def test_a_damaged_entry_does_no_harm(machine: Machine, damage: str) -> None:
    first, _ = machine.run("ptrace")
    (entry,) = machine.entries.iterdir()
    content = bytearray(entry.read_bytes())
    if damage == "empty":
        content.clear()
    elif damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "other":
        content[len(content) // 2] ^= 0x55
    else:  # an entry of something else, as a whole
        import binascii

        content[4:] = b"\x80\x04K\x07."
        content[:4] = binascii.crc32(content[4:]).to_bytes(4, "little")
    entry.write_bytes(content)
    printed, imported = machine.run("ptrace")
    assert printed == first
    assert imported >= COMPILERS
    assert not machine.run("ptrace")[1] & COMPILERS


def test_nothing_is_kept_with_the_switch(machine: Machine) -> None:
    machine.environment["DPROBES_NO_CACHE"] = "1"
    assert "@: 5" in machine.run("ptrace")[0]
    assert not machine.entries.exists()


def test_what_includes_files_or_has_warnings_is_compiled_each_time(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "header.h").write_text("#define COUNT count()\n")
    text = f'#include "{tmp_path}/header.h"\n"{machine.program}":tick {{ @ = COUNT; }}'
    for _ in range(2):
        assert "@: 5" in machine.run("ptrace", text)[0]
    assert not machine.entries.exists()
