"""What runs in a guest: bare programs in the kernel, and work for a file system. ``guestkernels`` calls it there."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["attach_nothing", "seconds_of_bare_links", "work_with_files"]

FILES = 150


def _nothing(*, many: bool) -> int:
    """Load a program that does nothing; return its descriptor."""
    from dprobes.bpf.bpf_assembler import Assembler
    from dprobes.bpf.bpf_instructions import Register
    from dprobes.engines.ebpf.kernel.bpf_objects import load
    from dprobes.platform.linux.bpf_calls import AttachType, ProgramType

    asm = Assembler()
    asm.mov(Register.R0, 0)
    asm.exit()
    kind = AttachType.TRACE_KPROBE_MULTI if many else AttachType.NONE
    return load(asm.assemble(), {}, ProgramType.KPROBE, attach_type=kind)


def _places(patterns: Iterable[str]) -> list[tuple[int, int]]:
    """Return the functions that patterns match, as far as they can be probed, each with a cookie."""
    from dprobes.target.kernel.running_kernel import RunningKernel

    kernel = RunningKernel()
    found = {symbol.address for pattern in patterns for symbol in kernel.symbols.matching(pattern, "")}
    return [(address, 0) for address in sorted(found) if kernel.is_traceable(address) and not kernel.refusal(address)]


def attach_nothing(name: str, *, many: bool) -> None:
    """Have a program at a function that does nothing, until standard input ends."""
    from dprobes.bpf.lower.lowering_request import Placement
    from dprobes.engines.ebpf.kernel.bpf_links import attach_kernel

    placement = Placement.ENTRY if many else Placement.KPROBE
    with attach_kernel(_nothing(many=many), _places([name]), placement):
        print("attached", flush=True)
        sys.stdin.read()


def seconds_of_bare_links(patterns: Sequence[str], many: bool) -> tuple[int, float, float]:
    """
    Attach a program that does nothing to functions, and detach it.

    Return how many functions there are, and what the kernel's calls alone take.
    """
    from dprobes.bpf.lower.lowering_request import Placement
    from dprobes.engines.ebpf.kernel.bpf_links import attach_kernel

    places = _places(patterns)
    program = _nothing(many=many)
    begin = time.monotonic()
    links = attach_kernel(program, places, Placement.ENTRY if many else Placement.KPROBE)
    attached = time.monotonic()
    links.close()
    return len(places), attached - begin, time.monotonic() - attached


def work_with_files(directory: str) -> float:
    """Create, write, sync, rename, read and remove files; return the seconds of the better one of two rounds."""
    return min(_round(Path(directory)) for _ in range(2))


def _round(directory: Path) -> float:
    begin = time.monotonic()
    for number in range(FILES):
        path = directory / f"new{number}"
        with path.open("wb") as file:
            file.write(bytes(9000))
            if number % 10 == 0:
                os.fsync(file.fileno())
        path.rename(directory / f"file{number}")
    for number in range(FILES):
        path = directory / f"file{number}"
        path.read_bytes()
        path.unlink()
    return time.monotonic() - begin


if __name__ == "__main__":
    attach_nothing(sys.argv[1], many="many" in sys.argv[2:])
