"""What was compiled, as bytes and back: what there is only one of stays that."""

from __future__ import annotations

import pickle
from pathlib import Path

from dprobes.arch import architecture, go_architecture
from dprobes.cli.compilationpickle import pickled, unpickled
from dprobes.diagnostics import Diagnostics
from dprobes.resolve.resolution import resolve
from dprobes.rpn.isa import rows_by_syntax
from dprobes.rpn.pipeline import parse_source
from dprobes.source import SourceFile
from dprobes.target.location import Module

EXECUTABLE = Path("/proc/self/exe").resolve()


def test_rows_and_architectures_are_the_same_objects() -> None:
    row = rows_by_syntax()["nop"]
    content = pickled((row, architecture("i386")))
    assert content is not None
    again = unpickled(content)
    assert isinstance(again, tuple)
    assert again[0] is row
    assert again[1] is architecture("i386")


def test_a_resolved_module_is_the_same_with_its_file_opened_again() -> None:
    module = Module.load(EXECUTABLE)
    source = SourceFile(
        "-e", f'name = "{EXECUTABLE}"\noffset = {module.elf.file_offset(module.elf.entry):#x}\npush r, rax\nexit\n'
    )
    diagnostics = Diagnostics()
    resolved = resolve(parse_source(source, diagnostics), module, diagnostics)
    content = pickled((resolved, resolved.image.instructions[0][1].span))
    assert content is not None
    assert len(content) < 20_000  # and not the bytes of the file
    pair = unpickled(content)
    assert isinstance(pair, tuple)
    again, span = pair
    assert again.probepoints[0].instruction == resolved.probepoints[0].instruction
    assert again.image.data == resolved.image.data
    assert again.module.path == EXECUTABLE
    assert again.module.elf.data == module.elf.data
    assert span.file is again.image.instructions[0][1].span.file


def test_what_has_no_name_of_its_own_has_no_bytes() -> None:
    assert pickled(go_architecture()) is None
    assert pickled(lambda: None) is None


def test_bytes_of_something_else_are_no_value() -> None:
    assert unpickled(b"") is None
    assert unpickled(b"\x80\x04garbage") is None
    assert unpickled(pickle.dumps(Path("x")).replace(b"PosixPath", b"PosixPavement"[:9])) is None
