"""What is carried of a module serves its stripped copy as the symbols served the original."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.errors import SourceError, TargetError
from dprobes.ppdf.ppdf_file import decode, encode
from dprobes.resolve.local_module import resolve
from dprobes.resolve.portable_program import build_ppdf
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile
from dprobes.target.carried_symbols import CarriedBuild, CarriedSymbols, OtherBuild
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.probed_module import Module
from dprobes.target.process_maps import executable_mappings, read_maps

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.ppdf.ppdf_model import Ppdf
    from dprobes.resolve.probepoints import ResolvedModule

SOURCE = """
int work_table[4] = {1, 2, 3, 4};
static int calls;
extern void abort(void);
extern void note(int) __attribute__((cold));
__attribute__((noipa)) void note(int n) { calls += n; }
__attribute__((noipa)) static int work_inner(int x) { return x * 3 + calls; }
__attribute__((noipa)) int work_tail(int x) { return work_inner(x * 2); }
__attribute__((noipa)) int work_partly(int n) {
    volatile int kept = n;
    if (__builtin_expect(n == 77, 0)) { note(n); note(kept); return kept + work_inner(n); }
    return work_inner(n) + kept;
}
__attribute__((noipa)) int work_again(int x) { for (int i = 0; i < x; i++) calls += work_table[i & 3]; return calls; }
int work_alias(int x) __attribute__((alias("work_again")));
__attribute__((used, noipa)) int idle(int x) { return x - 1; }
__asm__(".globl work_labels\\n.type work_labels, @function\\n"
        "work_labels: nop\\nwork_label_2: nop\\nwork_label_3: nop\\nret\\n"
        ".globl work_stop\\n.type work_stop, @function\\nwork_stop: int3\\nret\\n.size work_stop, 2\\n");
"""

PROGRAM = """
name = "libwork.so"
offset = work_inner
minor = 1
    push work_table + 4
    push calls
    log 2
    exit
offset = work_again + 0
return = yes
minor = 2
    exit
offset = "work_*"
minor = 3
    exit
offset = "work_[pt]*"
return = yes
minor = 4
    exit
address = work_table : work_table + 3
watchpoint = w
minor = 5
    exit
