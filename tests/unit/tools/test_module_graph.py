"""The lint that finds modules which import each other in a circle, and those that are a part of another one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "module_graph.py"


@pytest.fixture(scope="module")
def lint() -> Any:
    spec = importlib.util.spec_from_file_location("module_graph", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "src" / "p").mkdir(parents=True)
    (tmp_path / "src" / "p" / "__init__.py").write_text("")
    return tmp_path / "src"


def write(sources: Path, **modules: str) -> None:
    for name, text in modules.items():
        (sources / "p" / f"{name}.py").write_text(text)


@pytest.mark.parametrize(
    ("text", "place", "kind"),
    [
        ("from p.a import x\n", 1, "at the start"),
        ("import p.a\n", 1, "at the start"),
        ("from p import a\n", 1, "at the start"),
        ("from . import a\n", 1, "at the start"),
        ("from .a import x\n", 1, "at the start"),
        ("def f():\n    from p.a import x\n", 2, "late"),
        ("class C:\n    def f(self):\n        import p.a\n", 3, "late"),
        ("if TYPE_CHECKING:\n    from p.a import x\n", 2, "for types"),
        ("if typing.TYPE_CHECKING:\n    import p.a\n", 2, "for types"),
        ("try:\n    import p.a\nexcept ImportError:\n    pass\n", 2, "at the start"),
    ],
)
def test_every_kind_of_import_closes_a_circle(lint: Any, sources: Path, text: str, place: int, kind: str) -> None:
    write(sources, a="from p.b import y\n", b=text)
    expected = [
        (
            "2 modules import each other in a circle:\n"
            "  src/p/a.py:1: p.a imports p.b (at the start)\n"
            f"  src/p/b.py:{place}: p.b imports p.a ({kind})"
        )
    ]
    assert expected == lint.problems(sources, ())


def test_what_leads_to_a_circle_or_out_of_it_is_no_part_of_it(lint: Any, sources: Path) -> None:
    write(sources, a="import p.b", b="import p.c", c="import p.d\nimport p.b", d="import os")
    expected = [
        (
            "2 modules import each other in a circle:\n"
            "  src/p/b.py:1: p.b imports p.c (at the start)\n"
            "  src/p/c.py:2: p.c imports p.b (at the start)"
        )
    ]
    assert expected == lint.problems(sources, ())


def test_a_known_circle_passes_until_it_changes(lint: Any, sources: Path) -> None:
    known = (frozenset(("p.a", "p.b")),)
    write(sources, a="import p.b", b="import p.a")
    assert lint.problems(sources, known) == []
    write(sources, b="")
    assert lint.problems(sources, known) == ["a known circle is gone, or has changed: bring KNOWN up to date: p.a, p.b"]
    write(sources, b="import p.c", c="import p.a")
    assert len(lint.problems(sources, known)) == 2


def test_a_short_module_with_one_importer_is_a_part_of_it(lint: Any, sources: Path) -> None:
    write(sources, a="import p.b\nimport p.c\nimport p.d", b="import p.c", c="", d="\n" * 151)
    found = ["p.b has 1 lines and one importer, p.a: it belongs there"]
    assert lint.parts_of_others(sources, {}) == found
    assert lint.parts_of_others(sources, {"p.b": "a process of its own"}) == []


def test_an_excuse_without_need_is_refused(lint: Any, sources: Path) -> None:
    write(sources, a="import p.b", b="\n" * 151)
    found = ["p.b needs no excuse any more: bring EXCUSED up to date"]
    assert lint.parts_of_others(sources, {"p.b": "a process of its own"}) == found
