"""
Write the syntax files of editors in editors/ from the tables of the language; with --check only compare.

A TextMate grammar (VS Code, Sublime Text, GitHub, and others read it) and a syntax file for Vim and Neovim, for each of
the two languages.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dprobes.arch import ARCHITECTURE_NAMES, architecture
from dprobes.dpc.syntax.program_parser import MODULE_ATTRIBUTES, POINT_WORDS, PROBE_ATTRIBUTES
from dprobes.dpc.syntax.statement_parser import BASIC_WORDS, NAMED_TYPES, QUALIFIERS, STORAGES, TAGGED
from dprobes.dpc.syntax.statement_parser import KEYWORDS as STATEMENTS
from dprobes.dpc.typers.provided_names import ACTIONS, PROVIDED, RESERVED_CALLS
from dprobes.rpn.instruction_set import ALIASES, ROWS
from dprobes.rpn.program_text import KEYWORD_ALIASES, KEYWORDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EDITORS = Path(__file__).parent.parent / "editors"
GRAMMAR = EDITORS / "vscode" / "syntaxes" / "dprobes.tmLanguage.json"
GRAMMAR_OF_C = EDITORS / "vscode" / "syntaxes" / "dprobes-c.tmLanguage.json"
VIM = EDITORS / "vim" / "syntax" / "rpn.vim"
VIM_OF_C = EDITORS / "vim" / "syntax" / "dpc.vim"

LOGGING = ("log", "exit", "abort", "remove")
"""Operators that determine whether a record is written."""

_POINTS = ("module", "when", *POINT_WORDS)
"""First words of the sections of a program in DProbes C, except ``return``, which also begins a statement."""
_ATTRIBUTES = (*MODULE_ATTRIBUTES, *PROBE_ATTRIBUTES)
_STATEMENTS = ("else", "catch", *(word for word in STATEMENTS if word != "default"))
_TYPES = (*BASIC_WORDS, *NAMED_TYPES, *TAGGED)
_CALLS = tuple(sorted({*RESERVED_CALLS, *ACTIONS, "sizeof", "offsetof"}))


def operators() -> list[str]:
    """Return the first words of all instructions, old spellings among them."""
    return sorted({each.operator for each in (*ROWS, *ALIASES)})


def operand_words() -> list[str]:
    """Return the fixed words after operators."""
    words = {word for each in (*ROWS, *ALIASES) for word in each.operands if isinstance(word, str)}
    return sorted(word for word in words if re.fullmatch(r"[a-z]\w*", word))


def keywords() -> list[str]:
    """Return the words before '=' in headers."""
    return sorted({*(keyword.name for keyword in KEYWORDS), *KEYWORD_ALIASES})


def registers() -> list[str]:
    """Return the names of the registers of all processors that are not words of the language."""
    names = {name for known in ARCHITECTURE_NAMES for name in architecture(known).register_names}
    return sorted(names - {*operand_words(), *operators()})


def one_of(words: Sequence[str]) -> str:
    """Return a regular expression for one of some words, the longest first."""
    return "|".join(sorted(map(re.escape, words), key=lambda word: (-len(word), word)))


def grammar() -> str:
    """Return the TextMate grammar."""
    others = [word for word in operators() if word not in LOGGING]
    patterns: list[dict[str, Any]] = [
        {"name": "string.quoted.double.dprobes", "match": r'"[^"\n]*"'},
        {"name": "constant.character.dprobes", "match": r"'(?:\\.|[^'\\\n])'"},
        {
            "match": rf"(?i)^\s*({one_of(keywords())})\s*(=)",
            "captures": {
                "1": {"name": "keyword.other.header.dprobes"},
                "2": {"name": "keyword.operator.assignment.dprobes"},
            },
        },
        {"name": "entity.name.label.dprobes", "match": r"^\s*[A-Za-z_.$]\w*(?=:)"},
        {"name": "keyword.control.record.dprobes", "match": rf"(?i)(?<=^|[\s;])(?:{one_of(LOGGING)})\b"},
        {"name": "keyword.control.dprobes", "match": rf"(?i)(?<=^|[\s;])(?:{one_of(others)})\b"},
        {"name": "variable.language.register.dprobes", "match": rf"(?i)\b(?:{one_of(registers())})\b"},
        {"name": "storage.type.dprobes", "match": rf"(?i)(?<=[\s,])(?:{one_of(operand_words())})\b"},
        {"name": "constant.numeric.dprobes", "match": r"\b(?:0[xX][0-9a-fA-F]+|\d+(?:[hH][zZ])?)\b"},
    ]
    return textmate("DProbes RPN", "dprobes", "rpn", patterns)


def grammar_of_c() -> str:
    """Return the TextMate grammar of DProbes C."""
    attribute = {"1": {"name": "keyword.other.attribute.dprobes-c"}}
    patterns: list[dict[str, Any]] = [
        {"name": "string.quoted.double.dprobes-c", "match": r'"(?:\\.|[^"\\\n])*"'},
        {"name": "constant.character.dprobes-c", "match": r"'(?:\\.|[^'\\\n])*'"},
        {"name": "variable.other.table.dprobes-c", "match": r"@[A-Za-z_]?\w*"},
        {"match": rf",\s*({one_of(_ATTRIBUTES)})\b(?=\s+[\"\w])", "captures": attribute},
        {"name": "keyword.control.dprobes-c", "match": rf"\b(?:{one_of(_STATEMENTS)})\b(?!:)|\bdefault\b"},
        {"name": "keyword.other.point.dprobes-c", "match": rf"\b(?:{one_of(_POINTS)})\b(?![:(+])"},
        {"name": "storage.modifier.dprobes-c", "match": rf"\b(?:{one_of((*STORAGES, *QUALIFIERS))})\b"},
        {"name": "storage.type.dprobes-c", "match": rf"\b(?:{one_of(_TYPES)})\b"},
        {"name": "support.function.dprobes-c", "match": rf"\b(?:{one_of(_CALLS)})\b(?=\s*\()"},
        {"name": "variable.language.dprobes-c", "match": rf"\b(?:{one_of(tuple(PROVIDED))})\b"},
        {"name": "constant.numeric.dprobes-c", "match": r"\b(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[A-Za-z]*\b"},
    ]
    return textmate("DProbes C", "dprobes-c", "dpc", patterns)


def textmate(name: str, scope: str, suffix: str, patterns: list[dict[str, Any]]) -> str:
    """Return the TextMate grammar of a language with the comments and the preprocessor of C."""
    of_c = [
        {"name": f"comment.line.double-slash.{scope}", "match": r"//.*$"},
        {"name": f"comment.block.{scope}", "begin": r"/\*", "end": r"\*/"},
        {"name": f"meta.preprocessor.{scope}", "match": r"^\s*#\s*\w+.*$"},
    ]
    content = {"name": name, "scopeName": f"source.{scope}", "fileTypes": [suffix], "patterns": [*of_c, *patterns]}
    return json.dumps(content, indent=2) + "\n"


def vim() -> str:
    """Return the syntax file for Vim."""
    others = [word for word in operators() if word not in LOGGING]
    rules = [
        "syntax case ignore",
        vim_words("rpnRecord", LOGGING),
        vim_words("rpnOperator", others),
        vim_words("rpnOperand", [word for word in operand_words() if word not in operators()]),
        vim_words("rpnRegister", registers()),
        rf"syntax match rpnHeader /^\s*{vim_one_of(keywords())}\ze\s*=/",
        r"syntax match rpnLabel /^\s*[A-Za-z_.$]\w*\ze:/",
        r"syntax match rpnNumber /\<\%(0x\x\+\|\d\+\%(hz\)\?\)\>/",
        r'syntax match rpnString /"[^"]*"/',
        r"syntax match rpnCharacter /'\%(\\.\|[^'\\]\)'/",
    ]
    links = {
        "Header": "Type", "Record": "Statement", "Operator": "Keyword", "Operand": "StorageClass",
        "Register": "Identifier", "Label": "Label",
    }  # fmt: skip
    return vim_file("rpn", rules, links)


def vim_of_c() -> str:
    """Return the syntax file of DProbes C for Vim."""
    rules = [
        vim_words("dpcModifier", (*STORAGES, *QUALIFIERS)),
        vim_words("dpcType", _TYPES),
        vim_words("dpcVariable", tuple(PROVIDED)),
        rf"syntax match dpcStatement /\<{vim_one_of(_STATEMENTS)}\>:\@!\|\<default\>/",
        rf"syntax match dpcPoint /\<{vim_one_of(_POINTS)}\>[:(+]\@!/",
        rf"syntax match dpcAttribute /,\s*\zs{vim_one_of(_ATTRIBUTES)}\>\ze\s\+[\"0-9A-Za-z_]/",
        rf"syntax match dpcFunction /\<{vim_one_of(_CALLS)}\>\ze\s*(/",
        r"syntax match dpcTable /@\w*/",
        r"syntax match dpcNumber /\<\%(0[xX]\x\+\|0[bB][01]\+\|\d\+\)\a*\>/",
        r'syntax match dpcString /"\%(\\.\|[^"\\]\)*"/',
        r"syntax match dpcCharacter /'\%(\\.\|[^'\\]\)*'/",
    ]
    links = {
        "Modifier": "StorageClass", "Type": "Type", "Variable": "Identifier", "Statement": "Statement",
        "Point": "Keyword", "Attribute": "Keyword", "Function": "Function", "Table": "Special",
    }  # fmt: skip
    return vim_file("dpc", rules, links)


def vim_words(group: str, names: Sequence[str]) -> str:
    """Return the rule for some words, in the same order at any time."""
    return f"syntax keyword {group} {' '.join(sorted(names))}"


def vim_one_of(words: Sequence[str]) -> str:
    """Return Vim's regular expression for one of some words."""
    return rf"\%({one_of(words).replace('|', chr(92) + '|')}\)"


