"""The running kernel and its modules: names to addresses and back, text, and what nobody may probe."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.arch.x86 import WATCHPOINTS
from dprobes.errors import TargetError, reason_of
from dprobes.lazynamedtuple import NamedTuple
from dprobes.lazypattern import lazy_pattern
from dprobes.target.kernel.formernames import advice_on_data, present_names
from dprobes.target.kernel.kallsyms import KALLSYMS, Kallsyms
from dprobes.target.kernel.keptlists import read_list
from dprobes.target.kernel.kerneltext import KernelText, open_text
from dprobes.target.names.clones import clones_among, only_clones

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.target.kernel.kallsyms import KernelSymbol
    from dprobes.target.kernel.kerneltext import Text

__all__ = ["KERNEL_BASE", "KERNEL_NAMES", "LoadedModule", "RunningKernel"]

KERNEL_NAMES = ("vmlinux", "bzImage", "vmlinuz", "kernel")
"""What all means the running kernel in ``name =`` of a program with ``modtype = kernel``."""

KERNEL_BASE = "_text"
"""The symbol that offsets in the kernel count from: its image begins there."""

_LISTED = 16
_BLACKLISTED = "the kernel allows no probe there: the code may be what handles the probe itself (kprobe blacklist)"
_PER_CPU_OFFSETS = "__per_cpu_offset"
_PER_CPU_AREA = ("__per_cpu_start", "__per_cpu_end")
_CODE_OF_START = ("_sinittext", "_einittext")
_PADDING = "__pfx_"
"""
What the names of the space before functions begin with, since Linux kernel commit b341b20d648b ("x86: Add prefix
symbols for function padding") (in v6.2).
"""
_PROC_MODULES = Path("/proc/modules")
_TRACING = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
_BLACKLIST = Path("/sys/kernel/debug/kprobes/blacklist")
_INJECTABLE = Path("/sys/kernel/debug/error_injection/list")
_TRAMPOLINES = ("arch_rethook_trampoline", "__kretprobe_trampoline", "kretprobe_trampoline")
"""
Commits f3a112c0c40d ("x86,rethook,kprobes: Replace kretprobe with rethook on x86") (in v5.18) and adf8a61a940c
("kprobes: treewide: Make it harder to refer kretprobe_trampoline directly") (in v5.16) have renamed it.
"""
_FIRST_WORD = lazy_pattern(rb"^\S+", re.MULTILINE)
_ENDBR = 4
"""Bytes of the ``endbr64`` that may stand before what ftrace changes."""


class LoadedModule(NamedTuple):
    """A module that is loaded: ``size`` bytes from an address on."""

    name: str
    address: int
    size: int


class RunningKernel:
    """
    The kernel that runs here; what it shows is read when it is first asked for.

    Names of modules are the kernel's own, "" being the kernel itself. ``expected`` are instructions that somebody knows
    of, by address, where memory cannot be read. Lists are those that were kept, which lack code that the kernel has
    generated, such as BPF programs, unless ``reads_anew``.
    """

    is_loaded = True
    """Whether addresses are those of a running kernel."""
    called: tuple[str, ...] = KERNEL_NAMES
    """What it may be called in programs."""
    checks_places = True
    """Whether it refuses places that are no instructions."""
    watchpoints = WATCHPOINTS
    """How many watchpoints there can be."""

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
        """The symbols; raises ``TargetError`` if they cannot be seen."""
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
        """What is in memory, as far as the kernel shows it."""
        return self._text if isinstance(self._text, KernelText) else open_text()

    @cached_property
    def text(self) -> Text:
        """What is in memory, or where that cannot be read, in the kernel's files."""
        if self._text is None:
            if self.memory.problem is None:
                return self.memory
            from dprobes.target.kernel.textfiles import FileText, KernelFiles  # only where memory is closed

            files = KernelFiles.of_release(os.uname().release)
            self._text = FileText(self.memory.problem, files, lambda: self.base_of(""), self.modules.values)
        return self._text

    @cached_property
    def modules(self) -> Mapping[str, LoadedModule]:
        """The modules that are loaded, by name; none if the kernel hides their addresses."""
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
        """Return the address that offsets of a module count from; raise ``TargetError`` if it is not loaded."""
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
        Return the symbol called ``name`` of a module; raise ``TargetError`` if there is none, or several.

        With ``is_code`` those of data do not count, and a former name stands for the present one.
        """
        for each in (name, *present_names(name)) if is_code else (name,):
            found = self.symbols.find(each, module)
            if is_code:
                found = [symbol for symbol in found if symbol.is_code] or found
            addresses = sorted({symbol.address for symbol in found})
            if len(addresses) > 1:
                raise self._ambiguous(each, module, addresses)
            if found:
                return found[0]
        raise self._not_found(name, module)

    @property
    def return_trampolines(self) -> tuple[int, ...]:
        """The addresses of what stands in the place of a return address that a kretprobe awaits; none if unknown."""
        return tuple(symbol.address for name in _TRAMPOLINES for symbol in self.symbols.find(name, ""))

    def is_per_cpu(self, address: int) -> bool:
        """
        Return whether each CPU has a copy of what has an address, which then is that of no copy.

        On x86-64 such addresses begin at 0 before Linux kernel commit 9d7de2aa8b41 ("x86/percpu/64: Use relative percpu
        offsets") (in v6.15), and lie in the kernel's image since then.
        """
        start, end = self._per_cpu_area
        return start <= address < end

    @property
    def per_cpu_offsets(self) -> int:
        """The address of the words that say what each CPU's copies are further on; 0 if it is not known."""
        return next((symbol.address for symbol in self.symbols.find(_PER_CPU_OFFSETS, "")), 0)

    @cached_property
    def _per_cpu_area(self) -> tuple[int, int]:
        found = [self.symbols.find(name, "") for name in _PER_CPU_AREA]
        start, end = (symbols[0].address if symbols else 0 for symbols in found)
        return start, end

    def name_of(self, address: int) -> str:
        """Return a name for an address of code, a function with the distance from its start, or else a number."""
        symbol = self.symbols.covering(address)
        if symbol is None:
            return f"{address:#x}"
        distance = address - symbol.address
        return f"{symbol.name}+{distance:#x}" if distance else symbol.name

    @cached_property
    def blacklist(self) -> tuple[tuple[int, int, str], ...] | None:
        """
        The code that nobody may probe: first address, end and name of each part, None where that cannot be read.

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
        """The blacklist as first addresses and ends that do not overlap, sorted."""
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
        The names of the functions that may be skipped, None where the list cannot be read.

        The kernel's source says so of each, by ALLOW_ERROR_INJECTION.
        """
        try:
            lines = _INJECTABLE.read_text().splitlines()
        except OSError:
            return None
        return frozenset(line.split()[0] for line in lines if line.strip())

    @property
    def file(self) -> Path | None:
        """The file that all is read from in the place of a running kernel."""
        return None

    def offset_text(self, offset: int) -> str:
        """Return an offset for people."""
        return f"{offset:#x} from where it is loaded"

    def refusal(self, address: int) -> str | None:
        """Return why the kernel is known to refuse a probe at an address; None if it is not."""
        if self.is_given_back(address):
            return "the kernel has executed it when it started, and given its memory back (__init)"
        padded = next((name for name in self.symbols.names_at(address) if name.startswith(_PADDING)), None)
        if padded is not None:
            return f"it is the space before '{padded.removeprefix(_PADDING)}', and never executed"
        return _BLACKLISTED if self.is_blacklisted(address) else None

    def is_given_back(self, address: int) -> bool:
        """Return whether an address is in the code that the kernel gives back when it has started."""
        start, end = self._code_of_start
        return start <= address < end and self.has_started

    @property
    def has_started(self) -> bool:
        """Whether it has given back what it needs at its start only."""
        return True

    @cached_property
    def _code_of_start(self) -> tuple[int, int]:
        found = [self.symbols.find(name, "") for name in _CODE_OF_START]
        start, end = (symbols[0].address if symbols else 0 for symbols in found)
        return start, end

    def is_changed_later(self, address: int) -> bool:  # noqa: ARG002 - for code that is not in memory yet
        """Return whether other code will be at an address than is seen there."""
        return False

    def anchor(self, address: int, module: str) -> tuple[str, int] | None:
        """Return a name that only one symbol of a module has, at or before an address, and the distance."""
        symbol = self.symbols.covering(address)
        if symbol is None or symbol.module != module:
            return None
        name = self._only_name(symbol.address, module)
        return None if name is None else (name, address - symbol.address)

    def _only_name(self, address: int, module: str) -> str | None:
        names = sorted(self.symbols.names_at(address))
        return next((name for name in names if len({s.address for s in self.symbols.find(name, module)}) == 1), None)

    def end_of(self, function: KernelSymbol) -> int:
        """Return where a function ends, as far as the kernel knows: where the next symbol is."""
        end = self.symbols.following(function)
        if end is not None:
            return end
        module = self.modules.get(function.module)
        return module.address + module.size if module is not None else function.address + 1

    def is_traceable(self, address: int) -> bool | None:
        """Return whether ftrace can redirect the function that begins at an address; None where that is not known."""
        if self._traceable_places is not None:
            places = self._traceable_places
            return b"%016x" % address in places or b"%016x" % (address + _ENDBR) in places
        if self._traceable_names is None:
            return None
        return any(name.encode() in self._traceable_names for name in self.symbols.names_at(address))

    @cached_property
    def _traceable_places(self) -> frozenset[bytes] | None:
        """The addresses where ftrace changes functions, in hex."""
        # Since Linux kernel commit 83f74441bcb1 ("ftrace: Show all functions with addresses in
        # available_filter_functions_addrs") (in v6.5).
        data = self._traced("available_filter_functions_addrs")
        return None if data is None else frozenset(_FIRST_WORD.findall(data))

    @cached_property
    def _traceable_names(self) -> frozenset[bytes] | None:
        """The functions that ftrace can redirect, each by one of its names."""
        data = self._traced("available_filter_functions")
        return None if data is None else frozenset(_FIRST_WORD.findall(data))

    def _traced(self, name: str) -> bytes | None:
        """Return what a list of tracefs says, None where it cannot be read."""
        for directory in _TRACING:
            try:
                return self._read(directory / name)
            except OSError:
                continue
        return None

    def _ambiguous(self, name: str, module: str, addresses: list[int]) -> TargetError:
        base = self.base_of(module)
        files = self.source_files(name, module)
        listed = ", ".join(self._place_among(address, base, files.get(address)) for address in addresses[:_LISTED])
        more = f" and {len(addresses) - _LISTED} more" if len(addresses) > _LISTED else ""
        hint = f"write the one that is meant as a number, 'offset = {addresses[0] - base:#x}', or all as a pattern, "
        hint += f"'offset = {name[:-1]}[{name[-1]}]'"
        if not files:
            hint += f"; which source file each is of is in no file here: debug information of {_shown(module)} has it"
        return TargetError(
            f"'{name}' stands for {len(addresses)} places in {_shown(module)}, at offsets {listed}{more}", hint=hint
        )

    def _place_among(self, address: int, base: int, file: str | None) -> str:
        """Return an offset with the source file, and with the function before it that others may call."""
        known = self.symbols.global_before(address)
        marks = [file] if file is not None else []
        marks += [f"after '{known}'"] if known is not None else []
        return f"{address - base:#x}" + (f" ({', '.join(marks)})" if marks else "")

    def source_files(self, name: str, module: str) -> Mapping[int, str]:
        """Return the source files of the static symbols called ``name``, by address, as far as a file here has them."""
        from dprobes.target.kernel.debugfiles import described_kernel, sources_in_kernel, sources_in_module

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
