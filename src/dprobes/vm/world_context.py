"""
The interface between a handler and the outside: the protocol between the interpreter and its host.

An engine implements it on a stopped thread, a test on a dictionary. Values are unsigned integers; addresses and words
are as wide as the module's word.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dprobes.keyed.table_entries import KeyedStore

__all__ = ["AddressFault", "Context", "SelectorFault", "SharedCells"]


class AddressFault(Exception):  # noqa: N818 - no error of DProbes: an event in the life of a handler
    """Fault of an access to memory; ``address`` is its first byte that cannot be accessed."""

    def __init__(self, address: int) -> None:
        super().__init__(f"{address:#x}")
        self.address = address


class SelectorFault(Exception):  # noqa: N818 - as AddressFault
    """Fault of an access through ``selector``, which names no usable segment."""

    def __init__(self, selector: int) -> None:
        super().__init__(f"{selector:#x}")
        self.selector = selector


class SharedCells(MutableSequence[int]):
    """A fixed number of 64-bit cells in memory that other threads and processes change at the same time."""

    @abstractmethod
    def store(self, index: int, value: int, word_size: int) -> None:
        """Set a cell to a word of 8 bytes, or its low half to one of 4."""

    @abstractmethod
    def add(self, index: int, amount: int, word_size: int) -> None:
        """Add to a cell, or to its low half, so that no concurrent change is lost."""

    def insert(self, index: int, value: int) -> None:  # noqa: ARG002 - the signature is the base class's
        """Raise TypeError: the number of cells is fixed."""
        raise TypeError("the number of shared variables is fixed")

    def __delitem__(self, index: int | slice) -> None:
        raise TypeError("the number of shared variables is fixed")


class Context(Protocol):
    """Access of a handler to the hit thread, its memory, and the program's variables."""

    local_variables: MutableSequence[int]
    """The program's local variables; as many as its ``vars``."""

    global_variables: MutableSequence[int]
    """The first ``gvars`` 64-bit cells that all programs share; programs with 4-byte words use the low halves."""

    keyed_tables: Sequence[KeyedStore]
    """The program's keyed tables, in the order of its header."""

    def cpu_variables(self) -> MutableSequence[int]:
        """Return the per-CPU variables of the CPU that took the hit; as many as the program's ``cvars``."""

    def thread_variables(self) -> MutableSequence[int]:
        """Return the variables of the thread that took the hit; as many as the program's ``tvars``, at first zeros."""

    def register(self, index: int, *, user: bool) -> int:
        """Return register number ``index`` of the reference's appendix, of the user context or the current context."""

    def selected_register(self, index: int, selector: int) -> tuple[int, ...]:
        """Return the values of a register of several parts or with a selector, in the order of their pushes."""

    def set_register(self, index: int, value: int, *, user: bool) -> None:
        """
        Change a register that the processor's table allows a handler to write.

        Raise ``SelectorFault`` for a value that a segment register cannot hold; it is then unchanged.
        """

    def read(self, address: int, size: int) -> bytes:
        """Return ``size`` bytes of memory; raise ``AddressFault`` if one of them cannot be read."""

    def write(self, address: int, data: bytes) -> None:
        """Change memory; raise ``AddressFault`` if one of the bytes cannot be written, and then change none."""

    def is_readable(self, address: int) -> bool:
        """Return whether the byte at ``address`` can be read."""

    def is_writable(self, address: int) -> bool:
        """Return whether the byte at ``address`` can be written, without a write."""

    def linear_address(self, selector: int, offset: int, size: int = 0, *, write: bool = False) -> int:
        """
        Return the flat address of ``selector:offset``, for a read or write of ``size`` bytes.

        Raise ``SelectorFault`` if the selector is bad, the offset (or one of the bytes) is beyond the segment's limit,
        or the segment does not allow the read or the write.
        """

    def read_physical(self, address: int, size: int) -> bytes:
        """Return ``size`` bytes of physical memory; raise ``AddressFault`` if one of them cannot be read."""

    def write_physical(self, address: int, data: bytes) -> None:
        """Change physical memory; raise ``AddressFault`` if one of the bytes cannot be written."""

    def physical_address(self, address: int) -> int:
        """Return the physical address of the byte at ``address``; raise ``AddressFault`` if no page is mapped there."""

    def read_port(self, port: int, size: int) -> int:
        """Return the value of an I/O port of ``size`` bytes."""

    def write_port(self, port: int, size: int, value: int) -> None:
        """Write to an I/O port of ``size`` bytes."""

    def symbol_address(self, symbol: str) -> int:
        """Return the run-time address of a symbol of the module in the process that took the hit."""

    def kernel_stack(self) -> Sequence[int]:
        """Return the addresses of the call stack in the kernel, the innermost first; none outside of the kernel."""

    def user_stack(self, frames: int) -> Sequence[int]:
        """
        Return up to ``frames`` addresses of the program's call stack, the innermost first.

        If the stack cannot be unwound to its end, the number of a ``StackEnd`` follows them.
        """

    def traced_field(self, name: str) -> int:
        """Return a field of the tracepoint that was hit; raise ``AddressFault`` with 0 if it does not exist."""

    def entry_time(self) -> int:
        """Return the time of the returning call's entry; raise ``AddressFault`` (UNSEEN_ENTRY) if it was not seen."""

    def entry_register(self, index: int) -> int:
        """Return a register, or one in memory, as at the returning call's entry; raise as ``entry_time`` does."""

    def pid(self) -> int:
        """Return the process id."""

    def tid(self) -> int:
        """Return the thread id."""

    def uid(self) -> int:
        """Return the real user id."""

    def cpu(self) -> int:
        """Return the number of the CPU that took the hit."""

    def process_name(self) -> bytes:
        """Return the name of the thread from the kernel, without its NUL."""

    def task(self) -> int:
        """Return the address of the kernel's task structure."""

    def time(self) -> int:
        """Return CLOCK_MONOTONIC in nanoseconds."""

    def call_extension(self, name: str | None, machine: Any) -> None:
        """Run the registered extension called ``name``, or all of them, on ``machine``, the calling ``Machine``."""
