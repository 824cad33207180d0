"""
Features of the running kernel that the engine uses, found by trials: it loads small BPF programs, or creates maps.

A feature is never inferred from a version: distributions backport features, and lockdown, a security module or a
missing capability disables them. The type information (BTF) of the running kernel is opened when it is first used.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Self

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Alu, Helper, Jump, Register
from dprobes.cache_files import cache_directory, read_cached, write_cached
from dprobes.engines.ebpf.attach.code_mappers import RecentMaps
from dprobes.engines.ebpf.kernel.bpf_objects import load
from dprobes.errors import TargetError, system_error
from dprobes.platform.linux.bpf_calls import (
    AttachType,
    MapFlag,
    MapType,
    ProgramFlag,
    ProgramType,
    create_map,
    link_kprobes_nowhere,
    link_uprobes_nowhere,
    open_raw_tracepoint,
)
from dprobes.record.record_origin import BOOT_ID
from dprobes.target.btf import KERNEL_BTF, Btf, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from dprobes.platform.foreign.examiner import Examiner
    from dprobes.target.btf import Signature

__all__ = ["KERNEL_BTF", "Feature", "Features", "KeptAnswers", "KernelTypes"]


class KeptAnswers:
    """
    Cache of numbers about the running kernel, in the file ``name``, which is valid until the next boot.

    The file is text: the kernel's boot id, then lines of a key and a number. If the file cannot be read or written, the
    cache is empty. ``directory`` is by default the user's cache directory.
    """

    def __init__(self, name: str, directory: Path | None = None) -> None:
        self._directory = cache_directory() if directory is None else str(directory)
        self._name = name
        self._known: dict[str, int] | None = None
        self._boot = ""

    def get(self, key: str) -> int | None:
        """Return the cached number of a key, None if there is none."""
        return self._read().get(key)

    def add(self, key: str, number: int) -> None:
        """Add a number under ``key`` to the cache of what this kernel supports, and write the cache file."""
        known = self._read()
        known[key] = number
        if self._boot:
            lines = [self._boot, *(f"{one} {value}" for one, value in known.items())]
            write_cached(self._directory, self._name, ("\n".join(lines) + "\n").encode())

    def _read(self) -> dict[str, int]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, ValueError):
                self._boot = BOOT_ID.read_text().strip()
                boot, *lines = (read_cached(self._directory, self._name) or b"").decode().splitlines()
                if boot == self._boot:
                    pairs = (line.rsplit(" ", 1) for line in lines)
                    self._known = {key: int(number) for key, number in pairs}
        return self._known


def _contents(path: str) -> bytes | mmap.mmap:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Since Linux kernel commit a539e2a6d51d ("btf: Allow mmap of vmlinux btf") (in v6.16).
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    except OSError:
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


class KernelTypes:
    """
    Types of the running kernel. ``Btf`` describes the results of the methods.

    The methods raise OSError if the kernel's BTF cannot be read (FileNotFoundError if the kernel was built without
    BTF), and ``TargetError`` if it lacks a type or member. The look-ups of a start take some 10 ms, so results are
    cached until the next boot, except with another ``path``. Any thread may call the methods, including ``close``.
    """

    def __init__(self, path: str = KERNEL_BTF) -> None:
        self._path = path
        self._answers = KeptAnswers("kernel-types") if path == KERNEL_BTF else None
        self._btf: Btf | None = None
        self._close_data: Callable[[], None] | None = None
        self._lock = threading.RLock()

    def _opened(self) -> Btf:
        if self._btf is None:
            data = _contents(self._path)
            self._btf = Btf(data)
            if isinstance(data, mmap.mmap):
                self._close_data = data.close
        return self._btf

    def require(self) -> None:
        """Raise OSError if the kernel's BTF cannot be read. This takes less time than a look-up."""
        with self._lock:
            self._opened()

    def find(self, kind: Kind, name: str) -> int:
        """Return the BTF id of the type with a kind and name in the running kernel."""
        return self._answer(f"{kind.name} {name}", lambda: self._opened().find(kind, name))

    def member_offset(self, composite: str, path: str) -> int:
        """Return the offset in bytes of a member of a structure. ``path`` may lead into nested structures."""
        return self._answer(f"{composite}.{path}", lambda: self._opened().member_offset(composite, path))

    def signature(self, function: str) -> Signature | None:
        """Return the signature of a function, or None if its arguments are not a fixed number of words."""
        with self._lock:
            return self._opened().signature(function)

    def _answer(self, question: str, look_up: Callable[[], int]) -> int:
        with self._lock:
            if self._answers is None:
                return look_up()
            number = self._answers.get(question)
            if number is None:
                number = look_up()
                self._answers.add(question, number)
            return number

    def tracepoint(self, name: str) -> int:
        """Return the BTF id of a tracepoint's typedef, by which a TRACING program is loaded for the tracepoint."""
        return self.find(Kind.TYPEDEF, f"btf_trace_{name}")

    def close(self) -> None:
        """Release the BTF; a later look-up opens it again."""
        with self._lock:
            if self._btf is not None:
                self._btf.close()
                self._btf = None
            if self._close_data is not None:
                self._close_data()
                self._close_data = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


