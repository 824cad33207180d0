"""
Measure one hit with a handler of ten instructions and a record, beside other tracers that do the same work.

The bare loop in C (``ptrace_loop.c``) shows what ptrace costs by itself. GDB, libdebug and python-ptrace are what
one would take instead of DProbes; the latter two are optional.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from handlers import Cost

__all__ = ["HANDLER", "hit_costs"]

HERE = Path(__file__).parent

REGISTERS = ("arg0", "arg1", "arg2", "arg3", "arg4", "arg5", "sp", "pc")
HANDLER = "".join(f"push r, {name}\n" for name in REGISTERS) + "log 8\nexit"
"""Ten instructions: the registers that all peers write down, too."""

GDB = """
set pagination off
break *{place}
commands
silent
printf "%lx %lx %lx %lx %lx %lx %lx %lx\\n", $rdi, $rsi, $rdx, $rcx, $r8, $r9, $rsp, $rip
continue
end
run {arguments}
"""


class Timer(Protocol):
    """Run a command and return the microseconds of an iteration that the program in it prints."""

    def __call__(self, command: list[str], *, one_cpu: bool = False) -> float: ...


def hit_costs(program: Path, hits: int, ours: dict[tuple[str, bool], float], time: Timer) -> list[Cost]:
    """
    Return the rows of the table.

    ``ours`` holds our figures by place ("called" is an emulated push, "loop" a stepped dec) and whether everything was
    held on one CPU.
    """
    costs: list[Cost] = []
    for place, what in (("called", "10 instructions, emulated push"), ("loop", "10 instructions, stepped dec")):
        for one_cpu in (False, True):
            name = what + (", on one CPU" if one_cpu else "")
            peers = _Peers(program, place, [str(hits), *(["calls"] if place == "called" else [])], one_cpu, time)
            costs += [(name, ours[place, one_cpu], peer, figure) for peer, figure in peers.measure()]
    return costs


class _Peers:
    def __init__(self, program: Path, place: str, arguments: list[str], one_cpu: bool, time: Timer) -> None:
        self._program = program
        self._place = place
        self._arguments = arguments
        self._one_cpu = one_cpu
        self._time = time
        self._output = str(program.parent / "peer.records")
        symbols = subprocess.run(["nm", program], capture_output=True, text=True, check=True).stdout
        found = re.search(rf"^([0-9a-f]+) \w {place}$", symbols, re.MULTILINE)
        assert found is not None
        self._address = f"0x{found[1]}"

    def measure(self) -> list[tuple[str, float | None]]:
        return [
            self._c_loop(),
            self._gdb(),
            self._library("libdebug", "libdebug"),
            self._library("python-ptrace", "ptrace"),
        ]

    def _c_loop(self) -> tuple[str, float | None]:
        loop = self._program.parent / "ptrace_loop"
        subprocess.run(["gcc", "-O2", "-o", loop, HERE / "ptrace_loop.c"], check=True)
        how = ["push" if self._place == "called" else "step", "one-cpu" if self._one_cpu else "any-cpu"]
        command = [str(loop), *how, self._address, self._output, str(self._program), *self._arguments]
        return "bare C loop", self._time(command)

    def _gdb(self) -> tuple[str, float | None]:
        if shutil.which("gdb") is None:
            return "gdb (not installed)", None
        script = self._program.parent / "peer.gdb"
        script.write_text(GDB.format(place=self._place, arguments=" ".join(self._arguments)))
        command = ["gdb", "-q", "-batch", "-x", str(script), str(self._program)]
        return "gdb", self._time(command, one_cpu=self._one_cpu)

    def _library(self, name: str, module: str) -> tuple[str, float | None]:
        if importlib.util.find_spec(module) is None:
            return f"{name} (not installed)", None
        script = HERE / f"peer_{name.replace('-', '_')}.py"
        command = [sys.executable, str(script), self._address, self._output, str(self._program), *self._arguments]
        return name, self._time(command, one_cpu=self._one_cpu)
