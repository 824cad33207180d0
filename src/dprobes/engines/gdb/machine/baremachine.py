"""
A machine as such, whatever runs on it: a kernel without symbols, in which each address is a place.

A program names it ``machine``, and writes addresses as numbers. It is for firmware, boot loaders, other systems, and
kernels that have not begun. What is at an address when a program is compiled says nothing of what will be there.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.guestkernel import WATCHPOINTS_MAX
from dprobes.errors import TargetError
from dprobes.lazydataclass import dataclass
from dprobes.resolve.spaces import MACHINE
from dprobes.target.kernel.kallsyms import Kallsyms, KernelSymbol
from dprobes.target.kernel.runningkernel import RunningKernel

if TYPE_CHECKING:
    from dprobes.arch import Architecture
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint
    from dprobes.rpn.encoder import CodeImage
    from dprobes.target.code.instructions import DecodedInstruction

__all__ = ["BareMachine", "MachinePlaces"]


@dataclass(frozen=True, slots=True)
class MachinePlaces:
    """What a session is told of places that are in no module (``Resolved``)."""

    architecture: Architecture
    image: CodeImage
    probepoints: tuple[Probepoint, ...]
    symbols: tuple[tuple[str, int], ...] = ()
    left_out: tuple[LeftOutProbe, ...] = ()
    per_cpu: tuple[int, frozenset[int]] = (0, frozenset())


class BareMachine(RunningKernel):
    """A machine without a system that is known."""

    called = (MACHINE,)
    checks_places = False
    watchpoints = WATCHPOINTS_MAX

    def __init__(self) -> None:
        super().__init__(_NoSymbols(b""), _NoText(), modules={})

    def know(self, kernel: RunningKernel) -> None:
        """Have the names of a kernel that runs there after all."""
        self.symbols, self.modules = kernel.symbols, kernel.modules

    def base_of(self, module: str) -> int:
        """Return 0; raise ``TargetError`` for a module."""
        if module:
            raise TargetError(f"the module '{module}' is in a kernel, and 'name = {MACHINE}' has none")
        return 0

    def symbol(self, name: str, module: str, *, is_code: bool = False) -> KernelSymbol:  # noqa: ARG002 - none of any
        """Raise ``TargetError``: there are none."""
        raise TargetError(
            f"a machine as such has no symbol '{name}'",
            hint="write 'address =' and a number, or 'name = vmlinux' if a kernel of Linux runs there",
        )

    @cached_property
    def blacklist(self) -> tuple[tuple[int, int, str], ...]:
        """Nothing: whoever stops the machine can probe whatever it executes."""
        return ()

    @cached_property
    def skippable(self) -> None:
        """Return None: no functions are known."""
        return

    def is_traceable(self, address: int) -> bool | None:  # noqa: ARG002 - nothing needs to be redirected
        """Return None: there is no kernel to be asked."""
        return None


class _NoSymbols(Kallsyms):
    """No names, but a place at each address."""

    @property
    def is_hidden(self) -> bool:
        """Return False: nothing is there to be hidden."""
        return False

    def covering(self, address: int) -> KernelSymbol | None:
        """Return the address itself."""
        return KernelSymbol(f"{address:#x}", address, "t")


class _NoText:
    """What stands in memory is another thing at each time."""

    shift: int | None = None

    def read(self, _address: int, _size: int) -> bytes:
        """Return nothing."""
        return b""

    def problem_at(self, _address: int) -> str | None:
        """Return None: nothing is asked of it."""
        return None

    def origin_of(self, _address: int) -> str:
        """Return nothing."""
        return ""

    def is_patched(self, _instruction: DecodedInstruction) -> bool:
        """Return False."""
        return False
