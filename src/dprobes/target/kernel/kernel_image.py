"""
A kernel, or a module of one, as its file has it: what a program is compiled for where that kernel does not run.

Of a kernel that is a ``vmlinux`` with symbols, or an image as it boots (``vmlinuz``) with a list of symbols: its debug
file, the ``System.map`` beside it, or a file that the user names. A module's file (``.ko``) has its symbols itself.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import TargetError, reason_of
from dprobes.target.elf.elf_headers import SHT_SYMTAB, symbol_rows
from dprobes.target.elf.file_contents import file_contents
from dprobes.target.elf.symbol_sources import DEBUG_DIRECTORY, find_debug_file
from dprobes.target.kernel.kernel_files import open_packed, source_files
from dprobes.target.kernel.kernel_symbols import KALLSYMS, Kallsyms, KernelArea, KernelSymbol, NeededKallsyms, listed
from dprobes.target.kernel.running_kernel import KCORE, KERNEL_BASE, KernelText, LoadedModule, RunningKernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.elf.elf_headers import Section
    from dprobes.target.kernel.kernel_symbols import CarriedKernel

__all__ = ["KernelFile", "moved_kernel", "running_areas"]

# A carried build of the kernel, or of a module, at the addresses where it lies on the machine that runs it.


_SECTIONS = "/sys/module/{}/sections"
_MASK = (1 << 64) - 1


def moved_kernel(carried: CarriedKernel, running: RunningKernel) -> RunningKernel:
    """
    Return the running kernel, of the same build, with the carried symbols in the place of those that it shows.

    Raise ``TargetError`` if nothing shows where it lies.
    """
    starts = section_addresses(carried.module) if carried.module else {KERNEL_BASE: _kernel_base(running)}

    def moved(address: int) -> int:
        for area in carried.areas:
            if area.name in starts and 0 <= address - area.address < area.size:
                return starts[area.name] + address - area.address
        return address  # what is not in the kernel's image is the same everywhere: offsets of per-CPU data

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
    """Return where the kernel begins in memory, as far as this machine shows it."""
    try:
        return running.base_of("")
    except TargetError as error:
        start = running.memory.kernel_start()
        if start is not None:
            return start
        problem = running.memory.problem or f"{KCORE} does not show the kernel's image"
        raise TargetError(
            f"nothing shows where the kernel lies in memory: {error.message}; {problem}",
            hint=f"run dprobes as root; {KALLSYMS} (kernel.kptr_restrict 0 or 1) or {KCORE} must be readable",
        ) from error


def section_addresses(module: str) -> dict[str, int]:
    """Return where the sections of a module that is loaded begin; raise ``TargetError`` if the kernel hides it."""
    directory = Path(_SECTIONS.format(module))
    try:
        found = {path.name: int(path.read_text(), 16) for path in sorted(directory.iterdir())}
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "no number"
        raise TargetError(f"nothing shows where the module '{module}' lies: {directory}: {reason}") from error
    if not any(found.values()):
        raise TargetError(
            f"nothing shows where the module '{module}' lies: {directory} has 0 for all sections",
            hint="run dprobes as root, or with CAP_SYSLOG, and set kernel.kptr_restrict to 0 or 1",
        )
    return found


_END = "_end"
"""The symbol at the end of the kernel's image."""

_BANNER, _BANNER_TEXT = "linux_banner", b"Linux version "

_NAMING = (0, 1, 2)  # STT_NOTYPE, STT_OBJECT, STT_FUNC
_FUNC = 2
_LOCAL = 0  # STB_LOCAL
_ABSOLUTE = 0xFFF1
_SHF_ALLOC = 2

_INIT = ".init"
"""How the names of sections begin that are gone once a module is loaded (``module_init_section`` in kernel/module)."""


def running_areas(kernel: RunningKernel, module: str) -> tuple[KernelArea, ...]:
    """Return the areas of the kernel that runs here, or of a module of it; raise ``TargetError`` if it hides them."""
    base = kernel.base_of(module)
    if not module:
        return (_image(kernel.symbols, base),)
    starts = sorted(section_addresses(module).items(), key=lambda item: item[1])
    size = kernel.modules[module].size
    ends = [start for _, start in starts[1:]] + [starts[-1][1] + size]
    areas = [KernelArea(name, start, min(end - start, size)) for (name, start), end in zip(starts, ends, strict=True)]
    return tuple(sorted(areas, key=lambda area: area.address != base))


