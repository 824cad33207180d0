"""Static checks of the headers of probepoints: what of a header goes together, and with the program's module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch.arguments import ARGUMENTS_MAX
from dprobes.diagnostics import Note
from dprobes.rpn.needs import usdt_arguments
from dprobes.rpn.program import Address, Glob, ModuleType, Offset, Sampler, Tracepoint, Usdt

if TYPE_CHECKING:
    from dprobes.arch import Architecture
    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.program import ProbeDefinition, Program

__all__ = ["check_location", "check_opcode"]


def check_location(program: Program, definition: ProbeDefinition, diagnostics: Diagnostics) -> None:
    """Check where a probepoint is to be, and what its header says of that."""
    location = definition.location
    span = definition.span("address")
    if isinstance(location, Tracepoint) or program.modtype is ModuleType.TRACEPOINT:
        _check_tracepoint(program, definition, diagnostics)
        return
    if definition.watchpoint is not None and not isinstance(location, Address):
        diagnostics.error(
            definition.span("watchpoint"),
            "a watchpoint needs 'address =', not 'offset ='",
            hint="write 'address = <symbol>'",
        )
    if isinstance(location, Address):
        if definition.watchpoint is None and location.high is not None:
            diagnostics.warning(span, "the upper address means nothing for a breakpoint probe")
        if definition.watchpoint is None and program.modtype is ModuleType.USER:
            diagnostics.error(
                span,
                "'address =' in a user program is for watchpoints only",
                hint="a module lies elsewhere in each process: write 'offset =' with a symbol or a file offset",
            )
        _check_range(location, definition, diagnostics)
    if isinstance(location, Usdt):
        _check_usdt(program, definition, location, diagnostics)
        return
    for instruction in usdt_arguments(program, definition):
        diagnostics.error(
            instruction.span,
            f"'{instruction}' needs a USDT probe",
            hint="write 'offset = usdt:PROVIDER:NAME'; 'dprobes list MODULE' shows them",
            notes=(Note("the probe definition that executes it is here", definition.span("offset")),),
        )
    if isinstance(location, Sampler) and definition.opcode is not None:
        diagnostics.error(definition.span("opcode"), "a sampler probe has no opcode")
    if definition.at_return and not isinstance(location, (Offset, Glob)):
        diagnostics.error(definition.span("return"), "'return = yes' needs the 'offset =' of a function")
    if program.name == "*" and not isinstance(location, Sampler):
        diagnostics.error(definition.span("offset"), 'the name "*" is for sampler probes only')


def _check_usdt(program: Program, definition: ProbeDefinition, location: Usdt, diagnostics: Diagnostics) -> None:
    if program.modtype is not ModuleType.USER:
        diagnostics.error(definition.span("offset"), f"'{location}' is in a program or library, not in the kernel")
    if program.name == "*":
        diagnostics.error(definition.span("offset"), 'the name "*" is for sampler probes only')
    if definition.at_return:
        diagnostics.error(definition.span("return"), "a USDT probe has no return")
    for instruction in usdt_arguments(program, definition):
        if not 1 <= int(str(instruction.operand)) <= ARGUMENTS_MAX:
            diagnostics.error(
                instruction.operand_place,
                f"a USDT probe has no argument {instruction.operand}: they are counted from 1 to {ARGUMENTS_MAX}",
            )


def _check_tracepoint(program: Program, definition: ProbeDefinition, diagnostics: Diagnostics) -> None:
    location = definition.location
    if not isinstance(location, Tracepoint):
        if isinstance(location, Glob):
            diagnostics.error(
                definition.span("offset"),
                "tracepoints and system calls have no patterns: each is named",
                hint="all system calls are the tracepoints raw_syscalls:sys_enter and raw_syscalls:sys_exit",
            )
            return
        diagnostics.error(
            definition.span("offset"),
            "a program with 'modtype = tracepoint' has tracepoints and system calls only",
            hint="write 'offset = SUBSYSTEM:NAME' or 'offset = syscall:NAME'",
        )
        return
    if program.modtype is not ModuleType.TRACEPOINT:
        diagnostics.error(
            definition.span("offset"),
            f"'{location}' is a tracepoint",
            hint="write 'modtype = tracepoint' and 'name = vmlinux' in the file header",
        )
    if definition.watchpoint is not None:
        diagnostics.error(definition.span("watchpoint"), "a watchpoint needs 'address =', not 'offset ='")
    if definition.opcode is not None:
        diagnostics.error(definition.span("opcode"), "a tracepoint has no opcode")
    if definition.at_return and not location.is_system_call:
        diagnostics.error(definition.span("return"), "a tracepoint has no return; a system call has one")


def _check_range(location: Address, definition: ProbeDefinition, diagnostics: Diagnostics) -> None:
    low, high = location.low, location.high
    if high is not None and low.symbol == high.symbol and high.addend < low.addend:
        diagnostics.error(definition.span("address"), "the upper address is below the lower one")


def check_opcode(definition: ProbeDefinition, architecture: Architecture, diagnostics: Diagnostics) -> None:
    """Check the opcode that a header expects."""
    if definition.opcode is not None and definition.watchpoint is not None:
        diagnostics.warning(definition.span("opcode"), "'opcode =' means nothing for a watchpoint")
    if definition.opcode is not None and (mnemonic := architecture.unprobeable.get(definition.opcode)):
        diagnostics.error(
            definition.span("opcode"),
            f"opcode {definition.opcode:#04x} ({mnemonic}) can never carry a probe",
            hint="place the probepoint on the instruction before or after it",
        )
