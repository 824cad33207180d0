"""A probepoint has a piece for each instruction at which something runs for it."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.map_layouts import CallTable
from dprobes.diagnostics import Diagnostics
from dprobes.engines.inline.handler_pieces import Order, PieceWriter, call_table_of
from dprobes.engines.ptrace.client.site_answers import CompiledSite
from dprobes.record.log_record import Item
from dprobes.resolve.local_module import resolve
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.rpn_program import Point
from dprobes.source_text import SourceFile
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.engines.inline.handler_pieces import Piece
    from dprobes.rpn.rpn_program import Program

CODE = """
__attribute__((noipa)) long other(long a) { return a + 1; }
__attribute__((noipa)) long way(long a) { if (a > 5) return other(a * 2); return a * 3; }
int main(void) { return 0; }
"""


@pytest.fixture(scope="module")
def program_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pieces")
    (directory / "a.c").write_text(CODE)
    path = directory / "pieces"
    subprocess.run(["gcc", "-O2", "-o", path, directory / "a.c"], check=True)
    return path


def parsed(path: Path, body: str, header: str = "") -> Program:
    text = f'name = "{path}"\nlogmax = 64\n{header}{body}\n'
    return parse_source(SourceFile("a.rpn", text), Diagnostics(), CompileOptions())


def pieces_of(path: Path, body: str, header: str = "") -> tuple[Piece, ...] | str:
    program = parsed(path, body, header)
    resolved = resolve(program, Module.load(path), Diagnostics())
    (probe,) = resolved.probepoints
    site = CompiledSite(resolved, Point.of(program, probe.definition, probe.offset, probe.arguments), (0, 0))
    return PieceWriter(program, Item.PID).pieces(0, probe, site)


def test_a_handler_before_an_instruction_is_one_piece(program_file: Path) -> None:
    found = pieces_of(program_file, "offset = other\npush r, rdi\nlog 1\nexit")
    assert not isinstance(found, str)
    assert [piece.order for piece in found] == [Order.HANDLER]


def test_a_return_has_a_piece_for_each_return_instruction(program_file: Path) -> None:
    found = pieces_of(program_file, "offset = way\nreturn = yes\npush r, rax\nlog 1\nexit")
    assert not isinstance(found, str)
    assert [(piece.order, piece.raw) for piece in found] == [(Order.RETURN, b"\xc3")]  # the tail call is the tracer's


def test_what_asks_for_the_entry_has_a_piece_there(program_file: Path) -> None:
    found = pieces_of(program_file, "offset = way\nreturn = yes\npush elapsed\npush entry, rdi\nlog 2\nexit")
    assert not isinstance(found, str)
    assert [piece.order for piece in found] == [Order.ENTRY, Order.RETURN]


def test_what_cannot_be_has_a_reason(program_file: Path) -> None:
    names = "its handler reads the process name or the user id, which only the kernel knows"
    assert pieces_of(program_file, "offset = way\npush uid\nlog 1\nexit") == names
    assert not isinstance(pieces_of(program_file, "offset = way\nexit", "vars = 1\n"), str)


def test_the_table_of_calls_has_room_for_what_is_asked(program_file: Path) -> None:
    def table(body: str) -> CallTable | None:
        return call_table_of(parsed(program_file, f"offset = way\nreturn = yes\n{body}"))

    assert table("push r, rax\nlog 1\nexit") is None
    assert table("push elapsed\nlog 1\nexit") == CallTable(64)
    registers = "".join(f"push entry, {name}\n" for name in ("rdi", "rsi", "rdx", "rcx", "r8", "r9", "rbx"))
    assert table(f"{registers}log 7\nexit") == CallTable(128)


@pytest.mark.parametrize("body", ["abort", "push r, rdi\nlog 1\nexit", "push other\nlog 1\nexit", "log st\nexit"])
def test_many_probepoints_have_the_code_that_each_would_have_alone(program_file: Path, body: str) -> None:
    program = parsed(program_file, "offset = *\nlogonfault = yes\n" + body)
    resolved = resolve(program, Module.load(program_file), Diagnostics())
    writer, found = PieceWriter(program, Item.PID | Item.IP), 0
    for number, probe in enumerate(resolved.probepoints):
        point = Point.of(program, probe.definition, probe.offset, probe.arguments)
        site = CompiledSite(resolved, point, (0, 0))
        for distance in (0, 4000):  # numbers that take one byte, and more
            alone = PieceWriter(program, Item.PID | Item.IP).pieces(number + distance, probe, site)
            assert not isinstance(alone, str)
            pieces = writer.pieces(number + distance, probe, site)
            assert not isinstance(pieces, str)
            assert [(piece._replace(code=alone[0].code), piece.assembled) for piece in pieces] == [
                (piece._replace(code=alone[0].code), piece.assembled) for piece in alone
            ]
        found += 1
    assert found > 4
