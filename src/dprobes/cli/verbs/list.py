"""The verb ``list``: what there is to probe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.cli.options import PROCESS_ID, symbols_option
from dprobes.cli.output.textoutput import print_lines, print_table
from dprobes.cli.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["command"]


@click.command("list")
@click.argument("what", metavar="[MODULE[:PATTERN]]", required=False)
@symbols_option
@click.option("-p", "--pid", type=PROCESS_ID, help="The process whose modules are meant.")
def command(what: str | None, symbols: Path | None, pid: int | None) -> int:
    """
    List what there is to probe: the functions of MODULE that match the shell pattern PATTERN, or all of them.

    MODULE is a path, or a name as in 'name ='; or 'kernel', or a module that the kernel has loaded; or 'tracepoint'
    or 'syscall', as in 'tracepoint sched:*'. With -p alone, the modules of the process. Each function is listed as
    a program says it, in quotes, so that no other one is meant: where its name is not enough for that, by the
    linker's name, by its source file too, or by its offset. What a hit at its start costs is said as the marks of
    'dprobes locate' do. The USDT probes of the module follow; 'MODULE:usdt:PROVIDER:NAME' lists those that match the
    patterns, and no functions.
    """
    from dprobes.cli.output import inventory
    from dprobes.cli.output.kernelplace import kernel_module
    from dprobes.cli.output.tracepointplace import describe_traced, is_traced, split_traced
    from dprobes.cli.output.usdtplace import USDT_HEADER, split_usdt, usdt_rows
    from dprobes.target.modules import find_module

    progress = Progress.of_command()
    progress.begin("looking for what can be probed")

    def show(header: tuple[str, ...], rows: Iterable[Sequence[str]]) -> None:
        found = list(rows)
        progress.end()
        print_table(header, found)

    if what is None:
        if pid is None:
            raise click.UsageError("name a module, or a process with -p PID")
        show(inventory.MODULE_HEADER, inventory.module_rows(pid, "*"))
        return 0
    if is_traced(what):
        kind, pattern = split_traced(what)
        lines = list(describe_traced(what if any(c in pattern for c in "*?[") else f"{kind}:{pattern}*"))
        progress.end()
        print_lines(lines)
        return 0
    name, _, pattern = what.partition(":")
    if (path := find_module(name, pid=pid)) is not None:
        from dprobes.target.elf.debugfiles import lack_of_debug_file
        from dprobes.target.location import Module

        module, usdt = Module.load(path, symbols), split_usdt(what)
        if (problem := lack_of_debug_file(module.elf)) is not None:
            console.note(problem)
        if usdt is not None:
            show(USDT_HEADER, inventory.usdt_rows(module, *usdt[1:]))
            return 0
        probes = usdt_rows(module) if not pattern else []
        if pattern or not probes or any(True for _ in module.symbols.functions()):
            functions = inventory.function_rows(module, pattern or "*")
            are_read = any(row[-1] for row in functions)
            header = inventory.FUNCTION_HEADER if are_read else inventory.FUNCTION_HEADER[:-1]
            show(header, [row[: len(header)] for row in functions])
        if probes:
            print_lines([""])
            show(USDT_HEADER, probes)
        return 0
    if (in_kernel := kernel_module(name)) is not None:
        show(inventory.KERNEL_HEADER, inventory.kernel_rows(*in_kernel, pattern or "*"))
        return 0
    from dprobes.cli.verbs.locate import not_there

    raise not_there(name, pid, what)
