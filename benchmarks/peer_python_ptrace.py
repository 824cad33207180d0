"""Run a program with a python-ptrace breakpoint, and write a record of eight registers at each hit; see peers.py."""

import importlib
import struct
import sys
from pathlib import Path
from typing import Any

debugging: Any = importlib.import_module("ptrace.debugger")
children: Any = importlib.import_module("ptrace.debugger.child")


def main(offset: str, output: str, program: list[str]) -> None:
    pid = children.createChild(program, no_stdout=False)
    debugger = debugging.PtraceDebugger()
    process = debugger.addProcess(pid, is_attached=True)
    address = int(Path(f"/proc/{pid}/maps").read_text().partition("-")[0], 16) + int(offset, 0)
    with open(output, "wb") as file:  # noqa: PTH123 - as its users would write it
        breakpoint_ = process.createBreakpoint(address)
        process.cont()
        try:
            while True:
                debugger.waitSignals()
                r = process.getregs()
                file.write(struct.pack("=9Q", pid, r.rdi, r.rsi, r.rdx, r.rcx, r.r8, r.r9, r.rsp, address))
                breakpoint_.desinstall(set_ip=True)
                process.singleStep()
                debugger.waitSignals()
                breakpoint_ = process.createBreakpoint(address)
                process.cont()
        except debugging.ProcessExit:
            pass


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
