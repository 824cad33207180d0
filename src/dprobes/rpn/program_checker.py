"""
Static checks of a parsed program for one processor, apart from those that need the module or the engine.

Each ``_check_*`` function checks one property; ``check`` calls them in the order of their messages.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dprobes.arch import Direction
from dprobes.arch.usdt_arguments import ARGUMENTS_MAX
from dprobes.arch.x86_processors import ACCESSED, PORT_MAX
from dprobes.diagnostics import Note, did_you_mean
from dprobes.rpn import control_flow
from dprobes.rpn.instruction_set import ITEM_PREFIX_SIZE, LOG_WIDTHS, ExceptionCode, Flow, Group, OperandKind
from dprobes.rpn.keyed_tables import KEY_SIZE_MAX, MEMORY_MAX, KeyKind, operated_table
from dprobes.rpn.performance_counters import counter_named
from dprobes.rpn.program_needs import (
    ENTRY,
    entry_instructions,
    executed_instructions,
    skipping_instruction,
    stops_target,
    usdt_arguments,
)
from dprobes.rpn.rpn_program import Address, Expression, Glob, ModuleType, Offset, Sampler, Tracepoint, Usdt

if TYPE_CHECKING:
    from dprobes.arch import Architecture
    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.keyed_tables import Table
    from dprobes.rpn.rpn_program import Code, Instruction, ProbeDefinition, Program

__all__ = ["check", "check_flow"]

# Only certain faults are reported. Where the analysis has no bound, there is no message.


def check_flow(program: Program, architecture: Architecture, diagnostics: Diagnostics) -> None:
    """Add warnings about the flow of control in a program to ``diagnostics``: unreachable code, missing cells."""
    gains = control_flow.procedure_gains(program, architecture)
    writes_below = any(_writes_below_top(i) for code in program.bodies() for i in code.instructions)
    clean: set[object] = set()
    for definition in program.definitions:
        code = definition.handler
        shape = _shape(code), definition.exception_mask
        if shape in clean:
            continue
        before = diagnostics.total
        _check_unreachable(code, diagnostics)
        depths, underflows = control_flow.depths(code, architecture, gains, tables=program.tables)
        for index, depth in sorted(depths.items()):
            instruction = code.instructions[index]
            if instruction.row.flow is Flow.RETURN:
                message = "'ret' in a handler always raises CALL_MAX: there is no procedure to return from"
                diagnostics.warning(instruction.span, message, hint="write 'exit'")
            if not writes_below:
                _check_cell(instruction, depth, diagnostics)
        if not definition.exception_mask & ExceptionCode.LOG_OVERFLOW:
            _check_room(program.logmax, code, architecture.word_size, diagnostics)
        for underflow in underflows:
            instruction = code.instructions[underflow.index]
            cells = instruction.row.effect.partition("--")[0].strip()
            needed = f"{underflow.needed} cell{'s' if underflow.needed > 1 else ''} ({cells})"
            pushed = f"at most {underflow.depth} {'were' if underflow.depth > 1 else 'was'}"
            pushed = pushed if underflow.depth else "none was"
            diagnostics.warning(instruction.span, f"'{instruction}' needs {needed}, but {pushed} pushed")
        if definition.patch is not None:
            pass
        elif not code.instructions:
            diagnostics.note(definition.span("offset"), "the handler is empty: a hit gives a record without data")
        elif control_flow.runs_off_end(code):
            span = code.instructions[-1].span
            diagnostics.note(span, "the handler has no 'exit' at its end; it acts as if it had one")
        if diagnostics.total == before:
            clean.add(shape)
    for procedure in program.procedures:
        _check_unreachable(procedure.code, diagnostics)
        if control_flow.runs_off_end(procedure.code):
            diagnostics.warning(procedure.span, f"procedure '{procedure.name}' has no 'ret' at its end; one is added")


def _shape(code: Code) -> object:
    """
    Return a hashable value on which the messages about code depend, besides its places in the source.

    Handlers of thousands of probepoints are often equal. If the first one has no messages, equal ones have none.
    """
    instructions = tuple([(each.row.syntax, each.operand, _is_compiled(each)) for each in code.instructions])
    return instructions, tuple(code.labels.items())


def _is_compiled(instruction: Instruction) -> bool:
    """Return whether a compiler chose the spelling of an instruction."""
    return instruction.span is not None and instruction.span.file.wording is not None


def _writes_below_top(instruction: Instruction) -> bool:
    """Return whether an instruction may write to a cell below the top of the stack, or change SBP or TSP."""
    return instruction.row.operator in ("copy", "restore") or instruction.row.syntax.startswith(
        ("pop sbp", "pop tsp", "callk")
    )


def _check_cell(instruction: Instruction, depth: int, diagnostics: Diagnostics) -> None:
    """
    Warn of a read of a cell that was never written, or that was popped (docs/reference/rpn.md, "RPN stack").

    ``depth`` is an upper bound: the cells TSP+0 to TSP+depth-1 may have been written. In a handler, where SBP is the
    end of the stack, these are the cells SBP-depth to SBP-1.
    """
    displacement = instruction.operand
    if not isinstance(displacement, int) or depth >= control_flow.UNKNOWN:
        return
    match instruction.row.syntax:
        case "push tsp, <n>":
            written = range(depth)
        case "push sbp, <n>":
            written = range(-depth, 0)
        case _:
            return
    if displacement not in written:
        cells = f"{depth} cell{'s' * (depth != 1)}"
        has = f"at most {cells} {'are' if depth != 1 else 'is'} on the stack" if depth else "the stack is empty"
        message = f"'{instruction}' reads a cell that nothing has written, or that was popped: {has}"
        diagnostics.warning(instruction.operand_place, message)


def _check_room(logmax: int, code: Code, word_size: int, diagnostics: Diagnostics) -> None:
    """
    Warn of the first instruction whose logged data certainly exceed the log buffer.

    ``logmax`` is the size of the buffer in bytes.
    """
    least: dict[int, int] = {}
    todo = [(0, 0)] if code.instructions else []
    while todo:
        index, logged = todo.pop()
        if least.get(index, logged + 1) <= logged:
            continue
        least[index] = logged
        instruction = code.instructions[index]
        if instruction.row.syntax == "pop lp" or instruction.row.flow is Flow.CALL:
            return
        after = logged + _least_logged(instruction, word_size)
        todo += [(target, after) for target in control_flow.successors(code, index)]
    for index, logged in sorted(least.items()):
        instruction = code.instructions[index]
        needed = logged + _least_logged(instruction, word_size)
        if needed > logmax:
            message = (
                f"'{instruction}' has no room: the log has {_bytes(logmax)}, and at least {_bytes(needed)} are needed"
            )
            diagnostics.warning(instruction.span, message, hint="write a larger 'logmax' in the file header")
            return


def _least_logged(instruction: Instruction, word_size: int) -> int:
    """Return the minimum number of bytes that an instruction logs if there is room."""
    row = instruction.row
    if row.operator != "log" or row.syntax == "log st":
        return 0
    if row.syntax not in LOG_WIDTHS or not isinstance(instruction.operand, int):
        return ITEM_PREFIX_SIZE
    return (LOG_WIDTHS[row.syntax] or word_size) * instruction.operand


def _bytes(count: int) -> str:
    return f"{count} byte{'s' * (count != 1)}"


def _check_unreachable(code: Code, diagnostics: Diagnostics) -> None:
    for run in control_flow.unreachable(code):
        first = code.instructions[run.start]
        if first.row.flow in (Flow.END, Flow.RETURN) and len(run) == 1:
            continue  # an "exit" or "ret" after a jump or another "exit" is a habit, not a mistake
        diagnostics.warning(first.span, f"'{first}' is never reached")


class _HeaderChecks:
    """Checks of the header of a definition: the location of its probepoint, and the statements that depend on it."""

    def __init__(self, program: Program, definition: ProbeDefinition, diagnostics: Diagnostics) -> None:
        self._program = program
        self._definition = definition
        self._diagnostics = diagnostics

    def _wrong(self, keyword: str, message: str, hint: str | None = None) -> None:
        self._diagnostics.error(self._definition.span(keyword), message, hint=hint)

    def check_location(self) -> None:
        program, definition, location = self._program, self._definition, self._definition.location
        if isinstance(location, Tracepoint):
            self._check_tracepoint(location)
            return
        if program.modtype is ModuleType.TRACEPOINT:
            self._check_other_than_tracepoint()
            return
        if definition.watchpoint is not None and not isinstance(location, Address):
            self._wrong("watchpoint", _NO_ADDRESS, "write 'address = <symbol>'")
        if isinstance(location, Address):
            self._check_address(location)
        if isinstance(location, Usdt):
            self._check_usdt(location)
            return
        for instruction in usdt_arguments(program, definition):
            self._diagnostics.error(
                instruction.span,
                f"'{instruction}' needs a USDT probe",
                hint="write 'offset = usdt:PROVIDER:NAME'; 'dprobes list MODULE' shows them",
                notes=(Note("the probe definition that executes it is here", definition.span("offset")),),
            )
        if isinstance(location, Sampler) and definition.opcode is not None:
            self._wrong("opcode", "a sampler probe has no opcode")
        if isinstance(location, Sampler):
            self._check_counter(location)
        if definition.at_return and not isinstance(location, (Offset, Glob)):
            self._wrong("return", "'return = yes' needs 'offset =' with a function")
        if program.name == "*" and not isinstance(location, Sampler):
            self._wrong("offset", _NAME_OF_SAMPLERS)

    def _check_counter(self, sampler: Sampler) -> None:
        program, counter = self._program, sampler.counter
        if counter is None or program.name == "*" or program.modtype is ModuleType.KERNEL:
            return
        if counter_named(counter).is_in_scheduler:
            message = f"there are no {counter} in the code of '{program.name}': they occur in the kernel's scheduler"
            self._wrong("sampler", message, "sample them in all code, and compare 'comm' or 'pid'")

    def _check_address(self, location: Address) -> None:
        low, high = location.low, location.high
        if self._definition.watchpoint is None and high is not None:
            span = self._definition.span("address")
            self._diagnostics.warning(span, "a breakpoint probe has no upper address")
        if self._definition.watchpoint is None and self._program.modtype is ModuleType.USER:
            hint = "a module has another address in each process: write 'offset =' with a symbol or a file offset"
            self._wrong("address", "'address =' in a user program is for watchpoints only", hint)
        if high is not None and low.symbol == high.symbol and high.addend < low.addend:
            self._wrong("address", "the upper address is below the lower one")
        if self._definition.watches_ports:
            self._check_ports(low, high or low)

    def _check_ports(self, low: Expression, high: Expression) -> None:
        symbol = low.symbol or high.symbol
        if symbol is not None:
            self._wrong("address", f"'{symbol}' is an address in memory, and a port is a number", "write its number")
        elif max(low.addend, high.addend) > PORT_MAX:
            self._wrong("address", f"ports are numbers up to {PORT_MAX:#x}")

    def _check_usdt(self, location: Usdt) -> None:
        if self._program.modtype is not ModuleType.USER:
            self._wrong("offset", f"'{location}' is in a program or library, not in the kernel")
        if self._program.name == "*":
            self._wrong("offset", _NAME_OF_SAMPLERS)
        if self._definition.at_return:
            self._wrong("return", "a USDT probe has no return")
        for instruction in usdt_arguments(self._program, self._definition):
            if not 1 <= int(str(instruction.operand)) <= ARGUMENTS_MAX:
                message = f"a USDT probe has no argument {instruction.operand}: they are counted from 1 to"
                self._diagnostics.error(instruction.operand_place, f"{message} {ARGUMENTS_MAX}")

    def _check_other_than_tracepoint(self) -> None:
        if isinstance(self._definition.location, Glob):
            hint = "all system calls are the tracepoints raw_syscalls:sys_enter and raw_syscalls:sys_exit"
            self._wrong("offset", "tracepoints and system calls have no patterns: each is named", hint)
        else:
            hint = "write 'offset = SUBSYSTEM:NAME' or 'offset = syscall:NAME'"
            self._wrong("offset", "a program with 'modtype = tracepoint' has tracepoints and system calls only", hint)

    def _check_tracepoint(self, location: Tracepoint) -> None:
        if self._program.modtype is not ModuleType.TRACEPOINT:
            hint = "write 'modtype = tracepoint' and 'name = vmlinux' in the file header"
            self._wrong("offset", f"'{location}' is a tracepoint", hint)
        if self._definition.watchpoint is not None:
            self._wrong("watchpoint", _NO_ADDRESS)
        if self._definition.opcode is not None:
            self._wrong("opcode", "a tracepoint has no opcode")
        if self._definition.at_return and not location.is_system_call:
            self._wrong("return", "a tracepoint has no return; a system call has one")

    def check_opcode(self, architecture: Architecture) -> None:
        opcode = self._definition.opcode
        if opcode is not None and self._definition.watchpoint is not None:
            self._diagnostics.warning(self._definition.span("opcode"), "a watchpoint has no opcode")
        if opcode is not None and (mnemonic := architecture.unprobeable.get(opcode)):
            hint = "place the probepoint on the instruction before or after it"
            self._wrong("opcode", f"opcode {opcode:#04x} ({mnemonic}) can never carry a probe", hint)

    def check_accessed(self, architecture: Architecture) -> None:
        register = architecture.register(ACCESSED)
        if register is None or self._definition.access is not None:
            return
        for instruction in executed_instructions(self._program, self._definition):
            if instruction.row.operand_kind is OperandKind.REGISTER and instruction.operand in (
                ACCESSED,
                register.index,
            ):
                self._diagnostics.error(
                    instruction.operand_place,
                    f"a program cannot read '{ACCESSED}'; only those that 'dprobes storage' makes can",
                )

    def check_selection(self) -> None:
        program, definition = self._program, self._definition
        for keyword, names, known, definer in (
            ("group", (definition.group,) if definition.group else (), program.groups, "groupdef"),
            ("type", definition.types, program.types, "typedef"),
        ):
            for name in names:
                if name not in known:
                    hint = did_you_mean(name, known) or f"add it to '{definer} =' in the file header"
                    self._wrong(keyword, f"{keyword} '{name}' is not in '{definer} ='", hint)

    def check_skip(self) -> None:
        definition = self._definition
        skip = skipping_instruction(self._program, definition)
        if skip is None:
            return
        if definition.watchpoint is not None:
            what, keyword = "a watchpoint", "watchpoint"
        elif isinstance(definition.location, Sampler):
            what, keyword = "a sampler", "sampler"
        elif isinstance(definition.location, Tracepoint):
            what, keyword = "a tracepoint", "offset"
        elif isinstance(definition.location, Usdt):
            what, keyword = "a USDT probe", "offset"
        elif definition.at_return:
            what, keyword = "the return of a function", "return"
        else:
            return
        message = f"'skip' returns from the function that begins at the probepoint, but none begins at {what}"
        notes = (Note("the probepoint is here", definition.span(keyword)),)
        self._diagnostics.error(skip.span, message, notes=notes)

    def check_entry(self, title: str) -> None:
        asking = entry_instructions(self._program, self._definition)
        if asking and not self._definition.at_return:
            message = f"'{asking[0]}' needs a call that returns, and {title} is not at a return"
            hint = "write 'return = yes' in the header of the probepoint"
            self._diagnostics.error(asking[0].span, message, hint=hint)
        for instruction in asking:
            if instruction.row.syntax == ENTRY and self._program.modtype is ModuleType.TRACEPOINT:
                hint = "write 'push tp, FIELD': a system call has its arguments at its end as well"
                self._diagnostics.error(instruction.span, _NO_REGISTERS, hint=hint)

    def check_patch(self, architecture: Architecture, *, allow_write: bool) -> None:
        program, definition = self._program, self._definition
        if definition.patch is None:
            for keyword, value in (
                ("persist", definition.persists), ("idle", definition.idle), ("replace", definition.is_replacing),
            ):  # fmt: skip
                if value:
                    self._wrong(keyword, f"'{keyword} =' needs 'patch ='")
            if program.has_patches:
                self._wrong("offset", "a program with 'patch =' has patches only", _OWN_PROGRAM)
            return
        if program.modtype is not ModuleType.USER:
            self._wrong("patch", "'patch =' replaces a function of a program or library, not of the kernel")
        elif architecture.name != "x86_64":
            self._wrong("patch", f"'patch =' replaces functions of x86_64 programs, not of {architecture.name} ones")
        if not isinstance(definition.location, Offset) or not _is_function(definition.location):
            self._wrong("patch", "'patch =' needs 'offset =' with a function, without a distance")
        for keyword, value in (
            ("return", definition.at_return), ("passcount", definition.passcount), ("maxhits", definition.maxhits),
            ("heap", definition.heap is not None), ("opcode", definition.opcode is not None),
        ):  # fmt: skip
            if value:
                self._wrong(keyword, f"'{keyword} =' is for hits, and a patch has none")
        handler = definition.handler.instructions
        if any(each.row.syntax not in ("exit", "abort") for each in handler):
            message = "a patch has no handler: the process calls the function of the object directly"
            self._diagnostics.error(handler[0].span or definition.span("patch"), message, hint=_OWN_PROGRAM)
        if not allow_write:
            self._wrong("patch", "'patch =' changes the code of the target", "allow it with --allow-write")


def _is_function(location: Offset) -> bool:
    """Return whether an offset is a symbol alone."""
    return location.expression.symbol is not None and not location.expression.addend


_OWN_PROGRAM = "to probe the function as well, insert a program of its own for that"
_NO_ADDRESS = "a watchpoint needs 'address =', not 'offset ='"
_NAME_OF_SAMPLERS = 'the name "*" is for sampler probes only'
_NO_REGISTERS = "a tracepoint has no registers of its own"

_OUTSIDE = "a program of the type 'user' is hit outside of the kernel"
_X86_ONLY = (Group.IO, Group.SEGMENT)

_EXTENSION_WORD = "kmod"
"""The operator that the paper uses, "call kmod"; all released versions call the instruction ``callk``."""

_VARIABLES = {
    OperandKind.LV: ("local", "vars"),
    OperandKind.GV: ("global", "gvars"),
    OperandKind.CV: ("per-CPU", "cvars"),
    OperandKind.TV: ("per-thread", "tvars"),
}


def check(program: Program, architecture: Architecture, diagnostics: Diagnostics, *, allow_write: bool = False) -> None:
    """
    Add errors and warnings about ``program`` on ``architecture`` to ``diagnostics``.

    Without ``allow_write``, instructions that change the target are errors. Control flow is checked only if there are
    no errors.
    """
    if not _is_for_words_of(program, architecture, diagnostics):
        return
    for table in program.tables:
        _check_table(program, table, diagnostics)
    titles = _handler_titles(program)
    for definition, title in zip(program.definitions, titles, strict=True):
        header = _HeaderChecks(program, definition, diagnostics)
        header.check_location()
        header.check_opcode(architecture)
        header.check_accessed(architecture)
        header.check_selection()
        header.check_skip()
        header.check_entry(title)
        header.check_patch(architecture, allow_write=allow_write)
    blocks: list[tuple[str, Code]] = [
        *((title, definition.handler) for definition, title in zip(program.definitions, titles, strict=True)),
        *((f"procedure '{p.name}'", p.code) for p in program.procedures),
    ]
    owners: dict[str, str] = {}
    for title, code in blocks:
        owners.update(dict.fromkeys(code.labels, title))
    clean: set[object] = set()
    for title, code in blocks:
        if (shape := _shape(code)) in clean:
            continue
        before = diagnostics.total
        for instruction in code.instructions:
            _check_names(program, title, code, owners, instruction, diagnostics)
            _check_index(program, instruction, diagnostics)
            _check_table_name(program, instruction, diagnostics)
            _check_register(architecture, instruction, diagnostics)
            _check_field(program, instruction, diagnostics)
            _check_value(architecture, instruction, diagnostics)
            _check_symbol(program, instruction, diagnostics)
            _check_exit(program, instruction, diagnostics)
            _check_write(program, instruction, diagnostics, allow_write=allow_write)
        if diagnostics.total == before:
            clean.add(shape)
    if not diagnostics.has_errors:
        check_flow(program, architecture, diagnostics)


def _is_for_words_of(program: Program, architecture: Architecture, diagnostics: Diagnostics) -> bool:
    """
    Return whether the program suits the processor's word size.

    If it does not, add an error, after which no other check makes sense.
    """
    compiled, found = program.word_size, architecture.word_size
    if compiled in (None, found):
        return True
    message = f"the program is for words of {compiled} bytes, and those of {architecture.name} have {found}"
    hint = "write a second program, whose module is the path of a file with such words: it is compiled for them"
    diagnostics.error(program.spans.get("wordsize"), message, hint=hint)
    return False


def _handler_titles(program: Program) -> list[str]:
    """Return the names of handlers for messages: the minor code, and the line if several handlers have it."""
    minors = Counter(definition.minor for definition in program.definitions)
    titles = []
    for definition in program.definitions:
        span = definition.span("offset") if minors[definition.minor] > 1 else None
        titles.append(f"the handler of minor {definition.minor}" + (f" at line {span.line}" if span else ""))
    return titles


def _check_field(program: Program, instruction: Instruction, diagnostics: Diagnostics) -> None:
    if instruction.row.syntax.startswith("log kstack") and not _sees_kernel(program):
        diagnostics.error(instruction.span, f"'{instruction}' needs a program about the kernel", hint=_OUTSIDE)
    if program.modtype is not ModuleType.TRACEPOINT:
        if instruction.row.operand_kind is OperandKind.FIELD:
            hint = "write 'modtype = tracepoint' in the file header"
            diagnostics.error(instruction.span, f"'{instruction}' needs a tracepoint", hint=hint)
    elif instruction.row.group is Group.REGISTER and " r," in instruction.row.syntax:
        hint = f"write 'push tp, FIELD', or 'push u, {instruction.operand}' for that of the program"
        diagnostics.error(instruction.span, _NO_REGISTERS, hint=hint)


def _check_names(
    program: Program,
    title: str,
    code: Code,
    owners: dict[str, str],
    instruction: Instruction,
    diagnostics: Diagnostics,
) -> None:
    kind, name = instruction.row.operand_kind, instruction.operand
    if kind is OperandKind.LABEL and name not in code.labels:
        name = str(name)
        owner = owners.get(name)
        message = f"unknown label '{name}' in {title}"
        if owner is None and any(procedure.name == name for procedure in program.procedures):
            notes = (Note(f"'{name}' is a procedure"),)
            diagnostics.error(instruction.operand_place, message, notes=notes, hint=f"write 'call {name}'")
        elif owner is None:
            diagnostics.error(instruction.operand_place, message, hint=did_you_mean(name, code.labels))
        elif instruction.row.operator == "sx":
            note = Note(f"'{name}' is a label of {owner}")
            diagnostics.error(
                instruction.operand_place, f"the exception handler '{name}' is not a label of {title}", notes=(note,)
            )
        else:
            diagnostics.error(instruction.operand_place, message, notes=(Note(f"'{name}' is a label of {owner}"),))
    if kind is OperandKind.PROCEDURE:
        known = [procedure.name for procedure in program.procedures]
        if name not in known:
            hint = did_you_mean(str(name), known)
            if name in code.labels:
                hint = f"'{name}' is a label: write 'jmp {name}', or make a procedure of what it does"
            elif name == _EXTENSION_WORD:
                hint = "extensions are called with 'callk', or 'callk NAME' for one of them"
            diagnostics.error(instruction.operand_place, f"unknown procedure '{name}'", hint=hint)


def _check_index(program: Program, instruction: Instruction, diagnostics: Diagnostics) -> None:
    kind, index = instruction.row.operand_kind, instruction.operand
    if kind not in _VARIABLES or not isinstance(index, int):
        return
    what, keyword = _VARIABLES[kind]
    count = getattr(program, keyword)
    if index >= count:
        has = f"has {count}" if count else "has none"
        message, hint = f"{what} variable {index} does not exist: the program {has}", f"write '{keyword} = {index + 1}'"
        diagnostics.error(instruction.operand_place, message, hint=f"{hint} in the file header")


def _check_table(program: Program, table: Table, diagnostics: Diagnostics) -> None:
    if table.key_size > KEY_SIZE_MAX:
        message = f"the keys of table '{table.name}' take {table.key_size} bytes, more than {KEY_SIZE_MAX}"
        diagnostics.error(table.span, message, hint="give strings and stacks a smaller size, such as 'ustack[20]'")
    elif table.memory > MEMORY_MAX:
        mebibytes = -(-table.memory >> 20)
        message = f"table '{table.name}' would take {mebibytes} MiB, more than {MEMORY_MAX >> 20}"
        diagnostics.error(table.span, message, hint="give it a smaller 'room ='")
    # A companion declares the tables of all programs that were written as one source, and need not use all of them.
    if (
        any(part.kind is KeyKind.KERNEL_STACK for part in table.parts)
        and not _sees_kernel(program)
        and any(
            instruction.row.operand_kind is OperandKind.TABLE and instruction.operand == table.name
            for code in program.bodies()
            for instruction in code.instructions
        )
    ):
        what = "key" if any(key.kind is KeyKind.KERNEL_STACK for key in table.keys) else "value"
        message = f"the {what} 'kstack' of table '{table.name}' needs a program about the kernel"
        diagnostics.error(table.span, message, hint=_OUTSIDE)


def _sees_kernel(program: Program) -> bool:
    return program.modtype is not ModuleType.USER or program.name == "*"


def _check_table_name(program: Program, instruction: Instruction, diagnostics: Diagnostics) -> None:
    if instruction.row.operand_kind is not OperandKind.TABLE:
        return
    name, known = str(instruction.operand), [table.name for table in program.tables]
    if name not in known:
        hint = did_you_mean(name, known) or f"write 'table = {name}, count' in the file header"
        diagnostics.error(instruction.operand_place, f"unknown table '{name}'", hint=hint)
    elif operated_table(instruction.row, name, program.tables) is None:
        message = "'add table' needs a table of kind 'last' with numbers as values, and no user call stacks as keys"
        diagnostics.error(instruction.operand_place, message, hint="'tally' adds to a table of kind 'sum'")


def _check_register(architecture: Architecture, instruction: Instruction, diagnostics: Diagnostics) -> None:
    which = instruction.operand
    if instruction.row.operand_kind is not OperandKind.REGISTER or not isinstance(which, (str, int)):
        return
    register = architecture.register(which)
    if register is None:
        shown = f"'{which}'" if isinstance(which, str) else f"{which:#x}"
        hint = did_you_mean(which, architecture.register_names) if isinstance(which, str) else None
        diagnostics.error(instruction.operand_place, f"{architecture.name} has no register {shown}", hint=hint)
        return
    access = instruction.row.syntax.partition(",")[0]
    if not register.may_be(access):
        others = ", ".join(f"'{d.value}'" for d in Direction if d in register.allowed)
        message = f"'{access}' is not allowed for register '{which}' of {architecture.name}"
        diagnostics.error(instruction.operand_place, message, hint=f"allowed: {others}" if others else None)


def _check_symbol(program: Program, instruction: Instruction, diagnostics: Diagnostics) -> None:
    operand = instruction.operand
    if program.name == "*" and isinstance(operand, Expression) and operand.symbol is not None:
        message = f"'{operand.symbol}' has no address: the name \"*\" stands for no module"
        diagnostics.error(instruction.operand_place, message)


def _check_value(architecture: Architecture, instruction: Instruction, diagnostics: Diagnostics) -> None:
    row, operand = instruction.row, instruction.operand
    bits = architecture.word_bits
    if (
        isinstance(operand, Expression)
        and operand.symbol is None
        and not -(1 << (bits - 1)) <= operand.addend < 1 << bits
    ):
        diagnostics.error(
            instruction.operand_place, f"{operand.addend:#x} does not fit in the {bits}-bit word of {architecture.name}"
        )
    if row.operand_kind is OperandKind.BITS and row.operator[0] == "p" and isinstance(operand, int):
        if not 1 <= operand <= bits:
            diagnostics.warning(
                instruction.operand_place, f"bit {operand} is outside 1 to {bits}: this always raises INVALID_OPERAND"
            )
    elif (
        row.operand_kind is OperandKind.BITS and isinstance(operand, int) and operand >= bits and row.operator[0] == "s"
    ):
        diagnostics.warning(instruction.operand_place, f"a shift by {operand} of a {bits}-bit word always gives 0")
    if row.syntax == "log d, <count>" and architecture.word_size == 4 and not _is_compiled(instruction):
        diagnostics.note(instruction.span, f"'log d, {operand}' is written 'log {operand}' since version 3.4.0")
    if row.group in _X86_ONLY and architecture.name not in ("i386", "x86_64"):
        diagnostics.error(
            instruction.span, f"'{row.syntax}' is for x86 only, and the module is for {architecture.name}"
        )


def _check_exit(program: Program, instruction: Instruction, diagnostics: Diagnostics) -> None:
    if instruction.row.syntax != "exit <code>":
        return
    if instruction.operand not in (1, 2, 3):
        message = f"'exit {instruction.operand}' always raises INVALID_OPERAND: the codes are 1, 2 and 3"
        diagnostics.warning(instruction.operand_place, message)
    elif instruction.operand == 2 and program.modtype is ModuleType.USER:
        message = "'exit 2' (crash dump) is for kernel probes; here it acts as 'exit'"
        diagnostics.warning(instruction.operand_place, message)


def _check_write(program: Program, instruction: Instruction, diagnostics: Diagnostics, *, allow_write: bool) -> None:
    if allow_write:
        return
    if instruction.row.writes or stops_target(instruction, program.modtype):
        does = "writes to" if instruction.row.writes else "stops"
        hint = "allow it with --allow-write"
        diagnostics.error(instruction.span, f"'{instruction}' {does} the target", hint=hint)
