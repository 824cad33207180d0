"""Capabilities that probe programs may need of an engine, and that the rows of the engine registry list."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from dprobes.arch import RegisterClass
from dprobes.errors import EngineError
from dprobes.rpn.instruction_set import Group, OperandKind
from dprobes.rpn.program_needs import watches_user_addresses
from dprobes.rpn.rpn_program import Access, Address, Glob, ModuleType, Sampler, Tracepoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.arch import Architecture
    from dprobes.rpn.rpn_program import Instruction, ProbeDefinition, Program
    from dprobes.source_text import Span

__all__ = ["USUAL_PROCESSORS", "Capability", "Requirement", "requirements"]


class Capability(Enum):
    """Capability that a probe program may need of an engine. The value is a noun phrase for messages."""

    OTHER_PROCESSOR = "probes in code of another processor"
    KERNEL_MODULE = "probes in the kernel or a kernel module"
    KERNEL_EVENT = "watchpoints or samplers in the kernel"
    TRACEPOINT = "tracepoints and system calls of the kernel"
    WATCHPOINT = "watchpoint probes"
    MODULE_WATCHPOINT = "watchpoints in a module"
    PAGE_WATCHPOINT = "watchpoints without debug registers"
    ACCESS_CHECK = "checks of the memory that instructions access"
    PORT_WATCHPOINT = "watchpoints on I/O ports of the kernel"
    USER_PORT_WATCHPOINT = "watchpoints on I/O ports of programs"
    SAMPLER = "sampler probes"
    COUNTER_SAMPLER = "samples of the events of performance counters"
    RETURN = "probes at a function's return"
    GLOB = "patterns in 'offset ='"
    WRITE_REGISTER = "writing registers"
    WRITE_MEMORY = "writing memory"
    KERNEL_WRITE = "writing registers or memory at a hit in the kernel"
    SKIP = "returning at once from functions of programs"
    KERNEL_SKIP = "returning at once from functions of the kernel"
    VERIFY_WRITE = "finding out whether memory can be written"
    SEGMENT_REGISTER = "the segment registers other than cs and ss"
    FLOATING_POINT = "floating-point and SSE registers"
    SYSTEM_REGISTER = "control, debug and model-specific registers"
    CPUID = "the cpuid registers"
    SEGMENTED = "segmented addresses"
    PHYSICAL_MEMORY = "physical memory"
    IO_PORT = "I/O ports"
    COUNTER = "performance counters of threads"
    SWITCH_COUNTER = "counting context switches"
    TASK = "the kernel's task structure"
    KERNEL_STACK = "the call stack in the kernel"
    USER_STACK = "the call stack of the program"
    HAND_OVER = "handing the process to a debugger"
    CORE_DUMP = "writing a core dump"
    LIVE_PATCH = "replacing functions of programs"
    EXTENSION = "extensions called by callk"
    INTERPRETED_EXTENSION = "extensions that have no form for eBPF"


class Requirement(NamedTuple):
    """
    Need of a probe program for a capability of the engine.

    ``what`` is the instruction or header that needs the capability, at ``span`` in the source. ``hurdle`` is the usual
    reason why an engine lacks it.
    """

    capability: Capability
    what: str
    span: Span | None
    hurdle: str | None = None


USUAL_PROCESSORS = ("x86_64", "i386")
"""Processors that engines support without a capability."""

_NO_KPROBES = (
    "this kernel has no kprobes (CONFIG_KPROBES and CONFIG_KPROBE_EVENTS), or lockdown forbids them, and no BPF "
    "trampolines (fentry) in their place: 'dprobes doctor' shows which"
)

_NO_OVERRIDE = (
    "this kernel has neither bpf_override_return (CONFIG_BPF_KPROBE_OVERRIDE) nor BPF trampolines that skip functions "
    "(fmod_ret): 'dprobes doctor' shows why"
)

_READING = {
    RegisterClass.FLOATING_POINT: Capability.FLOATING_POINT,
    RegisterClass.CPUID: Capability.CPUID,
    RegisterClass.SYSTEM: Capability.SYSTEM_REGISTER,
}
"""Capabilities for reading registers of a class. Every engine reads the general registers."""

_WRITING = (Capability.WRITE_REGISTER, Capability.WRITE_MEMORY)

_HELD_BY_EVERY_HIT = ("cs", "ss")
"""Segment registers that the kernel saves at each entry from user space, so that every engine can read them."""


def requirements(program: Program, architecture: Architecture) -> Iterator[Requirement]:
    """Iterate over the needs of a probe program that some engine does not meet."""
    if architecture.name not in USUAL_PROCESSORS:
        what = f"{program.name}, for {architecture.name}"
        yield Requirement(Capability.OTHER_PROCESSOR, what, program.spans.get("name"))
    in_kernel = program.modtype is not ModuleType.USER and not watches_user_addresses(program)
    if in_kernel:
        are_in_code = {_is_in_code(definition) for definition in program.definitions}
        what, span = f"modtype = {program.modtype.value}", program.spans.get("modtype")
        if program.modtype is ModuleType.TRACEPOINT:
            yield Requirement(Capability.TRACEPOINT, what, span)
        elif True in are_in_code:
            yield Requirement(Capability.KERNEL_MODULE, what, span, _NO_KPROBES)
        elif False in are_in_code:
            yield Requirement(Capability.KERNEL_EVENT, what, span)
    checking = next((definition for definition in program.definitions if definition.access is not None), None)
    if checking is not None:
        yield Requirement(Capability.ACCESS_CHECK, "a check of accesses", checking.span("offset"))
    for definition in program.definitions:
        if definition.watchpoint is not None and isinstance(definition.location, Address):
            in_module = program.modtype is ModuleType.USER
            yield _needed_to_watch(definition.watchpoint, definition.span("watchpoint"), in_module=in_module)
        if isinstance(definition.location, Sampler):
            is_timed = definition.location.counter is None
            needed = Capability.SAMPLER if is_timed else Capability.COUNTER_SAMPLER
            yield Requirement(needed, "sampler =", definition.span("sampler"))
        if isinstance(definition.location, Glob):
            yield Requirement(Capability.GLOB, f"offset = {definition.location.pattern}", definition.span("offset"))
        if definition.patch is not None:
            yield Requirement(Capability.LIVE_PATCH, f'patch = "{definition.patch}"', definition.span("patch"))
        if definition.at_return and not isinstance(definition.location, Tracepoint):
            yield Requirement(Capability.RETURN, "return = yes", definition.span("return"))
    for code in program.bodies():
        for instruction in code.instructions:
            if instruction.row.syntax == "skip":
                yield _needed_to_skip(instruction, in_kernel=program.modtype is not ModuleType.USER)
                continue
            if instruction.row.operand_kind is OperandKind.COUNTER:
                yield _needed_to_count(instruction)
                continue
            for capability in _needed_by(instruction, architecture):
                needed = Capability.KERNEL_WRITE if in_kernel and capability in _WRITING else capability
                yield Requirement(needed, str(instruction), instruction.span)


def _is_in_code(definition: ProbeDefinition) -> bool:
    return definition.is_in_code or isinstance(definition.location, Tracepoint)


_NO_PORT_KPROBES = (
    "the kernel's port instructions need kprobes (CONFIG_KPROBES and CONFIG_KPROBE_EVENTS), which lockdown may forbid: "
    "'dprobes doctor' shows whether they work"
)

_NO_USER_PORTS = (
    "the kernel allows no uprobe at a port instruction, so only the kernel's accesses to ports can be watched"
)


def _needed_to_watch(access: Access, span: Span | None, *, in_module: bool) -> Requirement:
    what = f"watchpoint = {access.value}"
    if access.is_of_ports:
        if in_module:
            return Requirement(Capability.USER_PORT_WATCHPOINT, what, span, _NO_USER_PORTS)
        return Requirement(Capability.PORT_WATCHPOINT, what, span, _NO_PORT_KPROBES)
    return Requirement(Capability.MODULE_WATCHPOINT if in_module else Capability.WATCHPOINT, what, span)


def _needed_to_skip(instruction: Instruction, *, in_kernel: bool) -> Requirement:
    capability = Capability.KERNEL_SKIP if in_kernel else Capability.SKIP
    return Requirement(capability, str(instruction), instruction.span, _NO_OVERRIDE if in_kernel else None)


def _needed_to_count(instruction: Instruction) -> Requirement:
    if instruction.operand == "context-switches":
        hurdle = "an engine that stops the thread at a hit adds context switches of its own"
        return Requirement(Capability.SWITCH_COUNTER, str(instruction), instruction.span, hurdle)
    return Requirement(Capability.COUNTER, str(instruction), instruction.span)


def _needed_by(instruction: Instruction, architecture: Architecture) -> Iterator[Capability]:
    row, operand = instruction.row, instruction.operand
    if row.operand_kind is OperandKind.REGISTER and isinstance(operand, (str, int)):
        if row.operator == "pop":
            yield Capability.WRITE_REGISTER
        register = architecture.register(operand)
        if register is None:
            return
        if register.kind is RegisterClass.SEGMENT and register.name not in _HELD_BY_EVERY_HIT:
            yield Capability.SEGMENT_REGISTER
        elif register.kind in _READING:
            yield _READING[register.kind]
    elif row.group is Group.SEGMENT:
        yield Capability.SEGMENTED
    elif row.group is Group.PHYSICAL:
        yield Capability.PHYSICAL_MEMORY
    elif row.group is Group.IO:
        yield Capability.IO_PORT
    elif row.operator == "callk":
        yield Capability.INTERPRETED_EXTENSION if _is_interpreted(instruction) else Capability.EXTENSION
    elif row.operator == "vfyrw":
        yield Capability.VERIFY_WRITE
    elif row.syntax == "push task":
        yield Capability.TASK
    elif row.syntax.startswith("log kstack"):
        yield Capability.KERNEL_STACK
    elif row.syntax.startswith("log ustack"):
        yield Capability.USER_STACK
    elif row.syntax == "exit <code>" and operand in (1, 3):
        yield Capability.HAND_OVER if operand == 1 else Capability.CORE_DUMP
    elif row.writes:
        yield Capability.WRITE_MEMORY


def _is_interpreted(call: Instruction) -> bool:
    """Return True if a ``callk`` calls an extension that has no form for eBPF."""
    from dprobes.extensions.extension_registry import load_extensions, registrations

    called = [r for r in registrations() if call.operand in (None, r.name)]
    try:
        return any(extension.compile is None for extension in load_extensions(called).values())
    except EngineError:
        return False  # the check of extensions reports what cannot be loaded
