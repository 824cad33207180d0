"""Complete handler: its parts in their order, and the checks for instructions without an eBPF form."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Alu, Jump, Register
from dprobes.bpf.lower import template_writer
from dprobes.bpf.lower.composer import call_extensions
from dprobes.bpf.lower.handler_flow import HandlerFlow, analyse, may_read_unwritten
from dprobes.bpf.lower.hits.hit_epilogue import Epilogue, RingEntries
from dprobes.bpf.lower.hits.hit_limits import ticket_of
from dprobes.bpf.lower.hits.hit_prologue import Prologue
from dprobes.bpf.lower.hosts.handler_host import Host
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.bpf.lower.lowering_request import Abilities, Lowered, Placement, Request
from dprobes.bpf.lower.state.handler_state import KEPT_MAX, StateLayout
from dprobes.bpf.lower.state.small_state import begin_small, may_be_small, move_to_stack
from dprobes.bpf.lower.template_writer import Writer
from dprobes.bpf.lower.templates import ROW_TEMPLATES
from dprobes.bpf.lower.templates.flow_templates import invalid_opcode, write_trace_routine
from dprobes.errors import NotSupportedError
from dprobes.record.log_record import Item
from dprobes.rpn.instruction_set import Group, OperandKind
from dprobes.rpn.keyed_tables import table_of
from dprobes.rpn.program_needs import COUNTED, ELAPSED, ENTRY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.arch import Register as CpuRegister
    from dprobes.bpf.lower.hits.hit_limits import Overload
    from dprobes.rpn.instruction_encoding import CodeImage, EncodedInstruction
    from dprobes.rpn.instruction_set import Row
    from dprobes.rpn.rpn_program import Point

__all__ = ["check_lowering", "host_of", "is_supported", "lower", "lower_for_word_sizes"]

TEMPLATES = {
    **ROW_TEMPLATES,
    "callk": call_extensions,
    "callk <name>": call_extensions,
}
"""Template of each row of the instruction table, by its syntax. Rows without an eBPF form are missing."""

_OFFSET_MAX = 1 << 24
"""Upper bound of offsets in encoded RPN that fit in frames. A damaged file may have larger ones."""

_SHORT = 64
"""Maximum number of instructions of a handler whose code is certain to be small enough."""

_UNWINDING = ("log ustack, <frames>", "log ustack")
_TRACING = ("log st", "push stp", "pop stp", "purge st")


def lower(
    image: CodeImage,
    architecture: Architecture,
    start: int,
    point: Point,
    request: Request,
    host: type[Host] | None = None,
) -> Lowered:
    """
    Lower the handler that starts at byte ``start`` of an encoded program to eBPF.

    ``point`` has the limits of the handler, such as the number of jumps. ``host`` is the class that writes the kernel
    interface, or None for ``host_of(request)``. Raise ``NotSupportedError`` for an instruction without an eBPF form, or
    a handler that is too large.
    """
    asm = Assembler()
    parts = image, architecture, start, point, request, host or host_of(request)
    handler = _Handler(asm, *parts)
    is_small = False
    if handler.may_be_small:
        with _limits(asm):
            is_small = handler.write_small()
        if not is_small:
            asm = Assembler()
            handler = _Handler(asm, *parts)
    with _limits(asm):
        if not is_small:
            handler.write()
            handler.write_functions()
        assembled = asm.assemble()
    return Lowered(assembled, handler.state, handler.sleeps, architecture.word_size)


def host_of(request: Request) -> type[Host]:
    """Return the class that writes the kernel interface for a request."""
    if not request.in_kernel:
        if request.diverts:
            from dprobes.bpf.lower.hosts.place_hosts import InlineHost

            return InlineHost
        return Host
    if request.placement is Placement.TRACEPOINT:
        from dprobes.bpf.lower.hosts.place_hosts import TracepointHost

        return TracepointHost
    if request.placement.is_trampoline:
        from dprobes.bpf.lower.hosts.place_hosts import TrampolineHost

        return TrampolineHost
    from dprobes.bpf.lower.hosts.place_hosts import KernelHost

    return KernelHost


def check_lowering(image: CodeImage, architecture: Architecture, start: int, point: Point, request: Request) -> None:
    """Raise the exceptions of ``lower``, in much less time for most handlers."""
    asm = Assembler()
    handler = _Handler(asm, image, architecture, start, point, request, host_of(request))
    if handler.is_plain:
        return
    with _limits(asm):
        handler.write()
        handler.write_functions()
        asm.assemble()


def lower_for_word_sizes(
    forms: Sequence[tuple[CodeImage, Architecture]], number: int, point: Point, request: Request
) -> Lowered:
    """
    Lower handler ``number`` of a program that exists for several word sizes.

    An event runs the same BPF program in code of each word size. In code of a word size without a form, the program
    does nothing.
    """
    from dprobes.bpf.lower.hosts.place_hosts import AnywhereHost

    host = host_of(request) if request.in_kernel else AnywhereHost
    asm = Assembler()
    asm.load(Register.R2, Register.R1, REGISTER_OFFSETS["cs"])
    asm.alu(Alu.AND, Register.R2, 0xFF)
    handlers = []
    with _limits(asm):
        for image, architecture in forms:
            other = asm.label()
            asm.jump_if(_IS_OTHER[architecture.word_size], Register.R2, _NARROW_CODE, other)
            handlers.append(_Handler(asm, image, architecture, image.handlers[number], point, request, host))
            handlers[-1].write()
            asm.place(other)
        asm.exit(0)
        for handler in handlers:
            handler.write_functions()
        assembled = asm.assemble()
    largest = max((handler.state for handler in handlers), key=lambda state: state.size)
    return Lowered(assembled, largest, any(handler.sleeps for handler in handlers), 8)


_NARROW_CODE = 0x23
"""The low byte of ``cs`` in 32-bit code of user programs, also under Xen (arch/x86/include/asm/segment.h)."""

_IS_OTHER = {8: Jump.JEQ, 4: Jump.JNE}


@contextmanager
def _limits(asm: Assembler) -> Iterator[None]:
    """Turn the assembler's OverflowError for code that is too long into a ``NotSupportedError``."""
    try:
        yield
    except OverflowError as error:
        raise NotSupportedError(
            f"the handler is too large for eBPF: {error}",
            hint="use --engine ptrace, or split the handler",
        ).of_instruction(asm.origin) from None


