"""
Write docs/language.md from the instruction and keyword tables; with --check only compare.

The reference is generated so that it cannot say anything else than the tables that the program uses.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dprobes.arch import ARCHITECTURE_NAMES, Architecture, Direction, architecture
from dprobes.rpn import isa
from dprobes.rpn.keywords import KEYWORD_ALIASES, Header, Keyword, keywords_of

OUTPUT = Path(__file__).parent.parent / "docs" / "language.md"

INTRODUCTION = """\
# The RPN language

*Written by `make docs` from `rpn/isa.py`, `rpn/keywords.py` and `arch/`; do not edit.*

A probe program is a file header, then probe definitions; a probe definition is a probepoint header, then the
instructions of its handler. Everything but module names, file names and symbols is case-insensitive. A statement ends
with its line or with `;`. `//` and `/* */` are comments. The C preprocessor runs first: `#include`, `#define`, `#if`.

```
name = "libc.so.6"     // file header
offset = malloc        // a probe definition: probepoint header ...
minor = 1
    push r, arg0       // ... and handler
    log 1
    exit
```

Values are numbers (`16`, `0x10`, `020`, `'a'`), symbols of the module, and expressions of them (`main + 4`,
`(1 << 3) | 1`); a symbol stands for its run-time address in the process that hits. `[label:]` before an instruction
names it for jumps; `proc name` ... `endproc` encloses a procedure.
"""


def keyword_rows(header: Header) -> list[str]:
    rows = ["| keyword | value | default | what it says |", "|---|---|---|---|"]
    rows += [
        f"| `{keyword.name}` | {keyword.kind.value}{bounds(keyword)} | {default(keyword)} | {keyword.doc} |"
        for keyword in keywords_of(header).values()
    ]
    return rows


def bounds(keyword: Keyword) -> str:
    return f" from {keyword.minimum} to {keyword.maximum}" if keyword.kind.value == "a number" else ""


def default(keyword: Keyword) -> str:
    match keyword.default:
        case None:
            return ""
        case bool():
            return "yes" if keyword.default else "no"
        case value:
            return str(value)


def instruction_rows(group: isa.Group) -> list[str]:
    rows = ["| code | instruction | stack | what it does | exceptions | since |", "|---|---|---|---|---|---|"]
    for row in isa.ROWS:
        if row.group is group:
            faults = ", ".join(fault.name for fault in row.faults)
            doc = row.doc + (" **Needs `--allow-write`.**" if row.writes else "")
            rows.append(f"| {row.opcode:02x} | `{row.syntax}` | `{row.effect}` | {doc} | {faults} | {row.since} |")
    return rows


def opcode_lines() -> list[str]:
    free = [(opcode, opcode + 1) for opcode in isa.free_opcodes()]
    joined: list[tuple[int, int]] = []
    for start, end in free:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    reserved = [f"{interval(each.start, each.stop)}: {purpose}" for each, purpose in isa.RESERVED]
    return [
        f"This is version {isa.VERSION} of the instruction set; compiled programs (`docs/ppdf.md`) carry that number.",
        "",
        (
            f"Codes that are free: {', '.join(interval(*each) for each in joined)}. "
            "Of these, `b0` to `df` are for instructions of one architecture."
        ),
        "",
        f"Codes that stand for no instruction, and are not free: {'; '.join(reserved)}.",
    ]


def interval(start: int, end: int) -> str:
    return f"`{start:02x}`" if end == start + 1 else f"`{start:02x}` to `{end - 1:02x}`"


def register_rows(arch: Architecture) -> list[str]:
    rows = ["| index | register | bits | push u | push r | pop u | pop r |", "|---|---|---|---|---|---|---|"]
    for register in arch.registers:
        marks = " | ".join("y" if direction in register.allowed else "n" for direction in Direction)
        rows.append(f"| {register.index:x} | `{register.name}` | {register.bits} | {marks} |")
    aliases = ", ".join(f"`{alias}` = `{name}`" for alias, name in arch.aliases.items())
    return [*rows, "", f"Other names: {aliases}."]


def document() -> str:
    lines = [INTRODUCTION, "## File header", "", *keyword_rows(Header.FILE), ""]
    lines += ["## Probepoint header", "", *keyword_rows(Header.POINT), ""]
    lines += ["Older spellings: " + ", ".join(f"`{old}` = `{new}`" for old, new in KEYWORD_ALIASES.items()) + ".", ""]
    lines += ["## Instructions", ""]
    lines += ["The code is the opcode byte in hexadecimal. The stack is before -- after, its top rightmost.", ""]
    for group in isa.Group:
        lines += [f"### {group.value}", "", *instruction_rows(group), ""]
    lines += ["### Older spellings", "", "| written | means | renamed in |", "|---|---|---|"]
    lines += [f"| `{alias.syntax}` | `{alias.canonical}` | {alias.since} |" for alias in isa.ALIASES]
    lines += ["", "Refused: " + "; ".join(reason for _, reason in isa.REJECTED) + ".", ""]
    lines += ["### Numbers", "", *opcode_lines(), ""]
    lines += ["## Exceptions", "", "| code | name | when disabled |", "|---|---|---|"]
    for code in isa.ExceptionCode:
        masked = "the handler ends" if code & isa.NON_MASKABLE else "ignored"
        lines.append(f"| {code:#06x} | {code.name} | {masked} |")
    lines += ["", f"The default of `ex_mask` is {isa.DEFAULT_EXCEPTION_MASK:#06x}.", "", "## Registers", ""]
    for name in ARCHITECTURE_NAMES:
        lines += [f"### {name}", "", *register_rows(architecture(name)), ""]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str]) -> int:
    text = document()
    if arguments == ["--check"]:
        if OUTPUT.exists() and OUTPUT.read_text() == text:
            return 0
        print(f"{OUTPUT.name} is not what the tables say: run 'make docs'", file=sys.stderr)
        return 1
    OUTPUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
