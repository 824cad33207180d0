"""
Returns of functions: probes that are hit after an instruction has left their function.

A return instruction is a hit at once. After a tail call the function has not returned yet. So a breakpoint is placed at
its return address, which is still on top of the stack. The hit occurs when the same thread arrives there with the stack
pointer that the return leaves. No return address is ever rewritten.

A ``longjmp`` or an exception leaves functions without a return, and the tracer cannot know which functions. So it marks
all pending returns. Later it gives up those whose frames are below the thread's stack pointer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.ptrace.breakpoint_sites import Role, Site
from dprobes.engines.ptrace.tracer.native.handler_memory import take_call
from dprobes.engines.ptrace.tracer.placed_breakpoints import INT3, Breakpoint, Entry
from dprobes.engines.ptrace.tracer.tracer_state import PendingReturn
from dprobes.engines.ptrace.tracer_messages import Placed
from dprobes.errors import TargetError
from dprobes.platform.linux.ptrace_calls import Register
from dprobes.platform.x86.instruction_emulation import plan
from dprobes.platform.x86.instruction_relocation import copy_of
from dprobes.target.process_maps import PAGE_SIZE, mapping_at
from dprobes.vm import AddressFault

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.engines.ptrace.tracer.handler_context import ThreadContext
    from dprobes.engines.ptrace.tracer.native.jump_patcher import Patcher
    from dprobes.engines.ptrace.tracer.tracer_programs import Probe
    from dprobes.engines.ptrace.tracer.tracer_state import Thread, TracerState
    from dprobes.platform.linux.ptrace_calls import RegisterWords

__all__ = ["ReturnHit", "Returns", "functions_of"]

_LONGEST = 15  # maximum size of an instruction in bytes; Intel SDM, volume 2, 2.3.11
_LONGEST_CALL = 10
"""
Size in bytes of a call through memory with two prefixes, REX, ModRM, SIB and a displacement.

