"""The page dprobes.lang(8): the tables of instructions, keywords, exceptions and registers, and the limits."""

from __future__ import annotations

import inspect
import itertools
import re
from typing import TYPE_CHECKING

from generate_docs import bounds, default, limits
from man_command import DATE
from roff import Page, bold, escaped, italic

from dprobes.arch import ARCHITECTURE_NAMES, Direction, architecture
from dprobes.arch.x86_processors import ACCESSED
from dprobes.rpn import instruction_set
from dprobes.rpn.program_text import KEYWORD_ALIASES, Header, keywords_of
from dprobes.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.arch import Architecture

DESCRIPTION = """
A probe program has a file header, which names the module to probe, and *probe definitions*. A probe definition has a
probepoint header, which locates the probepoint, and the instructions of its probe handler.

Names of modules, files, symbols and tables are case-sensitive; everything else is not. A statement ends with its line
or with `;`. `//` and `/* */` are comments. The C preprocessor runs first: `#include`, `#define`, `#if`.
A label, `name:`, before an instruction is a target for jumps. `proc name` and `endproc`
enclose a procedure, for `call`.

Values are numbers (`16`, `0x10`, `020`, `'a'`), symbols of the module, and expressions of these (`main + 4`). The value
of a symbol is its run-time address in the process of the hit. A word is the module's machine word, 4 or 8 bytes.
"""

EXAMPLE = """
// How much memory does a program ask for?
name = "libc.so.6"     // file header
offset = malloc        // a probe definition: probepoint header ...
minor = 1
    push r, arg0       // ... and handler
    log 1
    exit
"""

STACK = """
The parentheses after an instruction show its effect on the RPN stack: before -- after, with the top rightmost. `x*n` is
a number of cells given by the operand, `x*?` a number of cells given by a popped count. `value*cells` is the number of
cells that the value needs, the least significant on top.
"""

EXCEPTIONS = """
When an enabled exception is raised, its two parameters and its code are pushed. Then execution continues at an
exception handler, a label that `sx` has set: that of the innermost call frame that has an exception handler. Call
frames inside that frame are left. If no call frame has an exception handler, the probe handler ends, and its record is
kept. `ex_mask` of the probepoint header enables exceptions, one bit each; its default is {mask:#06x}. The last column
is the effect of a disabled exception.
"""

TOKENS = """
`log` with a count, and `log b`, `log w` and `log d`, write values without a prefix. All other log instructions write
items: a token byte, the length in bytes or the number of elements in two bytes, then the data.
"""


def page() -> str:
    result = Page("DPROBES.LANG", 8, DATE, f"dprobes {__version__}", "System administration")
    result.section("Name")
    result.raw(escaped("dprobes.lang - the RPN language of probe programs"))
    result.section("Description")
    paragraphs(result, DESCRIPTION)
    result.example(EXAMPLE)
    for header, name in ((Header.FILE, "File header"), (Header.POINT, "Probepoint header")):
        result.section(name)
        for keyword in keywords_of(header).values():
            described = f"{keyword.kind.value}{bounds(keyword)}"
            described += f"; default {default(keyword)}" if default(keyword) else ""
            result.item(f"{bold(keyword.name + ' =')} {italic(described)}", keyword.doc + since(keyword.since))
    result.paragraph(
        "Older spellings: " + ", ".join(f"`{old}` = `{new}`" for old, new in KEYWORD_ALIASES.items()) + "."
    )
    result.section("Instructions")
    paragraphs(result, STACK)
    for group in instruction_set.Group:
        result.subsection(group.value)
        for row in instruction_set.ROWS:
            if row.group is group:
                result.item(syntax(row.syntax) + f"\\ \\ {escaped(f'( {row.effect} )')}", about(row))
    result.subsection("Older spellings")
    result.table("l l", ("written", "means"), ((alias.syntax, alias.canonical) for alias in instruction_set.ALIASES))
    result.section("Log items")
    paragraphs(result, TOKENS)
    result.table(
        "l l",
        ("item", "token"),
        ((token.name.replace("_", " ").lower(), f"{token.value:#04x}") for token in instruction_set.Token),
    )
    result.section("Exceptions")
    paragraphs(result, EXCEPTIONS.format(mask=instruction_set.DEFAULT_EXCEPTION_MASK))
    result.table(
        "l l lx",
        ("name", "code", "when disabled"),
        (
            (code.name, f"{code:#06x}", "the handler ends" if code & instruction_set.NON_MASKABLE else "ignored")
            for code in instruction_set.ExceptionCode
        ),
    )
    result.section("Registers")
    result.paragraph(
        "The table shows which registers can be pushed and popped, in the user context (u) and in the current one (r)."
    )
    for name in ARCHITECTURE_NAMES:
        arch = architecture(name)
        result.subsection(name)
        result.table(
            "lw(30n) l l l l l",
            ("registers", "bits", *(direction.value for direction in Direction)),
            register_rows(arch),
        )
        result.paragraph("Other names: " + ", ".join(f"{alias} = {name}" for alias, name in arch.aliases.items()) + ".")
    result.section("Limits")
    for term, text in limits():
        result.item(bold(term), text)
    result.section("See also")
    result.raw(f"{bold('dprobes')}(8), {bold('cpp')}(1)")
    return result.text()


def paragraphs(result: Page, text: str) -> None:
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        result.paragraph(paragraph)


def since(version: str) -> str:
    return "" if version == "3.6" else f" (since {version})"


def syntax(text: str) -> str:
    """Return a row's syntax with the variable operand in italics."""
    head, bracket, rest = text.partition("<")
    return bold(head) + (italic(rest.removesuffix(">")) if bracket else "")


def about(row: instruction_set.Row) -> str:
    text = row.doc
    if row.writes:
        text += " Needs `--allow-write`."
    if row.faults:
        text += " Raises " + ", ".join(fault.name for fault in row.faults) + "."
    return text + since(row.since)


def register_rows(arch: Architecture) -> Iterator[tuple[str, ...]]:
    """Return a row for each run of registers that may do the same."""
    known = [each for each in arch.registers if each.name != ACCESSED]  # it is not for users' programs
    for (bits, allowed), run in itertools.groupby(known, lambda each: (each.bits, each.allowed)):
        marks = ("y" if direction in allowed else "n" for direction in Direction)
        yield (shortened([register.name for register in run]), str(bits), *marks)


def shortened(names: list[str]) -> str:
    """Return names, those of a numbered series as the first and the last one."""
    groups: list[list[str]] = []
    for name in names:
        stem = re.sub(r"\d+$", "", name)
        if groups and stem != name and re.sub(r"\d+$", "", groups[-1][-1]) == stem:
            groups[-1].append(name)
        else:
            groups.append([name])
    return ", ".join(
        ", ".join(group) if len(group) < 3 else f"{group[0]}-{group[-1].removeprefix(re.sub(r'[0-9]+$', '', group[0]))}"
        for group in groups
    )
