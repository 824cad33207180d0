"""
Kernel or kernel module in a file, for compiling probe programs on a machine on which that kernel does not run.

A kernel is a ``vmlinux`` with symbols, or a boot image (``vmlinuz``) with a list of symbols. The list is its debug
file, the ``System.map`` beside it, or a file that the user names. A module's file (``.ko``) has its own symbols.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import TargetError, reason_of
from dprobes.target.elf.elf_headers import SHT_SYMTAB, symbol_rows
from dprobes.target.elf.file_contents import file_contents
from dprobes.target.elf.relocations import targets_in
from dprobes.target.elf.symbol_sources import DEBUG_DIRECTORY, find_debug_file
from dprobes.target.kernel.kernel_files import (
    find_module_file,
    module_name,
    open_module_file,
    open_packed,
    source_files,
)
from dprobes.target.kernel.kernel_symbols import KALLSYMS, Kallsyms, KernelArea, KernelSymbol, NeededKallsyms, listed
from dprobes.target.kernel.running_kernel import KCORE, KERNEL_BASE, KernelText, LoadedModule, RunningKernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.elf.elf_headers import Section
    from dprobes.target.kernel.kernel_symbols import CarriedKernel

__all__ = ["KernelFile", "UnloadedModule", "moved_kernel", "open_unloaded_module", "running_areas"]

_SECTIONS = "/sys/module/{}/sections"
_MASK = (1 << 64) - 1


def moved_kernel(carried: CarriedKernel, running: RunningKernel) -> RunningKernel:
    """
    Return the running kernel, of the same build, with the carried symbols at their run-time addresses.

    Raise ``TargetError`` if its address is not known.
    """
    starts = section_addresses(carried.module) if carried.module else {KERNEL_BASE: _kernel_base(running)}

    def moved(address: int) -> int:
        for area in carried.areas:
            if area.name in starts and 0 <= address - area.address < area.size:
                return starts[area.name] + address - area.address
        return address  # the same in all kernels, as it is not in the image: an offset of per-CPU data

    symbols = Kallsyms(listed(symbol._replace(address=moved(symbol.address) & _MASK) for symbol in carried.symbols))
    expected = {moved(place.address): place.raw for place in carried.places if place.raw}
    modules = None
    if carried.module:
        first = carried.areas[0]
        known = running.modules.get(carried.module)
        size = known.size if known is not None else first.size
        modules = {**running.modules, carried.module: LoadedModule(carried.module, moved(first.address), size)}
    return RunningKernel(symbols, modules=modules, expected=expected)


def _kernel_base(running: RunningKernel) -> int:
    """Return the address of the kernel's image; raise ``TargetError`` if this machine hides it."""
    try:
        return running.base_of("")
    except TargetError as error:
        start = running.memory.kernel_start()
        if start is not None:
            return start
        problem = running.memory.problem or f"{KCORE} does not show the kernel's image"
        raise TargetError(
            f"the address of the kernel is unknown: {error.message}; {problem}",
            hint=f"run dprobes as root; {KALLSYMS} (kernel.kptr_restrict 0 or 1) or {KCORE} must be readable",
        ) from error


def section_addresses(module: str) -> dict[str, int]:
    """Return the addresses of a loaded module's sections by name; raise ``TargetError`` if the kernel hides them."""
    directory = Path(_SECTIONS.format(module))
    try:
        found = {path.name: int(path.read_text(), 16) for path in sorted(directory.iterdir())}
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "no number"
        raise TargetError(f"the address of the module '{module}' is unknown: {directory}: {reason}") from error
    if not any(found.values()):
        raise TargetError(
            f"the address of the module '{module}' is unknown: {directory} has 0 for all sections",
            hint="run dprobes as root, or with CAP_SYSLOG, and set kernel.kptr_restrict to 0 or 1",
        )
    return found


_END = "_end"
"""Symbol at the end of the kernel's image."""

_BANNER, _BANNER_TEXT = "linux_banner", b"Linux version "

