"""Completions for a position in a program: modules, functions, fields, parameters, names, instructions."""

from __future__ import annotations

import contextlib
import enum
import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from dprobes.cli.languageserver.edited_program import Position, analyse, is_c, position_at
from dprobes.cli.languageserver.name_definition import entries_known_at
from dprobes.errors import DprobesError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.cli.languageserver.edited_program import Analysis
    from dprobes.dpc.types.c_types import CType, Record

__all__ = ["CompletionKind", "completions_at"]

# Completion of members after ``.`` and ``->``: those of the compiler's type of the preceding expression.


_ACCESS = re.compile(r"(?<=[\w)\]])\s*(?:->|\.)\s*(?P<word>[A-Za-z_]\w*)?\Z")
_REST = re.compile(r"\w*")
_LINE_END = re.compile(r"[ \t]*(?:\n|\Z)")


@dataclass(frozen=True, slots=True)
class MemberAccess:
    """
    An access to a structure member in an unfinished program, such as ``task->pi``.

    ``word`` is the member's name, possibly incomplete. ``start`` and ``end`` are the offsets of the text after the
    structure's expression.
    """

    start: int
    end: int
    word: str


def access_at(text: str, offset: int) -> MemberAccess | None:
    """Return the access to a member at an offset, or None if there is none."""
    line = text.rfind("\n", 0, offset) + 1
    match = _ACCESS.search(text[line:offset])
    if match is None:
        return None
    rest = _REST.match(text, offset)
    return MemberAccess(line + match.start(), offset if rest is None else rest.end(), match["word"] or "")


def members_of(name: str, text: str, access: MemberAccess) -> Iterator[tuple[str, str]]:
    """
    Iterate over name and type of the members of the structure whose member is accessed.

    ``name`` is the file name of ``text``. There are none if the surrounding text does not compile.
    """
    # Without the incomplete access, the text compiles and yields a type for the preceding expression.
    end = ";" if _LINE_END.match(text, access.end) is not None else ""
    analysis = analyse(name, text[: access.start] + end + text[access.end :])
    record = _record_before(analysis, text, access.start)
    for member in record.member_names() if record is not None else ():
        found = record.member(member) if record is not None else None
        yield member, "" if found is None else str(found.type)


def _record_before(analysis: Analysis, text: str, end: int) -> Record | None:
    """
    Return the structure that is the type of the expression that ends at ``end``, or to which it points.

    Return None if the expression has another type.
    """
    opening = 0
    while text[end - 1 : end] == ")":
        opening = max(opening, _opening_of(text, end - 1))
        end -= 1
    here = [
        (span.end - span.start, type_)
        for span, type_ in analysis.types
        if span.file is analysis.source and span.end == end and span.start >= opening
    ]
    # In parentheses the whole expression counts; without them operators bind less tightly than the access.
    here.sort(key=lambda each: each[0], reverse=bool(opening))
    return next((record for _, type_ in here if (record := _record_of(type_)) is not None), None)


def _opening_of(text: str, closing: int) -> int:
    depth = 0
    for position in range(closing, -1, -1):
        depth += (text[position] == ")") - (text[position] == "(")
        if depth == 0:
            return position + 1
    return 0


def _record_of(type_: CType) -> Record | None:
    from dprobes.dpc.types.c_types import Pointer, Record

    target = type_.target if isinstance(type_, Pointer) else type_
    return target if isinstance(target, Record) else None


_MAX = 1000
"""Maximum number of completions."""

_PLACE = re.compile(r"[^\s(){},;\[\]]*\Z")
_WORD = re.compile(r"@?\w*\Z")
_EVENT = re.compile(r"\b(tracepoint|syscall)\s+([\w:]*)\Z")
_USDT = re.compile(r'\busdt\s+("[^"]+"|[^\s:"]+):([\w:]*)\Z')
_REGISTER = re.compile(r'\breg\("(\w*)\Z')
_FIELD = re.compile(r"\bargs\.(\w*)\Z")
_CONDITION = re.compile(r"\bwhen\s*\(")
_DECLARED = re.compile(
    r"\b(?:static|global|percpu|thread|extern|char|short|int|long|unsigned|signed|u?int\d+_t|[us]\d+|size_t|struct\s+\w+)"
    r"[\s*]+([A-Za-z_]\w*)\s*(?=[=;,\[)(])"
)
_TABLE = re.compile(r"@[A-Za-z_]\w*")
_DEFINED = {
    "label": r"^[ \t]*([A-Za-z_]\w*)[ \t]*:",
    "procname": r"^[ \t]*proc[ \t]+([A-Za-z_]\w*)",
    "table": r"^[ \t]*table[ \t]*=[ \t]*([A-Za-z_]\w*)",
}
"""The operands of instructions in RPN that are names, with patterns of their definitions."""

