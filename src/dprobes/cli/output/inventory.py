"""What there is to probe, as ``list`` shows it: the modules of a process, the functions of a module or the kernel."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.cli.output.placecost import costs_at
from dprobes.errors import TargetError
from dprobes.globs import compile_glob, is_pattern
from dprobes.target.code.instructions import first_instructions
from dprobes.target.functions import matching_functions, written_names
from dprobes.target.processmaps import code_mappings, command_name

if TYPE_CHECKING:
    from dprobes.target.kernel.runningkernel import RunningKernel
    from dprobes.target.location import Module

__all__ = [
    "FUNCTION_HEADER",
    "KERNEL_HEADER",
    "MODULE_HEADER",
    "function_rows",
    "kernel_rows",
    "module_rows",
    "usdt_rows",
]

MODULE_HEADER = ("module", "usdt probes", "path")
FUNCTION_HEADER = ("function", "size", "offset", "a hit at its start", "reads as")
KERNEL_HEADER = ("function", "a hit at its start")


def module_rows(pid: int, pattern: str) -> list[tuple[str, ...]]:
    """Return the files whose code a process maps, with the names that ``name =`` takes; raise ``TargetError``."""
    from dprobes.target.elf.file import ElfFile
    from dprobes.target.modules import root_of
    from dprobes.target.names.modulenames import module_name
    from dprobes.target.usdt import usdt_sites

    root, called = root_of(pid), (_started_as(pid), command_name(pid))
    paths = dict.fromkeys(mapping.path for mapping in code_mappings(pid)[0] if mapping.is_file)
    matches = compile_glob(pattern).match
    rows: list[tuple[str, ...]] = []
    for path in paths:
        soname, probes = None, 0
        with contextlib.suppress(TargetError):  # what is not there any more has its name still
            elf = ElfFile.open(root + path)
            soname = elf.soname
            probes = len({site.probe for site in usdt_sites(elf)})
        name = module_name(path, soname, called, root)
        if matches(name):
            rows.append((name, str(probes or "-"), path))
    return rows


def _started_as(pid: int) -> str:
    """Return the name with which a process was started, as far as it says; see proc(5), ``cmdline``."""
    with contextlib.suppress(OSError):
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0])
    return ""


def function_rows(module: Module, pattern: str) -> list[tuple[str, ...]]:
    """
    Return the functions of a module whose names match a pattern; raise ``TargetError`` if there is none.

    The first column is what a program says for exactly that function. Where that is not how people read its name, that
    stands in the last column.
    """
    named = [] if is_pattern(pattern) else [symbol.name for _, symbol in module.symbols.readable(pattern)]
    found = [matching_functions(module, each) for each in named or [pattern]]
    functions = [function for functions, _ in found for function in functions]
    if not functions and (of_file := {symbol.address for symbol in module.symbols.lookup(pattern)}):
        same, _ = matching_functions(module, pattern.rpartition(":")[2])
        functions = [function for function in same if function.address in of_file]
    left_out = [left for _, others in found for left in others]
    if not functions:
        if not left_out and not is_pattern(pattern):
            module.address_of(pattern)  # which says what may be meant
        reasons = {one.name: one.reason for one in left_out}
        why = next((f": '{name}': {reason}" for name, reason in reasons.items()), "")
        raise TargetError(f"'{pattern}' matches no function of '{module.path}'{why}")
    instructions = list(first_instructions(module, [each.offset for each in functions]))
    names = written_names(module, functions)
    return [
        (written, str(each.size or "?"), f"{each.offset:#x}", cost.text, "" if written.endswith(name) else name)
        for (written, name), each, cost in zip(names, functions, costs_at(module, instructions), strict=True)
    ]


def usdt_rows(module: Module, provider: str, name: str) -> list[tuple[str, ...]]:
    """Return the USDT probes of a module that match the patterns; raise ``TargetError`` if there is none."""
    from dprobes.cli.output import usdtplace

    if rows := usdtplace.usdt_rows(module, provider, name):
        return rows
    what = "no USDT probes" if (provider, name) == ("*", "*") else f"no USDT probe 'usdt:{provider}:{name}'"
    raise TargetError(f"'{module.path}' has {what}")


def kernel_rows(kernel: RunningKernel, module: str, pattern: str) -> list[tuple[str, ...]]:
    """Return the functions of the kernel or a module of it that match a pattern; raise ``TargetError``."""
    rows: list[tuple[str, ...]] = []
    for symbol in kernel.symbols.matching(pattern, module):
        if kernel.is_blacklisted(symbol.address):
            cost = "none: the kernel excludes it (kprobe blacklist)"
        elif kernel.is_traceable(symbol.address):
            cost = "cheap: ftrace calls the handler"
        else:
            cost = "a kprobe"
        rows.append((symbol.name, cost))
    if not rows:
        if not is_pattern(pattern):
            kernel.symbol(pattern, module, is_code=True)  # which says what may be meant
        raise TargetError(f"'{pattern}' matches no function of {f'the module {module!r}' if module else 'the kernel'}")
    return rows
