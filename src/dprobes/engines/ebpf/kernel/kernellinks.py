"""
Loaded programs attached to places in the kernel: one by one through the kprobe PMU, or to many functions at once.

The kernel takes all of it away when the descriptors are closed, also if this process is killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembler
from dprobes.bpf.asm.isa import Register
from dprobes.bpf.lower.request import Placement
from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.ebpf.kernel.links import link_event, link_events
from dprobes.engines.ebpf.kernel.loader import load
from dprobes.engines.ebpf.kernel.refusal import TOO_MANY_FILES
from dprobes.engines.linux import perfcalls
from dprobes.engines.linux.bpfcalls import AttachType, KprobeMulti, ProgramType, link_kprobes
from dprobes.errors import EngineError, PrivilegeError, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.bpf.asm.assembler import Assembled

__all__ = ["EntryKprobes", "attach_kernel", "attach_pattern", "kernel_attach_type"]

_MANY = (Placement.ENTRY, Placement.ENTRY_RETURN)


def kernel_attach_type(placement: Placement) -> AttachType:
    """Return the attach type with which a program for a place in the kernel is to be loaded."""
    return AttachType.TRACE_KPROBE_MULTI if placement in _MANY else AttachType.NONE


def attach_kernel(program: int, places: Sequence[tuple[int, int]], placement: Placement) -> Descriptors:
    """Attach a program to ``places``, addresses of the kernel with the cookie that the program gets there."""
    if placement in _MANY:
        try:
            return _link_functions(program, places, placement)
        except OSError as error:
            raise _refusal(error, [address for address, _ in places]) from error
    address = 0

    def events() -> Iterator[tuple[int, int]]:
        nonlocal address
        unit = perfcalls.kprobe_unit()
        for address, cookie in places:
            yield perfcalls.open_kprobe(unit, address, is_return=placement.is_return), cookie

    try:
        return link_events(program, events(), Descriptors())
    except OSError as error:
        raise _refusal(error, [address]) from error


def attach_pattern(
    program: int, places: Sequence[tuple[int, int]], placement: Placement
) -> tuple[Descriptors, dict[int, str]]:
    """
    Attach a program to those of ``places`` that the kernel takes; return the addresses of others with the reason.

    Raise an error of ours if the kernel takes none for a reason that is not the place's.
    """
    if placement in _MANY:
        try:
            return _link_functions(program, places, placement), {}
        except OSError as error:
            if error.errno not in _REASONS:
                raise _refusal(error, [address for address, _ in places]) from error
        refused = _refused_by_ftrace([address for address, _ in places])
        kept = [(address, cookie) for address, cookie in places if address not in refused]
        return (attach_kernel(program, kept, placement) if kept else Descriptors()), refused
    links, refused = Descriptors(), {}
    address = 0
    try:
        unit = perfcalls.kprobe_unit()
        for address, cookie in places:
            try:
                _link_kprobe(links, program, unit, address, cookie, placement)
            except OSError as error:
                if error.errno not in _REASONS:
                    raise
                refused[address] = _REASONS[error.errno]
    except BaseException as error:
        links.close()
        if isinstance(error, OSError):
            raise _refusal(error, [address]) from error
        raise
    return links, refused


class EntryKprobes:
    """
    Kprobes at the entries of functions, which the kernel has already, but that run no program until ``link``.

    What is attached to a function meanwhile comes before them at each hit (``add_new_kprobe`` in kernel/kprobes.c).
    """

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        self._events: list[tuple[int, int]] = []
        unit = perfcalls.kprobe_unit()
        for address, cookie in places:
            # What the kernel refuses, it refuses at the function's return as well, and that is reported.
            with contextlib.suppress(OSError):
                self._events.append((perfcalls.open_kprobe(unit, address), cookie))

    def link(self, program: int) -> Descriptors:
        """Let a program run at all of them from now on."""
        events, self._events = self._events, []
        return link_events(program, events, Descriptors())

    def close(self) -> None:
        """Take away those without a program."""
        while self._events:
            os.close(self._events.pop()[0])


def _link_functions(program: int, places: Sequence[tuple[int, int]], placement: Placement) -> Descriptors:
    flags = KprobeMulti.RETURN if placement.is_return else KprobeMulti.NONE
    addresses, cookies = [address for address, _ in places], [cookie for _, cookie in places]
    return Descriptors((link_kprobes(program, addresses, cookies, flags),))


def _link_kprobe(
    links: Descriptors, program: int, unit: perfcalls.ProbeUnit, address: int, cookie: int, placement: Placement
) -> None:
    link_event(links, program, perfcalls.open_kprobe(unit, address, is_return=placement.is_return), cookie)


def _refused_by_ftrace(addresses: Sequence[int]) -> dict[int, str]:
    """
    Return the functions that the kernel does not take for a link with many, with the reason.

    It refuses a list as a whole. So halves of it are tried, with a program that does nothing.
    """
    refused: dict[int, str] = {}
    program = load(_nothing(), {}, ProgramType.KPROBE, attach_type=AttachType.TRACE_KPROBE_MULTI, name="trial")
    waiting = [addresses]
    try:
        while waiting:
            tried = waiting.pop()
            try:
                os.close(link_kprobes(program, tried, [0] * len(tried)))
            except OSError as error:
                if error.errno not in _REASONS:
                    raise _refusal(error, tried) from error
                if len(tried) == 1:
                    refused[tried[0]] = _REASONS[error.errno]
                else:
                    middle = len(tried) // 2
                    waiting += (tried[:middle], tried[middle:])
    finally:
        os.close(program)
    return refused


def _nothing() -> Assembled:
    asm = Assembler()
    asm.mov(Register.R0, 0)
    asm.exit()
    return asm.assemble()


_REASONS = {
    errno.EILSEQ: "it is inside an instruction",
    errno.EINVAL: "the kernel excludes it from probes: it is in code that handles them, or in none",
    errno.EADDRNOTAVAIL: "it is in no function that may be probed",
    errno.ENOENT: "it is in no function that may be probed",
    errno.ESRCH: "it is in no function that may be probed",
    errno.EBUSY: "ftrace redirects it for somebody else, who forbids to change that",
    errno.EOPNOTSUPP: "the kernel cannot execute what stands there elsewhere",
}
"""What the kernel's refusal means if it is about the place (``register_kprobe``, ``check_kprobe_address_safe``)."""


def _refusal(error: OSError, addresses: Sequence[int]) -> EngineError:
    """Say what the kernel's refusal of kprobes means."""
    what = f"the probepoint at {addresses[0]:#x}" if len(addresses) == 1 else f"the {len(addresses)} probepoints"
    if error.errno in (errno.EPERM, errno.EACCES):
        return PrivilegeError(
            f"the kernel does not permit {what}", hint="run as root; kernel lockdown may forbid kprobes as well"
        )
    if (reason := _REASONS.get(error.errno or 0)) is not None:
        return EngineError(f"{what} in the kernel cannot be attached: {reason}")
    return EngineError(
        f"{what} in the kernel cannot be attached: {reason_of(error)}",
        hint=TOO_MANY_FILES if error.errno == errno.EMFILE else None,
    )