_NAMING = (0, 1, 2)  # STT_NOTYPE, STT_OBJECT, STT_FUNC
_FUNC = 2
_LOCAL = 0  # STB_LOCAL
_ABSOLUTE = 0xFFF1
_SHF_ALLOC = 2

_INIT = ".init"
"""Prefix of sections that are freed once a module is loaded (``module_init_section`` in kernel/module)."""


def running_areas(kernel: RunningKernel, module: str) -> tuple[KernelArea, ...]:
    """
    Return the areas of the running kernel or of one of its modules.

    Raise ``TargetError`` if the kernel hides them.
    """
    base = kernel.base_of(module)
    if not module:
        return (_image(kernel.symbols, base),)
    starts = sorted(section_addresses(module).items(), key=lambda item: item[1])
    size = kernel.modules[module].size
    ends = [start for _, start in starts[1:]] + [starts[-1][1] + size]
    areas = [KernelArea(name, start, min(end - start, size)) for (name, start), end in zip(starts, ends, strict=True)]
    return tuple(sorted(areas, key=lambda area: area.address != base))


def _image(symbols: Kallsyms, base: int) -> KernelArea:
    """Return the memory of the kernel's image, from ``base`` to its end symbol, as its only area."""
    end = next(iter(symbols.find(_END, "")), None)
    return KernelArea(KERNEL_BASE, base, (end.address if end is not None else 1 << 64) - base)


class KernelFile:
    """
    A build of the kernel, or of the kernel module ``module``, in a file.

    ``extra_symbols`` is the file of the option ``--sym``. The constructor raises ``TargetError`` if the file is
    something else, has no build-id, or if its symbols are not found.
    """

    def __init__(self, path: Path, module: str, extra_symbols: Path | None = None) -> None:
        elf = open_packed(path)
        if elf.machine != "x86_64":
            raise TargetError(f"'{path}' is for {elf.machine}, and kernels are probed on x86_64 only")
        if elf.build_id is None:
            raise TargetError(f"'{path}' has no build-id, by which the kernel that runs is recognised")
        if (elf.type == "rel") != bool(module):
            found = "a kernel" if module else "a module"
            wanted = f"the module '{module}'" if module else "the kernel"
            raise TargetError(f"'{path}' is {found}, and the program is for {wanted}")
        self.identity = elf.build_id
        self._module = module
        if module:
            self.areas = _areas_of_module(path, elf.sections)
            data = listed(_symbols_of(elf, module))
        else:
            data = _symbols_of_kernel(path, elf, extra_symbols)
            plain = RunningKernel(Kallsyms(data))
            self.areas = (_image(plain.symbols, plain.base_of("")),)
        self.symbols = NeededKallsyms(data)
        self._code = _FileCode(elf)
        self._elf = elf

    def kernel(self) -> RunningKernel:
        """Return the file as a kernel that runs at the addresses of the file."""
        loaded = {}
        if self._module:
            loaded[self._module] = LoadedModule(self._module, self.areas[0].address, self.areas[0].size)
        return _FileKernel(self._elf, self.symbols, self._code, loaded)


class _FileKernel(RunningKernel):
    """Kernel that does not run. The places where it refuses probes are unknown."""

    def __init__(self, elf: ElfFile, symbols: Kallsyms, code: _FileCode, modules: Mapping[str, LoadedModule]) -> None:
        super().__init__(symbols, code, modules=modules)
        self._elf = elf

    def source_files(self, name: str, module: str) -> dict[int, str]:  # noqa: ARG002 - the file is of one thing
        """
        Return the source file names of the static symbols called ``name``, by address.

        The result is empty if the file has none.
        """
        for elf in (self._elf, find_debug_file(self._elf)):
            if elf is not None and (found := source_files(elf, name, lambda section: section.address)):
                return found
        return {}

    @cached_property
    def blacklist(self) -> None:
        """None: unknown in a file."""
        return

    @cached_property
    def skippable(self) -> None:
        """None: unknown in a file."""
        return

    def is_traceable(self, address: int) -> None:  # noqa: ARG002 - as in the class above
        """Return None: a kernel's file does not list the functions that ftrace can trace."""
        return


