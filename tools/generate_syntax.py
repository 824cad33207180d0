"""
Write the syntax files of editors in editors/ from the tables of the language; with --check only compare.

A TextMate grammar (VS Code, Sublime Text, GitHub, and others read it) and a syntax file for Vim and Neovim.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from dprobes.arch import ARCHITECTURE_NAMES, architecture
from dprobes.dpc.syntax.declarationparser import BASIC_WORDS, NAMED_TYPES, QUALIFIERS, STORAGES, TAGGED
from dprobes.dpc.syntax.parser import POINT_WORDS
from dprobes.dpc.syntax.statementparser import KEYWORDS as STATEMENTS
from dprobes.dpc.typers.provided import ACTIONS, PROVIDED, RESERVED_CALLS
from dprobes.rpn.isa import ALIASES, ROWS
from dprobes.rpn.keywords import KEYWORD_ALIASES, KEYWORDS

EDITORS = Path(__file__).parent.parent / "editors"
GRAMMAR = EDITORS / "vscode" / "syntaxes" / "dprobes.tmLanguage.json"
GRAMMAR_OF_C = EDITORS / "vscode" / "syntaxes" / "dprobes-c.tmLanguage.json"
VIM = EDITORS / "vim" / "syntax" / "dprobes.vim"

LOGGING = ("log", "exit", "abort", "remove")
"""Operators that decide what becomes of a record."""


def operators() -> list[str]:
    """Return the first words of all instructions, old spellings among them."""
    return sorted({each.operator for each in (*ROWS, *ALIASES)})


def operand_words() -> list[str]:
    """Return the fixed words behind operators."""
    words = {word for each in (*ROWS, *ALIASES) for word in each.operands if isinstance(word, str)}
    return sorted(word for word in words if re.fullmatch(r"[a-z]\w*", word))


def keywords() -> list[str]:
    """Return the words before '=' in headers."""
    return sorted({*(keyword.name for keyword in KEYWORDS), *KEYWORD_ALIASES})


def registers() -> list[str]:
    """Return the names of the registers of all processors that are not words of the language."""
    names = {name for known in ARCHITECTURE_NAMES for name in architecture(known).register_names}
    return sorted(names - {*operand_words(), *operators()})


def one_of(words: list[str]) -> str:
    """Return a regular expression for one of some words, the longest first."""
    return "|".join(sorted(map(re.escape, words), key=lambda word: (-len(word), word)))


def grammar() -> str:
    """Return the TextMate grammar."""
    others = [word for word in operators() if word not in LOGGING]
    patterns = [
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
        {"name": "keyword.control.record.dprobes", "match": rf"(?i)(?<=^|[\s;])(?:{one_of(list(LOGGING))})\b"},
        {"name": "keyword.control.dprobes", "match": rf"(?i)(?<=^|[\s;])(?:{one_of(others)})\b"},
        {"name": "variable.language.register.dprobes", "match": rf"(?i)\b(?:{one_of(registers())})\b"},
        {"name": "storage.type.dprobes", "match": rf"(?i)(?<=[\s,])(?:{one_of(operand_words())})\b"},
        {"name": "constant.numeric.dprobes", "match": r"\b(?:0[xX][0-9a-fA-F]+|\d+(?:[hH][zZ])?)\b"},
    ]
    return textmate("DProbes RPN", "dprobes", "rpn", patterns)


def grammar_of_c() -> str:
    """Return the TextMate grammar of DProbes C."""
    calls = sorted({*RESERVED_CALLS, *ACTIONS})
    points = ["module", "return", "when", *POINT_WORDS]
    patterns = [
        {"name": "string.quoted.double.dprobes-c", "match": r'"(?:\\.|[^"\\\n])*"'},
        {"name": "constant.character.dprobes-c", "match": r"'(?:\\.|[^'\\\n])*'"},
        {"name": "variable.other.table.dprobes-c", "match": r"@[A-Za-z_]?\w*"},
        {"name": "keyword.control.dprobes-c", "match": rf"\b(?:{one_of(['else', 'catch', *STATEMENTS])})\b(?!:)"},
        {"name": "keyword.other.point.dprobes-c", "match": rf"\b(?:{one_of(points)})\b(?![:(+])"},
        {"name": "storage.modifier.dprobes-c", "match": rf"\b(?:{one_of([*STORAGES, *QUALIFIERS])})\b"},
        {"name": "storage.type.dprobes-c", "match": rf"\b(?:{one_of([*BASIC_WORDS, *NAMED_TYPES, *TAGGED])})\b"},
        {"name": "support.function.dprobes-c", "match": rf"\b(?:{one_of([*calls, 'sizeof', 'offsetof'])})\b(?=\s*\()"},
        {"name": "variable.language.dprobes-c", "match": rf"\b(?:{one_of(list(PROVIDED))})\b"},
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

    def words(group: str, names: list[str]) -> str:
        return f"syntax keyword {group} {' '.join(names)}"

    lines = [
        '" Programs of DProbes. Written by "make docs" from the tables of the language; do not edit.',
        "if exists('b:current_syntax')",
        "  finish",
        "endif",
        "syntax case ignore",
        words("dprobesRecord", list(LOGGING)),
        words("dprobesOperator", others),
        words("dprobesOperand", [word for word in operand_words() if word not in operators()]),
        words("dprobesRegister", registers()),
        rf"syntax match dprobesHeader /^\s*\%({one_of(keywords()).replace('|', chr(92) + '|')}\)\ze\s*=/",
        r"syntax match dprobesLabel /^\s*[A-Za-z_.$]\w*\ze:/",
        r"syntax match dprobesNumber /\<\%(0x\x\+\|\d\+\%(hz\)\?\)\>/",
        r'syntax match dprobesString /"[^"]*"/',
        r"syntax match dprobesCharacter /'\%(\\.\|[^'\\]\)'/",
        r"syntax match dprobesComment #//.*$# contains=@Spell",
        r"syntax region dprobesComment start=#/\*# end=#\*/# contains=@Spell",
        r"syntax match dprobesDirective /^\s*#.*$/",
        *(
            f"highlight default link dprobes{group} {meaning}"
            for group, meaning in (
                ("Header", "Type"), ("Record", "Statement"), ("Operator", "Keyword"), ("Operand", "StorageClass"),
                ("Register", "Identifier"), ("Label", "Label"), ("Number", "Number"), ("String", "String"),
                ("Character", "Character"), ("Comment", "Comment"), ("Directive", "PreProc"),
            )
        ),
        "let b:current_syntax = 'dprobes'",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or compare the files."""
    is_check = "--check" in sys.argv[1:]
    status = 0
    for path, text in ((GRAMMAR, grammar()), (GRAMMAR_OF_C, grammar_of_c()), (VIM, vim())):
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