R0, R1, R2, R3, R4, R5 = (Register(number) for number in range(6))
R10 = Register.R10


class Feature(Enum):
    """Optional features of the kernel. The value completes "this kernel has no ..."."""

    BPF = "BPF programs on uprobes"
    MMAPABLE_ARRAY = "BPF arrays that can be mapped"
    RING_BUFFER = "BPF ring buffers"
    UPROBE_MULTI = "uprobe_multi links"
    UPROBE_MULTI_PROCESS = "uprobe_multi links to one process"
    ATTACH_COOKIE = "cookies of uprobe programs"
    FUNC_IP = "bpf_get_func_ip for uprobes"
    SLEEPABLE_UPROBE = "sleepable uprobe programs"
    MAY_GOTO = "the BPF instruction may_goto"
    ITERATORS = "open-coded BPF iterators"
    BPF_LOOP = "bpf_loop"
    WRITE_USER = "bpf_probe_write_user (kernel lockdown forbids it)"
    WRITE_REGISTERS = "writing of registers by uprobe programs"
    SEND_SIGNAL = "bpf_send_signal"
    FIND_VMA = "bpf_find_vma"
    NAMESPACE_PID = "bpf_get_ns_current_pid_tgid"
    ANCESTOR_CGROUP = "bpf_get_current_ancestor_cgroup_id"
    PERF_EVENT = "BPF programs on perf events"
    PERF_EVENT_COOKIE = "cookies of perf event programs"
    BTF = "BTF type information"
    RAW_TRACEPOINT = "BPF programs on raw tracepoints"
    TYPED_TRACEPOINT = "BPF programs on typed tracepoints (tp_btf)"
    KPROBE = "kprobes"
    KPROBE_MULTI = "kprobe_multi links"
    KPROBE_EVENTS = "kprobe events in tracefs"
    LINK_MISSED = "counts of the hits that kprobes have missed"
    TRAMPOLINE = "BPF trampolines (fentry and fexit)"
    MODIFY_RETURN = "BPF trampolines that skip functions (fmod_ret)"
    OVERRIDE_RETURN = "bpf_override_return (CONFIG_BPF_KPROBE_OVERRIDE)"
    READ_KERNEL = "bpf_probe_read_kernel (kernel lockdown forbids it)"


class Features:
    """
    Container of the kernel's features. The first look-up of a feature tests the kernel.

    ``overrides`` has results that replace trials, for tests.
    """

    def __init__(self, types: KernelTypes | None = None, overrides: Mapping[Feature, bool] | None = None) -> None:
        self.types = types or KernelTypes()
        """The kernel's types, which are loaded at the first look-up."""
        self.maps = RecentMaps()
        """Cache of the mappings of processes, for all engines with these features."""
        self._found: dict[Feature, OSError | None] = {}
        self._results: dict[Callable[[Features], bool], bool] = {}
        for feature, is_there in (overrides or {}).items():
            self._found[feature] = None if is_there else OSError(errno.EOPNOTSUPP, "switched off")

    @cached_property
    def examiner(self) -> Examiner:
        """Reader of other users' files, for all engines with these features."""
        from dprobes.platform.foreign.examiner import Examiner

        return Examiner()

    def remembered(self, trial: Callable[[Features], bool]) -> bool:
        """Return the result of ``trial``, which only the first request calls. Its exceptions are propagated."""
        if trial not in self._results:
            self._results[trial] = trial(self)
        return self._results[trial]

    def __contains__(self, feature: Feature) -> bool:
        return self.error(feature) is None

    def error(self, feature: Feature) -> OSError | None:
        """Return the error of the feature's trial, or None if the kernel has the feature."""
        if feature not in self._found:
            try:
                _TRIALS[feature](self.types)
                self._found[feature] = None
            except OSError as error:
                self._found[feature] = error
            except TargetError as error:
                self._found[feature] = OSError(errno.ENOENT, error.message)
        return self._found[feature]


