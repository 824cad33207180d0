"""
What a compiled file carries of a kernel, or of a module of one.

Addresses are those of the file that it was taken from. After each boot the kernel lies elsewhere as a whole (KASLR),
and each section of a module on its own. So *areas* are carried: what moves as one, by a name that shows where it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.target.kernel.kallsyms import KernelSymbol

__all__ = ["CarriedKernel", "KernelArea", "KernelPlace", "listed"]


class KernelArea(NamedTuple):
    """
    Say what moves as one: ``size`` bytes from an address on.

    ``name`` is that of a module's section; the kernel's only area has the name of the symbol at its start.
    """

    name: str
    address: int
    size: int


class KernelPlace(NamedTuple):
    """
    Say which instruction is at an address; nothing where it could not be read. ``where`` names the place for people.

    ``definition`` is the number of the probe definition that it is for.
    """

    definition: int
    address: int
    raw: bytes
    where: str


@dataclass(frozen=True, slots=True)
class CarriedKernel:
    """
    Hold what a program needs to know of one build of the kernel, or of a module of it.

    ``identity`` is the build-id in hex, ``path`` that of the file, for people. ``module`` is what the kernel calls the
    module, "" for itself. The first area is the one that offsets count from.
    """

    identity: str
    path: str
    module: str
    areas: tuple[KernelArea, ...]
    symbols: tuple[KernelSymbol, ...] = ()
    places: tuple[KernelPlace, ...] = ()


def listed(symbols: Iterable[KernelSymbol]) -> bytes:
    """Return symbols in the form in which the kernel lists its own."""
    core, modules = [], []
    for symbol in sorted(symbols, key=lambda symbol: symbol.address):
        line = f"{symbol.address:016x} {symbol.letter} {symbol.name}"
        if symbol.module:
            modules.append(f"{line}\t[{symbol.module}]\n")
        else:
            core.append(f"{line}\n")
    return "".join((*core, *modules)).encode()
