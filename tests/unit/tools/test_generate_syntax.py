"""The syntax files of editors know every word of the language, and tell it from others."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.rpn.isa import ROWS
from dprobes.rpn.keywords import KEYWORDS

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


def test_vim_reads_its_file(tmp_path: Path) -> None:
    if (vim := shutil.which("vim.basic") or shutil.which("vim.tiny") or shutil.which("vim")) is None:
        pytest.skip("vim is not installed")
    messages = tmp_path / "messages"
    syntax = ROOT / "editors" / "vim" / "syntax" / "dprobes.vim"
    command = [
        vim,
        "-u",
        "NONE",
        "-es",
        "-c",
        f"redir! > {messages}",
        "-c",
        f"source {syntax}",
        "-c",
        "redir END",
        "-c",
        "qa!",
    ]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert messages.read_text().strip() == ""
