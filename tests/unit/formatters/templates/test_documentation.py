"""The statements of docs/reference/templates.md are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dprobes.cli.main import run
from dprobes.formatters.json_formatter import COLUMNS
from dprobes.formatters.templates.template_collection import Templates
from dprobes.formatters.templates.template_model import HEADER_ITEMS, Conversion
from unit.formatters.templates.support import formatted

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "reference" / "templates.md").read_text()
EXAMPLES = re.findall(r"^\| `([^`]+)` \| `([0-9a-f ]+)` \| (`.*`) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("fmt", "data", "printed"), EXAMPLES)
def test_the_tables_of_examples(fmt: str, data: str, printed: str) -> None:
    expected = "\n".join(re.findall(r"`([^`]+)`", printed))
    assert formatted(fmt, bytes.fromhex(data)) == expected


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 25


def test_the_files_of_the_page_are_right() -> None:
    (directory,) = re.findall(r"```\n(/\* which file.*?)```", PAGE, re.DOTALL)
    (file,) = re.findall(r"```template\n(.*?)```", PAGE, re.DOTALL)
    files = {"templates.lst": directory.encode(), "kernel.fmt": file.encode(), "shell.fmt": b"major = 2"}
    templates = Templates.from_files(files)
    assert templates.diagnostics.render() == ""
    assert [(template.minor, template.desc, len(template.lines)) for template in templates.all()] == [
        (1, "kill_proc entry", 1),
        (2, "", 2),
    ]


def test_everything_is_documented() -> None:
    for conversion in Conversion:
        assert re.search(rf"^\| `%?{conversion.value}` ", PAGE, re.MULTILINE), conversion
    assert f"`{' '.join(HEADER_ITEMS)}`" in PAGE
    assert f"`{' '.join(COLUMNS)}`" in " ".join(PAGE.split())


def test_the_templates_of_the_examples_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    directory = ROOT / "examples" / "templates"
    assert run(["check", str(directory)]) == 0
    programs = [path for path in sorted(ROOT.glob("examples/*.rpn")) if (directory / f"{path.stem}.fmt").exists()]
    assert len(programs) == 20
    for program in programs:
        assert run(["check", str(program), "--allow-write", "--templates", str(directory)]) == 0
    output, said = capsys.readouterr()
    assert not output
    # Of a place in the kernel it may be noted what nobody can check on this machine.
    assert not re.search("error|warning", said)
