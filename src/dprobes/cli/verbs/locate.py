"""The verbs ``locate``, which prints the statements for a probepoint at a name, and ``list``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.cli.console import Progress, print_lines, print_table
from dprobes.cli.shared_options import PROCESS_ID, symbols_option
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from dprobes.rpn.rpn_program import Expression
    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.probed_module import Module

__all__ = ["not_there"]

_BEFORE, _AFTER = 3, 6

_LISTED_NAME = re.compile(r"(?P<name>[A-Za-z_].*[:,\[].*?)(?: ?(?P<distance>[+-](?:0[xX][0-9a-fA-F]+|[0-9]+)))?")
"""A name with a source file before it, with a number after it, or with brackets, in the form of 'list'."""


@click.command("locate")
@click.argument("place", metavar="MODULE[:SYMBOL[+N|-N]|:FILE:LINE]")
@symbols_option
@click.option("-p", "--pid", type=PROCESS_ID, help="Search for the module among the files that this process maps.")
def locate_command(place: str, symbols: Path | None, pid: int | None) -> int:
    """
    Print the values of 'offset =' and 'opcode =' for a place in a module.

    MODULE is a path, or a name as in 'name ='; or 'kernel', or a module of the kernel. SYMBOL may be a
    number: a file offset. The instructions around the place are listed. Those marked with '+' are cheap to probe with
    all engines: a hit stops the thread only once, and needs no single step. 'dprobes list' shows this for functions.

    'MODULE:FILE:LINE', as in 'bash:shell.c:400' or 'bash:shell.c:400-410', lists the instructions that begin lines of
    the source, by the debug information of the module.

    'syscall NAME' and 'tracepoint SUBSYSTEM:NAME' show the fields of a system call or of a tracepoint of the kernel;
    patterns, as in 'tracepoint sched:*', list them.

    'MODULE:usdt:PROVIDER:NAME' shows the sites of a USDT probe with their arguments; both may be patterns.
    """
    with Progress("looking for the place"):
        lines = _lines(place, symbols, pid)
    print_lines(lines)
    return 0


def _lines(place: str, symbols: Path | None, pid: int | None) -> list[str]:
    """
    Return the output lines for a place: function, source lines, tracepoint, system call, or USDT probes.

    ``symbols`` is the value of ``--sym``. ``pid`` selects the process whose files are searched, or is None for this
    one.
    """
    from dprobes.target.module_lookup import find_module

    if place.startswith(("syscall", "tracepoint")):
        from dprobes.cli.output.kernel_listing import describe_traced, is_traced

        if is_traced(place):
            return list(describe_traced(place))
    from dprobes.cli.output.module_listing import describe_usdt, split_usdt

    if (usdt := split_usdt(place)) is not None:
        if (path := find_module(usdt[0], pid=pid)) is None:
            raise not_there(usdt[0], pid)
        module = _load(path, symbols)
        return [*_describe_module(module, usdt[0]), *describe_usdt(module, *usdt[1:])]
    from dprobes.cli.output.module_listing import describe_lines, split_lines

    if (lines := split_lines(place)) is not None:
        if (path := find_module(lines.module, pid=pid)) is None:
            raise not_there(lines.module, pid)
        module = _load(path, symbols)
        return [*_describe_module(module, lines.module), *describe_lines(module, lines, symbols)]
    name, expression = _split(place)
    from dprobes.cli.output.kernel_listing import describe_kernel_place, is_module_file, kernel_module

    path = None if is_module_file(name) else find_module(name, pid=pid)
    if path is None:
        if (in_kernel := kernel_module(name)) is not None:
            return list(describe_kernel_place(*in_kernel, expression))
        raise not_there(name, pid, place)
    module = _load(path, symbols)
    described = _describe_module(module, name)
    if expression is not None:
        described += _describe_place(module, expression)
    return described


def _split(place: str) -> tuple[str, Expression | None]:
    """Return the module and the parsed expression of ``MODULE[:SYMBOL[±N]]``."""
    first = re.search(r"(?<!:):(?!:)", place)
    name, colon, text = (place[: first.start()], ":", place[first.end() :]) if first is not None else ("", "", "")
    if not colon:
        name, text = place, ""
    if not name:
        raise click.UsageError("the name of the module is empty")
    if not colon:
        return name, None
    from dprobes.rpn.rpn_expressions import parse_readable

    if (readable := parse_readable(text)) is not None:
        return name, readable
    from dprobes.diagnostics import Diagnostics
    from dprobes.preprocessor import preprocess
    from dprobes.rpn.rpn_expressions import ExpressionError, Lexer, parse_expression
    from dprobes.rpn.rpn_program import Expression
    from dprobes.source_text import SourceFile

    diagnostics = Diagnostics()
    lexer = Lexer(preprocess(SourceFile("<place>", text), diagnostics), diagnostics.error)
    tokens = [token for statement in lexer.statements() for token in statement]
    try:
        return name, parse_expression(tokens)
    except ExpressionError as error:
        if (found := _LISTED_NAME.fullmatch(text)) is not None:
            return name, Expression(int(found["distance"] or "0", 0), found["name"])
        raise click.UsageError(
            f"'{text}' is not a symbol, a number, or a symbol and a number: {error.message}"
        ) from None


def not_there(name: str, pid: int | None, place: str | None = None) -> TargetError:
    """Return the error for a missing module, with a proposal based on a place."""
    from dprobes.target.module_lookup import suggestion

    hint = suggestion(name, pid=pid)
    if place is not None:
        from dprobes.dpc.tracer_words import place_hint

        known = place_hint(place)
        if name == "usdt" and place.count(":") == 1:
            hint = f"write '{place.removeprefix('usdt:')}:usdt:*'"
        elif name in ("syscalls", "tracepoints", "syscall", "tracepoint"):
            hint = f"write '{name.removesuffix('s')}', or '{name.removesuffix('s')}:*'"
        elif known is not None:
            written = known[1].removeprefix("return ")
            kind, _, rest = written.partition(" ")
            hint = f"write '{written if kind in ('tracepoint', 'syscall') else rest or written}'"
    return TargetError(f"there is no module '{name}' on this machine", hint=hint)


def _load(path: Path, symbols: Path | None) -> Module:
    from dprobes.target.probed_module import Module

    return Module.load(path, symbols)


def _describe_module(module: Module, name: str) -> list[str]:
    elf = module.elf
    called = name.rpartition("/")[2]
    is_link = called not in (module.path.name, elf.soname)
    lines = [
        f"module    {module.path}" + (f", to which '{called}' is a link" if is_link else ""),
        f"format    {elf.machine}, {elf.word_size}-byte words, "
        + ("position-independent" if elf.is_pie_or_shared else "fixed address"),
    ]
    if elf.soname:
        lines.append(f"soname    {elf.soname}")
    lines.append(f"build-id  {elf.build_id or 'none'}")
    return lines


def _describe_place(module: Module, expression: Expression) -> list[str]:
    from dprobes.cli.output.module_listing import guard_of
    from dprobes.target.code.machine_code import disassemble_around, instruction_at, unprobeable

    if expression.symbol is None:
        offset = expression.addend
    else:
        offset = module.file_offset(module.address_of(expression.symbol) + expression.addend)
    decoded, certain = instruction_at(module, offset)
    where = "no function is known there"
    if (symbol := module.symbol_at(offset)) is not None:
        name, distance = symbol
        where = f"{name}+{distance:#x}" if distance else name
    around = disassemble_around(module, offset, _BEFORE, _AFTER)
    lines = [
        f"function  {where}",
        *_source(module, symbol[0] if symbol is not None else "", decoded.address),
        *_readable(symbol[0] if symbol is not None else ""),
        *_arguments(module, symbol[0] if symbol is not None else None),
        f"address   {decoded.address:#x}",
        "",
        f"offset = {_offset_text(expression, offset)}",
        f"opcode = {decoded.opcode_byte:#04x}",
        "",
        *_instruction_lines(module, around, offset),
        "",
        *_verdict(module, decoded, unprobeable(decoded)),
    ]
    if (guard := guard_of(module, offset)) is not None:
        lines.append(guard)
    if not certain:
        lines.append("No function is known at this offset: it may be data. A probe here needs 'opcode ='.")
    return lines


def _source(module: Module, function: str, address: int) -> Iterator[str]:
    """Yield a line with the source file and line of a function called FILE:NAME, if known; nothing for others."""
    from dprobes.dwarf.declaration_places import function_source
    from dprobes.target.module_symbols import split_file

    if split_file(function) is not None and (source := function_source(module.elf, address)) is not None:
        yield f"source    {source}"


def _readable(function: str) -> Iterator[str]:
    """Yield a line with the readable name of a function in C++ or Rust; nothing for other names."""
    from dprobes.target.readable_names import Demangler

    if (name := Demangler().name_of(function)) != function:
        yield f"          {name}"


def _arguments(module: Module, function: str | None) -> Iterator[str]:
    """Yield a line about the argument registers of a function in a Go program; nothing for other programs."""
    from dprobes.target.go_binary import Convention, convention_of, go_version, passes_in_registers

    if (version := go_version(module.elf)) is None:
        return
    convention = convention_of(function) if passes_in_registers(module.elf) else Convention.ABI0
    where = convention.value
    if convention is Convention.GO:
        where += ": arg0 to arg8 are rax, rbx, rcx, rdi, rsi, r8, r9, r10 and r11"
    yield f"arguments {where}; Go {version[0]}.{version[1]}"


def _offset_text(expression: Expression, offset: int) -> str:
    from dprobes.globs import is_pattern
    from dprobes.rpn.rpn_program import Expression

    symbol = expression.symbol
    if symbol is None:
        return f"{offset:#x}"
    is_plain = re.fullmatch(r"[\w.$@]+", symbol, re.ASCII) or ("::" in symbol and not is_pattern(symbol))
    written = expression if is_plain else Expression(expression.addend, f'"{symbol}"')
    return f"{written}          // file offset {offset:#x}"


def _instruction_lines(module: Module, instructions: Sequence[DecodedInstruction], offset: int) -> Iterator[str]:
    from dprobes.cli.output.module_listing import costs_at

    for instruction, cost in zip(instructions, costs_at(module, instructions), strict=True):
        arrow = "=>" if instruction.offset == offset else "  "
        cheap = "+" if cost.is_cheap else " "
        yield f"{arrow} {instruction.offset:8x} {cheap} {instruction.raw.hex(' '):<30} {instruction.text}"


def _verdict(module: Module, decoded: DecodedInstruction, unprobeable: str | None) -> list[str]:
    if unprobeable is not None:
        return [f"'{decoded.text}' can never carry a probe: {unprobeable}"]
    from dprobes.engines.engine_registry import rows

    return [
        f"{row.name}: '{decoded.text}' is {note.text}{note.verdict}"
        for row in rows()
        for note in row.notes_on(module, [decoded])
    ]


# The verb ``list``: the possible places of probes.


@click.command("list")
@click.argument("what", metavar="[MODULE[:PATTERN]]", required=False)
@symbols_option
@click.option("-p", "--pid", type=PROCESS_ID, help="Search for the module among the files that this process maps.")
def list_command(what: str | None, symbols: Path | None, pid: int | None) -> int:
    """
    List the functions of MODULE whose names match the shell pattern PATTERN, or all its functions and USDT probes.

    MODULE is a path, a name as in 'name =', 'kernel', or a loaded module of the kernel. 'tracepoint [PATTERN]' and
    'syscall [PATTERN]' list tracepoints and system calls, as in 'tracepoint sched:*'. With -p alone, the modules of the
    process are listed.

    A name is printed in the form that probe programs accept in quotes. If several functions have the same readable
    name, each is listed by its linker name, its source file or its offset; of the kernel, by its source file or its
    number among them, as in 'init_once,3'. A pattern FILE:NAME lists the static functions of source files: '*:helper'
    lists all functions called helper. The second column is the cost of a hit at
    the start of the function. The USDT probes of the module follow the functions; 'MODULE:usdt:PROVIDER:NAME' lists
    only the USDT probes that match the patterns PROVIDER and NAME.
    """
    from dprobes.cli.output import module_listing
    from dprobes.cli.output.kernel_listing import describe_traced, is_traced, kernel_module, split_traced
    from dprobes.cli.output.module_listing import USDT_HEADER, split_usdt, usdt_rows
    from dprobes.target.module_lookup import find_module

    progress = Progress.of_command()
    progress.begin("looking for what can be probed")

    def show(header: tuple[str, ...], rows: Iterable[Sequence[str]]) -> None:
        found = list(rows)
        progress.end()
        print_table(header, found)

    if what is None:
        if pid is None:
            raise click.UsageError("name a module, or a process with -p PID")
        show(module_listing.MODULE_HEADER, module_listing.module_rows(pid, "*"))
        return 0
    if is_traced(what):
        kind, pattern = split_traced(what)
        lines = list(describe_traced(what if any(c in pattern for c in "*?[") else f"{kind}:{pattern}*"))
        progress.end()
        print_lines(lines)
        return 0
    name, _, pattern = what.partition(":")
    if (path := find_module(name, pid=pid)) is not None:
        from dprobes.target.elf.symbol_sources import lack_of_debug_file
        from dprobes.target.probed_module import Module

        module, usdt = Module.load(path, symbols), split_usdt(what)
        if (problem := lack_of_debug_file(module.elf)) is not None:
            console.note(problem)
        if usdt is not None:
            show(USDT_HEADER, module_listing.required_usdt_rows(module, *usdt[1:]))
            return 0
        probes = usdt_rows(module) if not pattern else []
        if pattern or not probes or any(True for _ in module.symbols.functions()):
            functions = module_listing.function_rows(module, pattern or "*")
            show(*module_listing.filled_columns(module_listing.FUNCTION_HEADER, functions))
        if probes:
            print_lines([""])
            show(USDT_HEADER, probes)
        return 0
    if (in_kernel := kernel_module(name)) is not None:
        rows = module_listing.kernel_rows(*in_kernel, pattern or "*")
        show(*module_listing.filled_columns(module_listing.KERNEL_HEADER, rows))
        return 0

    raise not_there(name, pid, what)
