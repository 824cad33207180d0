"""Planner of an engine: it determines the sites of the probepoints in files, once for each program and file."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import resource
import signal
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.attach.code_mappers import FileId, find_mappers
from dprobes.engines.ebpf.attach.handler_objects import basic_request, check_handlers
from dprobes.engines.ebpf.attach.site_spec import plan_file
from dprobes.errors import DprobesError, TargetError
from dprobes.platform.linux.procfs import process_field
from dprobes.target.elf.file_contents import file_contents
from dprobes.target.module_lookup import executable_of
from dprobes.target.module_outline import return_address_user_in, stack_user
from dprobes.target.other_users import foreign_owner

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.ebpf.attach.code_mappers import Mapper
    from dprobes.engines.ebpf.attach.site_spec import FilePlan
    from dprobes.engines.ebpf.inkernel.kernel_spec import PlannedKernel
    from dprobes.engines.ebpf.kernel.kernel_features import Features
    from dprobes.resolve.kernel_places import ResolvedKernel
    from dprobes.resolve.probepoints import Probepoint, ResolvedModule
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.probed_module import Module, SymbolProvider

__all__ = ["Planner", "Trampoline", "process_hazard", "trampoline", "uretprobe_hazard"]


class Trampoline(enum.Enum):
    """
    Ways in which a thread enters the kernel from the trampoline of uretprobes, on x86-64.

    32-bit processes always use a breakpoint.
    """

    BREAKPOINT = "a breakpoint"
    FILTERED_CALL = "a system call that seccomp filters"
    EXEMPT_CALL = "a system call that seccomp lets pass"


_SYS_URETPROBE = 335
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_NOT_ASKED = 255
# struct sock_filter { u16 code; u8 jt, jf; u32 k; }: load the number; if it is that of uretprobe, return EPERM.
_FILTER = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x20, 0, 0, 0),
        (0x15, 0, 1, _SYS_URETPROBE),
        (0x06, 0, 0, 0x00050000 | errno.EPERM),
        (0x06, 0, 0, 0x7FFF0000),
    )
)


def trampoline() -> Trampoline:
    """
    Return how uretprobes enter the kernel, by calling their system call with and without a seccomp filter.

    Child processes make the calls, because outside of the trampoline the call raises SIGILL. It exists since Linux
    kernel commit ff474a78cef5 ("uprobe: Add uretprobe syscall to speed up return probe") (in v6.11). Seccomp does not
    filter it since cf6cb56ef244 ("seccomp: passthrough uretprobe systemcall without filtering") (in v6.14, and in
    stable kernels before).
    """
    if _status_of_call(filtered=False) != -signal.SIGILL:
        return Trampoline.BREAKPOINT
    return Trampoline.EXEMPT_CALL if _status_of_call(filtered=True) == -signal.SIGILL else Trampoline.FILTERED_CALL


def _status_of_call(*, filtered: bool) -> int:
    """
    Return the exit code of a child process that makes the tested system call, with ``filtered`` under seccomp.

    It is the errno of the call, 0 for success, or the negative number of the signal that ended the child.
    """
    # PyDLL keeps the GIL: in the child, another thread that holds the GIL would not exist. os.fork is not needed: the
    # child uses nothing that the interpreter would have to reinitialize.
    libc = ctypes.PyDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(_FILTER, len(_FILTER))
    program = ctypes.create_string_buffer(struct.pack("=H6xQ", len(_FILTER) // 8, ctypes.addressof(code)))
    child = libc.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGILL, signal.SIG_DFL)
        if filtered:
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0):
                os._exit(_NOT_ASKED)
        libc.syscall(_SYS_URETPROBE)
        os._exit(ctypes.get_errno())
    if child < 0:
        raise OSError(ctypes.get_errno(), "no process to try a system call in")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def uretprobe_hazard(
    module: Module, pids: Iterable[int] | None = None, command: str = "", reached: str = ""
) -> str | None:
    """
    Return a clause with the reason why uretprobes in a module are not safe, or None if no reason is known.

    If they are not safe, uprobes at the return instructions are used. Uretprobes change return addresses in every
    process that executes the module, in scope or not. If ``pids`` is not None, only these processes are checked, for a
    link that is restricted to them. ``command`` is the name of a command to be started. Other processes that start
    later, or install a seccomp filter later, cannot be checked. ``reached`` is a path to the file, by default the
    module's; raise ``TargetError`` if the file does not exist.
    """
    if (reason := return_address_user_in(module)) is not None:
        return reason
    if command and (reason := _command_hazard(command)) is not None:
        return f"'{command}' {reason}"
    programs = _Programs()
    kind: Trampoline | None = None
    try:
        mappers = find_mappers(reached or module.path, pids)
    except OSError as error:
        raise TargetError(f"'{module.path}' no longer exists") from error
    for mapper in mappers:
        if kind is None and process_field(mapper.thread, "Seccomp") not in ("", "0"):
            kind = trampoline()
        if (reason := process_hazard(mapper.thread, kind) or programs.hazard(mapper)) is not None:
            return f"process {mapper.pid} ({process_field(mapper.thread, 'Name')}) {reason}"
    return None


def process_hazard(thread: int, kind: Trampoline | None) -> str | None:
    """
    Return the reason why uretprobes are not safe for a process, as a predicate, or None if no reason is known.

    ``thread`` is one of its threads. ``kind`` is the way into the kernel, or None if unknown.
    """
    if process_field(thread, "Seccomp") not in ("", "0") and kind in (None, Trampoline.FILTERED_CALL):
        return "is confined by seccomp, which may refuse the system call of this kernel's uretprobes"
    if "shstk" in process_field(thread, "x86_Thread_features").split():
        return "has a shadow stack, on which not every kernel changes the return address as well"
    return None


def _command_hazard(command: str) -> str | None:
    try:
        return stack_user(file_contents(executable_of(command), "a program"))
    except DprobesError:
        return None  # it cannot be started, which is reported when that is tried


_RUNTIMES = ("/libstdc++.so", "/libc++abi.so")


_FOREIGN_SIZE = 256 << 20
"""Maximum number of bytes of other users' files that are searched, which takes about a second."""


