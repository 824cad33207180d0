"""
Records of live patches in the memory of a process, and the stacks of patches of one function.

The memory of a patch is one mapping, within reach of a jump from the function::

    base       record, a line of JSON after a mark             r--
    + 4088     u64 base of the former patch, 0 without one
    + 4096     copy of the displaced instructions              r-x
    + 6144     jump to the address in the slot, and the slot
    + 7168     code that registers exception tables
    + 8192     the object                                      as its segments say
    ...        state of the registration, if there is any      rw-

The function's entry has the jump of the patch that was inserted last, the top of the stack. The words at + 4088 lead
from it to the patches below. An object calls the former function through the slot, or the original through the copy.

Memory of a process is not trusted: a record that is not valid is ignored, and a stack has at most as many patches as
there are records.
"""

from __future__ import annotations

import contextlib
import json
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.engines.ptrace.patching.thread_hold import refused
from dprobes.engines.ptrace.site_patches import without_jump
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.errors import EngineError, reason_of
from dprobes.target.process_maps import PAGE_SIZE, mappings_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "CODE_COPY",
    "FORMER_CALL",
    "JUMP_SIZE",
    "OBJECT",
    "REGISTRATION",
    "PatchRecord",
    "PatchState",
    "former_call",
    "is_active",
    "link_to",
    "listed_patches",
    "memory_of",
    "patches_of",
    "record_bytes",
    "record_in",
    "stack_at",
    "take_from_stack",
]

_MARK = b"DPROBES-PATCH-2\n"
_LINK = PAGE_SIZE - 8
_RECORD_MAX = _LINK - len(_MARK)
_NAME_MAX = 1024
"""Maximum number of characters of a path or a name in a record."""
CODE_COPY, OBJECT = PAGE_SIZE, 2 * PAGE_SIZE
"""Offsets of the displaced instructions and of the object in a patch's memory, in bytes."""
FORMER_CALL = CODE_COPY + 2048
"""Offset of the jump to the former function."""
_SLOT = FORMER_CALL + 8
REGISTRATION = CODE_COPY + 3072
"""Offset of the code that registers exception tables."""
_WORD_MAX = (1 << 63) - 1
_JUMP, JUMP_SIZE = b"\xe9", 5


class PatchRecord(NamedTuple):
    """
    A patch in a process: ``jump`` replaces the bytes ``original`` of the file at the address ``start``.

    ``function`` and ``module`` name what is patched, ``path`` and ``symbol`` what replaces it. The memory of the patch
    is ``size`` bytes at ``base``. With ``replaces``, the object calls the original function, not the former patch.
    """

    base: int
    size: int
    start: int
    original: bytes
    jump: bytes
    function: str
    module: str
    path: str
    symbol: str
    replaces: bool = False

    @property
    def target(self) -> int:
        """The address of the function that replaces the other one."""
        return self.start + JUMP_SIZE + int.from_bytes(self.jump[1:], "little", signed=True)


class PatchState(Enum):
    """The state of a patch; the values are the words that ``dprobes patch --list`` prints."""

    ACTIVE = "active"
    STACKED = "stacked"
    """A later patch calls it as the former function."""
    REPLACED = "replaced"
    """A later patch calls the original function in its place."""
    REMOVED = "removed"


@contextlib.contextmanager
def memory_of(pid: int) -> Iterator[AddressSpace]:
    """Open the memory of a process for reading; raise ``EngineError`` if that is refused, or the process has ended."""
    try:
        space = AddressSpace.of_thread(pid, 8)
    except PermissionError as error:
        raise refused(pid) from error
    except OSError as error:
        raise EngineError(f"the memory of process {pid} cannot be read: {reason_of(error)}") from error
    with contextlib.closing(space):
        yield space


def patches_of(pid: int) -> list[PatchRecord]:
    """
    Return the records of all patches of a process, removed ones included.

    Raise ``TargetError`` or ``EngineError`` if its memory cannot be read.
    """
    with memory_of(pid) as space:
        return _records(pid, space)


def listed_patches(pid: int) -> list[tuple[PatchRecord, PatchState]]:
    """
    Return the records of all patches of a process with their states.

    Patches of one function are in the order of their insertion; removed ones come last. Raise as ``patches_of``.
    """
    found: list[tuple[PatchRecord, PatchState]] = []
    with memory_of(pid) as space:
        records = _records(pid, space)
        for start in sorted({record.start for record in records}):
            found += reversed(_with_states(stack_at(space, records, start)))
    bases = {record.base for record, _ in found}
    return found + [(record, PatchState.REMOVED) for record in records if record.base not in bases]


def is_active(pid: int, record: PatchRecord) -> bool:
    """Return whether a patch is in the stack of its function; a uprobe may have changed the first byte of the jump."""
    with contextlib.suppress(OSError, EngineError), memory_of(pid) as space:
        return any(each.base == record.base for each in stack_at(space, _records(pid, space), record.start))
    return False


