"""
Attach loaded programs: to many places of a file at once, and to tracepoints; ``cpulinks`` has what each CPU has.

Everything lasts until the ``Descriptors`` that hold the links are closed; what was attached halfway is taken away again
before an error is raised.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, TypeVar

from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.ebpf.kernel.features import Feature
from dprobes.engines.ebpf.kernel.loader import load
from dprobes.engines.ebpf.kernel.refusal import TOO_MANY_FILES
from dprobes.engines.linux.bpfcalls import (
    AttachType,
    ProgramType,
    UprobeMulti,
    link_perf_event,
    link_uprobes,
    open_raw_tracepoint,
)
from dprobes.engines.linux.proxy import close_in_proxy
from dprobes.errors import EngineError, NotSupportedError, PrivilegeError, TargetError, reason_of_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.layout import MapName
    from dprobes.engines.ebpf.kernel.features import Features
    from dprobes.engines.ebpf.kernel.kerneltypes import KernelTypes

__all__ = [
    "SINGLE_UPROBES_MAX",
    "UprobeLinks",
    "attach_typed_tracepoint",
    "attach_uprobes",
    "link_event",
    "link_events",
    "uprobe_attach_type",
]

SINGLE_UPROBES_MAX = 16
"""
How many uprobes are attached one by one, where the kernel has no uprobe_multi.

