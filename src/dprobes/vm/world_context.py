"""
Protocol by which handlers access the thread that was hit: its registers, memory, ids and variables.

An engine implements it for a stopped thread; ``FakeContext`` implements it for tests. Values are unsigned integers.
Addresses and words are as wide as the module's word.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dprobes.keyed.table_entries import KeyedStore

__all__ = ["AddressFault", "Context", "SelectorFault", "SharedCells"]


class AddressFault(Exception):  # noqa: N818 - no error of DProbes: an event in the life of a handler
    """Fault of an access to memory. ``address`` is the address of the first byte that cannot be accessed."""

    def __init__(self, address: int) -> None:
        super().__init__(f"{address:#x}")
        self.address = address


class SelectorFault(Exception):  # noqa: N818 - as AddressFault
    """Fault of an access through ``selector``, which names no usable segment."""

    def __init__(self, selector: int) -> None:
        super().__init__(f"{selector:#x}")
        self.selector = selector


class SharedCells(MutableSequence[int]):
    """A fixed number of 64-bit variables in memory that other threads and processes change at the same time."""

    @abstractmethod
    def store(self, index: int, value: int, word_size: int) -> None:
        """Set a cell, or with a ``word_size`` of 4 bytes its low half."""

    @abstractmethod
    def add(self, index: int, amount: int, word_size: int) -> None:
        """Add to a cell atomically, or with a ``word_size`` of 4 bytes to its low half."""

    def insert(self, index: int, value: int) -> None:  # noqa: ARG002 - the signature is the base class's
        """Raise TypeError: the number of cells is fixed."""
        raise TypeError("the number of shared variables is fixed")

    def __delitem__(self, index: int | slice) -> None:
        raise TypeError("the number of shared variables is fixed")


class Context(Protocol):
    """Access of a handler to the hit thread, its memory, and the probe program's variables."""

    local_variables: MutableSequence[int]
    """The local variables of the probe program; their number is its ``vars``."""

    global_variables: MutableSequence[int]
    """The first ``gvars`` of the 64-bit variables that all probe programs share; 4-byte words use the low halves."""

    keyed_tables: Sequence[KeyedStore]
    """The keyed tables of the probe program, in the order of its header."""

    def cpu_variables(self) -> MutableSequence[int]:
        """Return the variables of the CPU on which the hit happened; their number is the probe program's ``cvars``."""

    def thread_variables(self) -> MutableSequence[int]:
        """Return the hit thread's variables, initially 0; their number is the probe program's ``tvars``."""

    def register(self, index: int, *, user: bool) -> int:
        """
        Return the register with number ``index`` (docs/reference/rpn.md).

        ``user`` selects the user context, else the context of the hit, which may be in the kernel.
        """

    def selected_register(self, index: int, selector: int) -> tuple[int, ...]:
        """
        Return the words of ``cpuid``, ``msr`` and similar registers in the order in which they are pushed.

        ``selector`` is the leaf of cpuid or the number of the MSR. Other registers ignore it.
        """

    def set_register(self, index: int, value: int, *, user: bool) -> None:
        """
        Change a register that the processor's table allows a handler to write.

        Raise ``SelectorFault``, and change nothing, for a value that a segment register cannot have.
        """

    def read(self, address: int, size: int) -> bytes:
        """Return ``size`` bytes of memory; raise ``AddressFault`` if one of them cannot be read."""

    def write(self, address: int, data: bytes) -> None:
        """Write ``data`` to memory; raise ``AddressFault``, and write nothing, if any byte cannot be written."""

    def is_readable(self, address: int) -> bool:
        """Return whether the byte at ``address`` can be read."""

    def is_writable(self, address: int) -> bool:
        """Return whether the byte at ``address`` can be written; write nothing."""

    def linear_address(self, selector: int, offset: int, size: int = 0, *, write: bool = False) -> int:
        """
        Return the linear address of ``selector:offset``, for an access to ``size`` bytes, or for no access if it is 0.

        Raise ``SelectorFault`` if the selector names no usable segment, a byte is beyond the segment's limit, or the
        segment does not allow the read, or the write with ``write``.
        """

    def read_physical(self, address: int, size: int) -> bytes:
        """Return ``size`` bytes of physical memory; raise ``AddressFault`` if one of them cannot be read."""

    def write_physical(self, address: int, data: bytes) -> None:
        """Change physical memory; raise ``AddressFault`` if one of the bytes cannot be written."""

    def physical_address(self, address: int) -> int:
        """Return the physical address of the byte at ``address``; raise ``AddressFault`` if no page is mapped there."""

    def read_port(self, port: int, size: int) -> int:
        """Read ``size`` bytes, 1, 2 or 4, from an I/O port, and return the number."""

    def write_port(self, port: int, size: int, value: int) -> None:
        """Write a number of ``size`` bytes, 1, 2 or 4, to an I/O port."""

    def symbol_address(self, symbol: str) -> int:
        """Return the run-time address, in the hit process, of a symbol of the probed module."""

    def kernel_stack(self) -> Sequence[int]:
        """Return the addresses of the call stack in the kernel, the innermost first; empty for a hit in user space."""

    def user_stack(self, frames: int) -> Sequence[int]:
        """
        Return up to ``frames`` addresses of the thread's call stack in user space, the innermost first.

        If the stack cannot be unwound to its end, the number of a ``StackEnd`` follows the addresses.
        """

    def traced_field(self, name: str) -> int:
        """Return a field of the tracepoint that was hit; raise ``AddressFault`` with 0 if it does not exist."""

    def entry_time(self) -> int:
        """
        Return the time of the entry of the call that returns, in nanoseconds of CLOCK_MONOTONIC.

        Raise ``AddressFault`` with UNSEEN_ENTRY if the entry was not seen.
        """

    def entry_register(self, index: int) -> int:
        """
        Return a register, or an argument in memory, at the entry of the call that returns.

        Raise as ``entry_time`` does.
        """

    def entry_counter(self, number: int) -> int | None:
        """
        Return a performance counter as at the returning call's entry, or None if it could not be read there.

        Raise as ``entry_time`` does.
        """

    def pid(self) -> int:
        """Return the process id (tgid) of the thread that has hit the probepoint."""

    def tid(self) -> int:
        """Return the id of the thread that has hit the probepoint."""

    def uid(self) -> int:
        """Return the real user id of the thread that has hit the probepoint."""

    def cpu(self) -> int:
        """Return the number of the CPU on which the hit happened."""

    def process_name(self) -> bytes:
        """Return the thread's name in the kernel (``comm``), without its NUL; at most 15 bytes."""

    def task(self) -> int:
        """Return the address of the thread's task_struct."""

    def time(self) -> int:
        """Return CLOCK_MONOTONIC in nanoseconds."""

    def counter(self, number: int) -> int | None:
        """
        Return a performance counter of the thread, by its index in ``COUNTERS``, as 64 bits.

        None if it cannot be read, or if it has not counted all the time and its value would be an estimate.
        """

    def call_extension(self, name: str | None, machine: Any) -> None:
        """Run the registered extension ``name``, or all extensions if it is None, on the calling ``machine``."""
