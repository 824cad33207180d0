"""Running kernel and its modules: symbols, addresses, code, and the ranges where the kernel refuses probes."""

from __future__ import annotations

import hashlib
import os
import re
import struct
from bisect import bisect_right
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.arch.x86_processors import WATCHPOINTS
from dprobes.cache_files import cache_directory, read_cached, write_cached
from dprobes.errors import TargetError, reason_of
from dprobes.record.record_origin import boot_id
from dprobes.target.kernel.kernel_copies import ambiguous_copies, copies_of, copy_name, written_copy
from dprobes.target.kernel.kernel_symbols import KALLSYMS, Kallsyms
from dprobes.target.module_symbols import clones_among, only_clones

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.kernel.kernel_symbols import KernelSymbol

__all__ = [
    "KCORE",
    "KERNEL_BASE",
    "KERNEL_NAMES",
    "KernelText",
    "LoadedModule",
    "RunningKernel",
    "Segment",
    "Text",
    "advice_on_data",
    "has_same_arguments",
    "present_names",
    "read_list",
]

# Former names of kernel functions, of 2000 to 2004, and their names today.
# Programs of that time still work: for code, a former name without a symbol stands for the present name. A former name
# of data stands for nothing, because its replacement is another thing; the user gets a hint.


_RENAMED = {
    # "x86/entry: Switch page fault exception to IDTENTRY_RAW" 91eeafea1e4b (v5.8), and others of that series
    "do_page_fault": ("exc_page_fault",),
    "do_general_protection": ("exc_general_protection",),  # be4c11afbb6d
    "smp_apic_timer_interrupt": ("sysvec_apic_timer_interrupt",),  # db0338eec583
    "scheduler_tick": ("sched_tick",),  # 86dd6c04ef9f (v6.10)
    "generic_make_request": ("submit_bio_noacct",),  # ed00aabd5eb9 (v5.9)
    "switch_to": ("__switch_to",),
    # "mm/slab: enable slab allocation tagging for kmalloc and friends" 7bd230a26648 (v6.10)
    "kmem_cache_alloc": ("kmem_cache_alloc_noprof",),
    "__kmalloc": ("__kmalloc_noprof",),
    "kmalloc": ("__kmalloc_noprof", "__kmalloc"),
}
"""Present names of renamed functions, by the former name. The likeliest is first."""

_REPLACED = {
    # "clone: support passing tls argument via C" 3033f14ab78c (v4.2); "fork: introduce kernel_clone()" cad6967ac108
    "do_fork": ("kernel_clone", "_do_fork"),
    "_do_fork": ("kernel_clone",),
    "do_execve": ("do_execveat_common", "bprm_execve"),  # 51f39a1f0cea (v3.19)
    "kill_proc": ("kill_pid",),
    "kill_proc_info": ("kill_pid_info",),
    "do_IRQ": ("common_interrupt",),  # "x86/entry: Use idtentry for interrupts" fa5e5c409213 (v5.8)
    "do_timer_interrupt": ("tick_periodic", "tick_handle_periodic"),
    "timer_interrupt": ("tick_handle_periodic", "hrtimer_interrupt"),
    "ll_rw_block": ("submit_bh",),  # "fs/buffer: remove ll_rw_block() helper" 79f597842069
    "path_lookup": ("filename_lookup",),  # "kill path_lookup()" c9c6cac0c2bd
    # "mm: enable page allocation tagging" b951aaff5035 (v6.10)
    "alloc_pages": ("__alloc_pages_noprof", "__alloc_pages"),
    "__alloc_pages": ("__alloc_pages_noprof",),
    "__free_pages_ok": ("__free_pages",),
    # labels of arch/x86/entry/entry_64.S, where no handler may run
    "system_call": ("entry_SYSCALL_64",),
    "ret_from_sys_call": ("syscall_return_via_sysret", "entry_SYSRETQ_unsafe_stack"),
}
"""Functions that replace a former function, with other arguments, by the former name. The likeliest is first."""

