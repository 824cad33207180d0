"""Run a program with a libdebug breakpoint whose callback writes a record of eight registers; see peers.py."""

import importlib
import struct
import sys
from typing import Any

debugger: Any = importlib.import_module("libdebug").debugger


def main(offset: str, output: str, program: list[str]) -> None:
    with open(output, "wb") as file:  # noqa: PTH123 - as its users would write it

        def on_hit(thread: Any, _breakpoint: Any) -> None:
            r = thread.regs
            file.write(struct.pack("=9Q", thread.tid, r.rdi, r.rsi, r.rdx, r.rcx, r.r8, r.r9, r.rsp, r.rip))

        d = debugger(program)
        d.run(redirect_pipes=False)
        d.breakpoint(int(offset, 0), callback=on_hit, file="binary")
        d.cont()
        d.wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
