"""Measure hits behind QEMU's stub, on programs of several processors, beside GDB with the same breakpoint."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from table import Measurement
from tracing import DPROBES

__all__ = ["behind_stubs"]

SOURCE = Path(__file__).parent.parent / "tests" / "programs" / "hotloop.c"
HITS = 3000
ROUNDS = 3

PROCESSORS = {
    "x86_64": ("gcc", "$rdi"),
    "aarch64": ("aarch64-linux-gnu-gcc", "$x0"),
    "riscv64": ("riscv64-linux-gnu-gcc", "$a0"),
    "s390x": ("s390x-linux-gnu-gcc", "$r2"),
    "ppc64": ("powerpc64-linux-gnu-gcc", "$r3"),
}
"""The compiler of each processor, and what GDB calls the first argument."""

RPN = 'name = "{program}"\noffset = tick\npush r, arg0; log 1; exit\n'
GDB = """
set pagination off
set confirm off
target remote {endpoint}
break *tick
commands
silent
printf "%lu\\n", {argument}
continue
end
continue
"""


def behind_stubs(directory: Path) -> list[Measurement]:
    """Measure each processor for which there are compiler and emulator."""
    debugger = shutil.which("gdb-multiarch") or shutil.which("gdb")
    measurements = []
    for name, (compiler, argument) in PROCESSORS.items():
        if shutil.which(compiler) is None or shutil.which(f"qemu-{name}") is None:
            measurements.append(Measurement(f"hit behind qemu-{name} (not installed)", None))
            continue
        program, endpoint = directory / f"hotloop.{name}", directory / "stub"
        subprocess.run([compiler, "-O1", "-g", "-static", "-o", program, SOURCE], check=True)
        source, script = directory / "stub.rpn", directory / "stub.gdb"
        source.write_text(RPN.format(program=program))
        script.write_text(GDB.format(endpoint=endpoint, argument=argument))
        ours = [*DPROBES, "run", str(source), "--engine", f"gdb={endpoint}", "-o", str(directory / "records.dpt")]
        theirs = [debugger or "gdb", "-nx", "-batch", "-x", str(script), str(program)]

        emulator = [f"qemu-{name}", "-g", str(endpoint), str(program)]
        peer = _of_a_hit(theirs, emulator) if debugger is not None else None
        what = f"hit behind qemu-{name}, one word logged"
        measurements.append(Measurement(what, _of_a_hit(ours, emulator), "gdb", peer))
    return measurements


def _of_a_hit(command: list[str], emulator: list[str]) -> float:
    """Return the microseconds of a hit, the best of some rounds, without the start."""
    start, whole = (min(_run(command, [*emulator, str(n)]) for _ in range(ROUNDS)) for n in (1, HITS + 1))
    return (whole - start) / HITS * 1e6


def _run(command: list[str], emulator: list[str]) -> float:
    """Return the seconds that a command takes with a program behind a stub."""
    Path(emulator[2]).unlink(missing_ok=True)
    with subprocess.Popen(emulator, stdout=subprocess.DEVNULL) as program:
        while not Path(emulator[2]).exists():
            time.sleep(0.01)
        begin = time.perf_counter()
        subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False, timeout=300)
        taken = time.perf_counter() - begin
        program.wait(30)
    return taken
