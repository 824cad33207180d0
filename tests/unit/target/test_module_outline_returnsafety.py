"""Which files hold code that looks at return addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.module_outline import return_address_user, stack_user

if TYPE_CHECKING:
    from pathlib import Path

    from unit.target.conftest import Toolbox

GO = "it is a Go program, and Go's runtime reads the return addresses on its stacks"
EXCEPTIONS = "uses C++ exceptions, and what meets a uretprobe on its way up the stack ends the program"
PANICS = "uses Rust panics, and what meets a uretprobe on its way up the stack ends the program"
STACKS = "switches stacks, and a return by way of a uretprobe on another stack ends the program"


def test_a_program_in_c_bears_uretprobes(pie: Path, static: Path) -> None:
    assert return_address_user(ElfFile.open(pie)) is None
    assert return_address_user(ElfFile.open(static)) is None


@pytest.mark.parametrize("section", [".go.buildinfo", ".gopclntab", ".note.go.buildid"])
def test_go_programs_are_known_by_their_sections(tools: Toolbox, pie: Path, section: str) -> None:
    (tools.directory / "empty").write_bytes(bytes(16))
    path = tools.directory / f"go{section}"
    tools.run("objcopy", f"--add-section={section}=empty", pie, path)
    assert return_address_user(ElfFile.open(path)) == GO


def test_go_programs_are_known_without_section_headers(tools: Toolbox) -> None:
    source = 'const char info[] = "\\xff Go buildinf:\\010\\002"; int main(void) { return info[0] == 0; }'
    path = tools.build("go_stripped", {"go_stripped.c": source})
    tools.run("objcopy", "--strip-section-headers" if has_option(tools) else "--strip-all", path)
    assert return_address_user(ElfFile.open(path)) == GO


def has_option(tools: Toolbox) -> bool:
    return "--strip-section-headers" in tools.run("objcopy", "--help")


def test_exceptions_are_found_in_the_program_that_throws(tools: Toolbox) -> None:
    source = "int main() { try { throw 1; } catch (int) { return 0; } }"
    path = tools.directory / "throws"
    (tools.directory / "throws.cc").write_text(source)
    tools.run("g++", "throws.cc", "-o", path)
    tools.run("strip", path)
    assert return_address_user(ElfFile.open(path)) == f"it {EXCEPTIONS}"


def test_panics_are_found_in_a_stripped_program(tools: Toolbox) -> None:
    (tools.directory / "panics.rs").write_text('fn main() { println!("{}", std::env::args().count()); }')
    tools.run("rustc", "-C", "strip=symbols", "panics.rs", "-o", "panics")
    assert return_address_user(ElfFile.open(tools.directory / "panics")) == f"it {PANICS}"


def test_a_program_that_switches_stacks_is_found_and_the_c_library_is_none() -> None:
    assert stack_user(b"..\0swapcontext\0..") == STACKS
    assert stack_user(b"..\0getcontext\0..") is None
    assert return_address_user(ElfFile.open("/lib/x86_64-linux-gnu/libc.so.6")) is None


def test_panics_are_found_where_the_distribution_has_built_the_compiler() -> None:
    assert stack_user(b"..note: run with `RUST_BACKTRACE=1` environment variable..") == PANICS
