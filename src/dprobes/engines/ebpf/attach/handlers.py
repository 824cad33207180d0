"""
Compiled handlers: whether they can be, and in the kernel, and what a refusal there means.

Handlers are written so that the verifier accepts them. One that it does not accept is a bug in DProbes: what the
verifier says goes to a file, for the report, and never to the user as an answer.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembler
from dprobes.bpf.asm.isa import Register
from dprobes.bpf.lower.request import Placement, Request
from dprobes.diagnostics import Note
from dprobes.engines.ebpf.attach.scope import refuse_stops
from dprobes.engines.ebpf.kernel.features import Features
from dprobes.engines.ebpf.kernel.links import attach_uprobes, uprobe_attach_type
from dprobes.engines.ebpf.kernel.loader import load, loadable
from dprobes.engines.ebpf.kernel.refusal import TOO_MANY_FILES
from dprobes.engines.ebpf.support import abilities_of
from dprobes.engines.linux.bpfcalls import AttachType, ProgramFlag, ProgramType
from dprobes.errors import DprobesError, EngineError, NotSupportedError, PrivilegeError, reason_of
from dprobes.resolve.spaces import Space, space_of
from dprobes.rpn.isa import Group
from dprobes.rpn.needs import CORE_DUMP, shared_tables
from dprobes.rpn.point import Point
from dprobes.rpn.program import Sampler, Tracepoint, calls_extensions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.arch import Architecture
    from dprobes.bpf.layout import MapName
    from dprobes.bpf.lower.composer import Composer
    from dprobes.bpf.lower.request import Lowered
    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.ebpf.kernel.descriptors import Descriptors
    from dprobes.engines.ebpf.kernel.tracepointlinks import ProgramForm
    from dprobes.rpn.encoder import CodeImage
    from dprobes.rpn.program import Instruction, ProbeDefinition, Program
    from dprobes.source import Span

__all__ = ["attach_nothing", "basic_request", "check_handlers", "load_handler"]

_SHORTAGES = (errno.ENOMEM, errno.ENFILE, errno.EMFILE)


def basic_request(features: Features, program: Program) -> Request:
    """Return what is asked for all handlers of a program on a kernel."""
    return Request(
        abilities=abilities_of(features, program),
        in_kernel=space_of(program) is Space.KERNEL,
        reads_kernel=space_of(program) is Space.SYSTEM,
        vars=program.vars,
        gvars=program.gvars,
        cvars=program.cvars,
        tvars=program.tvars,
        shared_tables=shared_tables(program),
        extensions=_compiled_extensions(program) if calls_extensions(program) else {},
    )


def _compiled_extensions(program: Program) -> dict[str, Callable[[Composer], None]]:
    """Return what a program may call by ``callk``, in order of registration, in the form for eBPF if there is one."""
    from dprobes.extensions.registry import called_extensions, load_extensions

    extensions = load_extensions(called_extensions(program))
    return {name: found.compile for name, found in extensions.items() if found.compile is not None}


def check_handlers(
    program: Program, image: CodeImage, architecture: Architecture, diagnostics: Diagnostics, request: Request
) -> None:
    """Add an error for each handler that cannot be compiled for a processor, or not be obeyed from here."""
    from dprobes.bpf.lower import check_lowering

    refuse_stops(program, diagnostics)
    if request.in_kernel:
        _refuse_exits(program, diagnostics)
    _warn_of_breakpoints(program, architecture, diagnostics)
    for definition, start in zip(program.definitions, image.handlers, strict=True):
        is_event = definition.watchpoint is not None or isinstance(definition.location, Sampler)
        placed = replace(request, placement=Placement.EVENT if is_event else _in_code(request, definition))
        try:
            check_lowering(image, architecture, start, Point.of(program, definition, 0), placed)
        except NotSupportedError as error:
            span = definition.span("offset") or definition.span("address")
            at = image.span_of(error.origin)
            notes = () if at is None or span is None else (Note("it is in this handler", span),)
            diagnostics.error(
                at or span, f"the ebpf engine cannot run this handler: {error.message}", hint=error.hint, notes=notes
            )


_WHOLE_MACHINE = "use --engine gdb=ENDPOINT, where a stub stands for the machine"
_NO_CORE = "what runs in the kernel has no core; 'exit 2' of --engine gdb=ENDPOINT writes the memory of a machine"


def _refuse_exits(program: Program, diagnostics: Diagnostics) -> None:
    """Add an error for each exit in the kernel that hands over: whatever runs there cannot be stopped for that."""
    for code in program.bodies():
        for instruction in code.instructions:
            if instruction.row.syntax == "exit <code>" and instruction.operand in (1, 2, 3):
                diagnostics.error(
                    instruction.span,
                    f"the ebpf engine cannot hand over what runs in the kernel ('{instruction}')",
                    hint=_NO_CORE if instruction.operand == CORE_DUMP else _WHOLE_MACHINE,
                )


def _in_code(request: Request, definition: ProbeDefinition) -> Placement:
    if isinstance(definition.location, Tracepoint):
        return Placement.TRACEPOINT
    return Placement.KPROBE if request.in_kernel else Placement.BREAKPOINT


def _warn_of_breakpoints(program: Program, architecture: Architecture, diagnostics: Diagnostics) -> None:
    """
    Warn of handlers that may read the code at their own place, where the kernel's breakpoint is to be seen.

    The place of a return is behind a call, where none is.
    """
    for definition in program.definitions:
        if definition.watchpoint is not None or definition.at_return or isinstance(definition.location, Sampler):
            continue
        instructions = definition.handler.instructions
        reads = any(i.row.syntax in ("log mrf", "log str") or i.row.syntax.startswith("push mem") for i in instructions)
        place = next((i for i in instructions if _pushes_ip(i, architecture)), None)
        if reads and place is not None:
            diagnostics.warning(
                place.span,
                "code that is read at a probepoint shows breakpoints (0xcc) with the ebpf engine",
                hint="--engine ptrace shows what the program itself would see",
            )


def _pushes_ip(instruction: Instruction, architecture: Architecture) -> bool:
    row, operand = instruction.row, instruction.operand
    if row.group is not Group.REGISTER or row.operator != "push" or not isinstance(operand, (str, int)):
        return False
    register = architecture.register(operand)
    return register is not None and register.name == "eip"


def load_handler(
    lowered: Lowered,
    placement: Placement,
    maps: Mapping[MapName, int],
    attach_type: AttachType,
    name: str,
    form: ProgramForm | None = None,
    span_of: Callable[[int], Span | None] = lambda _origin: None,
) -> int:
    """
    Load a handler and return its descriptor; ``name`` names it for people.

    ``span_of`` knows where the instruction at a byte of the encoded program was written.

    ``attach_type`` is that of uprobes on this kernel; the handler of an EVENT has none, that of a TRACEPOINT its
    ``form``.
    """
    if placement.is_in_kernel and not placement.is_trampoline:
        from dprobes.engines.ebpf.kernel.kernellinks import kernel_attach_type

        attach_type = kernel_attach_type(placement)
    kind, flags = ProgramType.KPROBE, ProgramFlag.SLEEPABLE if lowered.sleepable else ProgramFlag.NONE
    if placement is Placement.EVENT:
        kind, attach_type, flags = ProgramType.PERF_EVENT, AttachType.NONE, ProgramFlag.NONE
    btf_id = 0
    if form is not None:
        kind, attach_type, btf_id = form
    try:
        return load(
            lowered.assembled, maps, kind, attach_type=attach_type, flags=flags, attach_btf_id=btf_id, name="dprobes"
        )
    except OSError as error:
        reason = reason_of(error)
        if error.errno == errno.EPERM:
            raise PrivilegeError(
                f"the handler of {name} cannot be loaded into the kernel: {reason}",
                hint="dprobes doctor says what is missing",
            ) from error
        if error.errno in _SHORTAGES:
            raise EngineError(
                f"the handler of {name} cannot be loaded into the kernel: {reason}",
                hint=TOO_MANY_FILES if error.errno == errno.EMFILE else None,
            ) from error
        from dprobes.engines.ebpf.attach.verifierfindings import rejection

        with loadable(lowered.assembled, maps, kind, attach_type, flags, btf_id) as loaded:
            raise rejection(loaded, lowered, name, error, span_of) from error


def attach_nothing(path: str, offset: int) -> Descriptors:
    """Attach a program that does nothing to a place in a file, until the result is closed; OSError if that fails."""
    asm = Assembler()
    asm.mov(Register.R0, 0)
    asm.exit()
    features = Features()
    program = load(asm.assemble(), {}, ProgramType.KPROBE, attach_type=uprobe_attach_type(features), name="nothing")
    try:
        return attach_uprobes(program, path, [(offset, 0)], features)
    except DprobesError as error:
        raise OSError(errno.EPERM, error.message) from error
    finally:
        os.close(program)
