"""
The watchpoints of a program on I/O ports: a breakpoint at each port instruction of the kernel or of a kernel module.

The debug registers can watch ports, but Linux has no interface for it. The instructions are few, some 550 in a kernel
of a distribution. One with an immediate port is a probepoint only if it accesses a watched port. All others are
probepoints, and the engine compares ``dx`` at each execution, before it counts the hit.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.resolve.probepoints import LeftOutProbe, ProbedCode, Probepoint, probepoint_in_code
from dprobes.rpn.rpn_program import Access, Address
from dprobes.target.code.machine_code import decode
from dprobes.target.code.port_instructions import PortRange, port_accesses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.rpn_program import ProbeDefinition, Program
    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.code.port_instructions import PortAccess
    from dprobes.target.kernel.running_kernel import RunningKernel

__all__ = ["kernel_port_watchpoints", "watched_ports"]

_BITS = 64

_END = "_etext"
"""Symbol after the last function of the kernel."""

_XEN = bytes.fromhex("0f0b 78656e")
"""Prefix of instructions that Xen emulates: ``ud2``, and "xen", which is no code (XEN_EMULATE_PREFIX)."""

_PADDING = bytes(16)
"""Bytes that follow the code of a module, and are no code."""

_KPROBES = Path("/sys/kernel/debug/kprobes/list")
_KPROBE = re.compile(r"^([0-9a-f]+)  [kr]  (?!.*\[FTRACE\])", re.MULTILINE)
"""Line of that list, with the address of a kprobe that has replaced an instruction (``report_probe`` in kprobes.c)."""

_HIDDEN = "a kprobe is there already, and hides whether it is a port instruction"


def watched_ports(definition: ProbeDefinition) -> PortRange:
    """Return the ports of a definition that watches I/O ports."""
    assert isinstance(definition.location, Address), "the checker refuses other locations"
    low, high = definition.location.low, definition.location.high
    return PortRange(low.addend, (high or low).addend)


def kernel_port_watchpoints(
    program: Program, kernel: RunningKernel, module: str, path: str, diagnostics: Diagnostics
) -> tuple[list[Probepoint], list[LeftOutProbe]]:
    """
    Return the probepoints at port instructions of the kernel or a module, and the instructions that are left out.

    ``module`` is the kernel's name of the module, "" for the kernel; ``path`` is its name in messages.

    Add an error for each definition if the code cannot be read, or no port instruction accesses its ports.
    """
    watching = [(n, each) for n, each in enumerate(program.definitions) if each.watches_ports]
    found: list[Probepoint] = []
    left_out: list[LeftOutProbe] = []
    try:
        instructions = list(_instructions(kernel, module, path))
    except TargetError as error:
        for _, definition in watching:
            diagnostics.error(definition.span("watchpoint"), error.message, hint=error.hint)
        return found, left_out
    hidden = list(_hidden_places(kernel, module))
    for number, definition in watching:
        ports = watched_ports(definition)
        own: list[Probepoint] = []
        for instruction, access in instructions:
            if not _is_watched(definition.watchpoint, ports, access):
                continue
            where = kernel.name_of(instruction.address)
            if (reason := kernel.refusal(instruction.address)) is not None:
                left_out.append(LeftOutProbe(number, path, f"{where} ({instruction.text})", reason))
                continue
            code = ProbedCode(instruction, port=access)
            own.append(probepoint_in_code(number, definition, path, where, code, function=where.partition("+")[0]))
        left_out += [LeftOutProbe(number, path, where, _HIDDEN) for where in hidden]
        if not own:
            diagnostics.error(
                definition.span("watchpoint"),
                f"no instruction of '{path}' that can carry a probe accesses these ports",
                hint=None if module else "drivers are often modules: in RPN, 'modtype = kmod' and its name",
            )
        found += own
    return found, left_out


def _is_watched(direction: Access | None, ports: PortRange, access: PortAccess) -> bool:
    if direction is not Access.IO and access.is_output is not (direction is Access.OUTPUT):
        return False
    return ports.may_be_touched(access)


def _instructions(kernel: RunningKernel, module: str, path: str) -> Iterator[tuple[DecodedInstruction, PortAccess]]:
    """
    Iterate over the port instructions of the kernel or a module, by ascending address, with their accesses.

    Their offsets count from the start of the kernel or module. Raise ``TargetError`` if the code cannot be read.
    """
    text, base = kernel.text, kernel.base_of(module)
    for start, end in _functions(kernel, module):
        code = text.read(start, end - start)
        if not code:
            problem = text.problem_at(start) or "the kernel does not show its text"
            raise TargetError(
                f"the port instructions of '{path}' cannot be found: {problem}",
                hint="watching ports needs the kernel's code: /proc/kcore, or the kernel's files of this build",
            )
        if module:
            code = code.partition(_PADDING)[0]
        for position, raw, access in port_accesses(code.replace(_XEN, b"\x90" * len(_XEN)), _BITS, start):
            address = start + position
            yield next(decode(raw, _BITS, address, address - base)), access


def _functions(kernel: RunningKernel, module: str) -> Iterator[tuple[int, int]]:
    """Iterate over the functions of the kernel or a module: start and end, which is the start of the next one."""
    symbols = {symbol.address: symbol for symbol in kernel.symbols.matching("*", module)}
    starts = sorted(symbols)
    stop = next((symbol.address for symbol in kernel.symbols.find(_END, module)), None)
    for number, start in enumerate(starts):
        if (stop is not None and start >= stop) or kernel.is_given_back(start):
            continue
        end = starts[number + 1] if number + 1 < len(starts) else kernel.end_of(symbols[start])
        yield start, end


def _hidden_places(kernel: RunningKernel, module: str) -> Iterator[str]:
    """Iterate over the places of kprobes that exist already, if the kernel lists them."""
    if not kernel.is_loaded:
        return
    try:
        listed = _KPROBES.read_text()
    except OSError:
        return  # only root can read it, and only with debugfs mounted
    for match in _KPROBE.finditer(listed):
        if _is_in(kernel, module, address := int(match[1], 16)):
            yield kernel.name_of(address)


def _is_in(kernel: RunningKernel, module: str, address: int) -> bool:
    symbol = kernel.symbols.covering(address)
    return symbol is not None and symbol.module == module
