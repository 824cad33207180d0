"""
Loaded programs attached to places in the kernel: one by one through the kprobe PMU, or to many functions at once.

The kernel takes all of it away when the descriptors are closed, also if this process is killed.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from dprobes.bpf.lower.request import Placement
from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.ebpf.kernel.links import link_events
from dprobes.engines.ebpf.kernel.refusal import TOO_MANY_FILES
from dprobes.engines.linux import perfcalls
from dprobes.engines.linux.bpfcalls import AttachType, KprobeMulti, link_kprobes
from dprobes.errors import EngineError, PrivilegeError, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["attach_kernel", "kernel_attach_type"]

_MANY = (Placement.ENTRY, Placement.ENTRY_RETURN)


def kernel_attach_type(placement: Placement) -> AttachType:
    """Return the attach type with which a program for a place in the kernel is to be loaded."""
    return AttachType.TRACE_KPROBE_MULTI if placement in _MANY else AttachType.NONE


def attach_kernel(program: int, places: Sequence[tuple[int, int]], placement: Placement) -> Descriptors:
    """Attach a program to ``places``, addresses of the kernel with the cookie that the program gets there."""
    if placement in _MANY:
        flags = KprobeMulti.RETURN if placement.is_return else KprobeMulti.NONE
        addresses, cookies = [address for address, _ in places], [cookie for _, cookie in places]
        try:
            return Descriptors((link_kprobes(program, addresses, cookies, flags),))
        except OSError as error:
            raise _refusal(error, addresses) from error
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


def _refusal(error: OSError, addresses: Sequence[int]) -> EngineError:
    """Say what the kernel's refusal of kprobes means (``register_kprobe``, ``check_kprobe_address_safe``)."""
    what = f"the probepoint at {addresses[0]:#x}" if len(addresses) == 1 else f"the {len(addresses)} probepoints"
    match error.errno:
        case errno.EPERM | errno.EACCES:
            return PrivilegeError(
                f"the kernel does not permit {what}", hint="run as root; kernel lockdown may forbid kprobes as well"
            )
        case errno.EILSEQ:
            return EngineError(f"{what} in the kernel is inside an instruction")
        case errno.EINVAL:
            return EngineError(f"the kernel excludes {what} from probes: it is in code that handles them, or in none")
        case errno.EADDRNOTAVAIL | errno.ENOENT:
            return EngineError(f"{what} in the kernel is in no function that may be probed")
    return EngineError(
        f"{what} in the kernel cannot be attached: {reason_of(error)}",
        hint=TOO_MANY_FILES if error.errno == errno.EMFILE else None,
    )
