"""
Measure how fast jumps to trampolines are planned, and count by which method real modules' instructions get theirs.

Called as a program it prints that count, for the modules that its arguments name or the usual ones, each instruction
planned as if it were probed alone. The mappings are those of a Python that has all of the modules loaded. Time is that
of the processor.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from table import Measurement, Unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.platform.x86.patches.branch_targets import ModuleCode
    from dprobes.platform.x86.patches.trampoline_space import AddressSpace
    from dprobes.target.probed_module import Module
    from dprobes.target.process_maps import Mapping

__all__ = ["patch_plans"]

PYTHON = Path("/usr/bin/python3").resolve()
LIBRARIES = [
    Path("/usr/lib/x86_64-linux-gnu", name).resolve() for name in ("libc.so.6", "libcrypto.so.3", "libsqlite3.so.0")
]
ROOM = 96
EVERY = 10
PLENTY = 1 << 30
ROUNDS = 3
_LOADER = (
    "import ctypes, sys\nfor name in sys.argv[1:]:\n ctypes.CDLL(name)\nprint(open('/proc/self/maps').read(), end='')"
)


class Subject(NamedTuple):
    """A module as a process has it."""

    path: Path
    module: Module
    code: ModuleCode
    mappings: list[Mapping]
    start: int
    end: int

    def space(self) -> AddressSpace:
        """Return the addresses that are free around it."""
        from dprobes.platform.x86.patches.trampoline_space import AddressSpace

        return AddressSpace(self.mappings, self.start, self.end, regions_max=PLENTY)

    def entries(self) -> list[int]:
        """Return where its functions start."""
        elf = self.module.elf
        starts = {*elf.frames.starts, *(symbol.address for symbol in self.module.symbols.functions())}
        return sorted(
            start + self.code.bias for start in starts if self.code.around(start + self.code.bias) is not None
        )

    def instructions(self) -> list[int]:
        """Return its instructions, as far as its unwind table knows them."""
        from iced_x86 import Decoder

        elf, found = self.module.elf, []
        for start in elf.frames.starts:
            extent, around = elf.frames.extent(elf, start), self.code.around(start + self.code.bias)
            if extent is not None and around is not None:
                first = start + self.code.bias - around.start
                data = around.original[first : first + extent[1] - start]
                found += [one.ip for one in Decoder(64, data, ip=start + self.code.bias) if not one.is_invalid]
        return found


def patch_plans(_: Path) -> list[Measurement]:
    """Return the rows about planning."""
    from dprobes.platform.x86.patches.patch_placer import Placer

    rows = []
    for path in (PYTHON, *LIBRARIES):
        begin = time.process_time()
        subject = loaded([path])[0]
        analysis = time.process_time() - begin
        entries, seconds = subject.entries(), float("inf")
        for _round in range(ROUNDS):
            placer = Placer(subject.code.unchanged(), subject.space(), ROOM)
            begin = time.process_time()
            count = sum(1 for _ in placer.place(entries, windows_first=True))
            seconds = min(seconds, time.process_time() - begin)
        rows += [
            Measurement(f"plan jumps for all {count} functions of {path.name}", count / seconds, "", None, Unit.RATE),
            Measurement(f"read {path.name}, and find the branches in it", analysis * 1e6),
        ]
    return rows


def loaded(paths: Sequence[Path]) -> list[Subject]:
    """Return modules as a process has them that has loaded them all."""
    from dprobes.platform.x86.patches.branch_targets import ModuleCode
    from dprobes.target.probed_module import Module
    from dprobes.target.process_maps import parse_maps

    libraries = [str(path) for path in paths if path != PYTHON]
    done = subprocess.run([PYTHON, "-c", _LOADER, *libraries], check=True, capture_output=True, text=True)
    mappings, subjects = parse_maps(done.stdout), []
    for path in paths:
        own = [mapping for mapping in mappings if mapping.path == str(path)]
        module = Module.load(path)
        bias = own[0].start - module.elf.load_segments[0].vaddr & -0x1000
        subjects.append(Subject(path, module, ModuleCode.of(module, bias), mappings, own[0].start, own[-1].end))
    return subjects


def methods(subject: Subject, sites: Iterable[int], *, windows_first: bool) -> Counter[str]:
    """Return how many of the sites get which method, each alone."""
    from dprobes.platform.x86.patches.patch_placer import Placement, Placer

    placer = Placer(subject.code.unchanged(), subject.space(), ROOM)
    found: Counter[str] = Counter()
    for site in sites:
        (one,) = placer.place([site], windows_first=windows_first)
        if isinstance(one, Placement):
            found[one.plan.method.name] += 1
            placer.remove(one)
        else:
            found["none"] += 1
    return found


def main() -> int:
    """Print a table: per cent of functions and of instructions by method."""
    from dprobes.platform.x86.patches.patch_plans import Method

    paths = [Path(argument).resolve() for argument in sys.argv[1:]] or [PYTHON, *LIBRARIES]
    columns = [*(method.name for method in Method), "none"]
    print(f"{'module':24} {'what':20} {'first':8} {'count':>8}", *(f"{column:>7}" for column in columns))
    for subject in loaded(paths):
        rows = (("functions", subject.entries()), (f"instructions/{EVERY}", subject.instructions()[::EVERY]))
        for what, sites in rows:
            for windows_first in (False, True):
                found = methods(subject, sites, windows_first=windows_first)
                first = "windows" if windows_first else "puns"
                shares = (f"{100 * found[column] / len(sites):7.2f}" for column in columns)
                print(f"{subject.path.name:24} {what:20} {first:8} {len(sites):8}", *shares, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