class _FileCode(KernelText):
    """The code in a kernel's file, read by link address."""

    def __init__(self, elf: ElfFile) -> None:
        super().__init__(None, problem=f"'{elf.path}' does not have it")
        self._elf = elf

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes at an address, or no bytes if they are not in the file."""
        for section in self._elf.sections:
            start = address - section.address
            if section.flags & _SHF_ALLOC and section.in_file and 0 <= start < section.size:
                return self._elf.bytes_at(section.offset + start, min(size, section.size - start), section.name)
        return b""


def _areas_of_module(path: Path, sections: tuple[Section, ...]) -> tuple[KernelArea, ...]:
    """Return the parts of a module that stay in memory, code first (``layout_sections``)."""
    kept = [s for s in sections if s.flags & _SHF_ALLOC and s.size and not s.name.startswith(_INIT)]
    kept.sort(key=lambda section: not section.executable)
    if not kept or not kept[0].executable:
        raise TargetError(f"'{path}' is not a module of a kernel: there is no code in it")
    return tuple(KernelArea(section.name, section.address, section.size) for section in kept)


def _symbols_of_kernel(path: Path, elf: ElfFile, extra: Path | None) -> bytes:
    """Return the list of a kernel's symbols, in the kernel's format, from the first file that has them."""
    own = listed(_symbols_of(elf))
    if extra is None and own:
        return own
    if extra is not None:
        return _symbols_in(extra, path, elf)
    if (debug := find_debug_file(elf)) is not None and (found := listed(_symbols_of(debug))):
        return found
    version = path.name.partition("-")[2]
    candidates = (DEBUG_DIRECTORY / "boot" / f"vmlinux-{version}", path.parent / f"System.map-{version}")
    for candidate in candidates if version else ():
        if candidate.exists():
            try:
                return _symbols_in(candidate, path, elf)
            except TargetError:
                continue  # Debian's /boot/System.map-* only names the package that has the real one
    raise TargetError(
        f"'{path}' has no symbols, and there is no file with them ({', '.join(str(each) for each in candidates)})",
        hint="install the kernel's debug package, or name a System.map or vmlinux with --sym FILE",
    )


def _symbols_in(file: Path, path: Path, elf: ElfFile) -> bytes:
    """Return the kernel symbols in ``file``; raise ``TargetError`` if it does not belong to the image ``path``."""
    data = bytes(file_contents(file, "a file with symbols")[:])
    if data.startswith(b"\x7fELF"):
        other = open_packed(file)
        if other.build_id != elf.build_id:
            raise TargetError(
                f"'{file}' does not belong to '{path}': its build-id is {other.build_id}, the kernel's {elf.build_id}"
            )
        return listed(_symbols_of(other))
    found = listed(Kallsyms(data).all())
    symbols = Kallsyms(found)
    if not symbols.find(KERNEL_BASE, ""):
        raise TargetError(f"'{file}' is not a list of a kernel's symbols: it has no '{KERNEL_BASE}'")
    # A list has no build-id, so the banner of the kernel must be at its address in the list.
    code = _FileCode(elf)
    if not any(code.read(each.address, len(_BANNER_TEXT)) == _BANNER_TEXT for each in symbols.find(_BANNER, "")):
        raise TargetError(f"'{file}' does not belong to '{path}': '{_BANNER}' is not at the listed address")
    return found


def _symbols_of(elf: ElfFile, module: str = "") -> Iterator[KernelSymbol]:
    """Iterate over the symbols of a kernel's or a module's file. In a module's, values are offsets in sections."""
    sections = elf.sections
    table = next((section for section in sections if section.type == SHT_SYMTAB), None)
    if table is None or table.link >= len(sections):
        return
    strings = sections[table.link]
    names = elf.bytes_at(strings.offset, strings.size, "a string table")
    rows = symbol_rows(elf.bytes_at(table.offset, table.size, "a symbol table"), "<", 8)
    for name, info, _, index, value, _ in rows:
        if info & 0xF not in _NAMING or (index != _ABSOLUTE and not 0 < index < len(sections)):
            continue
        text = names[name : names.find(b"\0", name)].decode(errors="replace")
        if not text or text.startswith(".L") or any(letter.isspace() for letter in text):
            continue
        letter, start = "a", 0
        if index != _ABSOLUTE:
            section = sections[index]
            if module and section.name.startswith(_INIT):
                continue
            letter = "t" if section.executable or info & 0xF == _FUNC else "d"
            start = section.address if module else 0
        yield KernelSymbol(text, start + value, letter if info >> 4 == _LOCAL else letter.upper(), module)


