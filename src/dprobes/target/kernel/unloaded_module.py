"""
A module's file as the kernel is going to load it: its sections in an order, and with the changes that are known.

The file is relocatable, so its sections have no addresses. Ours are made up::

    0           code, as offsets count in the loaded module: the kernel puts executable sections one behind the other
    1 GiB       code that the kernel frees when the module is initialised (.init.text)
    2 GiB       data

Relocations do not change which bytes are the first ones of an instruction. The loader changes more: the calls of ftrace
become ``nop`` at once, other instructions as the processor needs it (``layout_sections`` in kernel/module/main.c,
``module_finalize`` in arch/x86/kernel/module.c).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import TargetError
from dprobes.target.elf.elf_headers import SHT_SYMTAB, symbol_rows
from dprobes.target.elf.relocations import targets_in
from dprobes.target.kernel.kernel_files import find_module_file, module_name, open_module_file, source_files
from dprobes.target.kernel.kernel_symbols import Kallsyms
from dprobes.target.kernel.running_kernel import KernelText, LoadedModule, RunningKernel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.elf.elf_headers import Section

__all__ = ["UnloadedModule", "open_unloaded_module"]

_REGION = 1 << 30
_CODE, _INIT_CODE, _DATA = range(3)

_SHF_WRITE, _SHF_ALLOC = 1, 2
_SHT_NOBITS = 8
_STB_LOCAL = 0
_NAMELESS = (3, 4)  # STT_SECTION, STT_FILE

_NOP5 = bytes.fromhex("0f1f440000")
_FTRACE_CALLS = "__mcount_loc"
_CHANGES = (
    ".altinstructions", ".retpoline_sites", ".return_sites", ".call_sites", ".static_call_sites", "__jump_table",
    ".smp_locks", ".parainstructions", ".ibt_endbr_seal", ".cfi_sites",
)  # fmt: skip
"""The tables of other instructions that the loader changes, or may change."""
_NO_PROBES = "_kprobe_blacklist"
_NO_PROBE_SECTIONS = (".kprobes.text", ".noinstr.text")

_ALIASES = ("init_module", "cleanup_module")
"""What the kernel's macros call the functions as well that a module begins and ends with."""


class ModuleSymbol(NamedTuple):
    """A symbol of a module; ``letter`` is its kind, as in nm(1)."""

    name: str
    address: int
    letter: str


