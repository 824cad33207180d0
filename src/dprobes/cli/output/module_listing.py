"""The output of ``list``: the modules of a process, the functions of a module or the kernel, and USDT probes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from dprobes.errors import TargetError
from dprobes.escapes import escaped
from dprobes.globs import compile_glob, is_pattern
from dprobes.target.code.machine_code import first_instructions, unprobeable
from dprobes.target.matching_functions import matching_functions, written_names
from dprobes.target.module_symbols import split_file
from dprobes.target.process_maps import code_mappings, command_name
from dprobes.target.usdt import matching_sites, near_probes, usdt_sites

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.kernel.running_kernel import RunningKernel
    from dprobes.target.matching_functions import LeftOut
    from dprobes.target.probed_module import Module
    from dprobes.target.usdt import UsdtSite

__all__ = [
    "FUNCTION_HEADER",
    "KERNEL_HEADER",
    "MODULE_HEADER",
    "USDT_HEADER",
    "PlaceCost",
    "costs_at",
    "describe_lines",
    "describe_usdt",
    "described_site",
    "filled_columns",
    "function_rows",
    "guard_of",
    "kernel_rows",
    "module_rows",
    "required_usdt_rows",
    "split_lines",
    "split_usdt",
    "usdt_rows",
]

# The cost of a hit at a place: the only definition of "cheap", for all verbs.


class PlaceCost(NamedTuple):
    """
    The cost of a hit, in words; ``is_cheap`` is true if a hit is cheap with every engine.

    With the ptrace engine a cheap hit stops the thread once, with the ebpf engine it needs no single step.
    """

    text: str
    is_cheap: bool


def costs_at(module: Module, instructions: Sequence[DecodedInstruction]) -> Iterator[PlaceCost]:
    """Iterate over the costs of a hit at some instructions of a module, in their order."""
    from dprobes.engines.engine_registry import rows

    notes = {row.name: found for row in rows() if (found := list(row.notes_on(module, instructions)))}
    for number, instruction in enumerate(instructions):
        cheap = [name for name, found in notes.items() if found[number].is_cheap]
        if (reason := unprobeable(instruction)) is not None:
            yield PlaceCost(f"none: {reason}", is_cheap=False)
        elif not cheap:
            yield PlaceCost("slow: single-stepped", is_cheap=False)
        elif len(cheap) == len(notes):
            yield PlaceCost("cheap", is_cheap=True)
        else:
            others = [name for name in notes if name not in cheap]
            yield PlaceCost(f"cheap with {' and '.join(cheap)}, slow with {' and '.join(others)}", is_cheap=False)


# Lines of the source in the output of ``locate``: the instructions that begin them, as written in programs.


class LinesOfSource(NamedTuple):
    """The lines ``first`` to ``last``, inclusive, of the source file ``path`` of a module."""

    module: str
    path: str
    first: int
    last: int


def split_lines(place: str) -> LinesOfSource | None:
    """Return the parts of ``MODULE:FILE:LINE`` or ``MODULE:FILE:LINE-LINE``; None for other forms."""
    from dprobes.dpc.modules.debug_places import SOURCE_LINES

    module, _, text = place.partition(":")
    lines = SOURCE_LINES.fullmatch(text)
    if not module or lines is None or Path(place.rpartition(":")[0]).is_file():
        return None  # a path may contain a colon, followed by a file offset
    first = int(lines["first"])
    return LinesOfSource(module, lines["path"], first, int(lines["last"] or first))


def describe_lines(module: Module, lines: LinesOfSource, symbols: Path | None) -> Iterator[str]:
    """
    Yield the instructions that begin lines; those that are cheap to probe are marked with '+'.

    Raise ``TargetError`` if there are none.
    """
    from dprobes.dpc.modules.debug_places import DebugPlaces, place_of
    from dprobes.target.code.machine_code import decode_at
    from dprobes.target.probed_module import FileSymbols

    finder = DebugPlaces(lambda _name: module.elf, FileSymbols(symbols))
    found, by_line = finder.addresses_of_lines(lines.module, lines.path, lines.first, lines.last)
    rows = [(line, address) for line, addresses in by_line.items() for address in addresses]
    decoded = [decode_at(found, found.file_offset(address)) for _, address in rows]
    costs = list(costs_at(found, decoded))
    file = lines.path.rpartition("/")[2]
    for number, ((line, address), instruction, cost) in enumerate(zip(rows, decoded, costs, strict=True)):
        if not number or rows[number - 1][0] != line:
            yield ""
            yield f"{file}:{line}"
        mark = "+" if cost.is_cheap else " "
        place = f"offset = {place_of(found, address)}"
        yield f"   {instruction.offset:8x} {mark} {place:<34} {instruction.text}"


# USDT probes of a module, in the output of ``list``, ``locate`` and ``show``.

PREFIX = "usdt"
USDT_HEADER = ("usdt probe", "sites", "arguments", "guarded by a semaphore")


def split_usdt(place: str) -> tuple[str, str, str] | None:
    """Return module, provider and name (patterns, or ``*``) of ``MODULE:usdt[:PROVIDER[:NAME]]``; None for others."""
    module, colon, rest = place.partition(f":{PREFIX}")
    if not colon or (rest and not rest.startswith(":")) or rest.startswith("::"):
        return None
    provider, _, name = rest.removeprefix(":").partition(":")
    return module, provider or "*", name or "*"


def usdt_rows(module: Module, provider: str = "*", name: str = "*") -> list[tuple[str, ...]]:
    """Return the USDT probes of a module that match the patterns, each with its arguments."""
    by_probe: dict[str, list[UsdtSite]] = {}
    for site in matching_sites(module.elf, provider, name):
        by_probe.setdefault(site.probe, []).append(site)
    return [
        (
            f"{PREFIX}:{escaped(probe)}",
            str(len(sites)),
            _types(sites),
            "yes" if any(site.semaphore for site in sites) else "no",
        )
        for probe, sites in sorted(by_probe.items())
    ]


def _types(sites: Sequence[UsdtSite]) -> str:
    """Return the types of arguments, for each variant among the sites."""
    forms = dict.fromkeys(", ".join(argument.type_name for argument in site.arguments) or "none" for site in sites)
    return " or ".join(forms)


def describe_usdt(module: Module, provider: str, name: str) -> Iterator[str]:
    """Iterate over lines with the sites of USDT probes; raise ``TargetError`` if there are none."""
    sites = matching_sites(module.elf, provider, name)
    if not sites:
        if not usdt_sites(module.elf):
            raise TargetError(f"'{module.path}' has no USDT probes")
        near = near_probes(module.elf, provider, name)
        hint = f"did you mean '{PREFIX}:{near[0]}'?" if near else None
        raise TargetError(f"'{module.path}' has no USDT probe '{PREFIX}:{provider}:{name}'", hint=hint)
    last = ""
    for site in sorted(sites, key=lambda site: (site.probe, site.address)):
        if site.probe != last:
            last = site.probe
            yield ""
            yield f"offset = {PREFIX}:{escaped(site.probe)}"
        yield from (f"    {line}" for line in _site_lines(module, site))


def _site_lines(module: Module, site: UsdtSite) -> Iterator[str]:
    if site.offset is None:
        yield f"at address {site.address:#x}, which is not in the code of the file"
        return
    symbol = module.symbol_at(site.offset)
    where = f" in {symbol[0]}+{symbol[1]:#x}" if symbol is not None else ""
    yield f"at file offset {site.offset:#x}{where}"
    yield from (f"    {line}" for line in described_site(site))


def described_site(site: UsdtSite) -> Iterator[str]:
    """Iterate over lines with the arguments of a USDT site, and the address of its semaphore if there is one."""
    for number, argument in enumerate(site.arguments, 1):
        obstacle = f": cannot be pushed, {argument.obstacle}" if argument.obstacle else ""
        yield f"push usdt, {number:<3} {argument.type_name:<4} {escaped(argument.text.rpartition('@')[2])}{obstacle}"
    if site.semaphore:
        yield "guarded by a semaphore, which is raised while the probe is inserted"


def guard_of(module: Module, offset: int) -> str | None:
    """
    Return a note for the user if a file offset is a site of a USDT probe, or None for other offsets.

    The note names the probe, and warns of a semaphore that guards it.
    """
    for site in usdt_sites(module.elf):
        if site.offset == offset:
            probe = f"{PREFIX}:{escaped(site.probe)}"
            if site.semaphore:
                return (
                    f"This is a place of '{probe}', which is guarded by a semaphore: a probe with a number is "
                    f"hit only while it is raised, as 'offset = {probe}' does."
                )
            return f"This is a place of '{probe}': 'offset = {probe}' knows its arguments."
    return None


MODULE_HEADER = ("module", "usdt probes", "path")
FUNCTION_HEADER = ("function", "size", "offset", "a hit at its start", "reads as", "source")
KERNEL_HEADER = ("function", "a hit at its start", "source")


def filled_columns(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return a table's header and rows without the columns that are empty in all rows."""
    filled = [number for number in range(len(header)) if any(row[number] for row in rows)]
    return tuple(header[n] for n in filled), [tuple(row[n] for n in filled) for row in rows]