def vim_file(language: str, rules: Sequence[str], links: Mapping[str, str]) -> str:
    """Return the syntax file of a language with the comments and the preprocessor of C; the last rule comes first."""
    of_both = {
        "Number": "Number", "String": "String", "Character": "Character", "Comment": "Comment", "Directive": "PreProc",
    }  # fmt: skip
    lines = [
        f'" Programs of DProbes (*.{language}). Written by "make docs" from the tables of the language; do not edit.',
        "if exists('b:current_syntax')",
        "  finish",
        "endif",
        *rules,
        rf"syntax match {language}Comment #//.*$# contains=@Spell",
        rf"syntax region {language}Comment start=#/\*# end=#\*/# contains=@Spell",
        rf"syntax match {language}Directive /^\s*#.*$/",
        *(f"highlight default link {language}{group} {meaning}" for group, meaning in {**links, **of_both}.items()),
        f"let b:current_syntax = '{language}'",
    ]
    return "\n".join(lines) + "\n"


def completions() -> dict[Path, str]:
    """Return the scripts of shells, as ``dprobes completion`` prints them, for the wheel."""
    from dprobes.cli import COMPLETE_VARIABLE
    from dprobes.cli.command_group import command_group
    from dprobes.cli.completions import script

    names = {"bash": "dprobes.bash", "zsh": "_dprobes", "fish": "dprobes.fish"}
    directory = EDITORS.parent / "packaging" / "completions"
    return {directory / name: script(shell, command_group, COMPLETE_VARIABLE) + "\n" for shell, name in names.items()}


def main() -> int:
    """Write or compare the files."""
    is_check = "--check" in sys.argv[1:]
    status = 0
    files = {GRAMMAR: grammar(), GRAMMAR_OF_C: grammar_of_c(), VIM: vim(), VIM_OF_C: vim_of_c()} | completions()
    for path, text in files.items():
        if is_check:
            if not path.exists() or path.read_text() != text:
                print(f"{path.relative_to(EDITORS.parent)} is not up to date: run make docs")
                status = 1
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