_COUNTED = "pages are counted in arrays today: '{}' has the sums, less what each CPU has not added yet"
# "mm, vmstat: add infrastructure for per-node vmstats" 75ef71840539 (v4.8)
_DATA = {
    "nr_free_pages": _COUNTED.format("vm_zone_stat") + ", and begins with the free pages",
    "nr_active_pages": _COUNTED.format("vm_node_stat"),
    "nr_inactive_pages": _COUNTED.format("vm_node_stat"),
    "xtime": "the kernel's clocks are in 'tk_core'; 'push time' gives the time of a hit",
}
"""Hints about the replacement of removed data, by its former name."""

_SYSTEM_CALL = re.compile(r"sys_(\w+)\Z")


def present_names(former: str) -> Iterator[str]:
    """Iterate over the names that a former name may have today on x86-64, the likeliest first."""
    yield from _RENAMED.get(former, ())
    yield from _REPLACED.get(former, ())
    if (match := _SYSTEM_CALL.match(former)) is not None:
        # d5a00528b58c ("syscalls/core, syscalls/x86: Rename struct pt_regs-based sys_*() to __x64_sys_*()") (v4.17)
        yield f"__x64_sys_{match[1]}"


def has_same_arguments(former: str, present: str) -> bool:
    """Return whether the kernel function ``present`` takes the arguments of ``former``, which it replaces."""
    return present in _RENAMED.get(former, ())


def advice_on_data(former: str) -> str | None:
    """Return a hint about the replacement of removed kernel data, or None if there is none."""
    return _DATA.get(former)


# Cache of lists that are slow to read, in the user's cache directory.
# The kernel generates ``/proc/kallsyms`` and the lists of ftrace, line by line, for each reader. Their contents depend
# only on the boot and the loaded modules. An exception is generated code, which is listed with names of modules that do
# not exist; its lines are left out. A cache file is:
#     64 hex digits: the digest of the list's dependencies │ newline │ the list


_PROC_MODULES = Path("/proc/modules")
_SYS_MODULE = "/sys/module"
_DIGITS = 64
_BEGINNING = 2048
"""Number of bytes of a list that are compared with the cached list: the kernel may have begun to hide addresses."""
_GENERATED = re.compile(rb"[^\n]*\t\[(?:bpf|__builtin__\w+)\]\n")


def read_list(path: Path) -> bytes:
    """
    Return a list without generated code, from the cache if it is current.

    Raise OSError if the file cannot be read.
    """
    directory, name = cache_directory(), path.name
    state = _state(path)
    kept = read_cached(directory, name)
    if kept is not None and kept[: _DIGITS + 1] == state + b"\n" and _begins_so(path, kept):
        return kept[_DIGITS + 1 :]
    data = _without_generated(path.read_bytes())
    if _state(path) == state:  # else a module was loaded or unloaded meanwhile
        write_cached(directory, name, state + b"\n" + data)
    return data


