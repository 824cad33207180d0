"""Access paths to the values that the kernel passes to a BPF program at a tracepoint."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "SYSTEM_CALL_END",
    "SYSTEM_CALL_ENTRY",
    "Form",
    "Source",
    "SystemCallNumbers",
    "TracedEvent",
    "TracedField",
    "entry_of",
]

SYSTEM_CALL_ENTRY, SYSTEM_CALL_END = "sys_enter", "sys_exit"
"""The tracepoints of all system calls."""


class Form(Enum):
    """Way in which a field's value is computed from the memory to which its path leads."""

    NUMBER = "the number there"
    ADDRESS = "its address"
    PLACED = "the address that a word there gives, which counts from the start of the record"
    PLACED_BEHIND = "the address that a word there gives, which counts from the end of that word"


class TracedField(NamedTuple):
    """
    Value that a BPF program reaches from its argument by loads.

    The path begins at the offset ``start`` of the argument, in bytes. Each number of ``path`` but the last is added to
    the current address, and the next address is loaded from there. Adding the last number gives the place of the value.
    Without a path, the place is in the argument itself. The value has ``size`` bytes: 1, 2, 4 or 8. In 32-bit programs,
    ``narrow_path`` is used.
    """

    type_name: str
    start: int
    size: int
    path: tuple[int, ...] = ()
    is_signed: bool = False
    form: Form = Form.NUMBER
    narrow_path: tuple[int, ...] | None = None


class Source(Enum):
    """Argument that the kernel passes to a BPF program; the values are for messages."""

    RECORD = "the tracepoint's record"
    ARGUMENTS = "the tracepoint's arguments"
    SYSTEM_CALL = "the registers of a system call"


class SystemCallNumbers(NamedTuple):
    """
    Numbers of a system call in 64-bit (``wide``) and 32-bit (``narrow``) processes, or None where it is missing.

    ``number`` is the path to the number. ``status`` is the offset in ``struct task_struct`` of the word that selects
    one of the two tables of system calls.
    """

    wide: int | None
    narrow: int | None
    number: TracedField
    status: int


@dataclass(frozen=True, slots=True)
class TracedEvent:
    """
    A tracepoint, or a system call, of the running kernel.

    ``name`` is the kernel's name of the attached tracepoint, ``event`` its number for perf_event_open(2) (a RECORD has
    one). ``fields`` are those that the program names.
    """

    source: Source
    name: str
    event: int = 0
    fields: Mapping[str, TracedField] = field(default_factory=dict)
    system_call: SystemCallNumbers | None = None


def entry_of(end: TracedEvent) -> TracedEvent:
    """Return the tracepoint at the entry of the system call whose end ``end`` is, without fields."""
    return replace(end, name=SYSTEM_CALL_ENTRY, fields={})