class ModuleImage:
    """The sections and symbols of a module's file by addresses."""

    def __init__(self, elf: ElfFile) -> None:
        self._elf = elf
        self._bases = dict(self._placed())

    def _placed(self) -> Iterator[tuple[int, int]]:
        """Give the sections that are loaded by their numbers, with their addresses."""
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
    def symbols(self) -> list[ModuleSymbol]:
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
                found.append(ModuleSymbol(text, self._bases[number] + value, letter if is_local else letter.upper()))
        # Of the two names of one function people know the other one.
        known = {symbol.address for symbol in found if symbol.name in _ALIASES}
        return [
            symbol._replace(letter="t" if symbol.name in _ALIASES else "T") if symbol.address in known else symbol
            for symbol in found
        ]

    @cached_property
    def _starts(self) -> list[int]:
        """The addresses of code at which a symbol stands, in order."""
        return sorted({symbol.address for symbol in self.symbols if symbol.letter in "tT"})

    def function_at(self, address: int) -> int | None:
        """Return where the function begins that covers an address."""
        place = bisect_right(self._starts, address)
        return self._starts[place - 1] if place else None

    def section_at(self, address: int) -> tuple[int, int] | None:
        """Return first and last address, excluded, of the section that has an address."""
        for number, base in self._bases.items():
            if base <= address < base + self._elf.sections[number].size:
                return base, base + self._elf.sections[number].size
        return None

    def start_of(self, section: Section) -> int | None:
        """Return the address of a section; None if it is not loaded."""
        return next((base for number, base in self._bases.items() if self._elf.sections[number] is section), None)

    @property
    def code_size(self) -> int:
        """How many bytes of code stay."""
        ends = [base + self._elf.sections[number].size for number, base in self._bases.items() if base < _REGION]
        return max(ends, default=0)

    # Text

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes from an address on, as they will be in memory but for later changes."""
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
        """Give the addresses that the entries of a table stand for: where its relocations lead to."""
        for _, section, place in targets_in(self._elf, table):
            if section in self._bases:
                yield self._bases[section] + place

    @cached_property
    def ftrace_calls(self) -> frozenset[int] | None:
        """The places of the calls that ftrace redirects; None if the module was built without."""
        if not any(section.name == _FTRACE_CALLS for section in self._elf.sections):
            return None
        return frozenset(self._targets(_FTRACE_CALLS))

    @cached_property
    def traceable(self) -> frozenset[int] | None:
        """The functions that ftrace can redirect, by where they begin; None if that is not known."""
        if self.ftrace_calls is None:
            return None
        starts = (self.function_at(call) for call in self.ftrace_calls)
        return frozenset(start for start in starts if start is not None)

    @cached_property
    def changes(self) -> frozenset[int]:
        """Where instructions stand that the loader may replace."""
        found = frozenset(address for table in _CHANGES for address in self._targets(table))
        return found - (self.ftrace_calls or frozenset())

    @cached_property
    def blacklist(self) -> tuple[tuple[int, int, str], ...]:
        """The code that the module allows no probes in: first address, end and name of each part."""
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
        """What the module says of itself (.modinfo): its name, the kernel that it is for."""
        section = next((each for each in self._elf.sections if each.name == ".modinfo"), None)
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
    A module's file as a kernel that has no other code.

    The kernel finds the places in a module that it loads by *anchors*: a symbol's name, and a distance.
    """

    is_loaded = False

    def __init__(self, name: str, elf: ElfFile) -> None:
        self.name = name
        self._file = elf.path
        self._elf = elf
        self._image = image = ModuleImage(elf)
        super().__init__(_ListedSymbols(name, image), _FileText(image))

    @property
    def file(self) -> Path:
        """The module's file."""
        return self._file

    def offset_text(self, offset: int) -> str:
        """Return an offset for people."""
        if offset >= self._image.code_size:
            return "in code that the kernel frees when the module has begun"
        return super().offset_text(offset)

    def source_files(self, name: str, module: str) -> dict[int, str]:  # noqa: ARG002 - there is no other one
        """Return the source files of the static symbols called ``name``, by address, as far as its file has them."""
        return source_files(self._elf, name, self._image.start_of)

    @cached_property
    def modules(self) -> dict[str, LoadedModule]:
        """The module as if it were loaded at 0."""
        return {self.name: LoadedModule(self.name, 0, self._image.code_size)}

    @cached_property
    def blacklist(self) -> tuple[tuple[int, int, str], ...] | None:
        """The code that the module allows no probes in."""
        return self._image.blacklist

    @cached_property
    def skippable(self) -> None:
        """Return None: the kernel reads the module's list when it loads it."""
        return

    def refusal(self, address: int) -> str | None:
        """Return why the kernel will refuse a probe at an address; None if it will not."""
        # Since Linux kernel commit 45408c4f9250 ("tracing: kprobes: Prohibit probing on notrace function").
        if self.is_traceable(self._image.function_at(address) or 0) is False:
            return _NO_FTRACE
        return super().refusal(address)

    def is_traceable(self, address: int) -> bool | None:
        """Return whether ftrace can redirect the function that begins at an address; None where that is not known."""
        return None if self._image.traceable is None else address in self._image.traceable

    def is_changed_later(self, address: int) -> bool:
        """Return whether the loader may replace the instruction at an address."""
        return address in self._image.changes

    def anchor(self, address: int, module: str) -> tuple[str, int] | None:
        """Return a name that only one symbol has, at or before an address in the same section, and the distance."""
        section = self._image.section_at(address)
        if section is None:
            return None
        before = {s.address for s in self._image.symbols if section[0] <= s.address <= address}
        for start in sorted(before, reverse=True):
            if (name := self._only_name(start, module)) is not None:
                return name, address - start
        return None


class _ListedSymbols(Kallsyms):
    """The symbols of a module's file, listed as the kernel would."""

    has_data = True

    def __init__(self, module: str, image: ModuleImage) -> None:
        lines = (f"{symbol.address:016x} {symbol.letter} {symbol.name}\t[{module}]\n" for symbol in image.symbols)
        super().__init__("".join(lines).encode(errors="replace"))

    @property
    def is_hidden(self) -> bool:
        """Return False: a file hides nothing."""
        return False


class _FileText(KernelText):
    def __init__(self, image: ModuleImage) -> None:
        super().__init__(None)
        self._image = image

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes from an address on."""
        return self._image.read(address, size)


def open_unloaded_module(name: str) -> UnloadedModule:
    """Return the module that a program names, which is not loaded; raise ``TargetError`` if there is no file of it."""
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