def _load(
    asm: Assembler,
    kind: ProgramType = ProgramType.KPROBE,
    *,
    attach_type: AttachType = AttachType.NONE,
    flags: ProgramFlag = ProgramFlag.NONE,
    attach_btf_id: int = 0,
) -> int:
    assembled = asm.assemble()
    return load(assembled, {}, kind, attach_type=attach_type, flags=flags, attach_btf_id=attach_btf_id, name="trial")


def _end(asm: Assembler) -> Assembler:
    asm.mov(R0, 0)
    asm.exit()
    return asm


def _nothing() -> Assembler:
    return _end(Assembler())


def _call(helper: Helper, *arguments: int) -> Assembler:
    """Return a program that calls a helper with numbers as arguments."""
    asm = Assembler()
    for register, argument in zip((R1, R2, R3, R4, R5), arguments, strict=False):
        asm.mov(register, argument)
    asm.call(helper)
    return _end(asm)


def _on_stack(helper: Helper, before: tuple[int, ...], size: int, *after: int) -> Assembler:
    """
    Return a program that calls a helper with the numbers ``before``, a pointer, and the numbers ``after``.

    The pointer is to ``size`` zeroed bytes of the stack.
    """
    asm = Assembler()
    for offset in range(-size, 0, 8):
        asm.store(R10, offset, 0)
    registers = iter((R1, R2, R3, R4, R5))
    for argument in before:
        asm.mov(next(registers), argument)
    pointer = next(registers)
    asm.mov(pointer, R10)
    asm.alu(Alu.ADD, pointer, -size)
    for argument in after:
        asm.mov(next(registers), argument)
    asm.call(helper)
    return _end(asm)


def _with_context(helper: Helper, *arguments: int) -> Assembler:
    """Return a program that calls a helper with the program's context and then numbers as arguments."""
    asm = Assembler()
    for register, argument in zip((R2, R3, R4, R5), arguments, strict=False):
        asm.mov(register, argument)
    asm.call(helper)
    return _end(asm)


def _loads(
    make: Callable[[], Assembler],
    kind: ProgramType = ProgramType.KPROBE,
    attach_type: AttachType = AttachType.NONE,
    flags: ProgramFlag = ProgramFlag.NONE,
) -> Callable[[KernelTypes], None]:
    return lambda _: os.close(_load(make(), kind, attach_type=attach_type, flags=flags))


def _link_nowhere(pid: int) -> int:
    """Return the errno of an attempt to create a uprobe_multi link for ``pid`` with an invalid path."""
    program = _load(_nothing(), attach_type=AttachType.TRACE_UPROBE_MULTI)
    try:
        os.close(link_uprobes_nowhere(program, pid))
    except OSError as error:
        return error.errno or 0
    finally:
        os.close(program)
    return 0


def _try_uprobe_multi(_: KernelTypes) -> None:
    # A kernel that supports such links checks the path; others refuse the attach type.
    if (number := _link_nowhere(0)) != errno.EBADF:
        raise system_error(number)


def _try_uprobe_multi_process(types: KernelTypes) -> None:
    # Since Linux kernel commit 46ba0e49b642 ("bpf: fix multi-uprobe PID filtering logic") (in v6.10) the number is that
    # of a process, not of a thread. An impossible one is refused before the path is checked.
    _try_uprobe_multi(types)
    if _link_nowhere(-1 & 0xFFFF_FFFF) != errno.EINVAL:
        raise OSError(errno.EOPNOTSUPP, "the kernel takes the process for a thread")


