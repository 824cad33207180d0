"""
Code before a handler: filter, limits, and the claim of its state.

::

    switch-over, filter ─► probe table: passcount and maxhits ─► overload guard ─► claim of a state, an element of
    SCRATCH ─► its fields
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.lower.hosts.handler_host import CONTEXT
from dprobes.bpf.lower.hosts.hit_thread import write_filter
from dprobes.bpf.lower.lowering_request import Filter, Placement
from dprobes.bpf.lower.state.handler_state import FRAMES, KEPT, LOG, RANGES, SCRATCH, Field, Frame
from dprobes.bpf.lower.templates.variable_templates import give_variables, keep_variables, uses_variables
from dprobes.bpf.map_layouts import CROSSED_SIZE, LIMIT, MapName, ProbeField, Status, SwitchOver
from dprobes.record.log_record import Item
from dprobes.rpn.instruction_set import RPN_STACK_CELLS
from dprobes.rpn.program_needs import ELAPSED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.bpf.bpf_assembler import Assembler, Label
    from dprobes.bpf.lower.hits.hit_epilogue import RingEntries
    from dprobes.bpf.lower.hits.hit_limits import Overload, Ticket
    from dprobes.bpf.lower.lowering_request import Request
    from dprobes.bpf.lower.template_writer import Writer

__all__ = ["Prologue", "write_switch_over"]

# The switch-over: while one program replaces another, each hit runs the handler of exactly one of the two.
#
# Both are attached for a moment. The new one was attached later, so the kernel runs it first at each hit (uprobes run
# their consumers from the newest to the oldest). If the new program finds NOT_OURS, it does nothing. If it finds
# CROSSING, it takes the hit and sets the bit of the thread in CROSSED. The old one, REPLACED, runs unless the thread
# has such a bit. It stays attached until those hits are over at which the new one found NOT_OURS: otherwise neither
# program would take them.
#
# So the new program alone decides, whenever it reads CROSSING. Both programs look at the bit of the thread that they
# run on, and a thread without a bit has not been hit since. A bit is never cleared, because a switch-over is never
# undone: at all later hits the new program runs first and takes the hit. The same applies to a later thread with the
# same id.


_KEY = -4
_WORD_BITS = 6  # log2 of the bits of a word
_R = Register


def write_switch_over(asm: Assembler, request: Request, outside: Label) -> None:
    """Write a jump to ``outside`` for hits of the other program of a switch-over. Clobbers R0-R5, R8 and R9."""
    if not (request.replaceable or request.replaces):
        return
    ours, replaced = asm.label(), asm.label()
    asm.load_value(_R.R1, MapName.STATUS, Status.SWITCH_OVER)
    asm.jump_if_word(Jump.JEQ, _R.R1, 0, SwitchOver.OURS, ours, by=_R.R9)
    if request.placement is Placement.EVENT:
        # Two perf events: their order is unknown, and nothing shows that they belong together.
        asm.jump_if(Jump.JNE, _R.R9, SwitchOver.CROSSING, outside)
    else:
        asm.jump_if(Jump.JEQ, _R.R9, SwitchOver.NOT_OURS, outside)
        if request.replaces:
            asm.jump_if(Jump.JEQ, _R.R9, SwitchOver.REPLACED, replaced)
            asm.load_value(_R.R8, MapName.CROSSED)
            _find_bit(asm)
            asm.atomic(Atomic.OR, _R.R8, 0, _R.R2)
            asm.jump(ours)
        asm.place(replaced)
        if request.replaceable:
            _find_successor(asm, ours)
            _find_bit(asm)
            asm.load(_R.R3, _R.R8, 0)
            asm.alu(Alu.AND, _R.R3, _R.R2)
            asm.jump_if(Jump.JNE, _R.R3, 0, outside)
    asm.place(ours)


def _find_successor(asm: Assembler, none: Label) -> None:
    """Set R8 to the bits of the program that replaces this one; go to ``none`` if there is none yet."""
    asm.store(_R.R10, _KEY, 0, Size.W)
    asm.load_map(_R.R1, MapName.SUCCESSOR)
    for number in range(2):
        if number:
            asm.mov(_R.R1, _R.R0)
        asm.add(_R.R2, _R.R10, _KEY)
        asm.call(Helper.MAP_LOOKUP_ELEM)
        asm.jump_if(Jump.JEQ, _R.R0, 0, none)
    asm.mov(_R.R8, _R.R0)


def _find_bit(asm: Assembler) -> None:
    """
    Move R8 from the start of a bit array to the word with the thread's bit, and set R2 to the bit.

    Clobbers R0-R5.
    """
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.mov(_R.R1, _R.R0, wide=False)
    asm.mov(_R.R2, 1)
    asm.alu(Alu.LSH, _R.R2, _R.R1)  # modulo 64
    asm.alu(Alu.RSH, _R.R1, _WORD_BITS)
    asm.alu(Alu.AND, _R.R1, CROSSED_SIZE // 8 - 1)
    asm.alu(Alu.LSH, _R.R1, 3)
    asm.alu(Alu.ADD, _R.R8, _R.R1)


_TRIES = 4
"""Number of states to try: hits can nest on a CPU, one interrupting the other."""
_ENDED = -24
"""Stack offset of an ENDED entry that is built before there is a state."""


class Prologue:
    """
    Writer of the code before one handler: filter, passcount and maxhits, overload guard, and the claim of a state.

    Hits that run no handler go to the label ``out``.
    """

    def __init__(
        self, writer: Writer, entries: RingEntries, ticket: Ticket | None, overload: Overload | None, out: Label
    ) -> None:
        self._w = writer
        self._asm = writer.asm
        self._request = writer.request
        self._entries = entries
        self._ticket = ticket
        self._overload = overload
        self._out = out
        self._busy = writer.asm.label()

    def write(self) -> None:
        """Write all code before the handler, in its order. Hits that run no handler go to ``out``."""
        self._asm.mov(CONTEXT, _R.R1)
        self._w.host.begin()
        write_switch_over(self._asm, self._request, self._out)
        self._filter()
        self._w.host.find_module(self._out, self._busy)
        self._w.host.find_mapper(self._out)
        self._count_hit()
        if self._overload is not None:
            self._admit(self._overload)
        if not self._w.is_small:
            self._claim()
        elif self._request.tvars > 0 and uses_variables(self._w.flow):
            self._find_variables()
        self._initialise()

    def _filter(self) -> None:
        """Write code that ends hits of threads out of scope. The overload guard charges their traps."""
        asm, scope, load_pid = self._asm, self._request.filter, self._w.host.global_pid
        if self._overload is None or scope == Filter():
            write_filter(asm, scope, load_pid, self._out)
            return
        foreign, ours = asm.label(), asm.label()
        write_filter(asm, scope, load_pid, foreign)
        asm.jump(ours)
        asm.place(foreign)
        self._load_cookie()
        self._overload.charge(is_foreign=True)
        asm.jump(self._out)
        asm.place(ours)

    def _load_cookie(self) -> None:
        """Load the attach cookie to R8, unless the handler has a fixed probepoint and does not need it."""
        if self._request.probe is None:
            self._w.host.cookie()
            self._asm.mov(_R.R8, _R.R0)

    def _count_hit(self) -> None:
        """
        Write code that counts the hit. R8 is the attach cookie; R9 becomes 0 for the last hit.

        R7 is no state yet.
        """
        self._load_cookie()
        if self._w.state.entry_words:
            from dprobes.bpf.lower.hits.call_entries import take_entry

            take_entry(self._asm, self._w.host, self._request, self._w.word_size, _R.R8)
        if self._ticket is not None:
            self._ticket.open(self._busy)
        self._look_whether_enabled()
        if self._overload is not None:
            self._overload.charge()
            self._entry_without_state()
        self._draw(self._ticket)

    def _look_whether_enabled(self) -> None:
        """Set R1 to the entry in the probe table; end the program if handlers are disabled. Clobbers R2."""
        self._entry_without_state()
        self._asm.jump_if_word(Jump.JNE, _R.R1, ProbeField.DISABLED, 0, self._out, by=_R.R2, size=Size.W)

    def _draw(self, ticket: Ticket | None) -> None:
        """Write the check of passcount and maxhits: number the hit in the entry at R1; end if it is outside of them."""
        asm, request = self._asm, self._request
        last = request.passcount + request.maxhits - 1
        if ticket is not None:
            ticket.draw(last if request.maxhits else None, self._out)
        else:
            asm.mov(_R.R2, 1)
            limited = bool(request.passcount or request.maxhits)
            asm.atomic(Atomic.ADD, _R.R1, ProbeField.HITS, _R.R2, fetch=limited)
        if request.passcount:
            asm.jump_if(Jump.JLT, _R.R2, request.passcount, self._out)
        if request.maxhits:
            asm.mov(_R.R3, last)
            asm.jump_if(Jump.JGT, _R.R2, _R.R3, self._out)
            asm.alu(Alu.SUB, _R.R3, _R.R2)
            asm.mov(_R.R9, _R.R3)  # 0 for the last one

    def _admit(self, overload: Overload) -> None:
        """Write the overload guard's check. If it rejects a hit, the handler does not run, as if no state were free."""
        asm, skipped, admitted = self._asm, self._asm.label(), self._asm.label()
        overload.admit(skipped)
        asm.jump(admitted)
        asm.place(skipped)
        if self._request.maxhits:
            self._miss_last()
        overload.count_skipped()
        asm.jump(self._out)
        asm.place(admitted)

    def _claim(self) -> None:
        """Write the search for a state that no running handler uses. The state then has its own number."""
        asm, claimed, full = self._asm, self._asm.label(), self._asm.label()
        has_variables = self._request.tvars > 0 and uses_variables(self._w.flow)
        is_kept = has_variables and not self._request.abilities.verified
        if has_variables:
            give_variables(asm, self._w.host, full, is_kept=is_kept)
        asm.call(Helper.GET_SMP_PROCESSOR_ID)
        asm.alu(Alu.MUL, _R.R0, _TRIES)
        if self._request.abilities.verified:
            for attempt in range(_TRIES):
                if attempt:
                    asm.alu(Alu.ADD, _R.R0, 1)
                self._try_to_claim(claimed)
        else:  # threads of a process may be preempted in handlers, any number of them on one CPU
            again = asm.label()
            asm.mov(_R.R5, self._request.tables.states)
            asm.place(again)
            self._try_to_claim(claimed)
            asm.alu(Alu.ADD, _R.R0, 1)
            asm.alu(Alu.SUB, _R.R5, 1)
            asm.jump_if(Jump.JNE, _R.R5, 0, again)
        if self._request.module is not None or self._ticket is not None:
            asm.jump(full)
            asm.place(self._busy)
            self._load_cookie()
            self._look_whether_enabled()
            self._draw(None)
        asm.place(full)
        if self._request.maxhits:
            self._miss_last()
        self._count_missed()
        asm.jump(self._out)
        asm.place(claimed)
        asm.store(_R.R10, _KEY, _R.R1, Size.W)
        asm.look_up(MapName.SCRATCH, _R.R10, _KEY, self._out)
        asm.mov(SCRATCH, _R.R0)
        asm.load(_R.R1, _R.R10, _KEY, Size.W)
        asm.store(SCRATCH, Field.NUMBER, _R.R1)
        if is_kept:
            keep_variables(asm)

    def _find_variables(self) -> None:
        """Write the search for the thread's variables for a handler with a small state, which claims none."""
        asm, full, found = self._asm, self._asm.label(), self._asm.label()
        give_variables(asm, self._w.host, full, is_kept=True)
        asm.jump(found)
        asm.place(full)
        if self._request.maxhits:
            self._miss_last()
        self._count_missed()
        asm.jump(self._out)
        asm.place(found)
        keep_variables(asm)

    def _try_to_claim(self, claimed: Label) -> None:
        """Set R1 to the number of the state that R0 selects, and go to ``claimed`` if it is free. Clobbers R2 to R4."""
        asm, states, address = self._asm, self._request.tables.states, _R.R3
        asm.derive(Alu.AND, _R.R1, _R.R0, states - 1)
        asm.derive(Alu.LSH, _R.R2, _R.R1, 3)
        asm.load_value(address, MapName.CLAIMS)
        asm.alu(Alu.ADD, address, _R.R2)
        asm.mov(_R.R4, 1)
        asm.atomic(Atomic.XCHG, address, 0, _R.R4)
        asm.jump_if(Jump.JEQ, _R.R4, 0, claimed)

    def _miss_last(self) -> None:
        """Write code that removes the probepoint if this hit, which runs no handler, is the last one of maxhits."""
        asm, other = self._asm, self._asm.label()
        asm.jump_if(Jump.JNE, _R.R9, 0, other)
        if self._ticket is None:
            self._entry_without_state()
            asm.store(_R.R1, ProbeField.DISABLED, 1, Size.W)
        self._entries.write_end(_R.R10, _ENDED, LIMIT, cookie=_R.R8)
        asm.place(other)

    def _entry_without_state(self) -> None:
        """Set R1 to the entry in the probe table, before R8, the attach cookie, is overwritten. Clobbers R2."""
        if self._request.probe is None:
            self._asm.mov(_R.R2, _R.R8)
            self._w.host.entry_at(_R.R1, _R.R2)
        else:
            self._w.host.probe_entry(_R.R1)

    def _count_missed(self) -> None:
        asm = self._asm
        self._entry_without_state()
        asm.count(_R.R1, ProbeField.MISSED)

    def _initialise(self) -> None:
        asm, request, w = self._asm, self._request, self._w
        if request.probe is None:
            asm.store(SCRATCH, Field.PROBE, _R.R8)
            asm.alu(Alu.ARSH, _R.R8, 32)
            asm.store(SCRATCH, Field.MOVED, _R.R8)
        if request.maxhits:
            asm.store(SCRATCH, Field.IS_LAST, _R.R9)
        if w.reads_unwritten:
            asm.mov(_R.R1, SCRATCH)
            asm.mov(_R.R2, 8 * RPN_STACK_CELLS)
            w.host.clear_memory()
        for field in self._cleared_fields():
            asm.store(SCRATCH, field, 0)
        asm.store(SCRATCH, Field.SBP, RPN_STACK_CELLS)
        asm.store(SCRATCH, Field.TSP, RPN_STACK_CELLS)
        if w.flow.uses("setmaj", "setmaj <major>", "setmin", "setmin <minor>"):
            asm.store(SCRATCH, Field.MAJOR, w.point.major)
            asm.store(SCRATCH, Field.MINOR, w.point.minor)
        if w.is_small:
            for place in range(LOG, LOG + w.log_mask, 8):
                w.cleared.append(len(asm))
                asm.store(SCRATCH, place, 0)
        if self._overload is not None:
            self._overload.begin()
        from dprobes.bpf.lower.hits.call_entries import SEEN

        for word in range(w.state.entry_words):
            asm.copy_from(_R.R10, SEEN - 8 * word, SCRATCH, KEPT + 8 * word)
        w.host.prepare()
        self._begin_record()

    def _cleared_fields(self) -> Iterator[int]:
        """Iterate over the fields that have to be 0 when the handler starts."""
        w, uses, takes_traces = self._w, self._w.flow.uses, bool(self._w.state.ex_logmax)
        yield from (Field.LP, Field.ENDING, Field.UNHANDLED, FRAMES + Frame.HANDLER)
        for is_used, fields in (
            (w.counts_jumps, (Field.JUMPS,)),
            (w.may_cut, (Field.CUT_AT,)),
            (uses("push plp"), (Field.PLP,)),
            (uses("pop lp"), (Field.LOGGED,)),
            (uses("pop stp"), (Field.TRACED,)),
            (uses("call <procname>", "ret") or takes_traces, (Field.DEPTH,)),
            (bool(w.flow.catches), (Field.DISPATCHES,)),
            (uses("push x") or takes_traces, (Field.LAST_CODE, Field.LAST_PARM1, Field.LAST_PARM2)),
            (takes_traces, (Field.STP, Field.TRACE_COUNT_AT, Field.TRACES, *(RANGES + 8 * n for n in range(6)))),
            (bool(w.state.heap), (Field.HEAP_END,)),
            (bool(w.state.stack_copy), (Field.STACKS,)),
        ):
            if is_used:
                yield from fields

    def _begin_record(self) -> None:
        """Write the items of the record's header that are known before the handler starts."""
        asm, host, entries = self._asm, self._w.host, self._entries
        measures = self._w.flow.uses(ELAPSED) and self._w.state.entry_words > 0
        if Item.TIME in entries.items or measures:
            host.time()
        if Item.TIME in entries.items:
            asm.store(SCRATCH, entries.header(Item.TIME), _R.R0)
        if measures:
            self._measure()
        for item, name in ((Item.CS, "cs"), (Item.IP, "eip"), (Item.SS, "ss"), (Item.SP, "esp")):
            if item in entries.items:
                host.register(_R.R1, name)
                asm.store(SCRATCH, entries.header(item), _R.R1, Size.of(entries.size_of(item)))

    def _measure(self) -> None:
        """Replace the entry's time in the state by the nanoseconds since then. R0 is the current time. Clobbers R1."""
        asm, is_unseen, took_time = self._asm, self._asm.label(), self._asm.label()
        asm.jump_if_word(Jump.JEQ, SCRATCH, KEPT, 0, is_unseen)
        asm.alu(Alu.SUB, _R.R0, _R.R1)
        asm.jump_if(Jump.JNE, _R.R0, 0, took_time)  # clocks may be coarse, and 0 means that the entry was not seen
        asm.mov(_R.R0, 1)
        asm.place(took_time)
        asm.store(SCRATCH, KEPT, _R.R0)
        asm.place(is_unseen)