def _state(path: Path) -> bytes:
    """Return a digest of the boot id, the path of the list, and the loaded modules."""
    lines = [boot_id(), str(path)]
    try:
        modules = _PROC_MODULES.read_text().splitlines()
    except FileNotFoundError:
        modules = []  # a kernel without loadable modules
    for line in modules:
        # name, size, uses, users, state, address; the directory in sysfs gets a new inode number at each loading
        module, size, _, _, state, address = line.split()[:6]
        try:
            number = os.stat(f"{_SYS_MODULE}/{module}").st_ino  # noqa: PTH116 - a hundred of them
        except OSError:
            number = 0
        lines.append(f"{module} {size} {state} {address} {number}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest().encode()


def _begins_so(path: Path, kept: bytes) -> bool:
    with path.open("rb", buffering=0) as file:
        beginning = file.read(_BEGINNING)
    return bool(beginning) and kept.startswith(beginning, _DIGITS + 1)


def _without_generated(data: bytes) -> bytes:
    """Return the list without the lines of generated code. In ``data``, they follow those of the kernel itself."""
    first = data.find(b"\t[")
    if first < 0:
        return data
    start = data.rfind(b"\n", 0, first) + 1
    return data[:start] + _GENERATED.sub(b"", data[start:])


# The text of the running kernel, as it is in memory: patched for this processor, and with breakpoints in it.
# ``/proc/kcore`` is an ELF core file whose segments are at the kernel's addresses. It cannot be read without
# CAP_SYS_RAWIO, nor in the lockdown mode "confidentiality"; the mode "integrity" permits it.


KCORE = Path("/proc/kcore")

# Elf64_Ehdr: e_phoff at 32, e_phentsize and e_phnum at 54; Elf64_Phdr: type, flags, offset, vaddr, paddr, filesz
_PROGRAM_HEADERS = struct.Struct("=32xQ14xHH")
_PROGRAM_HEADER = struct.Struct("=IIQQQQ")
_PT_LOAD, _PT_NOTE = 1, 4

_NOTES_MAX = 1 << 20
_SHIFT = re.compile(rb"^KERNELOFFSET=([0-9a-f]+)$", re.MULTILINE)
"""Line of the note VMCOREINFO (arch_crash_save_vmcoreinfo in arch/x86/kernel/crash_core_64.c or machine_kexec_64.c)."""

_IMAGES_START, _IMAGES_END = 0xFFFFFFFF80000000, 0xFFFFFFFFC0000000
"""Range of addresses of the kernel's image, below all modules (Documentation/arch/x86/x86_64/mm.rst)."""


class Segment(NamedTuple):
    """A segment of the core file: the ``size`` bytes at offset ``offset`` are the kernel's memory at ``address``."""

    address: int
    size: int
    offset: int


class Text(Protocol):
    """The kernel's code (.text of the kernel and its modules), from memory or from files."""

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes at an address, or no bytes if they cannot be read."""
        ...

    def problem_at(self, address: int) -> str | None:
        """Return a clause with the reason why an address cannot be read, or None if it can."""
        ...

    def origin_of(self, address: int) -> str:
        """Return the path of the file that code was read from, "" if it was read from memory."""
        ...

    def is_patched(self, instruction: DecodedInstruction) -> bool:
        """Return whether the kernel may have patched an instruction that was read here."""
        ...

    @property
    def shift(self) -> int | None:
        """Difference in bytes of the running kernel's addresses from its link addresses (KASLR), or None if unknown."""
        ...


class KernelText:
    """Kernel's memory as a file. ``problem`` is None, or a clause with the reason why the memory cannot be read."""

    def __init__(
        self,
        descriptor: int | None,
        segments: Sequence[Segment] = (),
        problem: str | None = None,
        shift: int | None = None,
    ) -> None:
        self._descriptor = descriptor
        self._segments = segments
        self.problem = problem
        self.shift = shift

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes at an address, or no bytes if they cannot be read."""
        if self._descriptor is None:
            return b""
        for segment in self._segments:
            if segment.address <= address < segment.address + segment.size:
                size = min(size, segment.address + segment.size - address)
                try:
                    return os.pread(self._descriptor, size, segment.offset + address - segment.address)
                except OSError:
                    return b""
        return b""

    def kernel_start(self) -> int | None:
        """
        Return the address of the kernel's image, or None if the file does not show it.

        Source: ``proc_kcore_text_init`` in fs/proc/kcore.c.
        """
        return next((s.address for s in self._segments if _IMAGES_START <= s.address < _IMAGES_END), None)

    def problem_at(self, address: int) -> str | None:
        """Return a clause with the reason why an address cannot be read, or None if it can."""
        return self.problem or (None if self.read(address, 1) else f"{KCORE} does not have the address")

    def origin_of(self, _address: int) -> str:
        """Return "", which means that the code was read from memory."""
        return ""

    def is_patched(self, _instruction: DecodedInstruction) -> bool:
        """Return False: memory has the instructions after the kernel has patched them."""
        return False

    def close(self) -> None:
        """Close ``/proc/kcore``, if it is open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def open_text(path: Path = KCORE) -> KernelText:
    """Open ``/proc/kcore``. If it cannot be read, the result's ``problem`` has the reason."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return KernelText(None, problem=f"{path} cannot be opened: {reason_of(error)}")
    try:
        header = os.pread(descriptor, 64, 0)
        offset, entry, count = _PROGRAM_HEADERS.unpack_from(header)
        table = os.pread(descriptor, entry * count, offset)
        segments = []
        shift = None
        for start in range(0, entry * count, entry):
            kind, _, place, address, _, size = _PROGRAM_HEADER.unpack_from(table, start)
            if kind == _PT_LOAD:
                segments.append(Segment(address, size, place))
            elif kind == _PT_NOTE and (found := _SHIFT.search(os.pread(descriptor, min(size, _NOTES_MAX), place))):
                shift = int(found[1], 16)
    except (OSError, struct.error) as error:
        os.close(descriptor)
        reason = f"cannot be read: {reason_of(error)}" if isinstance(error, OSError) else "is not a core file"
        return KernelText(None, problem=f"{path} {reason}")
    return KernelText(descriptor, segments, shift=shift)


KERNEL_NAMES = ("vmlinux", "bzImage", "vmlinuz", "kernel")
"""Names of the running kernel in ``name =`` of a program with ``modtype = kernel``."""

KERNEL_BASE = "_text"
"""Symbol at the beginning of the kernel's image, from which offsets in the kernel count."""

_BLACKLISTED = "the kernel allows no probe there: the code may be used by kprobes themselves (kprobe blacklist)"
_PER_CPU_OFFSETS = "__per_cpu_offset"
_PER_CPU_AREA = ("__per_cpu_start", "__per_cpu_end")
_CODE_OF_START = ("_sinittext", "_einittext")
_PADDING = "__pfx_"
"""
Prefix of the symbols of the padding before functions.

They exist since Linux kernel commit b341b20d648b ("x86: Add prefix symbols for function padding") (in v6.2).
"""
_TRACING = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
_BLACKLIST = Path("/sys/kernel/debug/kprobes/blacklist")
_INJECTABLE = Path("/sys/kernel/debug/error_injection/list")
_TRAMPOLINES = ("arch_rethook_trampoline", "__kretprobe_trampoline", "kretprobe_trampoline")
"""
Names of the trampoline whose address replaces a return address for a kretprobe.

It was renamed by the Linux kernel commits adf8a61a940c ("kprobes: treewide: Make it harder to refer
kretprobe_trampoline directly") (in v5.16) and f3a112c0c40d ("x86,rethook,kprobes: Replace kretprobe with rethook on
x86") (in v5.18).
"""
_FIRST_WORD = re.compile(rb"^\S+", re.MULTILINE)
_ENDBR = 4
"""Size in bytes of the ``endbr64`` that may precede the instruction that ftrace patches."""


class LoadedModule(NamedTuple):
    """A loaded kernel module: ``size`` bytes at ``address``."""

    name: str
    address: int
    size: int


class RunningKernel:
    """
    The running kernel. ``/proc/kallsyms`` and other lists are read at their first use.

    Names of modules are the kernel's; "" is the kernel itself. ``expected`` has known instructions by address, for
    memory that cannot be read. Lists come from the cache, without generated code such as BPF programs, unless
    ``reads_anew`` is True.
    """

    is_loaded = True
    """True if addresses are those of a running kernel."""
    called: tuple[str, ...] = KERNEL_NAMES
    """The values of ``name =`` with which probe programs refer to the kernel."""
    checks_places = True
    """True if the kernel itself refuses a breakpoint that is not at the start of an instruction."""
    watchpoints = WATCHPOINTS
    """The maximum number of watchpoints."""

    def __init__(
        self,
        symbols: Kallsyms | None = None,
        text: Text | None = None,
        *,
        modules: Mapping[str, LoadedModule] | None = None,
        expected: Mapping[int, bytes] | None = None,
        reads_anew: bool = False,
    ) -> None:
        self._read = Path.read_bytes if reads_anew else read_list
        self._symbols = symbols
        self._text = text
        self._modules = modules
        self.expected = expected or {}

    @cached_property
    def symbols(self) -> Kallsyms:
        """Symbols of the kernel; raise ``TargetError`` if they cannot be read."""
        if self._symbols is None:
            try:
                self._symbols = Kallsyms(self._read(KALLSYMS))
            except OSError as error:
                raise TargetError(
                    f"the kernel's symbols cannot be read: {KALLSYMS}: {reason_of(error)}",
                    hint="a kernel with CONFIG_KALLSYMS is needed",
                ) from error
        if self._symbols.is_hidden:
            raise TargetError(
                f"the kernel hides its addresses: {KALLSYMS} shows 0 for all of them",
                hint="run dprobes as root, or with CAP_SYSLOG, and set kernel.kptr_restrict to 0 or 1",
            )
        return self._symbols

    @cached_property
    def memory(self) -> KernelText:
        """The kernel's memory, as far as it can be read."""
        return self._text if isinstance(self._text, KernelText) else open_text()

    @cached_property
    def text(self) -> Text:
        """The kernel's code in memory, or where memory cannot be read, in the kernel's files."""
        if self._text is None:
            if self.memory.problem is None:
                return self.memory
            from dprobes.target.kernel.kernel_files import (
                FileText,  # only where memory is not readable
                KernelFiles,  # only where memory is not readable
            )

            files = KernelFiles.of_release(os.uname().release)
            self._text = FileText(self.memory.problem, files, lambda: self.base_of(""), self.modules.values)
        return self._text

    @cached_property
    def modules(self) -> Mapping[str, LoadedModule]:
        """The loaded modules by name. The mapping is empty if the kernel hides their addresses."""
        if self._modules is not None:
            return self._modules
        found = {}
        try:
            lines = _PROC_MODULES.read_text().splitlines()
        except OSError:
            return {}  # a kernel without loadable modules
        for line in lines:
            name, size, _, _, _, address = line.split()[:6]
            found[name] = LoadedModule(name, int(address, 16), int(size))
        return found

    def base_of(self, module: str) -> int:
        """
        Return the address from which offsets in a module count.

        Raise ``TargetError`` if the module is not loaded.
        """
        if not module:
            return self._text_start
        if module not in self.modules:
            raise TargetError(f"the module '{module}' is not loaded")
        return self.modules[module].address

    @cached_property
    def _text_start(self) -> int:
        found = self.symbols.find(KERNEL_BASE, "")
        if not found:
            raise TargetError(f"the kernel has no symbol '{KERNEL_BASE}', from which offsets count")
        return found[0].address

    def symbol(self, name: str, module: str, *, is_code: bool = False) -> KernelSymbol:
        """
        Return the symbol with a name; raise ``TargetError`` if the module has none, or several.

        ``name`` may be ``FILE:NAME`` or ``NAME,NUMBER``, as ``written_copy`` accepts it.
        With ``is_code``, symbols of code are preferred, and a former name finds the present one.
        """
        for each in (name, *present_names(name)) if is_code else (name,):
            copies = copies_of(self, each, module, is_code=is_code)
            if len(copies) > 1:
                raise ambiguous_copies(self, each, module, copies)
            if copies:
                return copies[0].symbol
        if (copy := written_copy(self, name, module, is_code=is_code)) is not None:
            return copy
        raise self._not_found(name, module)

    @property
    def return_trampolines(self) -> tuple[int, ...]:
        """Addresses of the trampolines that replace return addresses for kretprobes, or an empty tuple if unknown."""
        return tuple(symbol.address for name in _TRAMPOLINES for symbol in self.symbols.find(name, ""))

    def is_per_cpu(self, address: int) -> bool:
        """
        Return True if an address belongs to a per-CPU variable. The addresses of its copies are computed from it.

        On x86-64, such addresses begin at 0 before Linux kernel commit 9d7de2aa8b41 ("x86/percpu/64: Use relative
        percpu offsets") (in v6.15). Since then they are in the kernel's image.
        """
        start, end = self._per_cpu_area
        return start <= address < end

    @property
    def per_cpu_offsets(self) -> int:
        """Address of the array with each CPU's offset to its copies of per-CPU variables, or 0 if unknown."""
        return next((symbol.address for symbol in self.symbols.find(_PER_CPU_OFFSETS, "")), 0)

    @cached_property
    def _per_cpu_area(self) -> tuple[int, int]:
        found = [self.symbols.find(name, "") for name in _PER_CPU_AREA]
        start, end = (symbols[0].address if symbols else 0 for symbols in found)
        return start, end

    def name_of(self, address: int) -> str:
        """
        Return an address of code as "FUNCTION", "FUNCTION+0xDISTANCE", or without a symbol in hexadecimal.

        One of several functions with a name is named as ``copy_name`` does.
        """
        symbol = self.symbols.covering(address)
        if symbol is None:
            return f"{address:#x}"
        name, distance = copy_name(self, symbol), address - symbol.address
        return f"{name}+{distance:#x}" if distance else name

    @cached_property
    def blacklist(self) -> tuple[tuple[int, int, str], ...] | None:
        """
        Ranges of the kprobes blacklist as (first address, end (excluded), name), or None if it cannot be read.

        The kernel collects it from NOKPROBE_SYMBOL and the sections .kprobes.text, .entry.text and .noinstr.text.
        """
        try:
            lines = _BLACKLIST.read_text().splitlines()
        except OSError:
            return None
        rows = (re.match(r"0x([0-9a-f]+)-0x([0-9a-f]+)\t(\S+)", line) for line in lines)
        return tuple((int(row[1], 16), int(row[2], 16), row[3]) for row in rows if row is not None)

    def is_blacklisted(self, address: int) -> bool:
        """Return whether the kernel is known to refuse probes at an address."""
        index = bisect_right(self._forbidden, (address, 1 << 64))
        return index > 0 and address < self._forbidden[index - 1][1]

    @cached_property
    def _forbidden(self) -> list[tuple[int, int]]:
        """The ranges of the blacklist as (first address, end), merged and sorted."""
        merged: list[tuple[int, int]] = []
        for start, end, _ in sorted(self.blacklist or ()):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged

    @cached_property
    def skippable(self) -> frozenset[str] | None:
        """
        Names of the functions whose execution may be skipped, or None if the list cannot be read.

        The kernel's source marks each of them with ALLOW_ERROR_INJECTION.
        """
        try:
            lines = _INJECTABLE.read_text().splitlines()
        except OSError:
            return None
        return frozenset(line.split()[0] for line in lines if line.strip())

    @property
    def file(self) -> Path | None:
        """The file of a kernel or module that is not running, or None for the running kernel."""
        return None

    def offset_text(self, offset: int) -> str:
        """Return the offset of a place in the kernel or a module in the form that messages show."""
        return f"{offset:#x} from where it is loaded"

    def refusal(self, address: int) -> str | None:
        """
        Return a clause with the reason why the kernel refuses a probe at an address.

        Return None if no reason is known.
        """
        if self.is_given_back(address):
            return "the kernel has executed it when it started, and given its memory back (__init)"
        padded = next((name for name in self.symbols.names_at(address) if name.startswith(_PADDING)), None)
        if padded is not None:
            return f"it is the space before '{padded.removeprefix(_PADDING)}', and never executed"
        return _BLACKLISTED if self.is_blacklisted(address) else None

    def is_given_back(self, address: int) -> bool:
        """Return whether an address is in init code whose memory the kernel has freed."""
        start, end = self._code_of_start
        return start <= address < end and self.has_started

    @property
    def has_started(self) -> bool:
        """True if the kernel has freed its init code, as any kernel that runs user programs."""
        return True

    @cached_property
    def _code_of_start(self) -> tuple[int, int]:
        found = [self.symbols.find(name, "") for name in _CODE_OF_START]
        start, end = (symbols[0].address if symbols else 0 for symbols in found)
        return start, end

    def is_changed_later(self, address: int) -> bool:  # noqa: ARG002 - for code that is not in memory yet
        """Return True if the loader may replace the code at an address. Code in memory is final."""
        return False

    def anchor(self, address: int, module: str) -> tuple[str, int] | None:
        """
        Return the name of the symbol of code at or before an address, and the distance from it.

        Return None if there is no symbol, or its name is not unique in the module.
        """
        symbol = self.symbols.covering(address)
        if symbol is None or symbol.module != module:
            return None
        name = self._only_name(symbol.address, module)
        return None if name is None else (name, address - symbol.address)

    def _only_name(self, address: int, module: str) -> str | None:
        names = sorted(self.symbols.names_at(address))
        return next((name for name in names if len({s.address for s in self.symbols.find(name, module)}) == 1), None)

    def end_of(self, function: KernelSymbol) -> int:
        """Return the end of a function: the address of the next symbol, or else the end of its module."""
        end = self.symbols.following(function)
        if end is not None:
            return end
        module = self.modules.get(function.module)
        return module.address + module.size if module is not None else function.address + 1

    def is_traceable(self, address: int) -> bool | None:
        """Return True if ftrace can trace the function that begins at an address, or None if unknown."""
        if self._traceable_places is not None:
            places = self._traceable_places
            return b"%016x" % address in places or b"%016x" % (address + _ENDBR) in places
        if self._traceable_names is None:
            return None
        return any(name.encode() in self._traceable_names for name in self.symbols.names_at(address))

    @cached_property
    def _traceable_places(self) -> frozenset[bytes] | None:
        """Addresses that ftrace patches, as 16 hex digits each, or None if the kernel does not list them."""
        # The list exists since Linux kernel commit 83f74441bcb1 ("ftrace: Show all functions with addresses in
        # available_filter_functions_addrs") (in v6.5).
        data = self._traced("available_filter_functions_addrs")
        return None if data is None else frozenset(_FIRST_WORD.findall(data))

    @cached_property
    def _traceable_names(self) -> frozenset[bytes] | None:
        """Names of the functions that ftrace can trace, or None if the list cannot be read."""
        data = self._traced("available_filter_functions")
        return None if data is None else frozenset(_FIRST_WORD.findall(data))

    def _traced(self, name: str) -> bytes | None:
        """Return the contents of a file of tracefs, or None if it cannot be read."""
        for directory in _TRACING:
            try:
                return self._read(directory / name)
            except OSError:
                continue
        return None

    def source_files(self, name: str, module: str) -> Mapping[int, str]:
        """
        Return the source file names of the static symbols called ``name``, keyed by run-time address.

        ``module`` is the kernel's name of a module, "" for the kernel. The result is empty if no symbol file of the
        running build is installed.
        """
        from dprobes.target.kernel.kernel_files import described_kernel, sources_in_kernel, sources_in_module

        if module:
            return sources_in_module(name, module)
        return sources_in_kernel(described_kernel(), name, self._text_start)

    def _not_found(self, name: str, module: str) -> TargetError:
        elsewhere = sorted({symbol.module for symbol in self.symbols.find(name) if symbol.module != module})
        if elsewhere:
            other = elsewhere[0]
            how = f"'name = {other}' and 'modtype = kmod'" if other else "'name = vmlinux' and 'modtype = kernel'"
            return TargetError(f"'{name}' is not in {_shown(module)} but in {_shown(other)}", hint=f"write {how}")
        present = next((each for each in present_names(name) if self.symbols.find(each, module)), None)
        advice = f"it is called '{present}' in this kernel" if present is not None else advice_on_data(name)
        if advice is not None:
            return TargetError(f"{_shown(module)} has no symbol '{name}'", hint=advice)
        if clones := clones_among((symbol.name for symbol in self.symbols.matching(f"{name}.*", module)), name):
            return only_clones(_shown(module), name, clones)
        if not self.symbols.has_data:
            return TargetError(
                f"{_shown(module)} has no symbol '{name}'",
                hint=f"of data {KALLSYMS} has no names: the kernel was built without CONFIG_KALLSYMS_ALL",
            )
        near = self.symbols.near(name, module)
        hint = f"did you mean {' or '.join(repr(each) for each in near)}?" if near else None
        return TargetError(f"{_shown(module)} has no symbol '{name}'", hint=hint)


def _shown(module: str) -> str:
    return f"the module '{module}'" if module else "the kernel"
