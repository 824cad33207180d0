"""
Data from the entry of a call for the handler of its return, stored by a BPF program at the entry.

A call is identified by its frame, the address of its return address (``MapName.ENTRIES``). No two pending calls have
the same frame, on any stack or thread, except calls that are reached by tail calls. A call that ends without a return
(``longjmp``, an exception) leaves an entry, which the next call with the same frame replaces.

The return of a function that may end in a tail call is a uretprobe: the kernel writes the address of its trampoline
into the frame. If a function is entered with the trampoline as its return address, a tail call has jumped to it. The
calls before it have not returned, so their entries are kept below the new one. The kernel keeps a limited number of
pending returns. It does not report the return of a call beyond that number.

Where handlers run in the process, the calls are in a separate table instead (``bpf.map_layouts``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import NO_OVERWRITE, Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.lower.hosts.handler_host import CONTEXT, COUNTER_ROOM
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS, read_kernel_word, write_filter
from dprobes.bpf.lower.lowering_request import Lowered, Placement
from dprobes.bpf.lower.state.handler_state import StateLayout
from dprobes.bpf.map_layouts import (
    CALL_KEY,
    CALL_MULTIPLIER,
    CALL_WINDOW,
    COUNTER_UNREAD,
    PROBE_ENTRY_SIZE,
    PROBE_SHIFT,
    REGISTERS,
    SLOTS_SHIFT,
    TIME,
    MapName,
    ProbeField,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.arch import Architecture
    from dprobes.bpf.bpf_assembler import Assembled, Label
    from dprobes.bpf.lower.hosts.handler_host import Host
    from dprobes.bpf.lower.lowering_request import KeptEntry, NestingLayout, Request
    from dprobes.bpf.map_layouts import CallTable

__all__ = [
    "SEEN",
    "entry_program",
    "entry_size",
    "missed_returns",
    "table_entry_program",
    "take_entry",
    "take_from_table",
]

_R = Register

_ENTRY_WORD = -120
"""Stack offset of a word that is read, or of a new value for SPACES. The stack above it belongs to handlers."""

_SPACE, _FRAME, _PROBE, _TASK, _LEVEL = (-152 + distance for distance in (0, 8, 16, 20, 24))
"""Stack offsets of the key's fields, which follow each other."""

_ENTRY_KEY, _IDENTITY = _SPACE, 24
_BELOW, _TIME, _REGISTERS = 24, 32, 40
"""Offsets in the value of the fields after the identity."""

_SAVED = -160
"""Stack offset at which the field at ``_BELOW`` is saved while the entry is removed."""

SEEN = -168
"""Stack offset at which ``take_entry`` stores the time. The registers follow at descending addresses."""

_PAGE = 4096
_AWAITED_MAX = 64
"""
Maximum number of a thread's pending returns that the kernel keeps (MAX_URETPROBE_DEPTH in include/linux/uprobes.h).
"""


def entry_size(entry: KeptEntry) -> int:
    """Return the size in bytes of a value in the map ENTRIES, which has the data of one call's entry."""
    return _REGISTERS + 8 * entry.words


def entry_program(architecture: Architecture, request: Request, host: type[Host]) -> Lowered:
    """Return the BPF program for the entries of calls. The placement of ``request`` is the placement at the entry."""
    assert request.entry is not None
    if request.abilities.calls is not None:
        return table_entry_program(architecture, request, host)
    asm = Assembler()
    writer = _Recorder(asm, architecture, request, host(asm, architecture, request, uses_ip=False, uses_ids=False))
    writer.write()
    return Lowered(asm.assemble(), StateLayout(1), writer.host.sleeps, architecture.word_size)