class _Handler:
    """Writer of one handler for one word size. Call ``write``, and after all code ``write_functions``."""

    def __init__(
        self,
        asm: Assembler,
        image: CodeImage,
        architecture: Architecture,
        start: int,
        point: Point,
        request: Request,
        host: type[Host],
    ) -> None:
        flow = analyse(image, architecture, start, point.logmax)
        for instruction in flow.instructions.values():
            _check(instruction, architecture, request)
            _check_table(instruction, image)
        takes_stacks, stack_copy = _takes_snapshots(flow), 0
        if takes_stacks and request.abilities.copies_stacks:
            from dprobes.bpf.lower.state.stack_snapshot import STACK_COPY_SIZE

            stack_copy = STACK_COPY_SIZE
        self.state = StateLayout(
            point.logmax,
            point.ex_logmax if point.autostacktrace or flow.uses(*_TRACING) else 0,
            max(point.heap, architecture.word_size) if _uses(flow, Group.HEAP) else 0,
            has_snapshot=takes_stacks and not stack_copy,
            stack_copy=stack_copy,
            keys=max((table.key_size + table.kept_bytes for table in image.tables), default=0)
            if _uses(flow, Group.TABLE)
            else 0,
            entry_words=1 + request.entry.words if request.entry and flow.uses(ELAPSED, ENTRY, COUNTED) else 0,
        )
        assert self.state.entry_words <= KEPT_MAX
        self._host = host(asm, architecture, request, **_host_uses(architecture, flow, request))
        self._writer = Writer(asm, flow, architecture, point, request, self.state, self._host)
        self._writer.reads_unwritten = may_read_unwritten(image, architecture, flow)
        self._writer.relocated = dict(_relocated(image, flow, request))
        self._autostacktrace = point.autostacktrace
        self.may_be_small = not self._other_areas and may_be_small(flow, request, architecture.word_size)
        """True if all of the state may fit on the stack."""

    @property
    def _other_areas(self) -> bool:
        """True if the state has other areas than fields and a record."""
        state = self.state
        has_stacks = state.has_snapshot or state.stack_copy
        return bool(state.ex_logmax or state.heap or has_stacks or self._writer.reads_unwritten)

    @property
    def is_plain(self) -> bool:
        """True if the code can certainly be written, given that each instruction has a template."""
        rows = self._writer.flow.instructions.values()
        return len(rows) <= _SHORT and not any(i.row is not None and i.row.operator == "callk" for i in rows)

    @property
    def sleeps(self) -> bool:
        """True if the code written so far may sleep."""
        return self._host.sleeps

    def write(self) -> None:
        """Write the handler's main function: prologue, instructions and epilogue."""
        writer = self._writer
        around = writer, RingEntries(writer), ticket_of(writer), _overload_of(writer), writer.asm.label()
        Prologue(*around).write()
        writer.loops.write_inside(self._write_body)
        Epilogue(*around).write()

    def write_small(self) -> bool:
        """Write the whole program with its state on the stack; return False if that is not possible."""
        begin_small(self._writer)
        self.write()
        self.write_functions()
        return move_to_stack(self._writer)

    def write_functions(self) -> None:
        """Write the other functions that the handler or the kernel calls, after the main function."""
        self._writer.loops.write_behind(self._write_body)
        self._host.write_functions()

    def _write_body(self) -> None:
        writer = self._writer
        writer.write_blocks(TEMPLATES, invalid_opcode)
        template_writer.write_dispatch(writer, writer.trace.call if self._autostacktrace else None)
        if writer.flow.returns:
            template_writer.write_return(writer)
        write_trace_routine(writer)


def _overload_of(writer: Writer) -> Overload | None:
    """Return the overload guard of a handler, or None if its hits are not measured."""
    if (limit := writer.request.load_limit) is None:
        return None
    from dprobes.bpf.lower.hits.hit_limits import Overload

    return Overload(writer, limit)


