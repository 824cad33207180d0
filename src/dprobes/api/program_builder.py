"""
Probe programs written in Python.

A ``ProgramBuilder`` writes the text of the language, one statement for each call, and passes it to the parser of the
language. There is therefore a single definition of valid programs, and an error refers to the line of Python that
caused it.
"""

from __future__ import annotations

import itertools
import linecache
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

from dprobes.api.mnemonics import Instructions
from dprobes.diagnostics import Diagnostic, Diagnostics, Note
from dprobes.errors import SourceError
from dprobes.rpn.compilation_passes import parse_source
from dprobes.rpn.instruction_set import OperandKind, rows_by_syntax
from dprobes.rpn.rpn_program import Sampler, quoted
from dprobes.source_text import SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from types import FrameType, TracebackType

    from dprobes.api.compiled_program import CompiledProgram
    from dprobes.rpn.rpn_program import Code, Program

__all__ = ["CodeBuilder", "HandlerBuilder", "ProcedureBuilder", "ProgramBuilder"]

# Lines of Python code as places of a probe program: the span of the call that a statement comes from.


class CallPlaces:
    """A finder of the calls of builder methods in the user's code; each source file is read once."""

    def __init__(self) -> None:
        self._files: dict[str, SourceFile] = {}

    def here(self, statement: str) -> Span:
        """
        Return the span in the user's code of the current call into this package.

        If the source is not available (an interactive session), ``statement`` is shown instead of the line.
        """
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - inspect.stack() reads all files
        while frame is not None and str(frame.f_globals.get("__name__")).startswith("dprobes.api."):
            frame = frame.f_back
        if frame is None:
            return Span(SourceFile("program", statement), 0, len(statement))
        return self._span(frame, statement)

    def _span(self, frame: FrameType, statement: str) -> Span:
        name = frame.f_code.co_filename
        if (file := self._files.get(name)) is None:
            file = SourceFile(name, "".join(linecache.getlines(name, frame.f_globals)))
            self._files[name] = file
        line, last, column, end = _position(frame)
        if not file.text or line > file.text.count("\n") + 1:
            file = SourceFile(name, "\n" * (line - 1) + statement)
            return Span(file, line - 1, line - 1 + len(statement))
        start, text = file.line_start(line), file.line_text(line)
        first = _characters(text, column)
        behind = _characters(text, end) if last == line else len(text)
        if first >= behind:
            first, behind = len(text) - len(text.lstrip()), len(text)
        return Span(file, start + first, start + behind)


def _position(frame: FrameType) -> tuple[int, int, int, int]:
    """
    Return the first and last line of a frame's current call, 1-based, and its first and last column.

    Columns are in UTF-8 bytes.
    """
    positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, last, column, end = next(positions, (None, None, None, None))
    line = line or frame.f_lineno
    return line, last or line, column or 0, end or 0


def _characters(text: str, count: int) -> int:
    """Return the number of characters in the first ``count`` bytes of a line in UTF-8."""
    return len(text.encode()[:count].decode("utf-8", "ignore"))


_Value = int | str | bool | tuple[str, ...] | None


class _Lines:
    """Lines of a program's text, each with the span of the Python call that added it."""

    def __init__(self, places: CallPlaces) -> None:
        self.places = places
        self.strings: list[str] = []
        self.spans: list[Span] = []

    def add(self, text: str) -> None:
        """Add the lines of ``text`` as statements. Their span is that of the current call."""
        place = self.places.here(text.strip())
        for line in text.splitlines():
            self.strings.append(line)
            self.spans.append(place)

    def extend(self, other: _Lines) -> None:
        """Append the lines of another builder, with their spans."""
        self.strings += other.strings
        self.spans += other.spans

    def header(self, **values: _Value) -> None:
        """Append a header statement ``name = value`` for each value that is not None."""
        for keyword, value in values.items():
            if value is not None:
                self.add(f"{keyword} = {_written(value)}")