More prefixes give no additional information.
"""

_SIGNAL_RETURNS = (
    bytes.fromhex("48c7c00f0000000f05"),  # mov $__NR_rt_sigreturn, %rax; syscall
    bytes.fromhex("b80f0000000f05"),  # mov $__NR_rt_sigreturn, %eax; syscall
    bytes.fromhex("b8ad000000cd80"),  # i386: mov $__NR_rt_sigreturn, %eax; int $0x80
    bytes.fromhex("58b877000000cd80"),  # i386: pop %eax; mov $__NR_sigreturn, %eax; int $0x80
)
"""Instructions that signal handlers return to, without a preceding call. GDB recognizes them by their bytes, too."""

_ARGUMENTS = 255
"""Maximum size in bytes of the arguments that a tail-called i386 function may drop (``ret n``)."""

_RET_IMMEDIATE = b"\xc2"

_RIP, _RSP = int(Register.RIP), int(Register.RSP)


class ReturnHit(NamedTuple):
    """A return: the probepoint, the instruction that left its function, and the entry of the call, if known."""

    probe: Probe
    site: Site
    entry: Entry | None = None


class Returns:
    """Detector of returns from functions. ``context`` is the context of the current thread."""

    def __init__(self, state: TracerState, context: ThreadContext, patcher: Patcher) -> None:
        self._connection = state.connection
        self._threads = state.threads
        self._context = context
        self._patcher = patcher

    def entered(self, thread: Thread, breakpoint_: Breakpoint, registers: RegisterWords) -> None:
        """
        Store the entry of a call, at whose first instruction ``thread`` has stopped, for the probepoints at its return.

        It has the time and the registers that their handlers need.
        """
        context, frame = self._context, registers[_RSP]
        now = context.time()
        for probe, site in breakpoint_.entries:
            if not probe.concerns(thread.pid):
                continue
            try:
                kept = {
                    index: context.register(index, user=False)
                    if distance is None
                    else context.read_word(frame + distance, thread.space.word_size)
                    for index, distance in site.kept
                }
            except OSError:
                thread.space.entries.take(thread.pid, probe, frame)
                continue
            entry = Entry(now, kept, {number: context.counter(number) for number in site.counters})
            if not self._patcher.keep_call(thread, breakpoint_, probe, frame, entry):
                thread.space.entries.enter(thread.pid, probe, frame, entry)

    def left(self, thread: Thread, breakpoint_: Breakpoint, registers: RegisterWords) -> list[ReturnHit]:
        """
        Return the returns from functions that the instruction at ``breakpoint_`` has made, such as a RET.

        The thread has executed it; ``registers`` are the registers after it. If it was a jump to another function, a
        tail call, the return is awaited at the caller, and is not in the result.
        """
        hits: list[ReturnHit] = []
        jumps: list[tuple[Probe, Site]] = []
        size = thread.space.word_size
        address, top = registers[_RIP], registers[_RSP]
        for probe, site in breakpoint_.exits:
            if not probe.concerns(thread.pid):
                continue
            if site.role is Role.RETURN:
                _give_up(thread, top)
                frame = top - size - _dropped(site.original)
                hits.append(ReturnHit(probe, site, _take_entry(thread, probe, site, frame)))
                continue
            distance = address - breakpoint_.address
            stays = distance == len(site.original) or any(start <= distance < end for start, end in site.inside)
            if not stays:
                jumps.append((probe, site))
        for probe, site in reversed(jumps):  # because they are hit from the last one backwards
            self._await_return(thread, probe, site, top)
        return hits

    def arrived(self, thread: Thread, breakpoint_: Breakpoint, registers: RegisterWords) -> list[ReturnHit]:
        """Return the probes of the functions that have returned to a breakpoint's address, the inner ones first."""
        top = registers[_RSP]
        slack = 0 if thread.space.word_size == 8 else _ARGUMENTS
        found = _returned(thread, breakpoint_.address, top, slack)
        if not found:
            # It may be the stack of a coroutine that has made the tail call on another thread.
            others = (t for t in self._threads.in_space(thread.space) if t.returns and t is not thread)
            found = next(filter(None, (_returned(other, breakpoint_.address, top, slack) for other in others)), [])
        _give_up(thread, top)
        return [ReturnHit(p.probe, p.site, p.entry) for p in reversed(found) if p.probe.concerns(thread.pid)]

    def unwinding(self, thread: Thread) -> None:
        """Mark the thread's awaited returns as doubtful: longjmp or an exception is about to discard stack frames."""
        for pending in thread.returns:
            pending.doubtful = True

    def _await_return(self, thread: Thread, probe: Probe, site: Site, top: int) -> None:
        size = thread.space.word_size
        entry = _take_entry(thread, probe, site, top)
        try:
            address = self._context.read_word(top, size)
        except OSError:
            return  # the function that was jumped to cannot return either
        placed = self._place(thread, probe, address)
        if placed:
            _give_up(thread, top + size)
            thread.returns.append(PendingReturn(address, top + size, probe, site, entry))
        elif placed is not None:
            probe.miss()

    def _place(self, thread: Thread, probe: Probe, address: int) -> bool | None:
        """
        Make sure that a breakpoint is at the return address of a call, and mark it as awaited by ``probe``.

        Return True if it is there, False if none can be placed, and None if ``address`` is not in executable memory.
        This is possible after a jump to another stack, because the word at the top, which is taken for the return
        address, may be anything.
        """
        space = thread.space
        breakpoint_ = space.breakpoints.get(address)
        if breakpoint_ is None or not breakpoint_.waiting:
            self._patcher.give_way(space, address)
        if breakpoint_ is not None:
            if probe not in breakpoint_.waiting:
                breakpoint_.waiting.add(probe)
                space.register(breakpoint_)
            return True
        try:
            mapping = mapping_at(thread.tid, address)
            if mapping is None or not mapping.executable:
                return None
        except TargetError:
            return None
        site = self._site(thread, address)
        if site is None:
            return False
        breakpoint_ = Breakpoint(address, site.original[0], site, waiting={probe})
        self._connection.send(Placed(thread.pid, ((address, site.original[0]),)))
        try:
            space.place(breakpoint_)
        except OSError:
            return False
        return True

    def _site(self, thread: Thread, address: int) -> Site | None:
        """Return the site of the instruction at a return address, or None if no instruction is known to begin there."""
        from iced_x86 import Decoder

        word_size = thread.space.word_size
        try:
            before, data = self._code_around(address)
        except AddressFault:
            return None
        if not _is_returned_to(before, data, word_size):
            return None
        instruction = Decoder(8 * word_size, data).decode()
        raw = data[: instruction.len]
        if instruction.is_invalid or raw[:1] == INT3:
            return None
        return Site(-1, -1, 0, raw, plan(raw, word_size), copy_of(raw, word_size))

    def _code_around(self, address: int) -> tuple[bytes, bytes]:
        """Return the bytes before and from an address on; omit the adjoining page if it cannot be read."""
        page = address - address % PAGE_SIZE
        try:
            before = self._context.read(address - _LONGEST_CALL, _LONGEST_CALL)
        except AddressFault:
            before = self._context.read(page, address - page)
        try:
            data = self._context.read(address, _LONGEST)
        except AddressFault:
            data = self._context.read(address, page + PAGE_SIZE - address)
        return before, data