def _relocated(image: CodeImage, flow: HandlerFlow, request: Request) -> Iterator[tuple[int, int]]:
    """
    Iterate over the offsets of symbol addresses in the encoded program, each with its link address.

    Raise ``NotSupportedError`` if the address is unknown, or cannot be found at a uretprobe.
    """
    for relocation in image.relocations:
        if relocation.offset - 1 not in flow.instructions:
            continue
        address = request.symbols.get(relocation.symbol)
        if address is None:
            raise NotSupportedError(f"the address of '{relocation.symbol}' is not known")
        if request.placement is Placement.URETPROBE and not request.abilities.function_ip:
            raise NotSupportedError(
                f"this kernel does not show a uretprobe which function returns, so '{relocation.symbol}' cannot be "
                "found in the process",
                hint="use --engine ptrace, or Linux 6.6 or later",
            )
        yield relocation.offset, address + relocation.addend


def _host_uses(architecture: Architecture, flow: HandlerFlow, request: Request) -> dict[str, bool]:
    names = {
        register.name
        for i in flow.instructions.values()
        if i.row is not None and i.row.group is Group.REGISTER
        if (register := architecture.register(i.operand)) is not None
    }
    return {
        "uses_ip": Item.IP in request.items or "eip" in names or _takes_snapshots(flow),
        "uses_ids": bool(request.items & (Item.PID | Item.TID))
        or flow.uses("push pid", "push tid")
        or _takes_snapshots(flow),
    }


def _takes_snapshots(flow: HandlerFlow) -> bool:
    """Return whether a handler logs or stores user call stacks, for which it copies the user stack."""
    numbers = (i.operand for i in flow.instructions.values() if i.row is not None and i.row.group is Group.TABLE)
    tables = [table_of(number, flow.tables) for number in numbers]
    return flow.uses(*_UNWINDING) or any(table is not None and table.has_user_stack for table in tables)


def _uses(flow: HandlerFlow, group: Group) -> bool:
    return any(i.row is not None and i.row.group is group for i in flow.instructions.values())


def is_supported(row: Row, register: CpuRegister | None, abilities: Abilities) -> bool:
    """Return True if an instruction has an eBPF form for the register that it names. Extensions are not considered."""
    if row.group is Group.REGISTER:
        has_code = register is None or register.name in REGISTER_OFFSETS or register.memory_offset is not None
        return has_code and (abilities.writes_registers or not row.writes)
    if row.syntax == "skip":
        return abilities.overrides_returns
    if row.syntax == "vfyrw" and abilities.vma is None:
        return False
    if row.operand_kind is OperandKind.COUNTER and abilities.counters is None:
        return False
    return row.syntax in TEMPLATES and row.operator != "callk" and (abilities.writes_memory or not row.writes)


def _abilities_at(request: Request) -> Abilities:
    """Return the abilities at the handler's place: handlers of events cannot change registers or look up mappings."""
    if request.in_kernel:
        return request.abilities._replace(writes_registers=False, writes_memory=False, vma=None)
    if request.placement is not Placement.EVENT:
        return request.abilities
    return request.abilities._replace(writes_registers=False, vma=None)


def _check_table(instruction: EncodedInstruction, image: CodeImage) -> None:
    """Raise ``NotSupportedError`` for access to table data that the kernel does not have."""
    row = instruction.row
    if row is None or row.group is not Group.TABLE:
        return
    table = table_of(instruction.operand, image.tables)
    if table is not None and table.has_user_stack and row.operator == "push":
        raise NotSupportedError(
            f"'push' cannot look at table '{table.name}': its call stacks are followed outside of the kernel",
            hint="use --engine ptrace, or addresses of callers as keys, as 'dprobes sets libc.malloc/leaks' shows",
        ).of_instruction(instruction.offset)


def _check(instruction: EncodedInstruction, architecture: Architecture, request: Request) -> None:
    """Raise ``NotSupportedError`` if there is no code for an instruction."""
    row = instruction.row
    if row is None:
        return
    if row.syntax in ("sx <label>", "call <procname>") and not 0 <= int(instruction.operand) < _OFFSET_MAX:
        raise NotSupportedError(
            f"'{row.operator}' at byte {instruction.offset} of the program leads to byte {instruction.operand}, "
            "where no program has instructions"
        ).of_instruction(instruction.offset)
    register = architecture.register(instruction.operand) if row.group is Group.REGISTER else None
    if row.operator == "callk":
        if row.operand_kind is not None and instruction.operand not in request.extensions:
            raise NotSupportedError(
                f"the extension '{instruction.operand}' has no form for eBPF", hint="use --engine ptrace"
            ).of_instruction(instruction.offset)
        return
    if not is_supported(row, register, _abilities_at(request)):
        raise NotSupportedError(
            f"'{row.syntax}' at byte {instruction.offset} of the program cannot be compiled to eBPF",
            hint=(
                "use --engine gdb=ENDPOINT, with the stub of a machine" if request.in_kernel else "use --engine ptrace"
            ),
        ).of_instruction(instruction.offset)
