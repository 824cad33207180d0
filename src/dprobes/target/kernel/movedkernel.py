"""A carried build of the kernel, or of a module, at the addresses where it lies on the machine that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import TargetError, reason_of
from dprobes.target.kernel.carriedkernel import listed
from dprobes.target.kernel.kallsyms import KALLSYMS, Kallsyms
from dprobes.target.kernel.kerneltext import KCORE
from dprobes.target.kernel.runningkernel import KERNEL_BASE, LoadedModule, RunningKernel

if TYPE_CHECKING:
    from dprobes.target.kernel.carriedkernel import CarriedKernel

__all__ = ["moved_kernel", "section_addresses"]

_SECTIONS = "/sys/module/{}/sections"
_MASK = (1 << 64) - 1


def moved_kernel(carried: CarriedKernel, running: RunningKernel) -> RunningKernel:
    """
    Return the running kernel, of the same build, with the carried symbols in the place of those that it shows.

    Raise ``TargetError`` if nothing shows where it lies.
    """
    starts = section_addresses(carried.module) if carried.module else {KERNEL_BASE: _kernel_base(running)}

    def moved(address: int) -> int:
        for area in carried.areas:
            if area.name in starts and 0 <= address - area.address < area.size:
                return starts[area.name] + address - area.address
        return address  # what is not in the kernel's image is the same everywhere: offsets of per-CPU data

    symbols = Kallsyms(listed(symbol._replace(address=moved(symbol.address) & _MASK) for symbol in carried.symbols))
    expected = {moved(place.address): place.raw for place in carried.places if place.raw}
    modules = None
    if carried.module:
        first = carried.areas[0]
        known = running.modules.get(carried.module)
        size = known.size if known is not None else first.size
        modules = {**running.modules, carried.module: LoadedModule(carried.module, moved(first.address), size)}
    return RunningKernel(symbols, modules=modules, expected=expected)


def _kernel_base(running: RunningKernel) -> int:
    """Return where the kernel begins in memory, as far as this machine shows it."""
    try:
        return running.base_of("")
    except TargetError as error:
        start = running.memory.kernel_start()
        if start is not None:
            return start
        problem = running.memory.problem or f"{KCORE} does not show the kernel's image"
        raise TargetError(
            f"nothing shows where the kernel lies in memory: {error.message}; {problem}",
            hint=f"run dprobes as root; {KALLSYMS} (kernel.kptr_restrict 0 or 1) or {KCORE} must be readable",
        ) from error


def section_addresses(module: str) -> dict[str, int]:
    """Return where the sections of a module that is loaded begin; raise ``TargetError`` if the kernel hides it."""
    directory = Path(_SECTIONS.format(module))
    try:
        found = {path.name: int(path.read_text(), 16) for path in sorted(directory.iterdir())}
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "no number"
        raise TargetError(f"nothing shows where the module '{module}' lies: {directory}: {reason}") from error
    if not any(found.values()):
        raise TargetError(
            f"nothing shows where the module '{module}' lies: {directory} has 0 for all sections",
            hint="run dprobes as root, or with CAP_SYSLOG, and set kernel.kptr_restrict to 0 or 1",
        )
    return found
