"""The syntax files of editors know every word of the language, and tell it from others."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.rpn.instruction_set import ROWS
from dprobes.rpn.program_text import KEYWORDS

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[3]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_syntax", ROOT / "tools" / "generate_syntax.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def scopes_of(line: str, name: str = "grammar") -> dict[str, str]:
    """Return the scope of each word of a line, found as editors do: the leftmost match, of several the first rule."""
    grammar: Any = json.loads(getattr(load(), name)())
    rules = [
        (re.compile(rule["match"].replace(r"(?<=^|[\s;])", r"(?:(?<=\s)|(?<=;)|^)")), rule)
        for rule in grammar["patterns"]
        if "match" in rule
    ]
    found, position = {}, 0
    while position < len(line):
        matches = [
            (match.start(), n, match) for n, (rule, _) in enumerate(rules) if (match := rule.search(line, position))
        ]
        if not matches:
            break
        _, n, match = min(matches, key=lambda each: each[:2])
        rule = rules[n][1]
        for group, capture in rule.get("captures", {"0": rule}).items():
            found[match[int(group)].strip()] = capture["name"].split(".dprobes")[0]
        position = max(match.end(), position + 1)
    return found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "name = libc.so.6   // the module",
            {"name": "keyword.other.header", "// the module": "comment.line.double-slash"},
        ),
        ("    push r, arg0", {"push": "keyword.control", "r": "storage.type", "arg0": "variable.language.register"}),
        ("    log str", {"log": "keyword.control.record", "str": "storage.type"}),
        (
            "loop_end: push 0x2a",
            {"loop_end": "entity.name.label", "push": "keyword.control", "0x2a": "constant.numeric"},
        ),
        ("sampler = 99hz", {"sampler": "keyword.other.header", "99hz": "constant.numeric"}),
        ('name = "a//b"', {'"a//b"': "string.quoted.double"}),
        ("    PUSH R, EAX; EXIT", {"PUSH": "keyword.control", "EAX": "variable.language.register"}),
    ],
)
def test_words_are_what_they_are(line: str, expected: dict[str, str]) -> None:
    scopes = scopes_of(line)
    assert {word: scopes.get(word) for word in expected} == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "return libc.so.6:malloc(size_t size) when (size > 1K) {  // large",
            {"return": "keyword.control", "size_t": "storage.type", "when": "keyword.other.point",
             "1K": "constant.numeric", "// large": "comment.line.double-slash"},
        ),
        ("watch w bash:x { @n[pid] = count(); }", {"watch": "keyword.other.point", "@n": "variable.other.table",
                                                   "pid": "variable.language", "count": "support.function"}),
        ("static unsigned long n;", {"static": "storage.modifier", "unsigned": "storage.type", "long": "storage.type"}),
        ('printf("%s", comm);', {"printf": "support.function", '"%s"': "string.quoted.double",
                                 "comm": "variable.language"}),
        ("every 5s { clear(@n); }", {"every": "keyword.other.point", "5s": "constant.numeric",
                                     "clear": "support.function"}),
        ("switch (n) { default: break; }", {"switch": "keyword.control", "default": "keyword.control"}),
        ("f(n), maxhits 3 {", {"maxhits": "keyword.other.attribute", "3": "constant.numeric"}),
        ("#define LIMIT 8", {"#define LIMIT 8": "meta.preprocessor"}),
    ],
)  # fmt: skip
def test_words_of_c_are_what_they_are(line: str, expected: dict[str, str]) -> None:
    scopes = scopes_of(line, "grammar_of_c")
    assert {word: scopes.get(word) for word in expected} == expected


def test_every_word_of_the_language_is_known() -> None:
    for row in ROWS:
        assert scopes_of(f"    {row.operator}")[row.operator].startswith("keyword.control")
    for keyword in KEYWORDS:
        assert scopes_of(f"{keyword.name} = 1")[keyword.name] == "keyword.other.header"


def groups_of(line: str, language: str, directory: Path) -> tuple[str, dict[str, str]]:
    """Return the file type that Vim gives to a file with a line, and the group by which it colours each word."""
    if (vim := shutil.which("vim.basic") or shutil.which("vim")) is None:
        pytest.skip("vim is not installed")
    program, answer = directory / f"program.{language}", directory / "answer"
    program.write_text(f"{line}\n")
    commands = [
        "filetype plugin on",
        "syntax on",
        f"edit {program}",
        f"redir! > {answer}",
        "echon &filetype",
        r'for c in range(1, len(getline(1))) | echon "\n" . synIDattr(synID(1, c, 1), "name") | endfor',
        "redir END",
        "qa!",
    ]
    words = [word for command in commands for word in ("-c", command)]
    start = [vim, "-N", "-u", "DEFAULTS", "-es", "--cmd", f"set runtimepath^={ROOT / 'editors' / 'vim'}", *words]
    subprocess.run(start, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    file_type, *groups = answer.read_text().split("\n")
    assert len(groups) == len(line)
    pieces = [
        (key, "".join(line[n] for n in run)) for key, run in itertools.groupby(range(len(line)), groups.__getitem__)
    ]
    return file_type, {piece.strip(): key.removeprefix(language) for key, piece in pieces if key}


@pytest.mark.parametrize(
    ("language", "line", "expected"),
    [
        (
            "rpn",
            "next:   push mem, u64   // a // pointer",
            {"next": "Label", "push": "Operator", "mem": "Operand", "u64": "Operand", "// a // pointer": "Comment"},
        ),
        ("rpn", 'name = "a//b"', {"name": "Header", '"a//b"': "String"}),
        ("rpn", "log 0x2a; PUSH R, EAX", {"log": "Record", "0x2a": "Number", "PUSH": "Operator", "EAX": "Register"}),
        (
            "dpc",
            "return libc.so.6:malloc(size_t size), maxhits 3 when (size > 1K) {  // large",
            {"return": "Statement", "size_t": "Type", "maxhits": "Attribute", "3": "Number", "when": "Point",
             "1K": "Number", "// large": "Comment"},
        ),
        ("dpc", "watch w bash:x { @n[pid] = count(); }", {"watch": "Point", "@n": "Table", "pid": "Variable",
                                                         "count": "Function"}),
        ("dpc", 'static long n; printf("/* %s", comm);', {"static": "Modifier", "long": "Type", "printf": "Function",
                                                        '"/* %s"': "String", "comm": "Variable"}),
        ("dpc", "switch (n) { default: break; }", {"switch": "Statement", "default": "Statement"}),
    ],
)  # fmt: skip
def test_vim_colours_words(tmp_path: Path, language: str, line: str, expected: dict[str, str]) -> None:
    file_type, groups = groups_of(line, language, tmp_path)
    assert file_type == language
    assert {word: groups.get(word) for word in expected} == expected