class CodeBuilder(Instructions):
    """
    A builder of the code of a handler or a procedure, instruction by instruction.

    Besides a method for each instruction there are ``label``, and ``do`` for statements in the language itself. A
    builder may be used as a context manager, which only shows in the Python code where the handler begins and ends.
    """

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def _add(self, words: str, operand: int | str | None = None) -> Self:
        separator = ", " if " " in words else " "
        is_text = f"{words}, <{OperandKind.TEXT.value}>" in rows_by_syntax()
        written = "" if operand is None else _quoted(str(operand), "a text") if is_text else _one_line(operand)
        self._lines.add(f"    {words}{separator if written else ''}{written}")
        return self

    def label(self, name: str) -> Self:
        """Define a label at the next instruction, as the target of jumps and of ``sx``."""
        self._lines.add(f"{_one_line(name)}:")
        return self

    def do(self, *statements: str) -> Self:
        """
        Add statements in the syntax of the language: ``do("push r, arg0", "log 1")``.

        A string may have several lines.
        """
        for statement in statements:
            self._lines.add(statement)
        return self


class HandlerBuilder(CodeBuilder):
    """A builder of the handler of a definition; created by ``ProgramBuilder.probe``, ``watch`` and ``sample``."""


class ProcedureBuilder(CodeBuilder):
    """A builder of a procedure's code; created by ``ProgramBuilder.procedure``."""


