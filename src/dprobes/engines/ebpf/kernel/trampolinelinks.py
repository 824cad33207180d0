"""
Loaded programs at functions of the kernel by BPF trampolines, which need no kprobes: one program for each function.

The kernel takes all of it away when the descriptors are closed, also if this process is killed.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembler
from dprobes.bpf.asm.isa import Register
from dprobes.bpf.lower.request import Placement
from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.ebpf.kernel.loader import load
from dprobes.engines.ebpf.kernel.refusal import TOO_MANY_FILES
from dprobes.engines.ebpf.kernel.tracepointlinks import ProgramForm
from dprobes.engines.linux.bpfcalls import AttachType, ProgramType, open_raw_tracepoint
from dprobes.errors import EngineError, PrivilegeError, reason_of
from dprobes.target.btf import Kind

if TYPE_CHECKING:
    from dprobes.engines.ebpf.kernel.kerneltypes import KernelTypes

__all__ = ["attach_trampoline", "is_refused", "trampoline_form"]

_ATTACH_TYPES = {
    Placement.FENTRY: AttachType.TRACE_FENTRY,
    Placement.FEXIT: AttachType.TRACE_FEXIT,
    Placement.MODIFY_RETURN: AttachType.MODIFY_RETURN,
}

_OF_THE_PLACE = (errno.EINVAL, errno.ENOENT, errno.EBUSY, errno.EOPNOTSUPP, errno.ENODEV, 524, errno.E2BIG)
"""Errors that are about the function: 524 is ENOTSUPP, which the kernel should keep to itself."""


def trampoline_form(placement: Placement, function: str, types: KernelTypes) -> ProgramForm:
    """Return the form of the program for a function."""
    return ProgramForm(ProgramType.TRACING, _ATTACH_TYPES[placement], types.find(Kind.FUNC, function))


def is_refused(placement: Placement, function: str, types: KernelTypes) -> bool:
    """Return whether the kernel takes no program for a function, found out with one that does nothing."""
    kind, attach_type, identifier = trampoline_form(placement, function, types)
    asm = Assembler()
    asm.mov(Register.R0, 0)
    asm.exit()
    try:
        os.close(load(asm.assemble(), {}, kind, attach_type=attach_type, attach_btf_id=identifier, name="trial"))
    except OSError as error:
        if error.errno not in _OF_THE_PLACE:
            raise _refusal(error, function) from error
        return True
    return False


def attach_trampoline(program: int, function: str, *, is_one_of_many: bool) -> Descriptors | str:
    """Attach a program to its function; return why the kernel refuses ``is_one_of_many``."""
    try:
        return Descriptors((open_raw_tracepoint(program),))
    except OSError as error:
        if is_one_of_many and error.errno in _OF_THE_PLACE:
            return f"the kernel puts no trampoline there ({reason_of(error)})"
        raise _refusal(error, function) from error


def _refusal(error: OSError, function: str) -> EngineError:
    if error.errno in (errno.EPERM, errno.EACCES):
        return PrivilegeError(
            f"the kernel does not permit a trampoline at '{function}'",
            hint="run as root; 'dprobes doctor' says what this kernel has",
        )
    return EngineError(
        f"the kernel puts no trampoline at '{function}': {reason_of(error)}",
        hint=TOO_MANY_FILES if error.errno == errno.EMFILE else None,
    )