def _try_func_ip(types: KernelTypes) -> None:
    # Any kernel since 5.15 loads the program, whatever its attach type. But where there are no uprobe_multi links, the
    # helper supports only kprobes, and returns 0. These links came with support in the helper, by commit 686328d80c43
    # ("bpf: Add bpf_get_func_ip helper support for uprobe link") (in v6.6).
    _try_uprobe_multi(types)
    os.close(_load(_with_context(Helper.GET_FUNC_IP), attach_type=AttachType.TRACE_UPROBE_MULTI))


def _may_goto() -> Assembler:
    asm = Assembler()
    turn, done = asm.label(), asm.label()
    asm.mov(R0, 0)
    asm.place(turn)
    asm.may_goto(done)
    asm.jump(turn)
    asm.place(done)
    asm.exit()
    return asm


def _try_iterators(types: KernelTypes) -> None:
    new, following, destroy = (types.find(Kind.FUNC, f"bpf_iter_num_{what}") for what in ("new", "next", "destroy"))
    asm = Assembler()
    turn, done = asm.label(), asm.label()

    def call(function: int) -> None:
        asm.mov(R1, R10)
        asm.alu(Alu.ADD, R1, -8)
        asm.call_kfunc(function)

    asm.mov(R2, 0)
    asm.mov(R3, 1 << 20)
    call(new)
    asm.place(turn)
    call(following)
    asm.jump_if(Jump.JEQ, R0, 0, done)
    asm.jump(turn)
    asm.place(done)
    call(destroy)
    os.close(_load(_end(asm)))


def _bpf_loop() -> Assembler:
    asm = Assembler()
    callback = asm.label()
    asm.mov(R1, 4)
    asm.load_function(R2, callback)
    asm.mov(R3, 0)
    asm.mov(R4, 0)
    asm.call(Helper.LOOP)
    _end(asm)
    asm.function(callback)
    return _end(asm)


def _find_vma() -> Assembler:
    asm = Assembler()
    callback = asm.label()
    asm.call(Helper.GET_CURRENT_TASK_BTF)
    asm.mov(R1, R0)
    asm.mov(R2, 0)
    asm.load_function(R3, callback)
    asm.mov(R4, 0)
    asm.mov(R5, 0)
    asm.call(Helper.FIND_VMA)
    _end(asm)
    asm.function(callback)
    return _end(asm)


_REGISTER_OFFSET = 80  # ax in struct pt_regs of x86-64


def _write_register() -> Assembler:
    asm = Assembler()
    asm.store(R1, _REGISTER_OFFSET, 0)
    return _end(asm)


def _try_typed_tracepoint(types: KernelTypes) -> None:
    kind, attach_type = ProgramType.TRACING, AttachType.TRACE_RAW_TP
    identifier = types.tracepoint("sched_process_exit")
    os.close(_load(_nothing(), kind, attach_type=attach_type, attach_btf_id=identifier))


def _try_kprobe(_: KernelTypes) -> None:
    from dprobes.platform.linux.perf_calls import kprobe_unit

    kprobe_unit()
    os.close(_load(_nothing()))


def _try_kprobe_multi(_: KernelTypes) -> None:
    from dprobes.platform.linux.perf_calls import kprobe_unit

    kprobe_unit()
    program = _load(_nothing(), attach_type=AttachType.TRACE_KPROBE_MULTI)
    try:
        os.close(link_kprobes_nowhere(program))
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
    finally:
        os.close(program)


def _try_kprobe_events(types: KernelTypes) -> None:
    from dprobes.target.kernel.tracefs import open_trace_files

    _try_kprobe(types)
    with open_trace_files() as files:
        files.append("kprobe_events", "")


def _try_link_missed(types: KernelTypes) -> None:
    from dprobes.platform.linux.bpf_calls import LINK_INFO, MISSED, MISSED_MANY

    for member in (MISSED, MISSED_MANY):
        types.member_offset(LINK_INFO, member)