class ProgramBuilder:
    r"""
    Builder of a probe program for one module.

    ::

        program = ProgramBuilder("libc.so.6", major=7)
        with program.probe("malloc", minor=1, maxhits=100) as handler:
            handler.push_r("arg0").log(1).exit()

    ``name`` is the module: a program, a shared library, or its path. With ``modtype`` "kernel" or "kmod", it is the
    kernel or one of its modules. The other arguments are the statements of the file header (docs/reference/rpn.md):
    ``vars``, ``gvars``, ``cvars`` and ``tvars`` are the numbers of local, global, per-CPU and per-thread variables.
    Each of ``table`` is the text after ``table =``. ``logmax``, ``ex_logmax`` and ``heapmax`` are in bytes.

    A builder is accepted wherever a program is expected. Building it reports all errors in one ``SourceError``, which
    refers to the lines of Python.
    """

    def __init__(
        self,
        name: str,
        *,
        modtype: Literal["user", "kernel", "kmod", "tracepoint"] = "user",
        wordsize: Literal[4, 8] | None = None,
        major: int | None = None,
        id: int | None = None,  # noqa: A002 - the language's word
        vars: int | None = None,  # noqa: A002
        gvars: int | None = None,
        cvars: int | None = None,
        tvars: int | None = None,
        table: Sequence[str] = (),
        jmpmax: int | None = None,
        logmax: int | None = None,
        ex_logmax: int | None = None,
        heapmax: int | None = None,
        autostacktrace: bool | None = None,
        logonfault: bool | None = None,
        groupdef: Sequence[str] = (),
        typedef: Sequence[str] = (),
    ) -> None:
        self._places = CallPlaces()
        self._header = _Lines(self._places)
        self._procedures: list[_Lines] = []
        self._definitions: list[_Lines] = []
        self._header.add("name = " + _quoted(name, "the name of a module"))
        for each in table:
            self._header.add(f"table = {each}")
        self._header.header(
            modtype=None if modtype == "user" else modtype,
            wordsize=wordsize,
            major=major,
            id=id,
            vars=vars,
            gvars=gvars,
            cvars=cvars,
            tvars=tvars,
            jmpmax=jmpmax,
            logmax=logmax,
            ex_logmax=ex_logmax,
            heapmax=heapmax,
            autostacktrace=autostacktrace,
            logonfault=logonfault,
            groupdef=tuple(groupdef) or None,
            typedef=tuple(typedef) or None,
        )

    def probe(
        self,
        offset: int | str,
        *,
        minor: int | None = None,
        opcode: int | None = None,
        group: str | None = None,
        type: str | Sequence[str] = (),  # noqa: A002 - the language's word
        passcount: int | None = None,
        maxhits: int | None = None,
        logonfault: bool | None = None,
        ex_mask: int | None = None,
        heap: int | None = None,
        at_return: bool | None = None,
        patch: str | None = None,
        persist: bool | None = None,
        idle: int | None = None,
        replace: bool | None = None,
    ) -> HandlerBuilder:
        """
        Begin a probe definition at ``offset``: a function, ``"function + 4"``, a file offset, or a pattern.

        With ``at_return``, the handler runs immediately after the function has returned (``return = yes``). ``minor``
        is in each record, and distinguishes the handlers of a program. With ``patch``, ``"OBJECT:SYMBOL"``, the
        function is replaced, and the definition has no handler. The other arguments are the header statements of the
        same name.
        """
        return self._definition(
            offset=offset,
            opcode=opcode,
            minor=minor,
            group=group,
            type=_names(type),
            passcount=passcount,
            maxhits=maxhits,
            logonfault=logonfault,
            ex_mask=ex_mask,
            heap=heap,
            patch=None if patch is None else _quoted(patch, "a patch"),
            persist=persist,
            idle=idle,
            replace=replace,
            **{"return": at_return},
        )

    def watch(
        self,
        address: int | str,
        access: Literal["w", "rw", "x", "io", "in", "out"] = "w",
        *,
        minor: int | None = None,
        group: str | None = None,
        type: str | Sequence[str] = (),  # noqa: A002
        passcount: int | None = None,
        maxhits: int | None = None,
        ex_mask: int | None = None,
        heap: int | None = None,
    ) -> HandlerBuilder:
        """
        Begin a probe definition that watches memory: a symbol, an address, or an inclusive range ``"first : last"``.

        With ``access`` "w", writes are hits, with "rw" reads and writes, with "x" execution. With "in" (reads), "out"
        (writes) or "io" (both), ``address`` is an I/O port or a range of ports. The other arguments are the header
        statements of the same name.
        """
        return self._definition(
            address=address,
            watchpoint=access,
            minor=minor,
            group=group,
            type=_names(type),
            passcount=passcount,
            maxhits=maxhits,
            ex_mask=ex_mask,
            heap=heap,
        )

    def sample(
        self,
        number: int,
        counter: str | None = None,
        *,
        minor: int | None = None,
        group: str | None = None,
        type: str | Sequence[str] = (),  # noqa: A002
        passcount: int | None = None,
        maxhits: int | None = None,
        ex_mask: int | None = None,
        heap: int | None = None,
    ) -> HandlerBuilder:
        """
        Begin a probe definition that samples each CPU that executes the module, ``number`` times a second.

        With the name of a performance ``counter``, it samples at each ``number``-th event of it on a CPU. The other
        arguments are the header statements of the same name.
        """
        return self._definition(
            sampler=str(Sampler(number, counter)),
            minor=minor,
            group=group,
            type=_names(type),
            passcount=passcount,
            maxhits=maxhits,
            ex_mask=ex_mask,
            heap=heap,
        )

    def procedure(self, name: str) -> ProcedureBuilder:
        """Begin a procedure, which all handlers of the program may ``call``."""
        lines = _Lines(self._places)
        lines.add(f"proc {_one_line(name)}")
        self._procedures.append(lines)
        return ProcedureBuilder(lines)

    def _definition(self, **header: _Value) -> HandlerBuilder:
        lines = _Lines(self._places)
        lines.header(**header)
        self._definitions.append(lines)
        return HandlerBuilder(lines)

    @property
    def text(self) -> str:
        """The source text of the program, as in a ``.rpn`` file."""
        return "\n".join(self._all().strings) + "\n"

    def build(self) -> Program:
        """
        Return the parsed program; raise ``SourceError`` for syntax errors.

        A program is checked for a processor and a module when it is compiled or inserted.
        """
        lines = self._all()
        file = SourceFile("program", "\n".join(lines.strings) + "\n")
        diagnostics = Diagnostics()
        relocation = _Relocation(file, lines.spans)
        try:
            program = relocation.program(parse_source(file, diagnostics))
        except SourceError as error:
            raise SourceError([relocation.diagnostic(diagnostic) for diagnostic in error.diagnostics]) from None
        if len(program.definitions) != len(self._definitions):
            diagnostics.error(
                program.spans.get("name"),
                "a text that was given to do() begins a probe definition of its own",
                hint="begin it with probe(), watch() or sample()",
            )
            diagnostics.raise_if_errors()
        return program

    def compile(
        self,
        *,
        symbols: str | Path | None = None,
        allow_write: bool = False,
        modules: Iterable[str | Path] | None = None,
    ) -> CompiledProgram:
        """Build and check the program. Arguments and errors are those of ``compile_file``."""
        from dprobes.api.compiled_program import compile_program

        return compile_program(self.build(), symbols=symbols, allow_write=allow_write, modules=modules)

    def _all(self) -> _Lines:
        lines = _Lines(self._places)
        lines.extend(self._header)
        for procedure in self._procedures:
            lines.extend(procedure)
            lines.strings.append("endproc")
            lines.spans.append(procedure.spans[0])
        for definition in self._definitions:
            lines.extend(definition)
        return lines


