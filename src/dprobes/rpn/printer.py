"""``Program`` back to text, in the new spellings, one statement a line: ``parse(print(program)) == program``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.globs import is_pattern
from dprobes.lazypattern import lazy_pattern
from dprobes.rpn.keywords import Header, keywords_of
from dprobes.rpn.program import Address, Expression, Glob, Instruction, Offset, Sampler, Tracepoint, Usdt, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.rpn.program import Code, ProbeDefinition, Program

__all__ = ["location_keyword", "print_header", "print_instruction", "print_program"]

_PLAIN_SYMBOL = lazy_pattern(r"[A-Za-z_$.][A-Za-z0-9_$.@]*")


def print_program(program: Program) -> str:
    """Return the source text of a program, with a final line end."""
    lines = [*_header(program, Header.FILE)]
    for procedure in program.procedures:
        lines += ["", f"proc {procedure.name}", *_code(procedure.code), "endproc"]
    for definition in program.definitions:
        lines += ["", *_header(definition, Header.POINT), *_code(definition.handler)]
    return "\n".join(lines) + "\n"


def print_header(section: Program | ProbeDefinition) -> list[str]:
    """Return the lines of a program's file header or of a definition's probepoint header."""
    return list(_header(section, Header.POINT if hasattr(section, "location") else Header.FILE))


def print_instruction(instruction: Instruction) -> str:
    """Return the source text of one instruction."""
    if isinstance(instruction.operand, Expression):
        return f"push {_operand_expression(instruction.operand)}"
    return str(instruction)


def _header(section: Program | ProbeDefinition, header: Header) -> Iterator[str]:
    for keyword in keywords_of(header).values():
        value = getattr(section, keyword.attribute)
        if keyword.attribute == "location":
            if keyword.name == location_keyword(value):
                yield f"{keyword.name} = {_text(value)}"
        elif keyword.is_repeated:
            yield from (f"{keyword.name} = {each}" for each in value)
        elif keyword.name == "name":
            yield f"name = {quoted(value)}"
        elif value not in ((), None, keyword.default) and getattr(value, "value", value) != keyword.default:
            yield f"{keyword.name} = {_text(value)}"


def location_keyword(location: object) -> str:
    """Return the keyword of the statement that gives a location."""
    match location:
        case Address():
            return "address"
        case Sampler():
            return "sampler"
        case _:
            return "offset"


def _text(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return str(value) if value < 10 else hex(value)
        case tuple():
            return " ".join(value)
        case Offset(Expression(0, str(symbol))) if is_pattern(symbol):
            return f"({quoted(symbol)})"  # the parentheses say that it is a symbol, not a pattern
        case Offset(expression):
            return _expression(expression)
        case Glob(pattern):
            return quoted(pattern)
        case Address(low, None):
            return _expression(low)
        case Address(low, Expression() as high):
            return f"{_expression(low)} : {_expression(high)}"
        case Sampler(frequency):
            return f"{frequency}hz"
        case Tracepoint():
            return str(value)
        case Usdt():
            return quoted(str(value)) if value.is_pattern else str(value)
        case _:
            return str(getattr(value, "value", value))


def _expression(expression: Expression) -> str:
    if expression.symbol is None or _PLAIN_SYMBOL.fullmatch(expression.symbol):
        return str(expression)
    return str(Expression(expression.addend, quoted(expression.symbol)))


def _operand_expression(expression: Expression) -> str:
    # Parentheses keep a symbol that is called like a register or a literal operand (say, "pid") a symbol.
    text = _expression(expression)
    return text if expression.symbol is None else f"({text})"


def _code(code: Code) -> Iterator[str]:
    labels: dict[int, list[str]] = {}
    for label, index in code.labels.items():
        labels.setdefault(index, []).append(label)
    for index, instruction in enumerate(code.instructions):
        yield from (f"{label}:" for label in labels.get(index, ()))
        yield f"    {print_instruction(instruction)}"
