"""
Functions of the kernel that have the same name: static functions of several source files.

A program writes one of them as ``FILE:NAME``, if symbols of the running build with source files are installed, or as
``NAME,NUMBER``. The number counts the places with this name by ascending address, from 1, like the position of a symbol
in the kernel's live patches (sympos). It is that of one build of the kernel.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.diagnostics import first_of
from dprobes.errors import TargetError
from dprobes.globs import compile_glob
from dprobes.target.module_symbols import split_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.target.kernel.kernel_symbols import Kallsyms, KernelSymbol

__all__ = [
    "KernelCopy",
    "ambiguous_copies",
    "bare_name",
    "copies_of",
    "copy_name",
    "matching_copies",
    "source_of_copy",
    "written_copy",
]

_LISTED = 16
_NUMBERED = re.compile(r"(?P<name>[^,]+),(?P<number>[0-9]{1,6})")


class SymbolsOfKernel(Protocol):
    """The symbols of a kernel and its modules with their source files; a ``RunningKernel`` is one."""

    @property
    def symbols(self) -> Kallsyms:
        """The list of all symbols."""

    def base_of(self, module: str) -> int:
        """Return the address from which offsets in a module count."""

    def symbol(self, name: str, module: str, *, is_code: bool = False) -> KernelSymbol:
        """Return the symbol called ``name`` of a module; raise ``TargetError`` if there is none, or several."""

    def source_files(self, name: str, module: str) -> Mapping[int, str]:
        """Return the source file names of the static symbols called ``name``, by run-time address."""


class KernelCopy(NamedTuple):
    """
    A symbol of the kernel; ``name`` denotes it alone: ``NAME``, ``FILE:NAME`` or ``NAME,NUMBER``.

    ``file`` is its source file; "" if unknown.
    """

    symbol: KernelSymbol
    name: str
    file: str = ""


def copies_of(kernel: SymbolsOfKernel, name: str, module: str, *, is_code: bool = True) -> list[KernelCopy]:
    """
    Return the symbols called ``name`` of a module, "" for the kernel, one for each address, in ascending order.

    With ``is_code``, symbols of code are preferred to others.
    """
    found = kernel.symbols.find(name, module)
    if is_code:
        found = [symbol for symbol in found if symbol.is_code] or found
    symbols = list({symbol.address: symbol for symbol in found}.values())
    if len(symbols) == 1:
        return [KernelCopy(symbols[0], name)]
    files = kernel.source_files(name, module) if symbols else {}
    known = [files.get(symbol.address, "") for symbol in symbols]
    return [
        KernelCopy(symbol, f"{file}:{name}" if file and known.count(file) == 1 else f"{name},{number}", file)
        for number, (symbol, file) in enumerate(zip(symbols, known, strict=True), 1)
    ]


def copy_name(kernel: SymbolsOfKernel, symbol: KernelSymbol) -> str:
    """Return the name of a symbol of code, with its file or number if others have the same name."""
    if symbol.name not in kernel.symbols.shared_names:
        return symbol.name
    copies = copies_of(kernel, symbol.name, symbol.module)
    return next((copy.name for copy in copies if copy.symbol.address == symbol.address), symbol.name)


def bare_name(name: str) -> str:
    """Return the symbol's name of a copy that is written as ``FILE:NAME`` or ``NAME,NUMBER``."""
    return name.rpartition(":")[2].partition(",")[0]


