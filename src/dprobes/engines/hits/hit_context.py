"""The records of one run: which header items they carry, and their bytes (``record.log_record``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dprobes.record.log_record import PROCESS_NAME_MAX, Item, header_struct
from dprobes.vm import Context

if TYPE_CHECKING:
    from dprobes.arch import ByteOrder
    from dprobes.vm import Outcome

__all__ = ["Changes", "Header", "HitContext", "Reach", "RecordBuilder", "SharedCounters", "SharedHits", "Tally"]

# What the life of a hit needs of an engine: the context of the handlers, and the programs that these are of.
#
# An engine implements ``HitContext`` once and lets it speak of one stopped thread after the other.


Changes = dict[int, tuple[int, int]]
"""Registers that handlers changed: (before, after) by the engine's number of the register."""


class Tally(Protocol):
    """The counts of one probepoint; hits without a run of the handler are in ``passed``, ``missed`` or ``skipped``."""

    hits: int
    records: int
    lost: int
    passed: int
    missed: int
    skipped: int
    faulted: int

    def note(self, placement: Any) -> None:
        """Note where the probed instruction is executed."""


class SharedHits(Protocol):
    """The hits of a probepoint that has handlers in the probed processes as well, which count at the same time."""

    is_limited: bool
    """Whether hits are drawn, because of passcount or maxhits."""

    @property
    def is_over(self) -> bool:
        """Whether no handler is to run any more: all hits are drawn, or a handler said so."""

    def draw(self) -> bool | None:
        """Draw a hit: return whether its handler runs, None if it is no hit any more."""

    def give_back(self) -> None:
        """Let a hit that was drawn be none after all."""

    def disable(self) -> None:
        """Let no handler run any more."""


class Reach(Protocol):
    """The processes that a program is about."""

    pids: set[int]


class SharedCounters(Protocol):
    """The memory of a program's variables, which others may ask to be reset."""

    def reset_if_asked(self) -> None:
        """Set variables to zero if somebody wants that; only between two handlers."""


class HitContext(Context, Protocol):
    """
    The context of the handlers of a hit, on a thread of the process ``process`` in code with words of ``word_size``.

    ``probe`` is that whose handler runs, on the variables and extensions of the program that ``use`` named. ``written``
    holds what handlers changed in the registers.
    """

    process: int
    word_size: int
    probe: Any
    written: Changes | None

    @property
    def program(self) -> object:
        """The program that was named last."""

    def use(self, program: Any) -> None:
        """Give handlers what is their program's."""

    def set_aside(self) -> Changes | None:
        """Set registers back to what they were before handlers changed them, and return the changes."""

    def apply(self, changes: Changes) -> None:
        """Make changes that were set aside; what was changed before stays as far as they do not concern it."""

    def pointers(self) -> tuple[int, int, int, int]:
        """Return cs, the instruction pointer, ss and the stack pointer."""


Header = tuple[int, list[int], bytes]
"""The flag word of a record, its items up to the process name, and the bytes of the rest."""


_IP = int(Item.IP)


class RecordBuilder:
    """
    Build records that carry ``items``, in a target's byte order.

    An item costs time at each hit, so only what is asked for is looked up.
    """

    def __init__(self, items: int, byte_order: ByteOrder = "little") -> None:
        self._order: ByteOrder = byte_order
        # Plain numbers and truth values: operations on enum members are an order slower, and this runs at each hit.
        self._flags = int(items | Item.MAJOR | Item.MINOR)
        self._wide_flags = self._flags | int(Item.WIDE)
        self._cpu, self._pid, self._uid, self._time, self._name, self._tid = (
            bool(items & item) for item in (Item.CPU, Item.PID, Item.UID, Item.TIME, Item.PROCESS_NAME, Item.TID)
        )
        self._cs, self._ip, self._ss, self._sp = (bool(items & item) for item in (Item.CS, Item.IP, Item.SS, Item.SP))
        self._pointers = self._cs or self._ip or self._ss or self._sp

    def header(self, context: HitContext, word_size: int, *, keep_ip: bool = False) -> Header:
        """
        Return flags, items and tail of a record for the state before the probed instruction.

        The first two items, major and minor, are zeros to be filled in by ``record``. ``keep_ip`` adds the instruction
        pointer to what was asked for.
        """
        values = [0, 0]
        if self._cpu:
            values.append(context.cpu())
        if self._pid:
            values.append(context.pid())
        if self._uid:
            values.append(context.uid())
        if self._pointers or keep_ip:
            cs, ip, ss, sp = context.pointers()
            if self._cs:
                values.append(cs)
            if self._ip or keep_ip:
                values.append(ip)
            if self._ss:
                values.append(ss)
            if self._sp:
                values.append(sp)
        if self._time:
            values.append(context.time())
        tail = context.process_name()[:PROCESS_NAME_MAX] + b"\0" if self._name else b""
        if self._tid:
            tail += context.tid().to_bytes(4, self._order)
        flags = self._wide_flags if word_size == 8 else self._flags
        return flags | _IP if keep_ip else flags, values, tail

    def record(self, header: Header, outcome: Outcome) -> bytes:
        """Return the record of a handler's log buffer."""
        flags, values, tail = header
        if outcome.is_cut:
            flags |= int(Item.CUT)
        values[0], values[1] = outcome.major, outcome.minor
        return header_struct(flags, self._order).pack(flags, *values) + tail + outcome.log

    def stack_trace(self, header: Header, outcome: Outcome) -> bytes:
        """Return the record of a handler's stack trace; its major and minor codes stay 0."""
        flags, values, tail = header
        flags |= int(Item.STACK_TRACE)
        values[0] = values[1] = 0
        return header_struct(flags, self._order).pack(flags, *values) + tail + outcome.trace
