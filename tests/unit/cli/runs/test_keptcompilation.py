"""What was compiled is kept under what it follows from, and counts as long as that is the same."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dprobes.api.compiledprogram import CompiledProgram
from dprobes.cli.runs import keptcompilation
from dprobes.cli.runs.headstarts import SWITCH, code_state
from dprobes.cli.runs.keptcompilation import KeptCompilation
from dprobes.diagnostics import Diagnostics
from dprobes.engines.insertion import Vantage
from dprobes.resolve.knownanswers import KnownAnswers
from dprobes.resolve.localmodule import Compiled, resolve_here
from dprobes.rpn.pipeline import CompileOptions, parse_source
from dprobes.source import SourceFile
from dprobes.target.elf.file import ElfFile
from dprobes.target.location import OWN_SYMBOLS

OPTIONS = CompileOptions()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an executable of the test's own."""
    monkeypatch.delenv(SWITCH, raising=False)
    path = tmp_path / "program"
    shutil.copy2(Path("/proc/self/exe").resolve(), path)
    return path


def kept_of(program: Path, text: str = "text", options: CompileOptions = OPTIONS, **more: object) -> KeptCompilation:
    others = tuple(more.values())
    directory = str(program.parent / "cache")
    return KeptCompilation(text, options, "module", "ebpf", Vantage(), others=others, directory=directory)


def entry_of(program: Path) -> int:
    """Return the file offset of the first instruction of an executable."""
    elf = ElfFile.open(program)
    offset = elf.file_offset(elf.entry)
    assert offset is not None
    return offset


def source_of(program: Path) -> SourceFile:
    return SourceFile("-e", f'name = "{program}"\noffset = {entry_of(program):#x}\nexit\n')


def compile_into(kept: KeptCompilation, program: Path) -> CompiledProgram:
    """Compile a program, and keep it."""
    source = source_of(program)
    diagnostics = Diagnostics()
    with kept.noting():
        loaded = CompiledProgram(parse_source(source, diagnostics), OWN_SYMBOLS, diagnostics)
        compiled = resolve_here(loaded.program, diagnostics)
    kept.keep(loaded, compiled)
    return loaded


def test_what_was_compiled_is_known_the_next_time(program: Path) -> None:
    assert kept_of(program).known is None
    loaded = compile_into(kept_of(program), program)
    again = kept_of(program)
    assert again.loaded is not None
    assert again.loaded.program.name == loaded.name
    places = again.places_of(again.loaded.program)
    assert places is not None
    assert [probe.offset for probe in places.probepoints] == [
        ElfFile.open(program).file_offset(places.module.elf.entry)
    ]
    assert again.places_of(loaded.program) is None, "another program, though it looks the same"


@pytest.mark.parametrize("change", ["text", "defines", "sym", "write"])
def test_another_question_has_another_answer(program: Path, change: str) -> None:
    compile_into(kept_of(program), program)
    assert kept_of(program).known is not None
    match change:
        case "text":
            assert kept_of(program, "another text").known is None
        case "defines":
            assert kept_of(program, options=CompileOptions(defines=(("A", "1"),))).known is None
        case "sym":
            assert kept_of(program, sym="file").known is None
        case "write":
            assert kept_of(program, options=CompileOptions(allow_write=True)).known is None


@pytest.mark.parametrize("change", ["touched", "replaced", "removed", "attributes"])
def test_a_file_that_has_changed_is_looked_at_again(program: Path, change: str) -> None:
    compile_into(kept_of(program), program)
    match change:
        case "touched":
            os.utime(program)
        case "replaced":
            other = program.with_name("other")
            shutil.copy2(program, other)
            other.replace(program)
        case "removed":
            program.unlink()
        case "attributes":
            program.chmod(0o700)
    assert kept_of(program).known is None


def test_a_file_that_was_missed_and_has_come_counts_as_changed(program: Path, tmp_path: Path) -> None:
    kept = kept_of(program)
    missing = tmp_path / "symbols.debug"
    with kept.noting(), pytest.raises(Exception, match="does not exist"):
        ElfFile.open(missing)
    compile_into(kept, program)
    assert kept_of(program).known is not None
    missing.touch()
    assert kept_of(program).known is None