def _returned(thread: Thread, address: int, top: int, slack: int) -> list[PendingReturn]:
    """Remove and return a thread's pending returns to ``address``, whose ``top`` is at most ``slack`` bytes lower."""
    found = [p for p in thread.returns if p.address == address and 0 <= top - p.top <= slack]
    if found:
        thread.returns = [p for p in thread.returns if p not in found]
    return found


def _is_returned_to(before: bytes, data: bytes, word_size: int) -> bool:
    """
    Return whether code can be a return address: it follows a call, or is executed after signal handlers.

    ``before`` are the bytes before the address, ``data`` those from there on.
    """
    from iced_x86 import Decoder, FlowControl

    if data.startswith(_SIGNAL_RETURNS):
        return True
    for length in range(2, len(before) + 1):
        call = Decoder(8 * word_size, before[-length:]).decode()
        if call.len == length and call.flow_control in (FlowControl.CALL, FlowControl.INDIRECT_CALL):
            return True
    return False


def _take_entry(thread: Thread, probe: Probe, site: Site, frame: int) -> Entry | None:
    """
    Remove and return the entry of a call, which the tracer or a handler in the process has stored.

    Return None if the call's beginning was not observed.
    """
    entry = thread.space.entries.take(thread.pid, probe, frame)
    return take_call(thread.space, probe, frame, site.kept) if entry is None else entry


def _dropped(raw: bytes) -> int:
    """Return how many bytes a return instruction removes from the stack besides the return address."""
    return int.from_bytes(raw[-2:], "little") if raw[-3:-2] == _RET_IMMEDIATE else 0


def _give_up(thread: Thread, top: int) -> None:
    """Forget the doubtful returns whose frames are below ``top``: the thread has left those functions."""
    if any(pending.doubtful for pending in thread.returns):
        thread.returns = [p for p in thread.returns if not (p.doubtful and p.top <= top)]


def functions_of(hits: Iterable[ReturnHit]) -> Iterator[list[ReturnHit]]:
    """Iterate over the returns grouped by function: in a group each probepoint occurs once."""
    function: list[ReturnHit] = []
    for hit in hits:
        place = hit.probe.file, hit.site.offset
        if function and (
            place != (function[0].probe.file, function[0].site.offset)
            or any(other.probe is hit.probe for other in function)
        ):
            yield function
            function = []
        function.append(hit)
    if function:
        yield function