Each takes the kernel about 0.1 s to detach, one after the other, because each waits for all CPUs.
"""


class UprobeLinks(Descriptors):
    """Own the links of uprobes, which are removed completely whoever is killed meanwhile."""

    def close(self) -> None:
        """Remove the uprobes."""
        close_in_proxy(self.detach())


_ENOTSUPP = 524  # include/linux/errno.h; not for user space, but uprobes let it out


def uprobe_attach_type(features: Features) -> AttachType:
    """Return the attach type with which programs for ``attach_uprobes`` are to be loaded."""
    return AttachType.TRACE_UPROBE_MULTI if Feature.UPROBE_MULTI in features else AttachType.NONE


def attach_uprobes(
    program: int,
    path: str,
    places: Sequence[tuple[int, int]],
    features: Features,
    *,
    pid: int | None = None,
    at_return: bool = False,
    counters: Sequence[int] = (),
    shown: str = "",
) -> Descriptors:
    """
    Attach a program to ``places``, file offsets with the cookie that the program gets there.

    ``counters`` are the file offsets of the semaphores to be raised meanwhile, one for each place, 0 for none.

    ``pid`` restricts it to one process without its children where the kernel can (``Feature.UPROBE_MULTI_PROCESS``),
    which saves the hits of others; the program must look itself. The offsets must be those of instructions that the
    kernel can serve. ``shown`` is the file's name in errors.
    """
    shown = shown or path
    if Feature.UPROBE_MULTI in features:
        process = pid if pid is not None and Feature.UPROBE_MULTI_PROCESS in features else 0
        flags = UprobeMulti.RETURN if at_return else UprobeMulti.NONE
        offsets, cookies = [offset for offset, _ in places], [cookie for _, cookie in places]
        try:
            return UprobeLinks((link_uprobes(program, path, offsets, cookies, flags, process, counters),))
        except OSError as error:
            raise _uprobe_error(error, shown, offsets, counts=any(counters)) from error
    if len(places) > SINGLE_UPROBES_MAX:
        raise NotSupportedError(
            f"{len(places)} probepoints in '{shown}' are too many for this kernel: it has no uprobe_multi links, "
            "attaches them one by one, and takes 0.1 s to detach each",
            hint=f"use at most {SINGLE_UPROBES_MAX} probepoints, Linux 6.6 or later, or --engine ptrace",
        )
    return _single_uprobes(program, path, places, pid, at_return=at_return, counters=counters, shown=shown)


def _single_uprobes(
    program: int,
    path: str,
    places: Sequence[tuple[int, int]],
    pid: int | None,
    *,
    at_return: bool,
    counters: Sequence[int],
    shown: str,
) -> UprobeLinks:
    from dprobes.engines.linux import perfcalls

    offset = 0

    def events() -> Iterator[tuple[int, int]]:
        nonlocal offset
        unit = perfcalls.uprobe_unit()
        process = -1 if pid is None else pid
        for (offset, cookie), counter in zip(places, counters or [0] * len(places), strict=True):
            event = perfcalls.open_uprobe(unit, path, offset, pid=process, is_return=at_return, counter=counter)
            yield event, cookie

    try:
        return link_events(program, events(), UprobeLinks())
    except OSError as error:
        raise _uprobe_error(error, shown, [offset], counts=any(counters)) from error


Links = TypeVar("Links", bound=Descriptors)


def link_event(links: Descriptors, program: int, event: int, cookie: int) -> None:
    """Attach a program to one event; from then on the link, which goes to ``links``, keeps it."""
    from dprobes.engines.linux import perfcalls

    try:
        links.add(link_perf_event(program, event, cookie))
        perfcalls.enable(event)
    finally:
        os.close(event)


def link_events(program: int, events: Iterable[tuple[int, int]], links: Links) -> Links:
    """
    Attach a program to events, each of which comes with the cookie that the program gets; the links go to ``links``.

    From then on these keep the events. OSError as the kernel answers.
    """
    try:
        for event, cookie in events:
            link_event(links, program, event, cookie)
    except BaseException:
        links.close()
        raise
    return links


def _uprobe_error(
    error: OSError, path: str, offsets: Sequence[int], *, counts: bool = False
) -> EngineError | TargetError:
    """Say what the kernel's refusal of uprobes means."""
    what = f"the probepoint at {offsets[0]:#x}" if len(offsets) == 1 else f"the {len(offsets)} probepoints"
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return TargetError(f"'{path}' is not there any more")
        case errno.EBADF:
            return TargetError(f"'{path}' is not a regular file")
        case errno.ESRCH:
            return TargetError("the process has ended")
        case errno.EPERM | errno.EACCES:
            return PrivilegeError(
                f"the kernel does not permit to attach uprobes to '{path}'",
                hint="run as root, or with the capabilities CAP_BPF and CAP_PERFMON",
            )
        case errno.EOPNOTSUPP if counts:
            return NotSupportedError(
                f"this kernel cannot raise the semaphore of the USDT probe of {what} in '{path}'",
                hint="use --engine ptrace",
            )
        case number if number in (_ENOTSUPP, errno.EOPNOTSUPP):
            return NotSupportedError(
                f"the kernel cannot execute the instruction of {what} in '{path}' out of line",
                hint="use --engine ptrace",
            )
        case errno.EINVAL if counts:
            return EngineError(
                f"the kernel refuses {what} in '{path}', which the semaphore of a USDT probe guards",
                hint="another tracer may have a probe at the same place that does not raise the semaphore: the kernel "
                "takes both only if they agree; --engine ptrace does not ask it",
            )
        case errno.EIO | errno.EINVAL:
            return EngineError(
                f"the kernel refuses {what} in '{path}' ({reason_of_number(error.errno or 0)})",
                hint="the file may be on a file system that uprobes cannot read, or have changed",
            )
    return EngineError(
        f"{what} in '{path}' cannot be attached: {reason_of_number(error.errno or 0)}",
        hint=TOO_MANY_FILES if error.errno == errno.EMFILE else None,
    )


def attach_typed_tracepoint(
    tracepoint: str, program: Assembled, maps: Mapping[MapName, int], types: KernelTypes
) -> int:
    """Attach a program to a tracepoint whose arguments it may follow as pointers; return the link's descriptor."""
    fd = load(
        program,
        maps,
        ProgramType.TRACING,
        attach_type=AttachType.TRACE_RAW_TP,
        attach_btf_id=types.tracepoint(tracepoint),
        name=tracepoint,
    )
    try:
        return open_raw_tracepoint(fd)
    finally:
        os.close(fd)
