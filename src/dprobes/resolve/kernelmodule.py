"""The kernel and its modules as spaces with symbols, which programs about the kernel name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.lazydataclass import dataclass
from dprobes.target.kernel.runningkernel import KERNEL_NAMES

if TYPE_CHECKING:
    from dprobes.target.kernel.runningkernel import RunningKernel

__all__ = ["KERNEL_CODE", "KernelModule", "PushedSymbols", "UnplacedSymbols"]

_BITS = 64

KERNEL_CODE = 1 << 63, (1 << 64) - 1
"""The addresses of all that is the kernel's and its modules', the last one excluded."""


@dataclass(frozen=True, slots=True)
class KernelModule:
    """The kernel, or a module of it, that a program names: a space with symbols. ``name`` is "" for the kernel."""

    kernel: RunningKernel
    name: str

    @property
    def path(self) -> Path:
        """What takes the place of a file's name in messages and records."""
        return Path(self.name or KERNEL_NAMES[0])

    @property
    def word_size(self) -> int:
        """How many bytes an address has."""
        return _BITS // 8

    @property
    def base(self) -> int:
        """The address that offsets count from."""
        return self.kernel.base_of(self.name)

    def check(self) -> None:
        """Raise ``TargetError`` if the kernel does not show where the module is."""
        self.kernel.base_of(self.name)

    @property
    def code(self) -> tuple[int, int]:
        """The addresses of the module, or of all that is the kernel's; the last one is excluded."""
        if not self.name:
            return KERNEL_CODE
        module = self.kernel.modules[self.name]
        return module.address, module.address + module.size

    @property
    def is_loaded(self) -> bool:
        """Whether it is in memory; else addresses are made up from its file."""
        return self.kernel.is_loaded

    def address_of(self, symbol: str) -> int:
        """Return the address of a symbol; raise ``TargetError`` if there is none, or one for each CPU."""
        address = self.kernel.symbol(symbol, self.name).address
        if not self.name and self.kernel.is_per_cpu(address):
            raise TargetError(
                f"each CPU has a copy of '{symbol}', with an address of its own",
                hint=f"'push {symbol}' gives the address of the copy of the CPU that was hit",
            )
        return address


@dataclass(frozen=True, slots=True)
class PushedSymbols:
    """The symbols of the kernel as handlers push them: those of which each CPU has a copy are among them."""

    module: KernelModule

    @property
    def path(self) -> Path:
        """What takes the place of a file's name in messages."""
        return self.module.path

    @property
    def word_size(self) -> int:
        """How many bytes an address has."""
        return self.module.word_size

    def address_of(self, symbol: str) -> int:
        """Return the address of a symbol; raise ``TargetError`` if there is none."""
        return self.module.kernel.symbol(symbol, self.module.name).address


@dataclass(frozen=True, slots=True)
class UnplacedSymbols:
    """The symbols of a module that is not loaded: nobody knows their addresses yet."""

    module: KernelModule

    @property
    def path(self) -> Path:
        """What takes the place of a file's name in messages."""
        return self.module.path

    @property
    def word_size(self) -> int:
        """How many bytes an address has."""
        return self.module.word_size

    def address_of(self, symbol: str) -> int:
        """Raise ``TargetError``, which says whether the module has the symbol at all."""
        self.module.address_of(symbol)
        raise TargetError(
            f"'{symbol}' has no address before the module '{self.module.name}' is loaded",
            hint="load the module first, or start from what a register points to",
        )
