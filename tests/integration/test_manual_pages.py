"""The manual pages are those of the program, and clean for the programs that show them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dprobes.rpn.instruction_set import ROWS
from dprobes.rpn.program_text import KEYWORDS
from integration.support import DPROBES, TIMEOUT, environment

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "man").glob("*.8"))


def output(*command: str) -> str:
    """Return all that a command prints, which must end well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def needed(program: str, package: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed (package {package})")
    return path


def shown(page: str) -> str:
    """Return a page as a reader sees it, on one line."""
    path = ROOT / "docs" / "man" / page
    return " ".join(output(needed("mandoc", "mandoc"), "-T", "ascii", "-O", "width=500", str(path)).split())


def plain(text: str) -> str:
    return re.sub(r".\x08", "", text)


def test_there_are_two_pages_as_the_tables_say() -> None:
    assert [page.name for page in PAGES] == ["dprobes.8", "dprobes.lang.8"]
    assert output(sys.executable, str(ROOT / "tools" / "generate_man.py"), "--check") == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_groff_has_nothing_to_complain_of(page: Path) -> None:
    man = needed("man", "man-db")
    needed("groff", "groff-base")
    formatted = output(man, "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", str(page))
    assert formatted.startswith("x T utf8\n")
    assert not re.findall(r".*:\d+: warning.*", formatted)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_mandoc_has_nothing_to_complain_of(page: Path) -> None:
    assert output(needed("mandoc", "mandoc"), "-T", "lint", str(page)) == ""


def test_the_page_has_every_verb_and_option_that_help_shows() -> None:
    text = plain(shown("dprobes.8"))
    help_text = output(*DPROBES, "--help")
    verbs = re.findall(r"^  ([a-z-]+)  ", help_text.partition("Verbs:")[2], re.MULTILINE)
    assert len(verbs) >= 14
    for verb in verbs:
        options = re.findall(r"(?<=[ ,])--[a-z-]+", output(*DPROBES, verb, "--help").partition("\nOptions:")[2])
        section = re.search(
            rf" dprobes {verb}( [a-z]+)? dprobes {verb}(?: [a-z]+)? .*?(?= dprobes [a-z-]+ dprobes )", text
        )
        assert section or verb == verbs[-1], verb
        described = section[0] if section else text
        for option in set(options) - {"--help"}:
            assert option in described, f"{verb} {option}"


@pytest.mark.alone
def test_the_first_example_runs_wherever_it_is_typed(tmp_path: Path) -> None:
    source = (ROOT / "docs" / "man" / "dprobes.8").read_text().partition(".SH EXAMPLES")[2]
    lines = source.partition(".EX\n")[2].partition(".EE\n")[0].replace("\\-", "-").replace("\\(aq", "'")
    command = lines.replace("\\&", "").replace("dprobes ", f"{shlex.join(DPROBES)} ", 1)
    shell = ["sh", "-c", command]
    done = subprocess.run(
        shell, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^0,0 +malloc +5 +5 ", done.stderr, re.MULTILINE), done.stderr


def test_the_language_has_every_instruction_and_keyword() -> None:
    text = plain(shown("dprobes.lang.8"))
    for row in ROWS:
        syntax = row.syntax.replace("<", "").replace(">", "")
        assert f" {syntax} ( {row.effect} ) {row.doc}" in text, row.syntax
    for keyword in KEYWORDS:
        assert f" {keyword.name} = {keyword.kind.value}" in text, keyword.name