"""


@pytest.fixture(scope="module", params=["-m64", "-m32", "no-build-id"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = "i686-linux-gnu-gcc" if request.param == "-m32" else "gcc"
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    directory = tmp_path_factory.mktemp("work")
    source, library = directory / "work.c", directory / "libwork.so"
    source.write_text(SOURCE)
    flags = ["-Wl,--build-id=none"] if request.param == "no-build-id" else ["-Wl,--build-id"]
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", *flags, "-o", str(library), str(source)], check=True)
    return library


@pytest.fixture(scope="module")
def stripped(library: Path) -> Path:
    copy = library.parent / "stripped" / library.name
    copy.parent.mkdir()
    subprocess.run(["strip", "-o", str(copy), str(library)], check=True)
    return copy


def built(library: Path, text: str = PROGRAM) -> Ppdf:
    program = parse_source(SourceFile("work.rpn", text), Diagnostics())
    ppdf = build_ppdf(program, [library], Diagnostics())
    assert decode(encode(ppdf)) == ppdf
    return decode(encode(ppdf))


def carried(ppdf: Ppdf, file: Path, other: OtherBuild = OtherBuild.REFUSE, *, verify: bool = True) -> ResolvedModule:
    symbols = CarriedSymbols(ppdf.builds, "work.ppdf", other, verify)
    return resolve(ppdf.program, symbols.module_of(ElfFile.open(file)), Diagnostics())


def test_the_stripped_copy_gets_the_same_probepoints(library: Path, stripped: Path) -> None:
    ppdf = built(library)
    with pytest.raises(TargetError):
        Module.load(stripped).address_of("work_inner")
    there, here = carried(ppdf, stripped), resolve(ppdf.program, Module.load(library), Diagnostics())
    assert [p._replace(path="") for p in there.in_code] == [p._replace(path="") for p in here.in_code]
    assert {p.state for p in there.in_code} == {ProbeState.COMPILED}
    assert [(x.number, x.name, x.reason) for x in there.left_out] == [
        (x.number, x.name, x.reason) for x in here.left_out
    ]
    assert there.symbols == here.symbols
    assert [(w.memory, w.state) for w in there.events] == [(w.memory, w.state) for w in here.events]
    assert there.events
    assert there.image == here.image
    assert {p.definition.minor for p in there.in_code} == {1, 2, 3, 4}


def test_only_what_is_needed_is_carried(library: Path) -> None:
    ppdf = built(library, 'name = "libwork.so"\noffset = work_tail\nexit\n')
    (build,) = ppdf.builds
    # What begins right behind tells engines that code may be entered there.
    assert {symbol.name for symbol in build.symbols if symbol.size} == {"work_tail", "work_partly"}
    assert [(place.definition, place.where) for place in build.places] == [(0, "work_tail")]
    assert ppdf.machines == ("x86_64", "i386")
    assert not ppdf.needs_write


def test_a_carried_build_is_told_from_others(library: Path, stripped: Path) -> None:
    ppdf = built(library)
    other = dataclasses.replace(ppdf.builds[0], identity="ffff", path="other.so")
    several = dataclasses.replace(ppdf, builds=(other, *ppdf.builds))
    assert carried(several, stripped).in_code
    only = dataclasses.replace(ppdf, builds=(other,))
    with pytest.raises(TargetError) as caught:
        carried(only, stripped)
    identity = ppdf.builds[0].identity
    assert caught.value.message == (
        f"'{stripped}' is build {identity}, but 'work.ppdf' was built for ffff ('other.so')"
    )
    assert caught.value.hint == (
        "build it for this file too (dprobes build --for FILE), or give --dont-verify-build-id if the code is the same"
    )
    # With the file's own symbols, which it has only as long as it is not stripped.
    assert len(carried(only, library, OtherBuild.OWN_SYMBOLS).in_code) == len(carried(ppdf, stripped).in_code)


def test_the_build_with_most_of_the_instructions_is_the_nearest(library: Path, stripped: Path) -> None:
    ppdf = built(library)
    right = dataclasses.replace(ppdf.builds[0], identity="ffff")
    places = tuple(dataclasses.replace(place, raw=b"\x0f\x0b") for place in right.places)
    wrong = dataclasses.replace(right, identity="eeee", places=places)
    for builds in ((right, wrong), (wrong, right)):
        found = carried(dataclasses.replace(ppdf, builds=builds), stripped, OtherBuild.NEAREST)
        assert {probe.state for probe in found.in_code} == {ProbeState.COMPILED}


def test_a_file_for_another_processor_is_refused(library: Path, stripped: Path) -> None:
    ppdf = built(library)
    machine = ppdf.builds[0].machine
    foreign = dataclasses.replace(ppdf.builds[0], identity="ffff", machine="s390x")
    for other in (OtherBuild.REFUSE, OtherBuild.NEAREST):
        with pytest.raises(TargetError) as caught:
            carried(dataclasses.replace(ppdf, builds=(foreign,)), stripped, other)
        assert caught.value.message == f"'{stripped}' is for {machine}, but 'work.ppdf' was built for modules of s390x"
        assert caught.value.hint == "build it for this file too (dprobes build --for FILE)"
    with pytest.raises(TargetError, match=r"but 'work\.ppdf' was built for no module$"):
        carried(dataclasses.replace(ppdf, builds=()), stripped)


def damaged(ppdf: Ppdf, where: str, *, is_exit: bool) -> Ppdf:
    """Return a compiled program that expects something else at one place."""
    (build,) = ppdf.builds
    places = tuple(
        dataclasses.replace(place, raw=b"\x0f\x0b") if (place.where, place.is_exit) == (where, is_exit) else place
        for place in build.places
    )
    return dataclasses.replace(ppdf, builds=(dataclasses.replace(build, places=places),))


@pytest.mark.parametrize("is_exit", [False, True])
def test_other_instructions_are_a_mismatch(library: Path, stripped: Path, is_exit: bool) -> None:
    ppdf = built(library)
    here = carried(ppdf, stripped)
    place = next(p for p in ppdf.builds[0].places if (p.where, p.is_exit) == ("work_again", is_exit))
    found = carried(damaged(ppdf, "work_again", is_exit=is_exit), stripped)
    differing = [p for p in found.in_code if p.state is ProbeState.MISMATCH]
    assert {p.where for p in differing} == {"work_again"}
    text = f"expected 0f 0b, found {ElfFile.open(stripped).data[place.offset : place.offset + 2].hex(' ')}"
    prefix = f"at offset {place.offset:#x}, where it is left: " if is_exit else ""
    assert {p.detail for p in differing} == {prefix + text}
    assert [p.offset for p in found.in_code] == [p.offset for p in here.in_code]
    assert f"MISMATCH: work_again: {prefix}{text}; not inserted" in [w.message for w in found.warnings]
    unverified = carried(damaged(ppdf, "work_again", is_exit=is_exit), stripped, verify=False)
    assert {p.state for p in unverified.in_code} == {ProbeState.COMPILED}


def test_functions_of_a_pattern_that_are_others_are_a_mismatch(library: Path, stripped: Path) -> None:
    ppdf = built(library, 'name = "libwork.so"\noffset = "work_[ptl]*"\nexit\n')
    found = carried(damaged(ppdf, "work_tail", is_exit=False), stripped)
    assert {p.where: p.state for p in found.in_code} == {
        "work_tail": ProbeState.MISMATCH,
        "work_partly": ProbeState.COMPILED,
        "work_labels": ProbeState.COMPILED,
    }
    assert len(found.warnings) == 1


def test_errors_on_the_other_machine_show_the_line(library: Path, stripped: Path) -> None:
    text = '#define PUT(n) push n; pop mem, u8\nname = "libwork.so"\noffset = work_tail\npush 1\nPUT(2)\nexit\n'
    program = parse_source(SourceFile("work.rpn", text), Diagnostics())
    ppdf = decode(encode(build_ppdf(program, [library], Diagnostics(), allow_write=True)))
    assert ppdf.needs_write
    with pytest.raises(SourceError) as there:
        carried(ppdf, stripped)
    with pytest.raises(SourceError) as here:
        resolve(program, Module.load(library), Diagnostics())
    assert there.value.message == here.value.message
    assert "work.rpn:5:1: error: 'pop mem, u8' writes to the target\n    PUT(2)\n    ^~~~~~\n" in there.value.message
    assert "in the expansion of macro 'PUT'" in there.value.message


def test_what_is_wrong_for_a_module_is_an_error_of_the_build(library: Path) -> None:
    with pytest.raises(SourceError, match="has no symbol 'nothing'"):
        built(library, 'name = "libwork.so"\noffset = nothing\nexit\n')


def test_a_program_about_no_module_needs_none() -> None:
    program = parse_source(SourceFile("a.rpn", 'name = "*"\nsampler = 99hz\nexit\n'), Diagnostics())
    ppdf = build_ppdf(program, [], Diagnostics())
    assert decode(encode(ppdf)) == ppdf
    assert ppdf.builds == ()


@pytest.mark.parametrize("lines", ['offset = "pthread_*"', 'offset = "*mem*"\nreturn = yes', 'offset = "__*"'])
def test_the_many_names_of_the_c_library_are_carried(lines: str) -> None:
    # Its functions have several names, in several versions, and some begin inside others.
    path = next(m.path for m in executable_mappings(read_maps(os.getpid())) if "/libc.so" in m.path)
    module = Module.load(path)
    program = parse_source(SourceFile("c.rpn", f'name = "libc.so.6"\n{lines}\nminor = 1\nexit\n'), Diagnostics())
    here = resolve(program, module, Diagnostics())
    ppdf = build_ppdf(program, [module.path], Diagnostics(), with_ebpf=False)
    there = carried(decode(encode(ppdf)), module.path)
    assert there.in_code == here.in_code
    assert sorted((x.name, x.reason) for x in there.left_out) == sorted((x.name, x.reason) for x in here.left_out)
    assert len(here.in_code) > 10


def test_symbols_of_another_file_are_carried(library: Path, stripped: Path) -> None:
    program = parse_source(SourceFile("work.rpn", PROGRAM), Diagnostics())
    ppdf = build_ppdf(program, [stripped], Diagnostics(), extra_symbols=library)
    assert ppdf.builds[0].places == built(library).builds[0].places
    assert {p.state for p in carried(ppdf, stripped).in_code} == {ProbeState.COMPILED}


def test_a_file_and_its_stripped_copy_are_one_build(library: Path, stripped: Path) -> None:
    program = parse_source(SourceFile("work.rpn", PROGRAM), Diagnostics())
    ppdf = build_ppdf(program, [library, stripped], Diagnostics(), extra_symbols=library)
    assert [build.path for build in ppdf.builds] == [str(library)]


def test_a_module_is_looked_for_on_the_processor_that_a_program_is_for() -> None:
    wide, narrow = CarriedBuild("a", "a.so", "x86_64"), CarriedBuild("b", "b.so", "i386")
    for builds, machine in (((), None), ((wide,), None), ((narrow,), "i386"), ((narrow, wide), None)):
        assert CarriedSymbols(builds, "work.ppdf").machine("x86_64") == machine
