"""Names for addresses of the running kernel's code."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.names.codenames import LocatedCode, LocatedFunction, MappedCode

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
        located = self.located(address)
        if located is None or located.function is None:
            return None
        function, distance, module, _ = located.name_of(address)
        return (f"{function}+{distance:#x}" if distance else function), module

    def located(self, address: int) -> LocatedCode | None:
        """Return where an address is; a function is mapped on its own, where it is: at its address of the kernel."""
        try:
            symbol = self._kernel.symbols.covering(address)
            if symbol is None or address >= self._end_of(symbol.module, symbol.address):
                return None
            end = self._kernel.symbols.following(symbol) or address + 1
        except TargetError:
            return None
        start, end = symbol.address, max(address + 1, min(end, self._end_of(symbol.module, symbol.address)))
        mapped = MappedCode(start, end, start, symbol.module or "vmlinux", "")
        return LocatedCode(None, 0, mapped, LocatedFunction(start, end, symbol.name))

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

        return RunningKernel(reads_anew=True)  # BPF programs have names too