def take_entry(asm: Assembler, host: Host, request: Request, word_size: int, cookie: Register) -> None:
    """
    Move the data that was stored at the entry of the returning call from the map ENTRIES to the stack, at SEEN.

    The time there is 0 if the entry was not seen. Preserves R6 and R8 only.
    """
    assert request.entry is not None
    if request.abilities.calls is not None:
        take_from_table(asm, request, SEEN)
        return
    unseen, count = asm.label(), request.entry.words
    for word in range(count + 1):
        asm.store(_R.R10, SEEN - 8 * word, 0)
    _write_key(asm, host, request, cookie, unseen)
    _load_frame(asm, request, word_size)
    if request.placement.is_return:
        asm.alu(Alu.SUB, _R.R1, word_size)
    asm.store(_R.R10, _FRAME, _R.R1)
    _call(asm, Helper.MAP_LOOKUP_ELEM)
    asm.jump_if(Jump.JEQ, _R.R0, 0, unseen)
    asm.mov(_R.R7, _R.R0)
    for number in range(count):
        asm.copy_from(_R.R7, _REGISTERS + 8 * number, _R.R10, SEEN - 8 * (number + 1))
    asm.copy_from(_R.R7, _BELOW, _R.R10, _SAVED)
    asm.load(_R.R9, _R.R7, _TIME)
    for word in range(0, _IDENTITY, 8):  # the kernel writes these first when it gives the element to another call
        asm.load(_R.R1, _R.R7, word)
        asm.load(_R.R2, _R.R10, _ENTRY_KEY + word)
        asm.jump_if(Jump.JNE, _R.R1, _R.R2, unseen)
    asm.store(_R.R10, SEEN, _R.R9)
    if request.entry.nests:
        _bring_up(asm)
    _call(asm, Helper.MAP_DELETE_ELEM)
    asm.place(unseen)


def _load_frame(asm: Assembler, request: Request, word_size: int) -> None:
    """
    Load the number that identifies a call's frame to R1: the stack pointer, or 0 at a tracepoint.

    At a BPF trampoline, it is the address of the context.
    """
    if request.placement is Placement.TRACEPOINT:
        asm.mov(_R.R1, 0)
    elif request.placement.is_trampoline:
        asm.mov(_R.R1, CONTEXT)  # the arguments, which lie in the trampoline's own frame from the entry to the return
    else:
        asm.load(_R.R1, CONTEXT, REGISTER_OFFSETS["esp"], Size.of(word_size))


def _bring_up(asm: Assembler) -> None:
    """
    If there is an outer call with the same frame, copy its data to level 0.

    The key on the stack is then the key of the entry to delete: the copied entry, or else the innermost one. Clobbers
    R0-R5.
    """
    alone, lost = asm.label(), asm.label()
    asm.jump_if_word(Jump.JEQ, _R.R10, _SAVED, 0, alone)
    asm.store(_R.R10, _LEVEL, _R.R1)
    _call(asm, Helper.MAP_LOOKUP_ELEM)
    asm.store(_R.R10, _LEVEL, 0)
    asm.jump_if(Jump.JEQ, _R.R0, 0, alone)
    _update(asm, _R.R0)
    asm.jump_if(Jump.JNE, _R.R0, 0, lost)
    asm.copy_from(_R.R10, _SAVED, _R.R10, _LEVEL)
    asm.place(lost)
    asm.place(alone)


