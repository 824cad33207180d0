"""
Programs at tracepoints of the kernel: on their records, by perf events, or on their arguments, with the kernel's types.

The kernel takes all of it away when the descriptors are closed, also if this process is killed.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.ebpf.kernel.links import link_events
from dprobes.engines.ebpf.kernel.refusal import PERF_REMEDY, TOO_MANY_FILES
from dprobes.engines.linux import perfcalls
from dprobes.engines.linux.bpfcalls import AttachType, ProgramType, open_raw_tracepoint
from dprobes.errors import EngineError, PrivilegeError, reason_of
from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.kernel.tracedfields import Source

if TYPE_CHECKING:
    from dprobes.engines.ebpf.kernel.kerneltypes import KernelTypes
    from dprobes.target.kernel.tracedfields import TracedEvent

__all__ = ["ProgramForm", "attach_tracepoint", "form_of"]


class ProgramForm(NamedTuple):
    """How the kernel is to take a program: its type, what it attaches to, and the number of the type that names it."""

    kind: ProgramType
    attach_type: AttachType
    btf_id: int


def form_of(traced: TracedEvent, types: KernelTypes) -> ProgramForm:
    """Return the form of the programs for a tracepoint."""
    if traced.source is Source.RECORD:
        return ProgramForm(ProgramType.TRACEPOINT, AttachType.NONE, 0)
    return ProgramForm(ProgramType.TRACING, AttachType.TRACE_RAW_TP, types.tracepoint(traced.name))


def attach_tracepoint(traced: TracedEvent, program: int) -> Descriptors:
    """Attach a loaded program to a tracepoint."""
    try:
        if traced.source is not Source.RECORD:
            return Descriptors((open_raw_tracepoint(program),))
        # One event runs the program on every CPU (perf_trace_run_bpf_submit in kernel/events/core.c).
        return link_events(program, ((perfcalls.open_tracepoint(each), 0) for each in (traced.event,)), Descriptors())
    except OSError as error:
        raise _refusal(error, traced) from error


def _refusal(error: OSError, traced: TracedEvent) -> EngineError:
    if error.errno in (errno.EPERM, errno.EACCES):
        return PrivilegeError(
            f"the kernel does not permit to attach to the tracepoint '{traced.name}'",
            hint=PERF_REMEDY,
        )
    return EngineError(
        f"the tracepoint '{traced.name}' cannot be attached to: {reason_of(error)}",
        hint=TOO_MANY_FILES if error.errno == errno.EMFILE else None,
    )