_POINTS = {
    "return": "just after the return of a function", "usdt": "a statically defined probe", "watch": "a watchpoint",
    "sample": "a sampler, as in 99hz", "tracepoint": "a tracepoint of the kernel", "syscall": "a system call",
    "kmod": "a function of a module of the kernel", "inline": "where calls of a function were inlined",
    "kernel": "a function of the kernel", "module": "the module of the probes below", "begin": "before it begins",
    "every": "again and again", "end": "at the end",
}  # fmt: skip
_STATEMENTS = ("if", "else", "while", "do", "for", "switch", "case", "break", "continue", "return", "try", "catch")


class CompletionKind(enum.Enum):
    """Kinds of completions, which editors display as icons."""

    MODULE = "module"
    FUNCTION = "function"
    FIELD = "field"
    VARIABLE = "variable"
    KEYWORD = "keyword"
    EVENT = "event"


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion, which replaces the text from the character offset ``start`` to the cursor."""

    text: str
    kind: CompletionKind
    start: int
    doc: str = ""


def completions_at(name: str, text: str, offset: int) -> list[Completion]:
    """Return the completions at an offset of a program, or an empty list after errors, which are not raised."""
    with contextlib.suppress(DprobesError, OSError):
        found = _in_c(name, text, offset) if is_c(name) else _in_rpn(text, offset)
        return list(islice(found, _MAX))
    return []


def _in_c(name: str, text: str, offset: int) -> Iterator[Completion]:
    line = text[text.rfind("\n", 0, offset) + 1 : offset]
    position = position_at(text, offset)
    if (match := _REGISTER.search(line)) is not None:
        from dprobes.arch import host_architecture

        names = sorted(host_architecture().register_names)
        yield from _starting(match[1], names, CompletionKind.VARIABLE, offset)
    elif position.is_text:
        return
    elif position.in_block or _CONDITION.search(position.head) is not None:
        access = None if _FIELD.search(line) is not None else access_at(text, offset)
        if access is None:
            yield from _in_block(text, line, position, offset)
            return
        for member, type_ in members_of(name, text, access):
            yield from _starting(access.word, (member,), CompletionKind.FIELD, offset, type_)
    elif (match := _EVENT.search(line)) is not None:
        yield from _starting(match[2], _events(match[1], match[2]), CompletionKind.EVENT, offset)
    elif (match := _USDT.search(line)) is not None:
        yield from _starting(match[2], _usdt_probes(match[1].strip('"')), CompletionKind.EVENT, offset)
    else:
        yield from _places(line, offset)


def _in_block(text: str, line: str, position: Position, offset: int) -> Iterator[Completion]:
    from dprobes.dpc.typers.provided_names import ACTIONS, PROVIDED, RESERVED_CALLS

    if (match := _FIELD.search(line)) is not None:
        yield from _starting(match[1], _fields(position), CompletionKind.FIELD, offset)
        return
    match = _WORD.search(line)
    word = match.group() if match is not None else ""
    if word.startswith("@"):
        yield from _starting(word, dict.fromkeys(_TABLE.findall(text)), CompletionKind.VARIABLE, offset, besides=word)
        return
    yield from _starting(word, position.parameters, CompletionKind.VARIABLE, offset, "a parameter of the function")
    listed = {*position.parameters}
    for entry in () if position.events else entries_known_at(text, position.head):
        if (known := entry.name) is not None and known not in listed:
            listed.add(known)
            yield from _starting(word, (known,), CompletionKind.VARIABLE, offset, "a variable of the module")
    fields = _fields(position) if position.events else ()
    yield from _starting(word, fields, CompletionKind.FIELD, offset, "a field")
    declared = dict.fromkeys(_DECLARED.findall(text))
    yield from _starting(word, declared, CompletionKind.VARIABLE, offset, besides=word)
    for each in PROVIDED.values():
        if position.is_return or not each.is_at_return:
            yield from _starting(word, (each.name,), CompletionKind.VARIABLE, offset, each.doc)
    for call, doc in RESERVED_CALLS.items():
        kind = "a statement" if call in ACTIONS else doc
        yield from _starting(word, (call,), CompletionKind.FUNCTION, offset, kind)
    yield from _starting(word, _STATEMENTS, CompletionKind.KEYWORD, offset)


def _places(line: str, offset: int) -> Iterator[Completion]:
    match = _PLACE.search(line)
    word = match.group() if match is not None else ""
    module, colon, start = word.rpartition(":")
    if colon:
        yield from _starting(start, _functions(module.strip('"'), start), CompletionKind.FUNCTION, offset)
        return
    for keyword, doc in _POINTS.items():
        yield from _starting(word, (keyword,), CompletionKind.KEYWORD, offset, doc)
    from dprobes.cli.completions import known_modules

    yield from _starting(word, sorted(set(known_modules(None))), CompletionKind.MODULE, offset)


def _in_rpn(text: str, offset: int) -> Iterator[Completion]:
    from dprobes.rpn.instruction_set import ROWS
    from dprobes.rpn.program_text import KEYWORDS

    line = text[text.rfind("\n", 0, offset) + 1 : offset].rpartition(";")[2]
    keyword, equals, value = line.partition("=")
    start = value.strip().strip('"')
    if "//" in line:
        return
    if equals and keyword.strip() == "name":
        from dprobes.cli.completions import known_modules

        yield from _starting(start, sorted(set(known_modules(None))), CompletionKind.MODULE, offset)
    elif equals and keyword.strip() == "offset":
        module = re.findall(r'^\s*name\s*=\s*"?([^"\n/]*[^"\s/])', text[:offset], re.MULTILINE)
        yield from _starting(start, _functions(module[-1], start) if module else (), CompletionKind.FUNCTION, offset)
    elif not equals:
        word = line.lstrip()
        yield from _operands(text, word, offset)
        for row in ROWS:
            plain = row.syntax.partition(" <")[0]
            yield from _starting(word, (plain,), CompletionKind.FUNCTION, offset, f"{row.effect}: {row.doc}")
        for each in KEYWORDS:
            yield from _starting(word, (each.name,), CompletionKind.KEYWORD, offset, each.doc)


def _operands(text: str, word: str, offset: int) -> Iterator[Completion]:
    """
    Yield completions if ``word`` is an RPN instruction and the beginning of its operand.

    ``text`` is the program, which defines labels and names. ``offset`` is the position of ``word`` in it.
    """
    from dprobes.rpn.instruction_set import ROWS

    for row in ROWS:
        plain, _, operand = row.syntax.partition(" <")
        if not operand or not re.match(rf"{re.escape(plain)}\s", word):
            continue
        start = word[len(plain) :].lstrip()
        if operand == "register>":
            from dprobes.arch import host_architecture

            names: Iterable[str] = sorted(host_architecture().register_names)
        else:
            defined = _DEFINED.get(operand.removesuffix(">"))
            names = dict.fromkeys(re.findall(defined, text, re.MULTILINE)) if defined else ()
        yield from _starting(start, names, CompletionKind.VARIABLE, offset, row.doc)


def _starting(
    word: str, names: Iterable[str], kind: CompletionKind, offset: int, doc: str = "", *, besides: str | None = None
) -> Iterator[Completion]:
    for name in names:
        if name.startswith(word) and name != besides:
            yield Completion(name, kind, offset - len(word), doc)


def _functions(module: str, start: str) -> Iterable[str]:
    if module == "kernel":
        from dprobes.target.kernel.running_kernel import RunningKernel

        return sorted(symbol.name for symbol in RunningKernel().symbols.matching(f"{start}*", ""))
    from dprobes.cli.completions import known_symbols

    return known_symbols(module, None, start)


def _events(kind: str, start: str) -> Iterable[str]:
    if kind == "syscall":
        from dprobes.target.kernel.tracepoints import system_calls

        return sorted(system_calls())
    from dprobes.target.kernel.tracepoints import KernelTracepoints

    tracepoints = KernelTracepoints()
    subsystem, colon, _ = start.partition(":")
    if not colon:
        return [f"{each}:" for each in tracepoints.subsystems()]
    return [f"{subsystem}:{each}" for each in tracepoints.names(subsystem)]


def _usdt_probes(module: str) -> list[str]:
    """Return the USDT probes of a module, with their providers."""
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.module_lookup import find_module
    from dprobes.target.usdt import usdt_sites

    path = find_module(module)
    return [] if path is None else sorted({each.probe for each in usdt_sites(ElfFile.open(path))})


def _fields(position: Position) -> Iterator[str]:
    from dprobes.cli.output.kernel_listing import describe_traced

    for event in position.events:
        with contextlib.suppress(DprobesError, OSError):
            for line in describe_traced(event):
                if (match := re.match(r"push tp, (\w+)", line)) is not None:
                    yield match[1]