def _image(symbols: Kallsyms, base: int) -> KernelArea:
    """Return the kernel's only area, its image."""
    end = next(iter(symbols.find(_END, "")), None)
    return KernelArea(KERNEL_BASE, base, (end.address if end is not None else 1 << 64) - base)


class KernelFile:
    """
    A build of the kernel, or of what it calls the module ``module``, in a file.

    ``extra_symbols`` is the file that ``--sym`` names. Making one raises ``TargetError`` if the file is another thing,
    if it has no build-id, or if nothing tells its symbols.
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
            raise TargetError(f"'{path}' is {found}, and the program is about {wanted}")
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
        """Return it as if it ran, where its addresses are those of the file."""
        loaded = {}
        if self._module:
            loaded[self._module] = LoadedModule(self._module, self.areas[0].address, self.areas[0].size)
        return _FileKernel(self._elf, self.symbols, self._code, loaded)


class _FileKernel(RunningKernel):
    """A kernel that does not run: nobody knows what it would let nobody probe."""

    def __init__(self, elf: ElfFile, symbols: Kallsyms, code: _FileCode, modules: Mapping[str, LoadedModule]) -> None:
        super().__init__(symbols, code, modules=modules)
        self._elf = elf

    def source_files(self, name: str, module: str) -> dict[int, str]:  # noqa: ARG002 - the file is of one thing
        """Return the source files of the static symbols called ``name``, by address, as far as its files have them."""
        for elf in (self._elf, find_debug_file(self._elf)):
            if elf is not None and (found := source_files(elf, name, lambda section: section.address)):
                return found
        return {}

    @cached_property
    def blacklist(self) -> None:
        """Return None."""
        return

    @cached_property
    def skippable(self) -> None:
        """Return None."""
        return

    def is_traceable(self, address: int) -> None:  # noqa: ARG002 - as in the class above
        """Return None."""
        return


class _FileCode(KernelText):
    """The code in a file, by the addresses of its sections."""

    def __init__(self, elf: ElfFile) -> None:
        super().__init__(None, problem=f"'{elf.path}' does not have it")
        self._elf = elf

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes from an address on; none if they are not in the file."""
        for section in self._elf.sections:
            start = address - section.address
            if section.flags & _SHF_ALLOC and section.in_file and 0 <= start < section.size:
                return self._elf.bytes_at(section.offset + start, min(size, section.size - start), section.name)
        return b""


def _areas_of_module(path: Path, sections: tuple[Section, ...]) -> tuple[KernelArea, ...]:
    """Return what of a module stays in memory, first the code that it begins with (``layout_sections``)."""
    kept = [s for s in sections if s.flags & _SHF_ALLOC and s.size and not s.name.startswith(_INIT)]
    kept.sort(key=lambda section: not section.executable)
    if not kept or not kept[0].executable:
        raise TargetError(f"'{path}' is no module of a kernel: there is no code in it")
    return tuple(KernelArea(section.name, section.address, section.size) for section in kept)


def _symbols_of_kernel(path: Path, elf: ElfFile, extra: Path | None) -> bytes:
    """Return the list of a kernel's symbols, in the kernel's form, from the first file that has them."""
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
    """Return the symbols that a file lists for the kernel in another one; raise ``TargetError`` if it is not for it."""
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
        raise TargetError(f"'{file}' is no list of a kernel's symbols: it has no '{KERNEL_BASE}'")
    # A list has no build-id: what every kernel says of itself must stand where the list has it.
    code = _FileCode(elf)
    if not any(code.read(each.address, len(_BANNER_TEXT)) == _BANNER_TEXT for each in symbols.find(_BANNER, "")):
        raise TargetError(f"'{file}' does not belong to '{path}': '{_BANNER}' is not where it says")
    return found


def _symbols_of(elf: ElfFile, module: str = "") -> Iterator[KernelSymbol]:
    """Give the named places of a kernel's or a module's file; in that of a module they count from its sections."""
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
