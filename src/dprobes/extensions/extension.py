"""
An extension's view of a hit: the RPN stack, the log buffer, variables, and the thread that took the hit.

A view is valid for one call. Values are unsigned numbers; a cell is as wide as the module's word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dprobes.arch import Direction
from dprobes.rpn.instruction_set import ITEM_PREFIX_SIZE, ExceptionCode, Token
from dprobes.vm.rpn_machine import LogFull, Raised, read_string
from dprobes.vm.world_context import AddressFault, SelectorFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableSequence

    from dprobes.arch import Architecture, Register
    from dprobes.bpf.lower.composer import Composer
    from dprobes.vm.rpn_machine import Machine

__all__ = ["ENTRY_POINTS", "Extension", "View", "call_extensions"]

_ITEM_MAX = 0xFFFF
_WRITE_MAX = 4096


class Variables:
    """
    Variables of one kind; an index out of range raises IndexError.

    A value is taken modulo the word. Global variables have 64 bits; a program with 4-byte words reads and changes their
    low half.
    """

    def __init__(self, values: MutableSequence[int], mask: int) -> None:
        self._values = values
        self._mask = mask

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> int:
        return self._values[index] & self._mask

    def __setitem__(self, index: int, value: int) -> None:
        self._values[index] = self._values[index] & ~self._mask | value & self._mask


class View:
    """
    The access of an extension to a hit.

    An extension need not catch the exceptions that are documented for these methods: each becomes the RPN exception
    that an instruction would raise. Any other exception of an extension is a failure (docs/reference/extensions.md).
    """

    def __init__(self, machine: Machine, *, may_write: bool) -> None:
        self._machine = machine
        self._may_write = may_write

    # The program

    @property
    def architecture(self) -> str:
        """The module's processor: "x86_64" or "i386"."""
        return self._machine.architecture.name

    @property
    def word_size(self) -> int:
        """The size of a cell in bytes, 4 or 8."""
        return self._machine.word_size

    @property
    def byte_order(self) -> Literal["little", "big"]:
        """The target's byte order."""
        return self._machine.architecture.byte_order

    @property
    def module(self) -> str:
        """The name of the probed module, as the program states it."""
        return self._machine.point.module

    @property
    def offset(self) -> int:
        """The offset in bytes of the probepoint in the module's file."""
        return self._machine.point.offset

    @property
    def major(self) -> int:
        """The major code of this hit's record; may be set."""
        return self._machine.major

    @major.setter
    def major(self, value: int) -> None:
        self._machine.major = value & 0xFFFF

    @property
    def minor(self) -> int:
        """The minor code of this hit's record; may be set."""
        return self._machine.minor

    @minor.setter
    def minor(self, value: int) -> None:
        self._machine.minor = value & 0xFFFF

    # The RPN stack

    def push(self, value: int) -> None:
        """Push a cell onto the RPN stack; the value is taken modulo the size of a word."""
        self._machine.push(value)

    def pop(self) -> int:
        """Remove the top cell of the RPN stack and return it."""
        return self._machine.pop()

    def peek(self, index: int = 0) -> int:
        """Return the cell ``index`` below the top of the stack; 0 is the top."""
        return self._machine.peek(index)

    # Variables

    @property
    def local_variables(self) -> Variables:
        """The program's local variables."""
        return Variables(self._machine.context.local_variables, self._machine.mask)

    @property
    def global_variables(self) -> Variables:
        """The global variables that the program declares."""
        return Variables(self._machine.context.global_variables, self._machine.mask)

    @property
    def cpu_variables(self) -> Variables:
        """The variables of the CPU that took the hit."""
        return Variables(self._machine.context.cpu_variables(), self._machine.mask)

    @property
    def thread_variables(self) -> Variables:
        """The variables of the thread that took the hit (``tv``)."""
        return Variables(self._machine.context.thread_variables(), self._machine.mask)

    # The thread that took the hit

    def register(self, name: str, *, user: bool = False) -> int:
        """
        Return a register of the current context, or of the user context.

        Raise ValueError if a handler cannot push it.
        """
        register = self._register(name, Direction.PUSH_USER if user else Direction.PUSH_CURRENT)
        context = self._machine.context
        if register.memory_offset is None:
            return context.register(register.index, user=user)
        stack_pointer = self._register("sp", Direction.PUSH_CURRENT)
        address = context.register(stack_pointer.index, user=user) + register.memory_offset
        return int.from_bytes(context.read(address & self._machine.mask, self.word_size), self.byte_order)

    def set_register(self, name: str, value: int, *, user: bool = False) -> None:
        """
        Change a register by name, with ``user`` that of user mode.

        Raise ValueError if a handler cannot pop it, PermissionError without ``writes``.
        """
        register = self._register(name, Direction.POP_USER if user else Direction.POP_CURRENT)
        self._check_write()
        self._machine.context.set_register(register.index, value & self._machine.mask, user=user)

    def read(self, address: int, size: int) -> bytes:
        """Return ``size`` bytes of memory, at most 65535; raise ``AddressFault`` if any of them cannot be read."""
        if not 0 <= size <= _ITEM_MAX:
            raise ValueError(f"{size} bytes cannot be read at once, but 0 to {_ITEM_MAX}")
        return self._machine.context.read(address & self._machine.mask, size) if size else b""

    def read_string(self, address: int, limit: int = 1024) -> bytes:
        """
        Return the bytes of a string before its NUL, at most ``limit``.

        Raise ``AddressFault`` if one cannot be read.
        """
        mask = self._machine.mask
        return read_string(self._machine.context, address & mask, limit, mask).removesuffix(b"\0")

    def write(self, address: int, data: bytes) -> None:
        """
        Write up to 4096 bytes to memory.

        Raise ``AddressFault`` if any of them cannot be written; then none is changed. Raise PermissionError without
        ``writes``.
        """
        self._check_write()
        if len(data) > _WRITE_MAX:
            raise ValueError(f"{len(data)} bytes cannot be written at once, but at most {_WRITE_MAX}")
        if data:
            self._machine.context.write(address & self._machine.mask, data)

    def symbol_address(self, name: str) -> int:
        """Return the run-time address of a symbol that the program pushes; raise KeyError for other names."""
        return self._machine.context.symbol_address(name)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._machine.context.pid()

    @property
    def tid(self) -> int:
        """The thread id."""
        return self._machine.context.tid()

    @property
    def uid(self) -> int:
        """The real user id."""
        return self._machine.context.uid()

    @property
    def cpu(self) -> int:
        """The number of the CPU that took the hit."""
        return self._machine.context.cpu()

    @property
    def time(self) -> int:
        """CLOCK_MONOTONIC in nanoseconds."""
        return self._machine.context.time()

    # The log buffer

    @property
    def log_room(self) -> int:
        """The number of bytes that still fit in the log buffer."""
        return self._machine.room

    def log(self, data: bytes) -> None:
        """Append bytes to the log buffer; raise LOG_OVERFLOW, and append nothing, if they do not all fit."""
        self._log(data)

    def log_memory(self, data: bytes) -> None:
        """Append bytes as ``log mrf`` does, after a token and their length."""
        self._log_item(Token.MEMORY, data)

    def log_string(self, text: bytes) -> None:
        """Append a string as ``log str`` does, after a token and its length."""
        self._log_item(Token.STRING, text)

    def _log_item(self, token: Token, data: bytes) -> None:
        if len(data) > _ITEM_MAX:
            raise ValueError(f"an item of {len(data)} bytes cannot be logged, but at most {_ITEM_MAX}")
        self._log(bytes([token]) + len(data).to_bytes(ITEM_PREFIX_SIZE - 1, self.byte_order) + data)

    def _log(self, data: bytes) -> None:
        machine = self._machine
        machine.plp = machine.lp
        if len(data) > machine.room:
            raise LogFull(ExceptionCode.LOG_OVERFLOW, machine.point.logmax)
        machine.append(data)
        machine.plp = machine.lp

    # Helpers

    def _register(self, name: str, direction: Direction) -> Register:
        architecture: Architecture = self._machine.architecture
        register = architecture.register(name.lower())
        if register is None:
            raise ValueError(f"{architecture.name} has no register '{name}'")
        if direction not in register.allowed or register.parts or register.selector_cells:
            raise ValueError(f"'{direction.value}' is not allowed for register '{name}' of an extension")
        return register

    def _check_write(self) -> None:
        if not self._may_write:
            raise PermissionError("the extension writes to the target, but is not declared with writes=True")


