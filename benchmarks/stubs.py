"""Measure hits behind QEMU's stub, of programs for several processors and of a machine, beside GDB."""

from __future__ import annotations

import os
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


MACHINE, MACHINE_HITS = "qemu-system-x86_64", 500
RESET = Path(__file__).parent / "reset.S"
RPN_OF_MACHINE = """name = machine
modtype = kernel
vars = 1
address = 0x600
push r, rbx; log 1; inc lv, 0; push lv, 0; push {hits}; eq; jz more
exit 1
more: exit
"""
GDB_OF_MACHINE = """
set pagination off
set confirm off
target remote {endpoint}
set $n = 0
break *0x600
commands
silent
printf "%lu\\n", $rbx
set $n = $n + 1
if $n == {hits}
quit
end
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
    return [*measurements, _of_a_machine(directory, debugger)]


def _of_a_machine(directory: Path, debugger: str | None) -> Measurement:
    """Measure a machine that counts in real mode, whose processor stops with all others."""
    if shutil.which(MACHINE) is None:
        return Measurement(f"hit behind {MACHINE} (not installed)", None)
    compiled, rom, endpoint = directory / "reset.o", directory / "reset.rom", directory / "stub"
    subprocess.run(["gcc", "-c", "-m32", "-o", compiled, RESET], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", compiled, rom], check=True)
    source, script = directory / "machine.rpn", directory / "machine.gdb"
    ours = [*DPROBES, "run", str(source), "--engine", f"gdb={endpoint}", "--allow-write", "-o", os.devnull]
    theirs = [debugger or "gdb", "-nx", "-batch", "-x", str(script)]
    emulator = [MACHINE, "-accel", "tcg,thread=single", "-nodefaults", "-display", "none", "-bios", str(rom), "-S"]
    emulator += ["-gdb", f"unix:{endpoint},server=on,wait=off"]

    def taken(command: list[str], hits: int) -> float:
        source.write_text(RPN_OF_MACHINE.format(hits=hits))
        script.write_text(GDB_OF_MACHINE.format(endpoint=endpoint, hits=hits))
        return _run(command, emulator, endpoint, is_endless=True)

    def of_a_hit(command: list[str]) -> float:
        start, whole = (min(taken(command, hits) for _ in range(ROUNDS)) for hits in (1, MACHINE_HITS + 1))
        return (whole - start) / MACHINE_HITS * 1e6

    peer = of_a_hit(theirs) if debugger is not None else None
    return Measurement(f"hit behind {MACHINE}, one word logged", of_a_hit(ours), "gdb", peer)


def _of_a_hit(command: list[str], emulator: list[str]) -> float:
    """Return the microseconds of a hit, the best of some rounds, without the start."""

    def taken(hits: int) -> float:
        return _run(command, [*emulator, str(hits)], Path(emulator[2]))

    start, whole = (min(taken(hits) for _ in range(ROUNDS)) for hits in (1, HITS + 1))
    return (whole - start) / HITS * 1e6


def _run(command: list[str], emulator: list[str], endpoint: Path, *, is_endless: bool = False) -> float:
    """Return the seconds that a command takes with what is behind a stub, which may have to be ended."""
    endpoint.unlink(missing_ok=True)
    with subprocess.Popen(emulator, stdout=subprocess.DEVNULL) as program:
        while not endpoint.exists():
            time.sleep(0.01)
        begin = time.perf_counter()
        subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False, timeout=300)
        taken = time.perf_counter() - begin
        if is_endless:
            program.kill()
        program.wait(30)
    return taken