def written_copy(kernel: SymbolsOfKernel, written: str, module: str, *, is_code: bool = False) -> KernelSymbol | None:
    """
    Return the symbol that ``FILE:NAME`` or ``NAME,NUMBER`` denotes; None for a name of another form.

    ``is_code`` is as for ``copies_of``. Raise ``TargetError`` if there is no such symbol.
    """
    if (numbered := _NUMBERED.fullmatch(written)) is not None:
        name, number = numbered["name"], int(numbered["number"])
        copies = copies_of(kernel, name, module, is_code=is_code)
        if not 1 <= number <= len(copies):
            if not copies:
                kernel.symbol(name, module, is_code=is_code)  # raises an error with proposals
            counted = f"{len(copies)} place{'s' * (len(copies) > 1)}"
            raise TargetError(
                f"'{name}' is the name of {counted} in {_shown(module)}: there is no number {number}",
                hint="the number counts them by address, from 1",
            )
        return copies[number - 1].symbol
    if (parts := split_file(written)) is None:
        return None
    file, name = parts
    copies = copies_of(kernel, name, module, is_code=is_code)
    if not copies:
        kernel.symbol(name, module, is_code=is_code)  # raises an error with proposals
    files = kernel.source_files(name, module)
    found = [copy for copy in copies if f"/{files.get(copy.symbol.address, '')}".endswith(f"/{file}")]
    if len(found) == 1:
        return found[0].symbol
    places = first_of([_place(kernel, copy, module) for copy in copies], _LISTED)
    if not found and not any(files.get(copy.symbol.address) for copy in copies):
        raise TargetError(
            f"the source files of the places called '{name}' in {_shown(module)} are unknown",
            hint=f"install debug information of {_shown(module)}, or write {_written(copies[0].name)}; "
            f"the places are at offsets {places}",
        )
    what = f"{len(found)} places" if found else "no place"
    raise TargetError(
        f"'{name}' is the name of {what} in '{file}' of {_shown(module)}", hint=f"it is at offsets {places}"
    )


def matching_copies(kernel: SymbolsOfKernel, pattern: str, module: str) -> Iterator[KernelCopy]:
    """
    Iterate over the functions of a module that match a shell pattern, one for each address, in the order of the list.

    A pattern ``FILE:NAME`` matches functions of source files; ``*`` as FILE also matches where the file is unknown.
    """
    file, name = split_file(pattern) or ("*", pattern)
    in_file = compile_glob(f"*/{file}").match
    seen: set[int] = set()
    known: dict[str, list[KernelCopy]] = {}
    symbols = kernel.symbols.matching(name, module)
    shared = kernel.symbols.shared_names
    for symbol in symbols:
        if symbol.address in seen:
            continue
        seen.add(symbol.address)
        if symbol.name not in shared:
            copy = KernelCopy(symbol, symbol.name)
        else:
            if symbol.name not in known:
                known[symbol.name] = copies_of(kernel, symbol.name, module)
            copy = next(each for each in known[symbol.name] if each.symbol.address == symbol.address)
        if file != "*":
            source = copy.file or kernel.source_files(symbol.name, module).get(symbol.address, "")
            if not source or not in_file(f"/{source}"):
                continue
        yield copy


def ambiguous_copies(kernel: SymbolsOfKernel, name: str, module: str, copies: list[KernelCopy]) -> TargetError:
    """Return the error for a name of several places of a module, "" for the kernel."""
    places = first_of([_place(kernel, copy, module) for copy in copies], _LISTED)
    hint = f"write the intended one as {_written(copies[0].name)}, or all as a pattern, {_written(f'*:{name}')}"
    if not any(copy.file for copy in copies):
        hint += f"; debug information of {_shown(module)} would show their source files"
    return TargetError(
        f"'{name}' is the name of {len(copies)} places in {_shown(module)}, at offsets {places}", hint=hint
    )


def source_of_copy(kernel: SymbolsOfKernel, copy: KernelCopy) -> str:
    """Return, as far as known, the source file of a copy and the global function before it: "slub.c, after 'x'"."""
    before = kernel.symbols.global_before(copy.symbol.address)
    return ", ".join(([copy.file] if copy.file else []) + ([f"after '{before}'"] if before is not None else []))


def _place(kernel: SymbolsOfKernel, copy: KernelCopy, module: str) -> str:
    """Return the offset of a copy as text, with its source."""
    source = source_of_copy(kernel, copy)
    return f"{copy.symbol.address - kernel.base_of(module):#x}" + (f" ({source})" if source else "")


def _written(name: str) -> str:
    return f"'offset = \"{name}\"'"


def _shown(module: str) -> str:
    return f"the module '{module}'" if module else "the kernel"