_TRIED_FUNCTION = "bpf_fentry_test1"
"""A kernel function that only the kernel's BPF tests call."""

_SKIPPABLE_FUNCTION = "security_file_open"
"""
A function that ``skip`` supports: BPF programs may override the return value of all ``security_`` functions
(check_attach_modify_return in the verifier).
"""


def _load_at(types: KernelTypes, attach_type: AttachType, function: str) -> int:
    identifier = types.find(Kind.FUNC, function)
    return _load(_nothing(), ProgramType.TRACING, attach_type=attach_type, attach_btf_id=identifier)


def _try_trampoline(types: KernelTypes) -> None:
    program = _load_at(types, AttachType.TRACE_FENTRY, _TRIED_FUNCTION)
    try:
        os.close(open_raw_tracepoint(program))
    finally:
        os.close(program)


def _try_modify_return(types: KernelTypes) -> None:
    _try_trampoline(types)
    os.close(_load_at(types, AttachType.MODIFY_RETURN, _SKIPPABLE_FUNCTION))


_SIGNAL_NONE = 0

_TRIALS: dict[Feature, Callable[[KernelTypes], None]] = {
    Feature.BPF: _loads(_nothing),
    Feature.MMAPABLE_ARRAY: lambda _: os.close(create_map(MapType.ARRAY, 4, 8, 1, MapFlag.MMAPABLE)),
    Feature.RING_BUFFER: lambda _: os.close(create_map(MapType.RINGBUF, 0, 0, mmap.PAGESIZE)),
    Feature.UPROBE_MULTI: _try_uprobe_multi,
    Feature.UPROBE_MULTI_PROCESS: _try_uprobe_multi_process,
    Feature.ATTACH_COOKIE: _loads(lambda: _with_context(Helper.GET_ATTACH_COOKIE)),
    Feature.FUNC_IP: _try_func_ip,
    Feature.SLEEPABLE_UPROBE: _loads(
        lambda: _on_stack(Helper.COPY_FROM_USER, (), 8, 8, 0), flags=ProgramFlag.SLEEPABLE
    ),
    Feature.MAY_GOTO: _loads(_may_goto),
    Feature.ITERATORS: _try_iterators,
    Feature.BPF_LOOP: _loads(_bpf_loop),
    Feature.WRITE_USER: _loads(lambda: _on_stack(Helper.PROBE_WRITE_USER, (0,), 8, 8)),
    Feature.WRITE_REGISTERS: _loads(_write_register),
    Feature.SEND_SIGNAL: _loads(lambda: _call(Helper.SEND_SIGNAL, _SIGNAL_NONE)),
    Feature.FIND_VMA: _loads(_find_vma),
    Feature.NAMESPACE_PID: _loads(lambda: _on_stack(Helper.GET_NS_CURRENT_PID_TGID, (0, 0), 8, 8)),
    Feature.ANCESTOR_CGROUP: _loads(lambda: _call(Helper.GET_CURRENT_ANCESTOR_CGROUP_ID, 0)),
    Feature.PERF_EVENT: _loads(_nothing, ProgramType.PERF_EVENT),
    Feature.PERF_EVENT_COOKIE: _loads(lambda: _with_context(Helper.GET_ATTACH_COOKIE), ProgramType.PERF_EVENT),
    Feature.BTF: KernelTypes.require,
    Feature.RAW_TRACEPOINT: _loads(_nothing, ProgramType.RAW_TRACEPOINT),
    Feature.TYPED_TRACEPOINT: _try_typed_tracepoint,
    Feature.KPROBE: _try_kprobe,
    Feature.KPROBE_MULTI: _try_kprobe_multi,
    Feature.KPROBE_EVENTS: _try_kprobe_events,
    Feature.LINK_MISSED: _try_link_missed,
    Feature.TRAMPOLINE: _try_trampoline,
    Feature.MODIFY_RETURN: _try_modify_return,
    Feature.OVERRIDE_RETURN: _loads(lambda: _with_context(Helper.OVERRIDE_RETURN, 0)),
    Feature.READ_KERNEL: _loads(lambda: _on_stack(Helper.PROBE_READ_KERNEL, (), 8, 8, 0)),
}