class _Relocation:
    """
    A conversion of spans in the text of a program to spans in Python code.

    ``spans`` has the span in Python code of each line of the text.
    """

    def __init__(self, file: SourceFile, spans: Sequence[Span]) -> None:
        self._file = file
        self._spans = spans

    def span(self, span: Span | None) -> Span | None:
        """Return the span in Python code for a span in the text, or None if ``span`` is None."""
        if span is None or span.file.name != self._file.name:
            return span
        return self._spans[min(span.line, len(self._spans)) - 1]

    def spans(self, spans: Mapping[str, Span]) -> dict[str, Span]:
        """Return the spans of header statements, by keyword, moved to the place of the caller's code."""
        return {keyword: self.span(span) or span for keyword, span in spans.items()}

    def diagnostic(self, diagnostic: Diagnostic) -> Diagnostic:
        """Return a diagnostic with its span moved to the place of the caller's code."""
        notes = tuple(Note(note.message, self.span(note.span)) for note in diagnostic.notes)
        return replace(diagnostic, span=self.span(diagnostic.span), notes=notes)

    def code(self, code: Code) -> Code:
        """Return code with the spans of its instructions moved to the caller's code."""
        return replace(code, instructions=tuple(replace(each, span=self.span(each.span)) for each in code.instructions))

    def program(self, program: Program) -> Program:
        """Return a program with all spans moved to the caller's code."""
        return replace(
            program,
            spans=self.spans(program.spans),
            definitions=tuple(
                replace(each, handler=self.code(each.handler), spans=self.spans(each.spans))
                for each in program.definitions
            ),
            procedures=tuple(
                replace(each, code=self.code(each.code), span=self.span(each.span)) for each in program.procedures
            ),
        )


def _written(value: _Value) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case tuple():
            return " ".join(value)
        case _:
            return _one_line(value)


def _one_line(value: object) -> str:
    """Return an operand or header value in source form, without line ends."""
    text = str(value)
    if any(sign in text for sign in ("\n", ";", "//", "/*")):
        raise ValueError(f"{text!r} is more than one operand: a line end, ';' and comments belong to do()")
    return text


def _names(names: str | Sequence[str]) -> tuple[str, ...] | None:
    return ((names,) if isinstance(names, str) else tuple(names)) or None


def _quoted(text: str, what: str) -> str:
    if "\n" in text:
        raise ValueError(f"{text!r} is not {what}")
    return quoted(text)
