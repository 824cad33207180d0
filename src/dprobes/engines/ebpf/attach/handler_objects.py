"""
Checks of handlers for the kernel, their loading as BPF programs, and the meaning of the kernel's errors.

If the verifier rejects a handler, this is a bug in DProbes. The verifier's log is written to a file for the bug report,
and the user's message has the place in the source.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.lower.lowering_request import Placement, Request
from dprobes.diagnostics import Note
from dprobes.engines.ebpf.attach.run_scope import refuse_stops
from dprobes.engines.ebpf.feature_support import abilities_of
from dprobes.engines.ebpf.kernel.bpf_links import attach_uprobes, uprobe_attach_type
from dprobes.engines.ebpf.kernel.bpf_objects import TOO_MANY_FILES, finished, load, loadable
from dprobes.engines.ebpf.kernel.kernel_features import Features
from dprobes.errors import DprobesError, EngineError, InternalError, NotSupportedError, PrivilegeError, reason_of
from dprobes.platform.linux.bpf_calls import AttachType, LogLevel, ProgramFlag, ProgramType, verifier_log
from dprobes.resolve.probepoints import Space, space_of
from dprobes.rpn.instruction_set import Group
from dprobes.rpn.program_needs import CORE_DUMP, shared_tables
from dprobes.rpn.rpn_program import Point, Tracepoint, calls_extensions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.arch import Architecture
    from dprobes.bpf.lower.composer import Composer
    from dprobes.bpf.lower.lowering_request import Lowered
    from dprobes.bpf.map_layouts import MapName
    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.ebpf.kernel.bpf_links import ProgramForm
    from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors
    from dprobes.platform.linux import bpf_calls
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.rpn.rpn_program import Instruction, ProbeDefinition, Program
    from dprobes.source_text import Span

__all__ = ["attach_nothing", "basic_request", "check_handlers", "load_handler", "rejection", "source_place", "span_in"]

_NARROW = 4

_INSTRUCTION = re.compile(r"^(\d+): \(", re.MULTILINE)
_TOO_LARGE = re.compile(r"^BPF program is too large\. Processed (\d+) insn", re.MULTILINE)


def span_in(program: Program, word_size: int, offset: int) -> Span | None:
    """Return the span in the source of the RPN instruction at a byte offset of the encoded program; None if unknown."""
    from dprobes.rpn.instruction_encoding import encode

    return encode(program, architecture("i386" if word_size == _NARROW else "x86_64")).span_of(offset)


def source_place(log: str, lowered: Lowered, span_of: Callable[[int], Span | None]) -> Span | None:
    """
    Return the span in a handler's source at which the verifier stopped, or None if its log does not show it.

    ``span_of`` returns the span of the RPN instruction at a byte offset of the encoded program.
    """
    numbers = _INSTRUCTION.findall(log)
    origins = lowered.assembled.origins
    if not numbers or int(numbers[-1]) >= len(origins):
        return None
    # Code that belongs to no instruction was generated for the one before it.
    before = [origin for origin in origins[: int(numbers[-1]) + 1] if origin >= 0]
    return span_of(before[-1]) if before else None


def rejection(
    program: bpf_calls.Program, lowered: Lowered, name: str, error: OSError, span_of: Callable[[int], Span | None]
) -> DprobesError:
    """Return the error for the kernel's refusal of the handler called ``name``, with the verifier's log."""
    log = verifier_log(program, LogLevel.LEVEL1 | LogLevel.STATS)
    span = source_place(log, lowered, span_of)
    where = f" at {span.file.name}:{span.line}" if span is not None else ""
    if (found := _TOO_LARGE.search(log)) is not None:
        return EngineError(
            f"the handler of {name} is too complex for the kernel's verifier, which gave up after {int(found[1]) - 1} "
            f"instructions{where}",
            hint="use --engine ptrace, or split the handler",
        )
    descriptor, path = tempfile.mkstemp(prefix="dprobes-verifier-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"the handler of {name}: {error}\n\n{log}\neBPF instruction: offset in the encoded program\n")
        file.writelines(f"{n}: {origin:#x}\n" for n, origin in enumerate(lowered.assembled.origins) if origin >= 0)
        file.write(program.instructions.hex(" ", 8) + "\n")
    return InternalError(f"the kernel refuses the handler of {name}{where}; its log is in '{path}'")


_SHORTAGES = (errno.ENOMEM, errno.ENFILE, errno.EMFILE)


def basic_request(features: Features, program: Program) -> Request:
    """Return the properties that all handlers of a program have in common on a kernel."""
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
    """Return the extensions with an eBPF form that a program's ``callk`` may call, in order of registration."""
    from dprobes.extensions.extension_registry import called_extensions, load_extensions

    extensions = load_extensions(called_extensions(program))
    return {name: found.compile for name, found in extensions.items() if found.compile is not None}


def check_handlers(
    program: Program, image: CodeImage, architecture: Architecture, diagnostics: Diagnostics, request: Request
) -> None:
    """Add an error for each handler that cannot be compiled, or whose ``exit`` does not work in this PID namespace."""
    from dprobes.bpf.lower import check_lowering

    refuse_stops(program, diagnostics)
    if request.in_kernel:
        _refuse_exits(program, diagnostics)
    _warn_of_breakpoints(program, architecture, diagnostics)
    for definition, start in zip(program.definitions, image.handlers, strict=True):
        is_event = not definition.is_in_code and not isinstance(definition.location, Tracepoint)
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


_WHOLE_MACHINE = "use --engine gdb=ENDPOINT, with the stub of a machine"
_NO_CORE = "what runs in the kernel has no core; 'exit 2' of --engine gdb=ENDPOINT writes the memory of a machine"


def _refuse_exits(program: Program, diagnostics: Diagnostics) -> None:
    """Add an error for each ``exit 1`` or ``exit 3`` in a handler of kernel code, which cannot be stopped."""
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
    Warn of handlers that may read the code at the instruction pointer, where the kernel's breakpoint is visible.

    At a return the instruction pointer is after the call, where no breakpoint is.
    """
    for definition in program.definitions:
        if not definition.is_in_code or definition.at_return:
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
    Load a handler and return its descriptor; raise a ``DprobesError`` if that fails.

    ``attach_type`` is the attach type for uprobes on this kernel. It is ignored for the placement EVENT, and if there
    is a ``form``, as for TRACEPOINT. ``span_of`` is as for ``source_place``. ``name`` is for messages.
    """
    if placement.is_in_kernel and not placement.is_trampoline:
        from dprobes.engines.ebpf.kernel.bpf_links import kernel_attach_type

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
        problem = f"the handler of {name} cannot be loaded into the kernel: {reason_of(error)}"
        if error.errno == errno.EPERM:
            raise PrivilegeError(problem, hint="'dprobes doctor' shows what is missing") from error
        if error.errno in _SHORTAGES:
            raise EngineError(problem, hint=TOO_MANY_FILES if error.errno == errno.EMFILE else None) from error
        with loadable(lowered.assembled, maps, kind, attach_type, flags, btf_id) as loaded:
            raise rejection(loaded, lowered, name, error, span_of) from error


def attach_nothing(path: str, offset: int) -> Descriptors:
    """
    Attach an empty BPF program to a file offset, until the result is closed.

    Raise OSError with the kernel's error.
    """
    features, nothing = Features(), finished(Assembler())
    program = load(nothing, {}, ProgramType.KPROBE, attach_type=uprobe_attach_type(features), name="nothing")
    try:
        return attach_uprobes(program, path, [(offset, 0)], features)
    except DprobesError as error:
        raise OSError(errno.EPERM, error.message) from error
    finally:
        os.close(program)
