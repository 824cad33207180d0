"""``docs/reference/rpn.md`` and ``tables.md``: the examples are valid, and the tables of rpn.md are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dprobes.arch import ARCHITECTURE_NAMES, architecture
from dprobes.arch.x86_processors import ACCESSED
from dprobes.cli.main import run
from dprobes.rpn import instruction_set

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
PAGE, TABLES = (REFERENCE / "rpn.md").read_text(), (REFERENCE / "tables.md").read_text()
EXAMPLES = re.findall(r"^```rpn\n(.*?)^```$", PAGE + TABLES, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=[str(number) for number in range(1, len(EXAMPLES) + 1)])
def test_an_example_is_a_program_or_a_handler(example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "example.rpn"
    program.write_text(example if example.startswith("name =") else f'name = "libc.so.6"\noffset = malloc\n{example}')
    status = run(["check", str(program), "--allow-write"])
    assert (status, *capsys.readouterr()) == (0, "", "")


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 19


def test_every_instruction_has_a_line_with_its_stack_effect() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for row in instruction_set.ROWS:
        syntax = (
            re.sub(r"\b[gct]v\b", "lv", row.syntax) if row.syntax.split()[0] not in ("log", "trace") else row.syntax
        )
        effect = row.effect.replace("|", "\\|")
        found = [line for line in lines if f"`{syntax}`" in line.split(" | ")[0] and f" | `{effect}` | " in line]
        assert len(found) == 1, row.syntax
        codes = [int(code, 16) for code in re.findall(r"`([0-9a-f]{2})`", found[0].split(" | ")[4])]
        assert row.opcode in codes or (len(codes) == 2 and row.opcode in range(*codes))
        assert all(fault.name in found[0] for fault in row.faults)
        assert ("†" in found[0]) == row.writes


def test_the_index_names_every_operator_and_leads_to_headings() -> None:
    (index,) = re.findall(r"^## Index of instructions$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    named = {name.split()[0] for name in re.findall(r"`([^`]+)`", index)}
    assert named == {row.operator for row in instruction_set.ROWS}
    headings = {
        re.sub(r"[^a-z0-9 -]", "", each.lower()).replace(" ", "-")
        for each in re.findall(r"^#+ (.*)", PAGE, re.MULTILINE)
    }
    assert headings >= set(re.findall(r"\(#([^)]+)\)", PAGE))


@pytest.mark.parametrize("name", ARCHITECTURE_NAMES)
def test_every_register_is_listed_with_its_index(name: str) -> None:
    (section,) = re.findall(rf"^### {name}$(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    listed = {alone: int(index, 16) for alone, index in re.findall(r"`(\w+)` \(([0-9a-f]+)\)", section)}
    for stem, first, last, low, high in re.findall(
        r"`(\w*?)(\d+)` to `\w*?(\d+)` \(([0-9a-f]+) to ([0-9a-f]+)\)", section
    ):
        numbers = range(int(first), int(last) + 1)
        assert len(numbers) == int(high, 16) - int(low, 16) + 1
        listed |= {f"{stem}{number}": int(low, 16) + number - int(first) for number in numbers}
    known = [register for register in architecture(name).registers if register.name != ACCESSED]
    assert listed == {register.name: register.index for register in known}