def test_another_code_of_ours_compiles_again(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_into(kept_of(program), program)
    states = code_state  # what the disk says
    monkeypatch.setattr(
        keptcompilation, "code_state", lambda path: (path, 0, 0) if "pipeline" in path else states(path)
    )
    assert kept_of(program).known is None


@pytest.mark.parametrize("text", ["#include <x>", Path("program.dpc")])
def test_what_depends_on_other_files_is_not_kept(program: Path, text: str | Path) -> None:
    kept = KeptCompilation(text, OPTIONS, "module", "ebpf", Vantage(), directory=str(program.parent / "cache"))
    compile_into(kept, program)
    assert not (program.parent / "cache").exists()


def test_with_the_switch_nothing_is_kept_or_known(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_into(kept_of(program), program)
    monkeypatch.setenv(SWITCH, "1")
    assert kept_of(program).known is None
    compile_into(kept_of(program, "another"), program)
    assert len(list((program.parent / "cache").iterdir())) == 1


def test_what_a_diagnostic_is_to_be_printed_of_is_not_kept(program: Path) -> None:
    kept, diagnostics = kept_of(program), Diagnostics()
    loaded = compile_into(kept_of(program, "another"), program)
    with kept.noting():
        compiled = resolve_here(loaded.program, diagnostics)
    diagnostics.warning(None, "something")
    kept.keep(loaded, Compiled(loaded.program, compiled.architecture, compiled.resolved, diagnostics))
    assert kept_of(program).known is None


def compile_with_answers(program: Path) -> None:
    """Compile a program, and keep it with an answer."""
    kept, diagnostics = kept_of(program), Diagnostics()
    with kept.noting():
        loaded = CompiledProgram(parse_source(source_of(program), diagnostics), OWN_SYMBOLS, diagnostics)
        compiled = resolve_here(loaded.program, diagnostics)
    answers = KnownAnswers()
    answers.add(("question", 1), b"answer")
    assert compiled.resolved is not None
    kept.keep(loaded, replace(compiled, resolved=replace(compiled.resolved, answers=answers)))


def test_answers_of_engines_are_kept_with_the_places(program: Path) -> None:
    compile_with_answers(program)
    known = kept_of(program).known
    assert known is not None
    assert known.resolved.answers is not None
    assert known.resolved.answers.find(("question", 1)) == b"answer"


def test_what_an_engine_works_out_later_is_kept_as_well(program: Path) -> None:
    compile_with_answers(program)
    for number in range(2, 5):
        kept = kept_of(program)
        assert kept.known is not None
        answers = kept.known.resolved.answers
        assert answers is not None
        assert [answers.find(("question", n)) for n in range(1, number)] == [b"answer"] * (number - 1)
        answers.add(("question", number), b"answer")
        loaded = kept.loaded
        assert loaded is not None
        kept.keep(loaded, resolve_here(loaded.program, Diagnostics(), known=kept.known.resolved))


def test_there_are_not_more_answers_than_are_soon_looked_through(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keptcompilation, "_ANSWERS_MAX", 1)
    compile_with_answers(program)
    kept = kept_of(program)
    assert kept.known is not None
    assert kept.loaded is not None
    assert kept.known.resolved.answers is not None
    kept.known.resolved.answers.add("another", b"answer")
    kept.keep(kept.loaded, resolve_here(kept.known.program, Diagnostics(), known=kept.known.resolved))
    again = kept_of(program).known
    assert again is not None
    assert again.resolved.answers is not None
    assert len(again.resolved.answers) == 1


def test_old_entries_make_room_for_new_ones(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keptcompilation, "_ENTRIES_MAX", 3)
    for number in range(5):
        compile_into(kept_of(program, f"text {number}"), program)
    assert len(list((program.parent / "cache").iterdir())) == 3
    assert kept_of(program, "text 0").known is None
    assert kept_of(program, "text 4").known is not None


def test_a_directory_that_cannot_be_made_is_no_error(program: Path) -> None:
    (program.parent / "cache").touch()
    compile_into(kept_of(program), program)
    assert kept_of(program).known is None