ENTRY_POINTS = "dprobes.extensions"
"""The group of entry points in which packages register extensions."""

FAILED = 6
"""The first parameter of the INVALID_OPERAND that a failing extension raises; the second is the extension's index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """
    An extension, as a function at each hit, as a code generator, or both.

    Engines that interpret handlers call ``interpret`` at each hit. Engines that compile handlers to eBPF call
    ``compile`` once for each place that calls the extension, and it writes the code for that place. ``writes`` means
    that the extension changes registers or memory of the target: a program that calls it needs ``--allow-write``. A
    view without ``writes`` refuses changes.
    """

    interpret: Callable[[View], None]
    compile: Callable[[Composer], None] | None = None
    writes: bool = False


def call_extensions(
    extensions: Mapping[str, Extension],
    name: str | None,
    machine: Machine,
    warn: Callable[[str], None],
) -> None:
    """
    Call the extension ``name`` at a hit; None means all extensions in order.

    An extension that fails with a Python exception is reported to ``warn``. The stack and the log are restored,
    INVALID_OPERAND is raised, and the following extensions are not called.
    """
    for number, (known, extension) in enumerate(extensions.items()):
        if name is not None and name != known:
            continue
        before = machine.tsp, machine.lp, machine.plp
        try:
            extension.interpret(View(machine, may_write=extension.writes))
        except (Raised, AddressFault, SelectorFault):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, the target must go on; even a SystemExit
            machine.tsp, machine.lp, machine.plp = before
            warn(f"the extension '{known}' failed: {_description(error)}")
            raise Raised(ExceptionCode.INVALID_OPERAND, FAILED, number) from None


def _description(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    text = str(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"
