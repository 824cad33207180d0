"""
Checks of ``doctor`` whether this machine permits the ptrace engine's operations.

Most are tried on a child process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import Area, Finding, Use
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.call_injection import MUNMAP, InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.native.handler_memory import map_code, share_memory
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState
from dprobes.engines.refusals import YAMA_REMEDY, yama_scope
from dprobes.errors import reason_of
from dprobes.platform.linux import process_calls, ptrace_calls
from dprobes.platform.linux.procfs import SPARED, process_field, set_score
from dprobes.platform.x86.debug_registers import CONTROL, SLOTS, Watch, control_bits
from dprobes.rpn.rpn_program import Access
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["examine"]

_COMMAND = Use("probe a command", 'dprobes run malloc -c "ls /"', 100)
_PROCESS = Use("probe running processes", "dprobes run malloc -p PID", 80)
_INLINE = Use(
    "run handlers in the process itself, a hundred times faster", "dprobes run --engine inline malloc -p PID", 30
)

_SYS_GETPID = 39


def examine() -> list[Finding]:
    """Return the findings about ptrace on this machine, the essential ones first."""
    findings = []
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        findings += _trace(child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, ptrace_calls.WALL)
    findings += [_other_processes(), _i386_programs(), _debug_files(), _debugger(), _core_files(), _processor()]
    return findings


def _trace(child: int) -> list[Finding]:
    attach = "take over a process of this user (ptrace)"
    try:
        ptrace_calls.seize(child)
        ptrace_calls.interrupt(child)
        os.waitpid(child, ptrace_calls.WALL)
    except OSError as error:
        remedy = "allow ptrace in this container: a seccomp profile or security module forbids it"
        detail = reason_of(error)
        return [Finding(attach, False, detail, remedy, essential=True, area=Area.RIGHTS, use=_COMMAND)]
    registers = ptrace_calls.Registers()
    ptrace_calls.get_registers(child, registers)
    return [
        Finding(attach, works=True, essential=True, area=Area.RIGHTS, use=_COMMAND),
        _code_write(child, registers[ptrace_calls.Register.RIP]),
        _memory_read(child, registers[ptrace_calls.Register.RSP]),
        *_injected_calls(child),
        _debug_registers(child, registers[ptrace_calls.Register.RIP]),
        _out_of_memory(child),
        _cpu_number(child),
    ]


def _code_write(child: int, address: int) -> Finding:
    what = "write breakpoints into code (/proc/PID/mem)"
    try:
        memory = os.open(f"/proc/{child}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            byte = os.pread(memory, 1, address)
            os.pwrite(memory, byte, address)
        finally:
            os.close(memory)
    except OSError as error:
        remedy = "boot with proc_mem.force_override=ptrace, or run on a kernel that does not restrict it"
        return Finding(what, False, reason_of(error), remedy, essential=True, area=Area.RIGHTS)
    return Finding(what, works=True, essential=True, area=Area.RIGHTS)


def _memory_read(child: int, address: int) -> Finding:
    what = "read memory (process_vm_readv)"
    works = len(process_calls.RemoteMemory().read(child, address, 8)) == 8
    remedy = "allow the system call in this container's seccomp profile"
    return Finding(what, works=works, remedy=remedy, essential=True, area=Area.RIGHTS)


def _injected_calls(child: int) -> Iterator[Finding]:
    """Iterate over the findings about system calls that are injected into the child."""
    stepped = "execute copies of probed instructions (a system call injected into the target)"
    alone = "run without a seccomp filter; until then copies are in padding, or instructions are executed in place"
    inline = "run handlers in the probed process, at the cost of a call (inline engine)"
    allowed = "allow processes to be sent files and to map executable memory; until then all hits are breakpoints"
    thread = Thread(child, child, AddressSpace.of_thread(child, 8), ThreadState.STOPPED)
    with contextlib.closing(thread.space):
        yield _injected(stepped, alone, thread, _call_getpid)
        yield _injected(inline, allowed, thread, _map_handlers)._replace(use=_INLINE)


def _injected(what: str, remedy: str, thread: Thread, try_it: Callable[[Thread], None]) -> Finding:
    if not may_inject(thread):
        filtered = process_field(thread.pid, "Seccomp") not in ("", "0")
        detail = "a seccomp filter is in force" if filtered else "threads have shadow stacks"
        return Finding(what, False, detail, remedy, area=Area.ENGINES)
    try:
        try_it(thread)
    except InjectionError as error:
        return Finding(what, False, str(error), remedy, area=Area.ENGINES)
    return Finding(what, works=True, remedy=remedy, area=Area.ENGINES)


def _call_getpid(thread: Thread) -> None:
    with injecting(thread) as call:
        found = call(_SYS_GETPID)
    if found != thread.pid:
        raise InjectionError(f"getpid has returned {found} in process {thread.pid}")


def _map_handlers(thread: Thread) -> None:
    """Map the inline engine's memory: a file that is shared with this process, and a page for code."""
    file = os.memfd_create("doctor")
    try:
        os.ftruncate(file, PAGE_SIZE)
        memory = share_memory(thread, [(file, PAGE_SIZE)], None, lambda _: None)
    finally:
        os.close(file)
    with injecting(thread) as call:
        call(MUNMAP[thread.space.word_size], memory.region, memory.size)
    map_code(thread, 0, [(memory.region, memory.region + PAGE_SIZE)])


