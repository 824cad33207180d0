"""
The tables of instruction forms (``tests/forms``), and the assembly program that is generated from them.

``forms/common.forms`` explains the columns. Each form becomes an entry point to which ``programs/forms`` jumps with a
complete initial state: the code before, the instruction at the label ``site_NAME``, the code after, and a jump back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

TABLES = Path(__file__).parents[1] / "forms"

ARENA, ARENA_SIZE = 0x20000000, 0x34000  # as in programs/forms/harness.c
_CONSTANTS = {
    "DATA": ARENA + 0x7000,
    "SOURCE": ARENA + 0x10000,
    "TARGET": ARENA + 0x20000,
    "ARENA_END": ARENA + ARENA_SIZE,
}
_COLUMNS = 5


class TableError(Exception):
    """A line of a table is malformed."""


@dataclass(frozen=True, slots=True)
class Form:
    """A row of a table, with its lists and names expanded."""

    name: str
    instruction: str
    before: str = ""
    after: str = ""
    hits: int = 1
    faults: bool = False
    may_fault: bool = False
    traps: bool = False
    needs: tuple[str, ...] = ()
    low: bool = False
    place: str = ""
    """The table and the section in it, such as ``common.forms [flags]``."""

    @property
    def sites(self) -> tuple[str, ...]:
        """The labels of the instructions that are probed."""
        first = f"site_{self.name}"
        return (first, f"{first}_next") if "next:" in self.after else (first,)

    def problem(self, runs: int, signals: int) -> str:
        """Return the difference between the signals in ``runs`` runs and those of the table, or an empty string."""
        if self.faults and signals != runs:
            return f"{signals} of {runs} runs ended in a fault; the table says that all do"
        if self.traps and not signals:
            return "no trap came; the table says that one does"
        if not (self.faults or self.traps or self.may_fault) and signals:
            return f"{signals} of {runs} runs got a signal; the table says that none does"
        return ""


def read_forms(architecture: str) -> list[Form]:
    """Return the forms of ``x86_64`` or ``i386``; raise ``TableError`` if a table is wrong."""
    tables = {name: (TABLES / name).read_text() for name in ("common.forms", f"{architecture}.forms")}
    names = dict(re.findall(r"^(\$\w+) *= *(.*)$", "\n".join(tables.values()), re.MULTILINE))
    forms: dict[str, Form] = {}
    for table, text in tables.items():
        place = table
        for line in text.splitlines():
            if line.startswith("["):
                place = f"{table} {line}"
            if not line or line[0] in "#[$":
                continue
            for form in _forms_of_line(line, names, 8 if architecture == "x86_64" else 4):
                if form.name in forms:
                    raise TableError(f"two forms are called '{form.name}'")
                forms[form.name] = replace(form, place=place)
    return list(forms.values())


def _forms_of_line(line: str, names: dict[str, str], word_size: int) -> list[Form]:
    while (match := re.search(r"\$\w+", line)) is not None:
        if match[0] not in names:
            raise TableError(f"'{match[0]}' has no value: {line}")
        line = line.replace(match[0], names[match[0]], 1)
    columns = [column.strip() for column in line.split("|")]
    if not 1 < len(columns) <= _COLUMNS:
        raise TableError(f"not a form: {line}")
    columns += [""] * (_COLUMNS - len(columns))
    return [_form([_native(c, word_size) for c in expanded]) for expanded in _expand(columns)]


def _expand(columns: list[str]) -> list[list[str]]:
    """Return the columns once for each element of their lists; lists in several columns advance together."""
    lists = [found.split() for column in columns for found in re.findall(r"<([^<>]+)>", column) if " " in found]
    if not lists:
        return [columns]
    if len({len(one) for one in lists}) != 1:
        raise TableError(f"lists of different lengths: {' | '.join(columns)}")
    expanded = []
    for n in range(len(lists[0])):
        pick = lambda match, n=n: match[1].split()[n] if " " in match[1] else match[0]  # noqa: E731
        expanded.append([re.sub(r"<([^<>]+)>", pick, column) for column in columns])
    return expanded


def _native(text: str, word_size: int) -> str:
    prefix, size = ("r", "qword ptr") if word_size == 8 else ("e", "dword ptr")
    return re.sub(r"%([abcd]x|[sd]i|[sb]p)", prefix + r"\1", text.replace("%ptr", size))


def _form(columns: list[str]) -> Form:
    name, instruction, before, after, options = columns
    if re.fullmatch(r"\w+", name) is None:
        raise TableError(f"'{name}' is not a name")
    values: dict[str, str] = {}
    for option in options.split():
        key, _, value = option.partition("=")
        values[key] = value
    if unknown := values.keys() - {"hits", "faults", "may-fault", "traps", "needs", "low"}:
        raise TableError(f"{name}: unknown options {sorted(unknown)}")
    return Form(
        name,
        instruction,
        before,
        after,
        int(values.get("hits", "1")),
        "faults" in values,
        "may-fault" in values,
        "traps" in values,
        tuple(values["needs"].split("+")) if "needs" in values else (),
        "low" in values,
    )


def assembly(forms: list[Form], word_size: int) -> str:
    """Return the source of the forms in the assembly language of gas; ``word_size`` is in bytes."""
    lines = [".intel_syntax noprefix"]
    lines += [f".set {name}, {value:#x}" for name, value in _CONSTANTS.items()]
    lines += [".set NEAR_DATA, near_data", ".text", ".globl forms_start, forms", "forms_start:"]
    for form in forms:
        lines += _code_of(form)
    word = ".quad" if word_size == 8 else ".long"
    lines += [".data", f".balign {word_size}", "forms:"]
    for n, form in enumerate(forms):
        lines += [f"{word} name_{n}, form_{form.name}, {form.sites[0]}"]
    lines += [f"{word} 0, 0, 0"]
    lines += [f'name_{n}: .asciz "{form.name}"' for n, form in enumerate(forms)]
    return "\n".join([*lines, '.section .note.GNU-stack, "", @progbits', ""])


def _code_of(form: Form) -> list[str]:
    site, *following = form.sites
    after = form.after
    for label in following:
        after = after.replace("next:", f".globl {label}; .type {label}, @function; {label}:")
    return [
        ".p2align 4",
        f"form_{form.name}: {form.before}",
        f".globl {site}",
        f".type {site}, @function",
        f"{site}: " + re.sub(r"\bsite\b", site, form.instruction),
        f".size {site}, . - {site}",
        after,
        "jmp leave_form",
    ]
