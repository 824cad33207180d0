"""
Parser from the text of a probe program to ``Program``, by recursive descent.

It reports at most one error for each statement. The grammar is::

    file        = { header | procedure } { definition }
    definition  = location-header { header } { procedure | [ label ":" ] [ instruction ] }
    procedure   = "proc" name  { [ label ":" ] [ instruction ] }  "endproc"
    header      = keyword "=" value

``check`` resolves names and checks the ranges of values.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dprobes.diagnostics import Note
from dprobes.rpn import instruction_set
from dprobes.rpn.header_statements import HeaderValue, find_keyword, is_keyword, parse_value, starts_definition
from dprobes.rpn.keyed_tables import TABLES_MAX, Table
from dprobes.rpn.operands import StatementError, check_typed, match_statement, operators, split_type
from dprobes.rpn.program_text import LOCATION_KEYWORDS, Header
from dprobes.rpn.rpn_expressions import Lexer, Statement, TokenKind
from dprobes.rpn.rpn_program import MAX_INSTRUCTIONS, Code, Instruction, ProbeDefinition, Procedure, Program

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.preprocessor import Preprocessed
    from dprobes.rpn.instruction_set import Alias
    from dprobes.rpn.program_text import Keyword
    from dprobes.rpn.rpn_expressions import WordToken
    from dprobes.source_text import Span

__all__ = ["parse"]

COMMENT_HINT = "a comment is written '// ...' or '/* ... */'"

MAX_ERRORS = 20
"""Number of errors after which the parser stops: the text is most likely not a probe program."""


def parse(text: Preprocessed, diagnostics: Diagnostics, *, has_blocks: bool = False) -> Program | None:
    """
    Return the program in a preprocessed text, or None if it has no module name.

    With ``has_blocks`` the program has blocks of the tool besides the text, and needs no probe definition.
    If ``diagnostics`` has errors afterwards, the program is incomplete and must not be used.
    """
    return _Parser(text, diagnostics, has_blocks=has_blocks).program()


class _Block:
    """Instructions and labels of a handler or procedure that is being parsed."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.label_spans: dict[str, Span] = {}
        self.is_broken = False  # an instruction with an error is missing

    def code(self) -> Code:
        return Code(tuple(self.instructions), self.labels)