def _debug_registers(child: int, address: int) -> Finding:
    what = "watch memory and code (debug registers)"
    free = 0
    detail = ""
    control = 0
    for slot in SLOTS:
        control |= control_bits(slot, Watch(address, 1, Access.EXECUTE))
        try:
            ptrace_calls.set_debug_register(child, slot, address)
            ptrace_calls.set_debug_register(child, CONTROL, control)
        except OSError as error:
            detail = f", {reason_of(error)}"
            break
        free += 1
    remedy = "end other users of them (perf, a debugger); in a virtual machine its host must provide them"
    return Finding(what, free == len(SLOTS), f"{free} of {len(SLOTS)}{detail}", remedy, area=Area.SYSTEM)


def _cpu_number(child: int) -> Finding:
    works = ptrace_calls.rseq_area(child) != 0
    detail = "" if works else "the C library registers no rseq area: a record's cpu is read from /proc, which is slower"
    what, remedy = "read a thread's CPU from its rseq area", "glibc 2.35 or newer has it"
    return Finding(what, works, detail, remedy, area=Area.SYSTEM)


def _out_of_memory(child: int) -> Finding:
    what = "protect the tracer from the out-of-memory killer"
    remedy = "give CAP_SYS_RESOURCE: a tracer that is killed may end what it traces (docs/explanation/safety.md)"
    try:
        set_score(child, SPARED)
    except OSError as error:
        return Finding(what, False, reason_of(error), remedy, area=Area.RIGHTS)
    return Finding(what, works=True, area=Area.RIGHTS)


def _other_processes() -> Finding:
    what = "attach to running processes of this user (-p)"
    if _has_ptrace_capability():
        return Finding(what, True, "and of all other users (CAP_SYS_PTRACE)", area=Area.RIGHTS, use=_PROCESS)
    scope = yama_scope()
    detail = f"kernel.yama.ptrace_scope is {scope}" if scope else ""
    return Finding(what, not scope, detail, YAMA_REMEDY, area=Area.RIGHTS, use=_PROCESS)


def _has_ptrace_capability() -> bool:
    effective = process_field(os.getpid(), "CapEff")
    return bool(effective) and bool(int(effective, 16) & 1 << 19)  # CAP_SYS_PTRACE, capability(7)


def _i386_programs() -> Finding:
    what = "run i386 programs"
    program = os.memfd_create("i386")
    os.write(program, _i386_program(status=42))
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            os.execve(program, ["i386"], {})  # noqa: S606 - a program of ours, no shell
        os._exit(127)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(program)
    remedy = "enable CONFIG_IA32_EMULATION, or boot with ia32_emulation=1"
    detail = "" if status == 42 else "the kernel refuses them"
    return Finding(what, status == 42, detail, remedy, area=Area.SYSTEM)


def _i386_program(status: int) -> bytes:
    """Return a complete i386 ELF program that ends with the exit status ``status``."""
    base, header_size, entry_size = 0x08048000, 52, 32
    # mov eax, 1 (exit) / mov ebx, status / int 0x80
    code = b"\xb8\x01\0\0\0\xbb" + struct.pack("<I", status) + b"\xcd\x80"
    start = header_size + entry_size
    size = start + len(code)
    header = b"\x7fELF\x01\x01\x01" + bytes(9)
    header += struct.pack(
        "<HHIIIIIHHHHHH", 2, 3, 1, base + start, header_size, 0, 0, header_size, entry_size, 1, 0, 0, 0
    )
    segment = struct.pack("<IIIIIIII", 1, 0, base, base, size, size, 5, 0x1000)
    return header + segment + code


def _debug_files() -> Finding:
    what = "find separate debug files (/usr/lib/debug)"
    works = any(Path("/usr/lib/debug/.build-id").glob("*"))
    remedy = "install the -dbg or -dbgsym package of what you probe, or give its symbols with --sym"
    return Finding(what, works, "" if works else "none is installed", remedy, area=Area.TOOLS)


def _debugger() -> Finding:
    found = shutil.which("gdb")
    remedy = "install gdb, or name another debugger with --debugger"
    what, detail = "hand a process over to a debugger (exit 1)", found or "gdb is not found"
    return Finding(what, bool(found), detail, remedy, area=Area.TOOLS)


def _core_files() -> Finding:
    works = os.access(".", os.W_OK)
    detail = "" if works else "this directory cannot be written"
    remedy = "name another directory with --core-dir"
    return Finding("write core files here (exit 3)", works, detail, remedy, area=Area.RIGHTS)


def _processor() -> Finding:
    machine = os.uname().machine
    cpus = os.sysconf("SC_NPROCESSORS_ONLN")
    return Finding(
        "processor that this version can probe",
        works=machine == "x86_64",
        detail=f"{machine}, {cpus} CPU{'s' if cpus != 1 else ''}, Linux {os.uname().release}",
        remedy="probe on an x86-64 machine",
        essential=True,
        area=Area.SYSTEM,
    )