# A module's file, laid out as the kernel will load it.


_REGION = 1 << 30
_CODE, _INIT_CODE, _DATA = range(3)

_SHF_WRITE = 1
_SHT_NOBITS = 8
_STB_LOCAL = 0
_NAMELESS = (3, 4)  # STT_SECTION, STT_FILE

_NOP5 = bytes.fromhex("0f1f440000")
_FTRACE_CALLS = "__mcount_loc"
_CHANGES = (
    ".altinstructions", ".retpoline_sites", ".return_sites", ".call_sites", ".static_call_sites", "__jump_table",
    ".smp_locks", ".parainstructions", ".ibt_endbr_seal", ".cfi_sites",
)  # fmt: skip
"""Sections that list the instructions, other than calls of ftrace, that the loader patches or may patch."""
_NO_PROBES = "_kprobe_blacklist"
_NO_PROBE_SECTIONS = (".kprobes.text", ".noinstr.text")

_ALIASES = ("init_module", "cleanup_module")
"""Aliases that the kernel's macros (module_init, module_exit) define for a module's init and exit functions."""


class ModuleImage(KernelText):
    """
    Sections and symbols of a module's file, at invented addresses, because the file is relocatable.

    ::

        0           code, as offsets count in the loaded module: executable sections one after the other
        1 GiB       code that the kernel frees when the module is initialised (.init.text)
        2 GiB       data

    Relocations do not change the first bytes of instructions. The loader changes more: it replaces the calls of ftrace
    by ``nop``, and other instructions depending on the processor (``layout_sections`` in kernel/module/main.c,
    ``module_finalize`` in arch/x86/kernel/module.c).
    """

    def __init__(self, elf: ElfFile) -> None:
        super().__init__(None)
        self._elf = elf
        self._bases = dict(self._placed())

    def _placed(self) -> Iterator[tuple[int, int]]:
        """Iterate over the sections that the kernel loads, as (section number, address in the image)."""
        ends = [0, _REGION, 2 * _REGION]
        for number, section in enumerate(self._elf.sections):
            if not section.flags & _SHF_ALLOC:
                continue
            is_init = section.name.startswith(".init")
            region = (_INIT_CODE if is_init else _CODE) if section.executable else _DATA
            base = -(-ends[region] // max(1, section.alignment)) * max(1, section.alignment)
            ends[region] = base + section.size
            yield number, base

    @cached_property
    def symbols(self) -> list[KernelSymbol]:
        """All symbols that have an address and a name."""
        sections = self._elf.sections
        table = next((each for each in sections if each.type == SHT_SYMTAB and each.link < len(sections)), None)
        if table is None:
            return []
        strings, data = sections[table.link], self._elf.bytes_at(table.offset, table.size, "the symbol table")
        found = []
        for name, info, _, number, value, _ in symbol_rows(data, "<", 8):
            if number not in self._bases or info & 15 in _NAMELESS:
                continue
            text = self._elf.string_at(strings.offset + name, strings.offset + strings.size)
            if text:
                letter = _letter(self._elf.sections[number])
                is_local = info >> 4 == _STB_LOCAL
                found.append(KernelSymbol(text, self._bases[number] + value, letter if is_local else letter.upper()))
        # Hide the aliases of these functions: people know the function by its other name.
        known = {symbol.address for symbol in found if symbol.name in _ALIASES}
        return [
            symbol._replace(letter="t" if symbol.name in _ALIASES else "T") if symbol.address in known else symbol
            for symbol in found
        ]

    @cached_property
    def _starts(self) -> list[int]:
        """The sorted addresses of symbols of code."""
        return sorted({symbol.address for symbol in self.symbols if symbol.letter in "tT"})

    def function_at(self, address: int) -> int | None:
        """Return the start of the function that covers an address, or None before the first function."""
        place = bisect_right(self._starts, address)
        return self._starts[place - 1] if place else None

    def section_at(self, address: int) -> tuple[int, int] | None:
        """Return the first address and the end of the section that contains an address, or None if there is none."""
        for number, base in self._bases.items():
            if base <= address < base + self._elf.sections[number].size:
                return base, base + self._elf.sections[number].size
        return None

    def start_of(self, section: Section) -> int | None:
        """Return the address of a section, or None if it is not loaded."""
        return next((base for number, base in self._bases.items() if self._elf.sections[number] is section), None)

    @property
    def code_size(self) -> int:
        """Size in bytes of the code that stays loaded."""
        ends = [base + self._elf.sections[number].size for number, base in self._bases.items() if base < _REGION]
        return max(ends, default=0)

    # Text

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes at an address, as before later patches: ``nop`` in place of ftrace's calls."""
        for number, base in self._bases.items():
            section = self._elf.sections[number]
            if base <= address < base + section.size and section.in_file:
                offset = section.offset + address - base
                code = bytearray(self._elf.data[offset : offset + min(size, base + section.size - address)])
                for call in self.ftrace_calls or ():
                    place = call - address
                    if place >= 0 and place + len(_NOP5) <= len(code):
                        code[place : place + len(_NOP5)] = _NOP5
                return bytes(code)
        return b""

    # Tables

    def _targets(self, table: str) -> Iterator[int]:
        """Iterate over the addresses that the entries of a table refer to by their relocations."""
        for _, section, place in targets_in(self._elf, table):
            if section in self._bases:
                yield self._bases[section] + place

    @cached_property
    def ftrace_calls(self) -> frozenset[int] | None:
        """Addresses of the calls that ftrace patches, or None if the module was built without them."""
        if not any(section.name == _FTRACE_CALLS for section in self._elf.sections):
            return None
        return frozenset(self._targets(_FTRACE_CALLS))

    @cached_property
    def traceable(self) -> frozenset[int] | None:
        """Addresses of the functions that ftrace can trace, or None if unknown."""
        if self.ftrace_calls is None:
            return None
        starts = (self.function_at(call) for call in self.ftrace_calls)
        return frozenset(start for start in starts if start is not None)

    @cached_property
    def changes(self) -> frozenset[int]:
        """The addresses of instructions that the loader may replace."""
        found = frozenset(address for table in _CHANGES for address in self._targets(table))
        return found - (self.ftrace_calls or frozenset())

    @cached_property
    def blacklist(self) -> tuple[tuple[int, int, str], ...]:
        """The ranges of code where the module forbids probes, as (first address, end (excluded), name)."""
        sections = [
            (base, base + section.size, section.name)
            for number, base in self._bases.items()
            if (section := self._elf.sections[number]).name in _NO_PROBE_SECTIONS
        ]
        functions = []
        for start in self._targets(_NO_PROBES):
            following = self._starts[bisect_right(self._starts, start) :]
            functions.append((start, following[0] if following else start + 1, "NOKPROBE_SYMBOL"))
        return (*sections, *functions)

    @cached_property
    def information(self) -> dict[str, str]:
        """The strings of ``.modinfo`` by key: "name", "vermagic" with the kernel release, and others."""
        section = self._elf.section(".modinfo")
        if section is None:
            return {}
        data = self._elf.bytes_at(section.offset, section.size, "'.modinfo'").decode(errors="replace")
        pairs = (each.partition("=") for each in data.split("\0") if each)
        return {key: value for key, _, value in pairs}


def _letter(section: Section) -> str:
    if section.executable:
        return "t"
    if section.type == _SHT_NOBITS:
        return "b"
    return "d" if section.flags & _SHF_WRITE else "r"


_NO_FTRACE = "the kernel allows none where ftrace cannot redirect the function (it is not among its __mcount_loc)"


class UnloadedModule(RunningKernel):
    """
    A kernel module that is not loaded, as a kernel whose only code is the module's file.

    The kernel finds places in a module that it loads by *anchors*: a symbol's name, and a distance.
    """

    is_loaded = False

    def __init__(self, name: str, elf: ElfFile) -> None:
        self.name = name
        self._file = elf.path
        self._elf = elf
        self._image = image = ModuleImage(elf)
        super().__init__(_ListedSymbols(name, image), image)

    @property
    def file(self) -> Path:
        """The module's file."""
        return self._file

    def offset_text(self, offset: int) -> str:
        """Return the offset of a place in the module in the form that messages show."""
        if offset >= self._image.code_size:
            return "in code that the kernel frees when the module has begun"
        return super().offset_text(offset)

    def source_files(self, name: str, module: str) -> dict[int, str]:  # noqa: ARG002 - there is no other one
        """
        Return the source file names of the static symbols called ``name``, by address.

        The result is empty if the file has none.
        """
        return source_files(self._elf, name, self._image.start_of)

    @cached_property
    def modules(self) -> dict[str, LoadedModule]:
        """The module as if it were loaded at 0."""
        return {self.name: LoadedModule(self.name, 0, self._image.code_size)}

    @cached_property
    def blacklist(self) -> tuple[tuple[int, int, str], ...] | None:
        """The ranges of code where the module forbids probes, as (first address, end (excluded), name)."""
        return self._image.blacklist

    @cached_property
    def skippable(self) -> None:
        """None: the kernel reads the module's list when it loads the module."""
        return

    def refusal(self, address: int) -> str | None:
        """Return the reason why the kernel will refuse a probe at an address, or None if it will not."""
        # Since Linux kernel commit 45408c4f9250 ("tracing: kprobes: Prohibit probing on notrace function").
        if self.is_traceable(self._image.function_at(address) or 0) is False:
            return _NO_FTRACE
        return super().refusal(address)

    def is_traceable(self, address: int) -> bool | None:
        """Return True if ftrace can trace the function that begins at an address, or None if unknown."""
        return None if self._image.traceable is None else address in self._image.traceable

    def is_changed_later(self, address: int) -> bool:
        """Return whether the loader may replace the instruction at an address."""
        return address in self._image.changes

    def anchor(self, address: int, module: str) -> tuple[str, int] | None:
        """
        Return the name of a unique symbol at or before an address in its section, and the distance from it.

        Return None if there is no such symbol.
        """
        section = self._image.section_at(address)
        if section is None:
            return None
        before = {s.address for s in self._image.symbols if section[0] <= s.address <= address}
        for start in sorted(before, reverse=True):
            if (name := self._only_name(start, module)) is not None:
                return name, address - start
        return None


class _ListedSymbols(Kallsyms):
    """The symbols of a module's file as a list in the format of ``/proc/kallsyms``."""

    has_data = True

    def __init__(self, module: str, image: ModuleImage) -> None:
        lines = (f"{symbol.address:016x} {symbol.letter} {symbol.name}\t[{module}]\n" for symbol in image.symbols)
        super().__init__("".join(lines).encode(errors="replace"))

    @property
    def is_hidden(self) -> bool:
        """False: a file hides nothing."""
        return False


def open_unloaded_module(name: str) -> UnloadedModule:
    """Open a module that is not loaded, by its name in a program; raise ``TargetError`` if it has no file."""
    path = find_module_file(name)
    elf = open_module_file(path)
    information = ModuleImage(elf).information
    release = os.uname().release
    built_for = information.get("vermagic", release).partition(" ")[0]
    if built_for != release:
        raise TargetError(
            f"'{path}' is a module for Linux {built_for}, and this is Linux {release}",
            hint="build the module for the kernel that runs",
        )
    return UnloadedModule(module_name(information.get("name", name)), elf)