class _Programs:
    """Executables and libraries of processes. Each file is examined once."""

    def __init__(self) -> None:
        self._known: dict[FileId, str | None] = {}
        self._left = _FOREIGN_SIZE

    def hazard(self, mapper: Mapper) -> str | None:
        """
        Return the reason, a predicate, why a process's code may unwind or switch stacks, or None if it does not.

        The process's executable and libraries are examined.
        """
        program = f"/proc/{mapper.thread}/exe"
        try:
            status = os.stat(program)
            identity = FileId(status.st_dev, status.st_ino)
            if identity not in self._known:
                self._known[identity] = self._clause(program, status)
        except (OSError, TargetError):
            return None  # it has ended
        if (clause := self._known[identity]) is not None:
            return clause
        if any(library in mapper.text for library in _RUNTIMES):
            return "uses C++ exceptions, and what meets a uretprobe on its way up the stack ends the program"
        return None

    def _clause(self, program: str, status: os.stat_result) -> str | None:
        if (owner := foreign_owner(status)) is not None:
            self._left -= status.st_size
            if self._left < 0:
                return f"executes a program of {owner}, which is too long to be searched for what unwinds stacks"
        return stack_user(file_contents(Path(program), "a program"))


class Planner:
    """
    Planner of the sites of a program's probepoints. It may be used by several threads.

    ``exact`` forbids moving a uprobe to a neighboring instruction where a hit takes less time. ``command`` is the name
    of the command that the run will start, or empty.
    """

    def __init__(
        self, features: Features, symbols: SymbolProvider, *, allow_write: bool, exact: bool, command: str
    ) -> None:
        self.features = features
        self.symbols = symbols
        self.allow_write = allow_write
        self.exact = exact
        self._command = command
        self._plans: dict[tuple[int, frozenset[int]], FilePlan] = {}
        self._kernel_plans: dict[int, PlannedKernel] = {}

    def plan(
        self,
        program: Program,
        resolved: ResolvedModule,
        diagnostics: Diagnostics,
        kept: frozenset[int] = frozenset(),
        reached: str = "",
    ) -> FilePlan:
        """
        Return the plan for the probepoints of a file; raise ``SourceError`` if a probepoint is not supported.

        Uprobes at the file offsets ``kept`` are not moved to a neighboring instruction. ``reached`` is a path to the
        file, by default the module's.
        """
        key = (id(resolved), kept)
        plan = self._plans.get(key)
        if plan is None:
            request = replace(basic_request(self.features, program), symbols=dict(resolved.symbols))
            check_handlers(program, resolved.image, resolved.architecture, diagnostics, request)
            self._refuse_events(resolved.events, diagnostics, everywhere=False)
            hazard = partial(uretprobe_hazard, resolved.module, command=self._command, reached=reached)
            plan = plan_file(program, resolved, diagnostics, exact=self.exact, kept=kept, uretprobe_hazard=hazard)
            self._plans[key] = plan
        return plan

    def plan_kernel(self, program: Program, resolved: ResolvedKernel, diagnostics: Diagnostics) -> PlannedKernel:
        """Return the plan for the probepoints in the kernel; raise ``SourceError`` if a probepoint is not supported."""
        from dprobes.engines.ebpf.inkernel.kernel_spec import plan_kernel, refuse_reading, refuse_skips, refuse_waiting

        if (known := self._kernel_plans.get(id(resolved))) is not None:
            return known
        request = replace(basic_request(self.features, program), symbols=dict(resolved.symbols))
        check_handlers(program, resolved.image, resolved.architecture, diagnostics, request)
        self._refuse_events(resolved.events, diagnostics, everywhere=True)
        refuse_reading(program, resolved, self.features, diagnostics)
        refuse_waiting(resolved, self.features, diagnostics)
        refuse_skips(program, resolved, self.features, diagnostics)
        diagnostics.raise_if_errors()
        planned = plan_kernel(program, resolved, self.features, diagnostics)
        diagnostics.raise_if_errors()
        self._kernel_plans[id(resolved)] = planned
        return planned

    def forget(self) -> None:
        """Discard the cached plans of runs that have ended."""
        self._plans.clear()
        self._kernel_plans.clear()

    def plan_everywhere(self, probes: Sequence[Probepoint], diagnostics: Diagnostics) -> None:
        """Raise ``SourceError`` if a probepoint of a program without a module is not supported."""
        self._refuse_events(probes, diagnostics, everywhere=True)
        diagnostics.raise_if_errors()

    def _refuse_events(self, probes: Sequence[Probepoint], diagnostics: Diagnostics, *, everywhere: bool) -> None:
        if probes:
            from dprobes.engines.ebpf.attach.perf_probes import refuse_events

            refuse_events(probes, self.features, diagnostics, everywhere=everywhere)
