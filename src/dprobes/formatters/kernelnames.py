"""Names for addresses of the running kernel's code."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.errors import TargetError

if TYPE_CHECKING:
    from dprobes.target.kernel.runningkernel import RunningKernel

__all__ = ["KernelNames", "is_of_kernel"]

_HALF = 63
_END = "_etext"
_FUNCTION_MAX = 1 << 20
"""How far an address may be behind a symbol of code that has no known end: that of a compiled BPF program."""


def is_of_kernel(address: int) -> bool:
    """Return whether an address is in the kernel's half of a 64-bit address space."""
    return bool(address >> _HALF)


class KernelNames:
    """The names of the running kernel's code; its list of symbols is read when the first one is asked for."""

    def __init__(self, kernel: RunningKernel | None = None) -> None:
        self._given = kernel

    def name_of(self, address: int) -> tuple[str, str] | None:
        """Return a function, with the distance from its start, and its module; None if the kernel shows none there."""
        try:
            symbol = self._kernel.symbols.covering(address)
            if symbol is None or address >= self._end_of(symbol.module, symbol.address):
                return None
        except TargetError:
            return None
        distance = address - symbol.address
        name = f"{symbol.name}+{distance:#x}" if distance else symbol.name
        return name, symbol.module or "vmlinux"

    def _end_of(self, module: str, function: int) -> int:
        """Return where a module's code ends at the latest."""
        if not module:
            return self._kernel_end
        loaded = self._kernel.modules.get(module)
        return function + _FUNCTION_MAX if loaded is None else loaded.address + loaded.size

    @cached_property
    def _kernel_end(self) -> int:
        return max((symbol.address for symbol in self._kernel.symbols.find(_END, "")), default=0)

    @cached_property
    def _kernel(self) -> RunningKernel:
        if self._given is not None:
            return self._given
        from dprobes.target.kernel.runningkernel import RunningKernel

        return RunningKernel()