def module_rows(pid: int, pattern: str) -> list[tuple[str, ...]]:
    """
    Return the files whose code a process maps and that match ``pattern``, each with its name for ``name =``.

    Raise ``TargetError`` if none matches.
    """
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.module_lookup import module_name, root_of

    root, called = root_of(pid), (_started_as(pid), command_name(pid))
    paths = dict.fromkeys(mapping.path for mapping in code_mappings(pid)[0] if mapping.is_file)
    matches = compile_glob(pattern).match
    rows: list[tuple[str, ...]] = []
    for path in paths:
        soname, probes = None, 0
        with contextlib.suppress(TargetError):  # a deleted file still has its name
            elf = ElfFile.open(root + path)
            soname = elf.soname
            probes = len({site.probe for site in usdt_sites(elf)})
        name = module_name(path, soname, called, root)
        if matches(name):
            rows.append((name, str(probes or "-"), path))
    return rows


def _started_as(pid: int) -> str:
    """Return the name with which a process was started, if it is available (proc(5), ``cmdline``)."""
    with contextlib.suppress(OSError):
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0])
    return ""


def function_rows(module: Module, pattern: str) -> list[tuple[str, ...]]:
    """
    Return the functions of a module whose names match a pattern; raise ``TargetError`` if there is none.

    The first column is the name in programs that denotes exactly that function. If that differs from the readable name,
    the column before the last has the readable name. The last column has the source file and line of a static function
    that several files have.
    """
    named = [] if is_pattern(pattern) else [symbol.name for _, symbol in module.symbols.readable(pattern)]
    found = [matching_functions(module, each) for each in named or [pattern]]
    functions = [function for functions, _ in found for function in functions]
    if not functions:
        _refuse_pattern(module, pattern, [left for _, others in found for left in others])
    from dprobes.dwarf.declaration_places import function_source

    instructions = list(first_instructions(module, [each.offset for each in functions]))
    names = written_names(module, functions)
    return [
        (
            written,
            str(each.size or "?"),
            f"{each.offset:#x}",
            cost.text,
            "" if written.endswith(name) else name,
            (function_source(module.elf, each.address) or "") if split_file(written) is not None else "",
        )
        for (written, name), each, cost in zip(names, functions, costs_at(module, instructions), strict=True)
    ]