def _records(pid: int, space: AddressSpace) -> list[PatchRecord]:
    found = []
    for each in mappings_of(pid):
        if each.permissions == "r--p" and not each.inode and not each.path:
            with contextlib.suppress(OSError):
                if (record := record_in(space.read(each.start, PAGE_SIZE), each.start)) is not None:
                    found.append(record)
    return found


def _with_states(stack: list[PatchRecord]) -> list[tuple[PatchRecord, PatchState]]:
    """Return the patches of a stack, the top first, with their states."""
    found, state = [], PatchState.ACTIVE
    for record in stack:
        found.append((record, state))
        state = PatchState.REPLACED if record.replaces or state is PatchState.REPLACED else PatchState.STACKED
    return found


def stack_at(space: AddressSpace, records: Iterable[PatchRecord], start: int) -> list[PatchRecord]:
    """Return those of ``records`` that are inserted at an address, the top first; empty if its memory is unreadable."""
    of_base = {record.base: record for record in records if record.start == start}
    stack: list[PatchRecord] = []
    with contextlib.suppress(OSError):
        found = space.read(start, JUMP_SIZE)
        top = next((record for record in of_base.values() if found[1:] == record.jump[1:]), None)
        while top is not None:
            stack.append(top)
            del of_base[top.base]
            top = of_base.get(int.from_bytes(space.read(top.base + _LINK, 8), "little"))
    return stack


def take_from_stack(pid: int, space: AddressSpace, record: PatchRecord) -> bool:
    """
    Remove a patch from the stack of its function, while all threads are stopped; return whether it was there.

    If it is the top, the entry gets the bytes of the patch below, or those of the file. Otherwise the patch above is
    linked to the one below: first its slot, then its link, so that a removal that was cut short can be repeated.
    """
    stack = stack_at(space, _records(pid, space), record.start)
    index = next((number for number, each in enumerate(stack) if each.base == record.base), None)
    if index is None:
        return False
    below = stack[index + 1] if index + 1 < len(stack) else None
    try:
        if index:
            above = stack[index - 1]
            if not above.replaces:
                called = below.target if below is not None else above.base + CODE_COPY
                _write(space, above.base + _SLOT, _word(called))
            return _write(space, above.base + _LINK, link_to(below))
        found = space.read(record.start, JUMP_SIZE)
        left = without_jump(found, record.jump, below.jump if below is not None else record.original)
        return left is not None and left != found and _write(space, record.start, left)
    except OSError:
        return False


def _write(space: AddressSpace, address: int, data: bytes) -> bool:
    return space.write(address, data) == len(data)


def _word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def link_to(former: PatchRecord | None) -> bytes:
    """Return the word of a patch's memory that leads to the former patch."""
    return _word(0 if former is None else former.base)


def former_call(target: int) -> bytes:
    """Return the code at FORMER_CALL, with the slot for the address ``target``."""
    return b"\xff\x25" + (_SLOT - FORMER_CALL - 6).to_bytes(4, "little") + b"\xcc\xcc" + _word(target)


def record_bytes(record: PatchRecord) -> bytes:
    """Return the contents of the page for a record; raise ``EngineError`` if its names are too long."""
    row = record._asdict() | {"original": record.original.hex(), "jump": record.jump.hex()}
    text = json.dumps(row).encode()
    if len(text) > _RECORD_MAX:
        raise EngineError("the names of the module, the function and the object are too long for a patch")
    return _MARK + text


def record_in(data: bytes, base: int) -> PatchRecord | None:
    """Return the record in a page of a process at ``base``; None if there is no valid one."""
    if not data.startswith(_MARK):
        return None
    try:
        row: dict[str, Any] = json.loads(data[len(_MARK) : _LINK].rstrip(b"\0"))
        start, size = (_number(row[name]) for name in ("start", "size"))
        original, written = (_piece(row[name]) for name in ("original", "jump"))
        function, module, path, symbol = (_name(row[name]) for name in ("function", "module", "path", "symbol"))
        replaces = row["replaces"] is True
        base_there = _number(row["base"])
        record = PatchRecord(base_there, size, start, original, written, function, module, path, symbol, replaces)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return record if record.base == base and record.jump.startswith(_JUMP) else None


def _number(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= _WORD_MAX:
        raise ValueError(f"{value!r} is neither an address nor a size")
    return value


def _piece(text: str) -> bytes:
    data = bytes.fromhex(text)
    if len(data) != JUMP_SIZE:
        raise ValueError(f"a jump of {len(data)} bytes")
    return data


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) > _NAME_MAX:
        raise ValueError("a name that is too long, or none")
    return value