def _write_key(
    asm: Assembler, host: Host, request: Request, cookie: Register, unknown: Label, *, creates: bool = False
) -> None:
    """
    Write the key of a call in ENTRIES to the stack, without the frame. Clobbers R0-R5.

    Go to ``unknown`` if the process has no entry in SPACES; with ``creates``, add one first.
    """
    asm.store(_R.R10, _LEVEL, 0)
    if request.probe is None:
        asm.mov(_R.R1, cookie)
        asm.alu(Alu.AND, _R.R1, request.tables.probes // 2 - 1)  # an entry of either bank
        asm.store(_R.R10, _PROBE, _R.R1, Size.W)
    else:
        asm.store(_R.R10, _PROBE, request.probe, Size.W)
    if request.in_kernel:
        asm.store(_R.R10, _SPACE, 0)
        if request.placement is Placement.TRACEPOINT:
            host.global_tid()
            asm.store(_R.R10, _TASK, _R.R0, Size.W)
        else:
            asm.store(_R.R10, _TASK, 0, Size.W)
        return
    known = asm.label()
    host.global_pid()
    asm.store(_R.R10, _TASK, _R.R0, Size.W)
    _look_up_space(asm)
    if creates:
        asm.jump_if(Jump.JNE, _R.R0, 0, known)
        asm.call(Helper.KTIME_GET_NS)
        asm.store(_R.R10, _ENTRY_WORD, _R.R0)
        _point_to_space(asm)
        asm.add(_R.R3, _R.R10, _ENTRY_WORD)
        asm.mov(_R.R4, NO_OVERWRITE)
        asm.call(Helper.MAP_UPDATE_ELEM)
        _look_up_space(asm)
    asm.jump_if(Jump.JEQ, _R.R0, 0, unknown)
    asm.place(known)
    asm.copy_from(_R.R0, 0, _R.R10, _SPACE)


def _look_up_space(asm: Assembler) -> None:
    _point_to_space(asm)
    asm.call(Helper.MAP_LOOKUP_ELEM)


def _point_to_space(asm: Assembler) -> None:
    asm.load_map(_R.R1, MapName.SPACES)
    asm.add(_R.R2, _R.R10, _TASK)


def _call(asm: Assembler, helper: Helper) -> None:
    """Call a map helper with ENTRIES and the key on the stack; R0 is the result. Clobbers R1-R5."""
    asm.ask_map(helper, MapName.ENTRIES, _R.R10, _ENTRY_KEY)


def _update(asm: Assembler, value: Register) -> None:
    """Store the value at an address in ENTRIES under the key on the stack; R0 is 0 on success. Clobbers R1-R5."""
    asm.mov(_R.R3, value)
    asm.mov(_R.R4, 0)
    _call(asm, Helper.MAP_UPDATE_ELEM)


class _Recorder:
    """A writer of the BPF program that runs at a function's entry and stores data for the handler at its return."""

    def __init__(self, asm: Assembler, architecture: Architecture, request: Request, host: Host) -> None:
        assert request.entry is not None
        self._asm = asm
        self._request = request
        self._entry = request.entry
        self._word_size = architecture.word_size
        self._value = _SAVED - entry_size(request.entry)
        self._forget = asm.label()
        self._out = asm.label()
        self.host = host

    def write(self) -> None:
        """Write the whole program that stores the entry of a call in the map ENTRIES."""
        asm, request = self._asm, self._request
        asm.mov(CONTEXT, _R.R1)
        write_filter(asm, request.filter, self.host.global_pid, self._out)
        self.host.find_module(self._out, self._out)
        if request.probe is None:
            self.host.cookie()
            asm.mov(_R.R8, _R.R0)
        _write_key(asm, self.host, request, _R.R8, self._out, creates=True)
        _load_frame(asm, request, self._word_size)
        asm.store(_R.R10, _FRAME, _R.R1)
        for word in range(0, _IDENTITY, 8):
            asm.copy_from(_R.R10, _ENTRY_KEY + word, _R.R10, self._value + word)
        asm.store(_R.R10, self._value + _BELOW, 0)
        self._keep_registers()
        self._keep_counters()
        if self._entry.nests:
            self._keep_calls_below()
        asm.call(Helper.KTIME_GET_NS)
        asm.store(_R.R10, self._value + _TIME, _R.R0)
        asm.add(_R.R3, _R.R10, self._value)
        _update(asm, _R.R3)
        asm.jump_if(Jump.JEQ, _R.R0, 0, self._out)
        asm.place(self._forget)  # the return must not use an older entry
        _call(asm, Helper.MAP_DELETE_ELEM)
        asm.place(self._out)
        asm.exit(0)
        self.host.write_functions()

    def _keep_registers(self) -> None:
        asm = self._asm
        for number, (name, _, distance) in enumerate(self._entry.registers):
            place = self._value + _REGISTERS + 8 * number
            if self._request.placement.is_trampoline:
                asm.store(_R.R10, place, 0)  # at the return, the trampoline has the arguments as well
                continue
            if distance is None:
                self._load_register(name)
                asm.store(_R.R10, place, _R.R1)
                continue
            asm.store(_R.R10, place, 0)
            _read_word(asm, self.host, self._word_size, (_R.R10, place), (_R.R10, _FRAME), distance)
            asm.jump_if(Jump.JNE, _R.R0, 0, self._forget)

    def _keep_counters(self) -> None:
        asm = self._asm
        for number, counter in enumerate(self._entry.counters, start=len(self._entry.registers)):
            place, unread = self._value + _REGISTERS + 8 * number, asm.label()
            asm.store(_R.R10, place, COUNTER_UNREAD)
            self.host.counter(counter, (_R.R10, self._value - COUNTER_ROOM), unread)
            asm.store(_R.R10, place, _R.R0)
            asm.place(unread)

    def _load_register(self, name: str) -> None:
        """Load a register to R1. Here the distance of the breakpoint is in the cookie (R8), not in a state."""
        asm, request = self._asm, self._request
        if name != "eip" or request.probe is not None or request.placement is not Placement.BREAKPOINT:
            self.host.register(_R.R1, name)
            return
        asm.load(_R.R1, CONTEXT, REGISTER_OFFSETS[name], Size.of(self._word_size))
        asm.derive(Alu.ARSH, _R.R2, _R.R8, 32)
        asm.alu(Alu.SUB, _R.R1, _R.R2)

    def _keep_calls_below(self) -> None:
        """Keep the older entries if a tail call from the function itself, or from a called function, has entered it."""
        asm, fresh = self._asm, self._asm.label()
        asm.store(_R.R10, _ENTRY_WORD, 0)
        asm.add(_R.R1, _R.R10, _ENTRY_WORD)
        asm.mov(_R.R2, self._word_size)
        asm.load(_R.R3, _R.R10, _FRAME)
        asm.call(Helper.PROBE_READ_USER)
        asm.jump_if(Jump.JNE, _R.R0, 0, fresh)
        asm.load(_R.R9, _R.R10, _ENTRY_WORD)
        asm.derive(Alu.AND, _R.R1, _R.R9, _PAGE - 1)
        asm.jump_if(Jump.JNE, _R.R1, 0, fresh)  # trampolines are at the beginning of a page
        _call(asm, Helper.MAP_LOOKUP_ELEM)
        asm.jump_if(Jump.JEQ, _R.R0, 0, fresh)
        asm.mov(_R.R7, _R.R0)
        if (layout := self._request.abilities.nesting) is None:
            asm.jump(self._forget)  # it is unknown whether this is the trampoline
            asm.place(fresh)
            return
        self._ask_kernel(layout, fresh)
        asm.load(_R.R1, _R.R7, _BELOW)
        asm.alu(Alu.ADD, _R.R1, 1)
        asm.store(_R.R10, _LEVEL, _R.R1)
        asm.store(_R.R10, self._value + _BELOW, _R.R1)
        _update(asm, _R.R7)
        asm.store(_R.R10, _LEVEL, 0)
        asm.jump_if(Jump.JNE, _R.R0, 0, self._forget)
        asm.place(fresh)

    def _ask_kernel(self, layout: NestingLayout, fresh: Label) -> None:
        """Go to ``fresh`` if the return address in R9 is not the trampoline; end if the kernel tracks no more."""
        asm, word = self._asm, (_R.R10, _ENTRY_WORD)

        def follow(base: Register, distance: int) -> None:
            read_kernel_word(asm, base, distance, word, self._forget)

        asm.call(Helper.GET_CURRENT_TASK)
        asm.mov(_R.R8, _R.R0)
        follow(_R.R8, layout.mm)
        follow(_R.R3, layout.area)
        follow(_R.R3, layout.trampoline)
        asm.jump_if(Jump.JNE, _R.R3, _R.R9, fresh)
        follow(_R.R8, layout.task)
        follow(_R.R3, layout.depth)
        asm.jump_if(Jump.JGE, _R.R3, _AWAITED_MAX, self._out, wide=False)


# From the entry of a call to its return, in the table of a process (``bpf.map_layouts``).
#
# The first slot is nearly always the right one, and free if the last call with this frame has returned.


_KEY, _SLOT, _LEFT, _OLDEST, _VICTIM, _OLD = _R.R1, _R.R2, _R.R3, _R.R4, _R.R5, _R.R0
_KEPT_SLOT = _R.R7


def take_from_table(asm: Assembler, request: Request, seen: int) -> None:
    """Move the returning call's entry from the table to ``seen`` in the frame (time 0: not found). Clobbers R0-R3."""
    assert request.entry is not None
    again, found, unseen = asm.label(), asm.label(), asm.label()
    table, count = _table_of(request), len(request.entry.registers)
    _find_window(asm, request)
    asm.jump_if_word(Jump.JEQ, _SLOT, CALL_KEY, _KEY, found, by=_OLD)
    asm.mov(_LEFT, CALL_WINDOW - 1)
    asm.place(again)
    asm.alu(Alu.ADD, _SLOT, table.slot)
    asm.jump_if_word(Jump.JEQ, _SLOT, CALL_KEY, _KEY, found, by=_OLD)
    asm.alu(Alu.SUB, _LEFT, 1)
    asm.jump_if(Jump.JNE, _LEFT, 0, again)
    for word in range(count + 1):
        asm.store(_R.R10, seen - 8 * word, 0)
    asm.jump(unseen)
    asm.place(found)
    for number in range(count):
        asm.copy_from(_SLOT, REGISTERS + 8 * number, _R.R10, seen - 8 * (number + 1), by=_OLD)
    asm.copy_from(_SLOT, TIME, _R.R10, seen, by=_OLD)
    asm.store(_SLOT, TIME, 0)
    asm.store(_SLOT, CALL_KEY, 0)
    asm.place(unseen)


def table_entry_program(architecture: Architecture, request: Request, host: type[Host]) -> Lowered:
    """Return the eBPF code for the entry of calls, for handlers that run in the probed process."""
    assert request.entry is not None
    asm = Assembler()
    asked = host(asm, architecture, request, uses_ip=False, uses_ids=False)
    out, forget = asm.label(), asm.label()
    asm.mov(CONTEXT, _R.R1)
    assert request.probe is not None
    asked.probe_entry(_R.R1)
    asm.jump_if_word(Jump.JNE, _R.R1, ProbeField.DISABLED, 0, out, size=Size.W)
    _find_window(asm, request)
    _claim(asm, _table_of(request))
    asm.mov(_KEPT_SLOT, _SLOT)
    for number, (name, _, distance) in enumerate(request.entry.registers):
        if distance is None:
            asked.register(_R.R1, name)
            asm.store(_KEPT_SLOT, REGISTERS + 8 * number, _R.R1)
            continue
        place = _KEPT_SLOT, REGISTERS + 8 * number
        _read_word(asm, asked, architecture.word_size, place, (CONTEXT, REGISTER_OFFSETS["esp"]), distance)
        asm.jump_if(Jump.JNE, _R.R0, 0, forget)
    asm.call(Helper.KTIME_GET_NS)
    asm.store(_KEPT_SLOT, TIME, _R.R0)
    asm.jump(out)
    asm.place(forget)
    asm.store(_KEPT_SLOT, CALL_KEY, 0)
    asm.place(out)
    asm.exit(0)
    return Lowered(asm.assemble(), StateLayout(1), asked.sleeps, architecture.word_size)


def _read_word(
    asm: Assembler, host: Host, size: int, to: tuple[Register, int], stack: tuple[Register, int], distance: int
) -> None:
    """
    Read a word of ``size`` bytes at ``distance`` bytes above a stack pointer to the address ``to``.

    The stack pointer is stored at ``stack``. R0 is 0 on success. Clobbers R1-R5.
    """

    def arguments() -> None:
        asm.add(_R.R1, *to)
        asm.mov(_R.R2, size)
        asm.load(_R.R3, *stack)
        asm.alu(Alu.ADD, _R.R3, distance)

    host.read_memory(arguments)


def _table_of(request: Request) -> CallTable:
    table = request.abilities.calls
    assert table is not None
    return table


def _find_window(asm: Assembler, request: Request) -> None:
    """Load the key of the call to R1, and the address of its first slot to R2. Clobbers R3."""
    assert request.probe is not None
    asm.load(_KEY, CONTEXT, REGISTER_OFFSETS["esp"])
    if request.probe:
        asm.mov(_R.R2, request.probe << PROBE_SHIFT)
        asm.alu(Alu.OR, _KEY, _R.R2)
    asm.mov(_SLOT, _KEY)
    asm.mov(_R.R3, CALL_MULTIPLIER)
    asm.alu(Alu.MUL, _SLOT, _R.R3)
    asm.alu(Alu.RSH, _SLOT, 64 - SLOTS_SHIFT)
    asm.alu(Alu.LSH, _SLOT, _table_of(request).slot.bit_length() - 1)
    asm.load_value(_R.R3, MapName.ENTRIES)
    asm.alu(Alu.ADD, _SLOT, _R.R3)


def _claim(asm: Assembler, table: CallTable) -> None:
    """
    Set R2 to the slot of the call table for a new call, whose key is in R1. Clobbers R0 and R3-R5.

    It is the slot of a pending call with the same key, a free one, or the slot of the oldest call.
    """
    look, occupied, evict, mine = (asm.label() for _ in range(4))
    asm.mov(_LEFT, CALL_WINDOW)
    asm.mov(_OLDEST, -1)
    asm.mov(_VICTIM, _SLOT)
    asm.place(look)
    asm.jump_if_word(Jump.JNE, _SLOT, CALL_KEY, 0, occupied, by=_OLD)
    asm.atomic(Atomic.CMPXCHG, _SLOT, CALL_KEY, _KEY)
    asm.jump_if(Jump.JEQ, _OLD, 0, mine)
    asm.place(occupied)
    asm.jump_if(Jump.JEQ, _OLD, _KEY, mine)
    _note_oldest(asm)
    asm.alu(Alu.ADD, _SLOT, table.slot)
    asm.alu(Alu.SUB, _LEFT, 1)
    asm.jump_if(Jump.JNE, _LEFT, 0, look)
    asm.mov(_SLOT, _VICTIM)
    asm.place(evict)
    asm.store(_SLOT, TIME, 0)  # so that no other thread takes it while it is being filled
    asm.load(_OLD, _SLOT, CALL_KEY)
    asm.mov(_LEFT, _OLD)
    asm.atomic(Atomic.CMPXCHG, _SLOT, CALL_KEY, _KEY)
    asm.jump_if(Jump.JNE, _OLD, _LEFT, evict)
    asm.place(mine)


def _note_oldest(asm: Assembler) -> None:
    """Set R4 to the lowest time minus one so far, R5 to its slot: a slot that is being filled comes last."""
    is_younger = asm.label()
    asm.load(_OLD, _SLOT, TIME)
    asm.alu(Alu.SUB, _OLD, 1)
    asm.jump_if(Jump.JGE, _OLD, _OLDEST, is_younger)
    asm.mov(_OLDEST, _OLD)
    asm.mov(_VICTIM, _SLOT)
    asm.place(is_younger)


# A program at the entries of functions whose returns are probed: it counts the calls whose returns are not seen.
#
# The kernel keeps a limited number of pending returns of a function. For each it replaces the return address by the
# address of its trampoline, before it runs programs at the entry that were attached earlier. So another return address
# is that of a call for which there was no room (``pre_handler_kretprobe`` in kernel/kprobes.c, ``arch_rethook_prepare``
# in arch/x86/kernel/rethook.c).
#
# A call is not counted if its entry finds the trampoline of another user. That user is another tracer of the function's
# returns, or a function that has entered this one by a tail call.


_ADDRESS = -8
_WORD_SIZE = 8


def missed_returns(request: Request, trampolines: Sequence[int]) -> Assembled:
    """
    Return the program that counts missed returns, for the scope and tables of a request.

    ``trampolines`` has the addresses that the kernel uses as return addresses.
    """
    asm = Assembler()
    out = asm.label()

    def load_process() -> None:
        asm.call(Helper.GET_CURRENT_PID_TGID)
        asm.alu(Alu.RSH, _R.R0, 32)

    asm.mov(CONTEXT, _R.R1)
    write_filter(asm, request.filter, load_process, out)
    asm.store(_R.R10, _ADDRESS, 0)
    asm.add(_R.R1, _R.R10, _ADDRESS)
    asm.mov(_R.R2, _WORD_SIZE)
    asm.load(_R.R3, CONTEXT, REGISTER_OFFSETS["esp"])
    asm.call(Helper.PROBE_READ_KERNEL)
    asm.jump_if(Jump.JNE, _R.R0, 0, out)
    asm.load(_R.R1, _R.R10, _ADDRESS)
    for trampoline in trampolines:
        asm.mov(_R.R2, trampoline)
        asm.jump_if(Jump.JEQ, _R.R1, _R.R2, out)
    asm.mov(_R.R1, CONTEXT)
    asm.call(Helper.GET_ATTACH_COOKIE)
    asm.alu(Alu.AND, _R.R0, request.tables.probes - 1)
    asm.mov(_R.R3, _R.R0)
    asm.alu(Alu.LSH, _R.R0, PROBE_ENTRY_SIZE.bit_length() - 1)
    asm.load_value(_R.R1, MapName.PROBES)
    asm.alu(Alu.ADD, _R.R1, _R.R0)
    asm.jump_if_word(Jump.JNE, _R.R1, ProbeField.DISABLED, 0, out, by=_R.R2, size=Size.W)
    asm.load_value(_R.R1, MapName.UNSEEN_RETURNS)
    asm.alu(Alu.LSH, _R.R3, _WORD_SIZE.bit_length() - 1)
    asm.alu(Alu.ADD, _R.R1, _R.R3)
    asm.count(_R.R1, 0)
    asm.place(out)
    asm.exit(0)
    return asm.assemble()
