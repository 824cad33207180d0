"""Expressions have the types that the debug information of their module says; a bar marks where they are asked for."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.cli.languageserver.edited_program import Analysis, analyse
from dprobes.cli.languageserver.explanation import explain, type_at

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
struct point { int x; unsigned y : 3; };
struct node { struct node *next; char name[16]; struct point places[2][4]; const char *text; double weight; };
static struct node first = { &first, "first", { { { 1, 2 } } }, "text", 0.5 };
__attribute__((noipa)) int visit(struct node *node, unsigned char depth) { return node->next != 0 && depth; }
__attribute__((noipa)) long count(long number) { return number; }
int main(void) { return visit(&first, 1) + (int)count(2); }
"""
NODE = """\
struct node {
    struct node *next;
    char name[16];
    struct point places[2][4];
    char *text;
    double weight;
};
```"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("types") / "typed"
    subprocess.run(["gcc", "-g", "-O1", "-x", "c", "-", "-o", path], input=SOURCE, text=True, check=True)
    return path


def asked(program: Path, text: str) -> tuple[Analysis, int]:
    text = text.replace("M:", f"{program}:")
    return analyse("/tmp/typed.dpc", text.replace("|", "", 1)), text.index("|")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("M:visit { @ = sum(node->places[0][1].|x); }", "int  // node->places[0][1].x\n```"),
        ("M:visit { @ = sum(node->places[0][1].|y); }", "unsigned int  // node->places[0][1].y\n```"),
        ("M:visit { @[str(node->|name)] = count(); }", "char [16]  // node->name\n```"),
        ("M:visit { @ = sum(|depth + 1); }", "unsigned char  // depth\n```"),
        ("M:visit(|head) { @ = count(); }", f"struct node *  // head\n{NODE}"),
        ("M:visit(head) { @ = sum(head->next->|next != 0); }", f"struct node *  // head->next->next\n{NODE}"),
        ("M:visit(head, int |size) { @ = count(); }", "int  // int size\n```"),
        ("return M:visit { @ = sum(|retval); }", "int  // retval\n```"),
        ("return M:count { @ = sum(|retval); }", "long  // retval\n```"),
        ('M:visit { printf("%S", |*node); }', f"struct node  // *node\n{NODE}"),
        # What is wrong elsewhere does not matter.
        ("M:visit { @ = sum(|depth + nothing); }", "unsigned char  // depth\n```"),
    ],
)
def test_types_are_those_of_the_source(program: Path, text: str, shown: str) -> None:
    assert type_at(*asked(program, text)) == f"```c\n{shown}"


def test_a_name_at_several_places_has_several_types(program: Path) -> None:
    text = "M:visit(|it), M:count(it) { @ = sum((long)it); }"
    assert type_at(*asked(program, text)) == f"```c\nstruct node *  // it\n{NODE[:-4]}\nlong  // it\n```"


def test_a_hover_has_the_type_before_what_is_known_of_the_name(program: Path) -> None:
    said = explain(*asked(program, "return M:visit { @ = sum(|retval); }"))
    assert said is not None
    assert said[0] == "```c\nint  // retval\n```\n\n`retval`: what the function returns"
    said = explain(*asked(program, "M:visit { long sum = depth; @ = sum(|sum); }"))
    assert said is not None
    assert said[0] == "```c\nlong  // sum\n```\n\n`sum` is a value of tables: write @name[keys] = …"
    said = explain(*asked(program, 'M:visit { pri|ntf("x"); }'))
    assert said is not None
    assert said[0] == "`printf` is a statement"


def test_where_is_no_expression_there_is_no_type(program: Path) -> None:
    assert type_at(*asked(program, "M:visit { @ = count(); | }")) is None
    assert type_at(*asked(program, "M:vi|sit { @ = count(); }")) is None