class _Section:
    """A file header or probepoint header that is being parsed, with the code that follows it."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.values: dict[str, HeaderValue] = {}
        self.spans: dict[str, Span] = {}
        self.handler = _Block()


class _TooManyErrorsError(Exception):
    """End of parsing after too many errors, because further messages would not help."""


class _Parser:
    def __init__(self, text: Preprocessed, diagnostics: Diagnostics, *, has_blocks: bool) -> None:
        self._has_blocks = has_blocks
        self._lexer = Lexer(text, self._error)
        self._diagnostics = diagnostics
        self._errors = 0
        self._instructions = 0
        self._tried_name = False  # there is a statement for the name, valid or not
        self._file = _Section(Header.FILE)
        self._section = self._file
        self._definitions: list[_Section] = []
        self._procedures: dict[str, Procedure] = {}
        self._procedure: tuple[str, Span, _Block] | None = None

    def program(self) -> Program | None:
        with contextlib.suppress(_TooManyErrorsError):
            for statement in self._lexer.statements():
                self._statement(statement)
            self._end_of_file()
        name = self._file.values.pop("name", None)
        if not isinstance(name, str):
            return None
        fields: dict[str, Any] = dict(self._file.values)
        return Program(
            name=name,
            definitions=tuple(self._definition(s) for s in self._definitions if "location" in s.values),
            procedures=tuple(self._procedures.values()),
            spans=self._file.spans,
            **fields,
        )

    def _definition(self, section: _Section) -> ProbeDefinition:
        fields: dict[str, Any] = dict(section.values)
        return ProbeDefinition(handler=section.handler.code(), spans=section.spans, **fields)

    def _statement(self, statement: Statement) -> None:
        try:
            if len(statement) > 1 and statement[1].is_punctuation("="):
                self._header(statement)
            elif self._is_header_with_colon(statement):
                # The value is used nevertheless: without the definition that it begins, every following line would be
                # an error.
                message = f"expected '=' after '{statement[0].text}', found ':'"
                self._error(self._lexer.span(statement[1]), message)
                self._header(statement)
            elif statement[0].word == "proc":
                self._begin_procedure(statement)
            elif statement[0].word == "endproc":
                self._end_procedure(statement)
            else:
                self._labels_and_instruction(statement)
        except StatementError as error:
            tokens = error.tokens or statement
            is_comment = any(token.is_punctuation("#") for token in statement)
            hint = error.hint or (COMMENT_HINT if is_comment else None)
            self._error(self._lexer.span(tokens[0], tokens[-1]), error.message, hint=hint)

    def _error(self, span: Span | None, message: str, *, notes: tuple[Note, ...] = (), hint: str | None = None) -> None:
        self._diagnostics.error(span, message, notes=notes, hint=hint)
        self._errors += 1
        if self._errors == MAX_ERRORS:
            self._diagnostics.error(span, "too many errors; the rest is not read")
            raise _TooManyErrorsError

    # Headers

    def _is_header_with_colon(self, statement: Statement) -> bool:
        """Return whether a statement is a header written with ':' for '=', and not a label with an instruction."""
        if len(statement) < 3 or not statement[1].is_punctuation(":") or not is_keyword(statement[0].word):
            return False
        if self._section.header is Header.POINT and statement[2].word in operators():
            return False
        header = Header.POINT if statement[0].word in LOCATION_KEYWORDS else self._section.header
        try:
            parse_value(find_keyword(statement[0], header), statement[2:])
        except StatementError:
            return False
        return True

    def _header(self, statement: Statement) -> None:
        key, values = statement[0], statement[2:]
        keyword = None
        with contextlib.suppress(StatementError):
            keyword = find_keyword(key, Header.POINT)
        if self._procedure is not None:
            message = f"'{key.text} =' inside procedure '{self._procedure[0]}'"
            self._error(self._lexer.span(key, statement[-1]), message, hint="is 'endproc' missing?")
            if keyword is None or not starts_definition(keyword):
                return
            self._close_procedure()
        if keyword is not None and (first := self._location_beside(keyword)) is not None:
            self._error(
                self._lexer.span(key, statement[-1]),
                f"'{keyword.name} =' beside '{first} =': a probepoint has only one of them",
                notes=(Note("the first one is here", self._section.spans[first]),),
                hint="a definition ends with its handler, which is at least 'exit'",
            )
            return
        if keyword is not None and starts_definition(keyword):
            # A definition with an error remains a definition: the following statements belong to it.
            self._section = _Section(Header.POINT)
            self._definitions.append(self._section)
            value = parse_value(keyword, values)
        else:
            keyword = find_keyword(key, self._section.header)
            if self._section.handler.instructions:
                raise StatementError(
                    f"'{keyword.name} =' after the first instruction of the handler",
                    hint="all statements of a probepoint header come before its instructions",
                )
            self._tried_name = self._tried_name or keyword.name == "name"
            value = parse_value(keyword, values)
        span = self._lexer.span(statement[0], statement[-1])
        if keyword.is_repeated:
            self._repeated(keyword, value, span)
            return
        if keyword.attribute in self._section.values:
            notes = (Note("the first one is here", self._section.spans[keyword.name]),)
            self._error(span, f"'{keyword.name} =' is given twice in {self._section.header.value}", notes=notes)
            return
        self._section.values[keyword.attribute] = value
        self._section.spans[keyword.name] = span

    def _repeated(self, keyword: Keyword, value: HeaderValue, span: Span) -> None:
        """
        Add the table of a repeated ``table =`` to those of the previous statements.

        Report a second table of one name.
        """
        before, (table,) = self._section.values.get(keyword.attribute, ()), value if isinstance(value, tuple) else ()
        tables = [each for each in before if isinstance(each, Table)] if isinstance(before, tuple) else []
        assert isinstance(table, Table)
        first = next((each for each in tables if each.name == table.name), None)
        if first is not None:
            self._error(
                span, f"table '{table.name}' is defined twice", notes=(Note("the first one is here", first.span),)
            )
            return
        if len(tables) == TABLES_MAX:
            self._error(span, f"the program has more than {TABLES_MAX} tables")
            return
        self._section.values[keyword.attribute] = (*tables, replace(table, span=span))
        self._section.spans.setdefault(keyword.name, span)

    def _location_beside(self, keyword: Keyword) -> str | None:
        """Return the keyword of another location that the current header already has, or None if there is none."""
        if not starts_definition(keyword) or self._section.handler.instructions:
            return None
        return next((name for name in LOCATION_KEYWORDS if name != keyword.name and name in self._section.spans), None)

    # Procedures

    def _begin_procedure(self, statement: Statement) -> None:
        if len(statement) != 2 or statement[1].kind is not TokenKind.NAME:
            raise StatementError("expected 'proc' and the name of the procedure")
        if self._procedure is not None:
            raise StatementError(f"'proc' inside procedure '{self._procedure[0]}'", hint="is 'endproc' missing?")
        self._procedure = (statement[1].word, self._lexer.span(statement[0], statement[1]), _Block())

    def _end_procedure(self, statement: Statement) -> None:
        if len(statement) != 1:
            raise StatementError("'endproc' takes no operand")
        if self._procedure is None:
            raise StatementError("'endproc' without 'proc'")
        self._close_procedure()

    def _close_procedure(self) -> None:
        assert self._procedure is not None
        name, span, block = self._procedure
        self._procedure = None
        self._check_trailing_label(block)
        if (first := self._procedures.get(name)) is not None:
            self._error(
                span, f"procedure '{name}' is defined twice", notes=(Note("the first one is here", first.span),)
            )
            return
        self._procedures[name] = Procedure(name, block.code(), span)

    # Code

    def _labels_and_instruction(self, statement: Statement) -> None:
        block = self._procedure[2] if self._procedure is not None else self._section.handler
        start = 0
        while len(statement) > start + 1 and statement[start + 1].is_punctuation(":"):
            start += 2
        tokens = statement[start:]
        if tokens and is_keyword(tokens[0].word):
            raise StatementError(f"expected '=' after '{tokens[0].text}'", tokens[:1])
        if self._procedure is None and self._section.header is Header.FILE:
            raise StatementError(
                "an instruction before the first probe definition", hint="'offset =' starts a probe definition"
            )
        for label in statement[:start:2]:
            self._label(label, block)
        if not tokens:
            return
        try:
            untyped, known = split_type(tokens)
            match = match_statement(untyped)
            if known is not None:
                check_typed(match.row, tokens)
        except StatementError:
            block.is_broken = True
            raise
        span = self._lexer.span(tokens[0], tokens[-1])
        of_operand = match.operand_tokens
        operand_span = self._lexer.span(of_operand[0], of_operand[-1]) if of_operand else None
        instruction = Instruction(match.row, match.operand, span, operand_span)
        block.instructions.append(instruction)
        self._instructions += 1
        if known is not None:
            of_type = self._lexer.span(tokens[-1])
            extension = instruction_set.rows_by_syntax()[known.extension]
            block.instructions.append(Instruction(extension, known.bits, span, of_type))
            self._instructions += 1
        if self._instructions > MAX_INSTRUCTIONS:
            self._error(span, f"the program has more than {MAX_INSTRUCTIONS} instructions")
            raise _TooManyErrorsError
        if match.alias is not None:
            self._suggest(match.alias, self._lexer.written(tokens[0], tokens[-1]), instruction)

    def _label(self, token: WordToken, block: _Block) -> None:
        if token.kind is not TokenKind.NAME:
            raise StatementError(f"'{token.text}' cannot be a label", [token], "a label starts with a letter or '_'")
        span = self._lexer.span(token)
        if token.word in block.labels:
            notes = (Note("the first one is here", block.label_spans[token.word]),)
            self._error(span, f"label '{token.word}' is defined twice", notes=notes)
            return
        block.labels[token.word] = len(block.instructions)
        block.label_spans[token.word] = span

    def _suggest(self, alias: Alias, written: str, instruction: Instruction) -> None:
        since = f" since version {alias.since}" if alias.since else ""
        self._diagnostics.note(instruction.span, f"'{written}' is written '{instruction}'{since}")

    def _check_trailing_label(self, block: _Block) -> None:
        if block.is_broken:
            return
        for label, index in block.labels.items():
            if index == len(block.instructions):
                self._error(
                    block.label_spans[label],
                    f"no instruction follows the label '{label}'",
                    hint="write 'nop', 'exit' or 'ret' after it",
                )

    def _end_of_file(self) -> None:
        if self._procedure is not None:
            name, span, _ = self._procedure
            self._error(span, f"procedure '{name}' has no 'endproc'")
            self._close_procedure()
        for section in self._definitions:
            self._check_trailing_label(section.handler)
        if not self._tried_name:
            self._error(
                self._lexer.start_span(), "the program names no module", hint='write name = "<module>" at its top'
            )
        if not self._definitions and not self._has_blocks:
            self._error(
                self._lexer.end_span(),
                "the program has no probe definition",
                hint="a probe definition starts with 'offset ='",
            )
