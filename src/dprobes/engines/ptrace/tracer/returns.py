"""
Returns of functions: which probes are hit when an instruction that leaves their function was carried out.

A return instruction is a hit at once. After a tail call the function has not returned yet: its return address, still on
top of the stack, gets a breakpoint, and the hit comes when the same thread arrives there with the stack as high as the
return leaves it. No return address is ever rewritten.

A ``longjmp`` or an exception leaves such functions without a return. Nothing tells which they are, so what waits is
only marked, and given up when the thread is seen above it on the stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.linux.ptracecalls import Register
from dprobes.engines.ptrace.reports import Placed
from dprobes.engines.ptrace.sites import Role, Site
from dprobes.engines.ptrace.tracer.breakpoints import INT3, Breakpoint
from dprobes.engines.ptrace.tracer.entries import Entry
from dprobes.engines.ptrace.tracer.native.nativecalls import take_call
from dprobes.engines.ptrace.tracer.state import PendingReturn
from dprobes.engines.x86.plan import plan
from dprobes.engines.x86.relocation import copy_of
from dprobes.errors import TargetError
from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.processmaps import PAGE_SIZE, parse_maps, read_maps
from dprobes.vm import AddressFault

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterable, Iterator

    from dprobes.engines.ptrace.tracer.connection import Connection
    from dprobes.engines.ptrace.tracer.native.patcher import Patcher
    from dprobes.engines.ptrace.tracer.programs import Probe
    from dprobes.engines.ptrace.tracer.state import Thread
    from dprobes.engines.ptrace.tracer.threadcontext import ThreadContext

__all__ = ["Returns", "functions_of"]

_LONGEST = 15  # bytes of an instruction; Intel SDM, volume 2, 2.3.11
_LONGEST_CALL = 8
_ARGUMENTS = 255
"""Bytes of arguments that an i386 function that was tail-called may drop (``ret n``)."""

_RET_IMMEDIATE = b"\xc2"

_RIP, _RSP = int(Register.RIP), int(Register.RSP)


class Hit(NamedTuple):
    """Hold a return: the probepoint, where its function was left, and how the call began, if that is known."""

    probe: Probe
    site: Site
    entry: Entry | None = None


class Returns:
    """The returns of threads from functions; ``context`` speaks of the thread at hand."""

    def __init__(self, connection: Connection, context: ThreadContext, patcher: Patcher) -> None:
        self._connection = connection
        self._context = context
        self._patcher = patcher

    def entered(self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]) -> None:
        """Keep what the returns of functions want to know of their entry, at which a thread stands."""
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
            entry = Entry(now, kept)
            if not self._patcher.keep_call(thread, breakpoint_, probe, frame, entry):
                thread.space.entries.enter(thread.pid, probe, frame, entry)

    def left(self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]) -> list[Hit]:
        """Return the probes that are hit by an instruction that was carried out; ``registers`` are those after it."""
        hits: list[Hit] = []
        jumps: list[tuple[Probe, Site]] = []
        size = thread.space.word_size
        address, top = registers[_RIP], registers[_RSP]
        for probe, site in breakpoint_.exits:
            if not probe.concerns(thread.pid):
                continue
            if site.role is Role.RETURN:
                _give_up(thread, top)
                frame = top - size - _dropped(site.original)
                hits.append(Hit(probe, site, _take_entry(thread, probe, site, frame)))
                continue
            distance = address - breakpoint_.address
            stays = distance == len(site.original) or any(start <= distance < end for start, end in site.inside)
            if not stays:
                jumps.append((probe, site))
        for probe, site in reversed(jumps):  # as they are hit from the last one backwards
            self._await_return(thread, probe, site, top)
        return hits

    def arrived(self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]) -> list[Hit]:
        """Return the probes of the functions that have returned to a breakpoint's address, the inner ones first."""
        top = registers[_RSP]
        slack = 0 if thread.space.word_size == 8 else _ARGUMENTS
        found = [p for p in thread.returns if p.address == breakpoint_.address and 0 <= top - p.top <= slack]
        if found:
            thread.returns = [p for p in thread.returns if p not in found]
        _give_up(thread, top)
        return [Hit(p.probe, p.site, p.entry) for p in reversed(found) if p.probe.concerns(thread.pid)]

    def unwinding(self, thread: Thread) -> None:
        """Note that functions are about to be left without a return."""
        for pending in thread.returns:
            pending.doubtful = True

    def _await_return(self, thread: Thread, probe: Probe, site: Site, top: int) -> None:
        size = thread.space.word_size
        entry = _take_entry(thread, probe, site, top)
        try:
            address = self._context.read_word(top, size)
        except OSError:
            return  # whoever was jumped to cannot return either
        if self._place(thread, probe, address):
            _give_up(thread, top + size)
            thread.returns.append(PendingReturn(address, top + size, probe, site, entry))

    def _place(self, thread: Thread, probe: Probe, address: int) -> bool:
        """See to it that there is a breakpoint at a return address; return False if it cannot be one."""
        space = thread.space
        breakpoint_ = space.breakpoints.get(address)
        if breakpoint_ is None or not breakpoint_.waiting:
            self._patcher.give_way(space, address)
        if breakpoint_ is not None:
            if probe not in breakpoint_.waiting:
                breakpoint_.waiting.add(probe)
                space.register(breakpoint_)
            return True
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
        """
        Describe the instruction at a return address; None if that is none, because no call stands before it.

        So it is after a jump to another stack, whose top holds anything.
        """
        from iced_x86 import Decoder, FlowControl

        word_size = thread.space.word_size
        try:
            if not any(m.executable and m.start < address < m.end for m in parse_maps(read_maps(thread.tid))):
                return None
            before = self._context.read(address - _LONGEST_CALL, _LONGEST_CALL)
            size = _LONGEST if address % PAGE_SIZE <= PAGE_SIZE - _LONGEST else PAGE_SIZE - address % PAGE_SIZE
            data = self._context.read(address, size)
        except (AddressFault, TargetError):
            return None
        for length in range(2, _LONGEST_CALL + 1):
            call = Decoder(8 * word_size, before[-length:]).decode()
            if call.len == length and call.flow_control in (FlowControl.CALL, FlowControl.INDIRECT_CALL):
                break
        else:
            return None
        instruction = Decoder(8 * word_size, data).decode()
        raw = data[: instruction.len]
        if instruction.is_invalid or raw[:1] == INT3:
            return None
        return Site(-1, -1, 0, raw, plan(raw, word_size), copy_of(raw, word_size))


def _take_entry(thread: Thread, probe: Probe, site: Site, frame: int) -> Entry | None:
    """Return how the call with a frame began, wherever that is kept; it is kept no longer."""
    entry = thread.space.entries.take(thread.pid, probe, frame)
    return take_call(thread.space, probe, frame, site.kept) if entry is None else entry


def _dropped(raw: bytes) -> int:
    """Return how many bytes a return instruction takes from the stack besides the return address."""
    return int.from_bytes(raw[-2:], "little") if raw[-3:-2] == _RET_IMMEDIATE else 0


def _give_up(thread: Thread, top: int) -> None:
    """Forget the doubtful returns below ``top``: the thread has left them."""
    if any(pending.doubtful for pending in thread.returns):
        thread.returns = [p for p in thread.returns if not (p.doubtful and p.top <= top)]


def functions_of(hits: Iterable[Hit]) -> Iterator[list[Hit]]:
    """Iterate over the returns of one function each: a probepoint has one of them."""
    function: list[Hit] = []
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