def _refuse_pattern(module: Module, pattern: str, left_out: Sequence[LeftOut]) -> NoReturn:
    if not left_out and not is_pattern(pattern):
        module.address_of(pattern)  # raises an error with proposals
    reasons = {one.name: one.reason for one in left_out}
    why = next((f": '{name}': {reason}" for name, reason in reasons.items()), "")
    raise TargetError(f"'{pattern}' matches no function of '{module.path}'{why}")


def required_usdt_rows(module: Module, provider: str, name: str) -> list[tuple[str, ...]]:
    """Return the USDT probes of a module that match the patterns; raise ``TargetError`` if there is none."""
    if rows := usdt_rows(module, provider, name):
        return rows
    what = "no USDT probes" if (provider, name) == ("*", "*") else f"no USDT probe 'usdt:{provider}:{name}'"
    raise TargetError(f"'{module.path}' has {what}")


def kernel_rows(kernel: RunningKernel, module: str, pattern: str) -> list[tuple[str, ...]]:
    """
    Return the functions of the kernel or one of its modules that match a pattern; raise ``TargetError`` without any.

    If several functions have one name, the last column has the source file, or else the global function before it.
    """
    from dprobes.target.kernel.kernel_copies import matching_copies, source_of_copy

    rows: list[tuple[str, ...]] = []
    for copy in matching_copies(kernel, pattern, module):
        symbol = copy.symbol
        if kernel.is_blacklisted(symbol.address):
            cost = "none: the kernel excludes it (kprobe blacklist)"
        elif kernel.is_traceable(symbol.address):
            cost = "cheap: ftrace calls the handler"
        else:
            cost = "a kprobe"
        rows.append((copy.name, cost, source_of_copy(kernel, copy) if copy.name != symbol.name else ""))
    if not rows:
        if not is_pattern(pattern):
            kernel.symbol(pattern, module, is_code=True)  # raises an error with proposals
        raise TargetError(f"'{pattern}' matches no function of {f'the module {module!r}' if module else 'the kernel'}")
    return rows
