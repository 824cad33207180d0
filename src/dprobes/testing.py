r"""
Tests of probe handlers without a process, a kernel or a privilege: a context backed by dictionaries, and one call.

::

    from dprobes.testing import FakeContext, run_handler

    context = FakeContext("x86_64", registers={"rdi": 0x1000}, memory={0x1000: b"/etc/passwd\0"})
    outcome = run_handler('''
        push 64          // at most so many bytes
        push r, arg0
        log str
    ''', context)
    assert outcome.log == b"\x01" + (11).to_bytes(2, "little") + b"/etc/passwd"

The handler is compiled and checked as by ``dprobes run``, and runs in the reference interpreter, whose behaviour is
that of every engine. Errors in its text raise ``SourceError``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.api.program_builder import ProgramBuilder
from dprobes.diagnostics import Diagnostics
from dprobes.errors import DprobesError
from dprobes.fake_context import PAGE, FakeContext, header_of
from dprobes.keyed.table_entries import stores_of
from dprobes.record.log_record import Item
from dprobes.rpn.compilation_passes import CompileOptions, check_program, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.program_text import Header, keywords_of
from dprobes.rpn.rpn_program import Address, Offset, Program
from dprobes.source_text import SourceFile
from dprobes.vm import Ending, Interpreter, Outcome, Point

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableSequence

    from dprobes.api.compiled_program import CompiledProgram
    from dprobes.record.log_record import LogRecord
    from dprobes.rpn.rpn_program import ProbeDefinition
    from dprobes.vm.rpn_machine import Machine

__all__ = ["PAGE", "FakeContext", "prepare", "record_of", "run_definition", "run_handler"]


def run_handler(
    handler: str | ProgramBuilder | CompiledProgram | Program,
    context: FakeContext | None = None,
    *,
    architecture: str = "x86_64",
    minor: int | None = None,
    allow_write: bool = True,
    **header: int | str | bool,
) -> Outcome:
    """
    Run one hit of a handler and return its outcome.

    ``handler`` is a program, the text of a program, or the instructions of one handler (and procedures that it calls).
    ``minor`` selects a handler of a program; without it the first one runs. ``architecture`` is ignored if there is a
    ``context``, which has its own. For a lone handler, other keyword arguments are header statements: ``logmax=16,
    ex_mask=0x1fff``. ``record_of`` converts the result to a record.

    Raise ``SourceError`` if the program has errors, and ``DprobesError`` if no handler has the code ``minor``.
    """
    context = FakeContext(architecture) if context is None else context
    diagnostics = Diagnostics()
    options = CompileOptions(allow_write=allow_write)
    if isinstance(handler, str):
        if not _PROGRAM.search(handler):
            if minor is not None:
                header["minor"] = minor
            handler, header = _wrap(handler, context, header), {}
        program = parse_source(SourceFile("handler.rpn", handler), diagnostics, options)
    elif isinstance(handler, Program):
        program = handler
    else:
        program = handler.build() if isinstance(handler, ProgramBuilder) else handler.program
    if header:
        raise DprobesError("header statements are given beside a program that has a file header of its own")
    check_program(program, context.architecture, diagnostics, options)
    for number, definition in enumerate(program.definitions):
        if minor in (None, definition.minor):
            return run_definition(program, number, context).outcome()
    raise DprobesError(f"the program has no handler with minor {minor}")


def record_of(outcome: Outcome, context: FakeContext) -> LogRecord | None:
    """
    Return the record of a hit as an engine would produce it, or None after ``abort``.

    A stack trace would be a second record, which is not returned; ``outcome.trace`` contains its data.
    """
    if outcome.ending is Ending.ABORT:
        return None
    items = Item.CPU | Item.PID | Item.UID | Item.IP | Item.SP | Item.TIME | Item.TID
    return header_of(context, items)._replace(major=outcome.major, minor=outcome.minor, data=outcome.log)


def run_definition(program: Program, number: int, context: FakeContext) -> Machine:
    """Run one hit of the definition with index ``number`` in a checked program; return the machine after it."""
    image = encode(program, context.architecture)
    point = prepare(program, number, context)
    return Interpreter(image, context.architecture).final_state(image.handlers[number], point, context)


def prepare(program: Program, number: int, context: FakeContext) -> Point:
    """
    Add the variables and tables of a program to a context.

    Return the point of the definition with index ``number``.
    """
    _grow(context.local_variables, program.vars)
    _grow(context.global_variables, program.gvars)
    _grow(context.cpu_variables(), program.cvars)
    _grow(context.thread_variables(), program.tvars)
    if [store.table for store in context.keyed_tables] != list(program.tables):
        context.keyed_tables = stores_of(program.tables)
    definition = program.definitions[number]
    return Point.of(program, definition, _offset(definition, context), context.arguments)


_PROGRAM = re.compile(r"^[ \t]*name[ \t]*=", re.MULTILINE | re.IGNORECASE)


def _wrap(handler: str, context: FakeContext, header: Mapping[str, int | str | bool]) -> str:
    """
    Return the text of a program with this handler.

    ``header`` maps keywords of header statements to their values. The header replaces an empty first line, so that line
    numbers are kept.
    """
    statements: dict[str, int | str | bool] = {
        "vars": len(context.local_variables),
        "gvars": len(context.global_variables),
        "cvars": len(context.cpu_variables()),
        "tvars": len(context.thread_variables()),
    }
    in_file = {k: v for k, v in header.items() if k in keywords_of(Header.FILE)}
    in_point = {k: v for k, v in header.items() if k not in in_file}
    places = ("offset", "address", "sampler")
    place = {k: v for k, v in in_point.items() if k in places} or {"offset": 0}
    statements = {"name": "handler", **statements, **in_file, **place, **in_point}
    text = "; ".join(f"{k} = {('no', 'yes')[v] if isinstance(v, bool) else v}" for k, v in statements.items())
    return text + ("" if handler.startswith("\n") else "\n") + handler


def _grow(variables: MutableSequence[int], count: int) -> None:
    variables.extend([0] * (count - len(variables)))


def _offset(definition: ProbeDefinition, context: FakeContext) -> int:
    match definition.location:
        case Offset(expression) | Address(expression):
            symbol = expression.symbol
            return expression.addend + (context.symbols.get(symbol, 0) if symbol is not None else 0)
        case _:
            return 0
