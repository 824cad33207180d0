"""The verb ``build``, and what other verbs say of compiled programs."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from dprobes.cli.main import run
from dprobes.ppdf.ppdf_file import decode, encode
from unit.ppdf.samples import SMALL, sample

SOURCE = "__attribute__((noipa)) int twice(int n) { return 2 * n; }\nint five(void) { return twice(2) + 1; }\n"
PROGRAM = 'name = "libtwo.so"\nmajor = 3\noffset = twice\nminor = 1\n    push 2\n    log 1\n    exit\n'


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    directory = tmp_path_factory.mktemp("two")
    source, library = directory / "two.c", directory / "libtwo.so"
    source.write_text(SOURCE)
    command = ["gcc", "-O1", "-shared", "-fPIC", "-Wl,--build-id=0xabcd", "-Wl,-soname,libtwo.so"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    return library


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.rpn").write_text(PROGRAM)
    return tmp_path


def outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_program_is_compiled_into_this_directory(
    library: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "sub").mkdir()
    (directory / "sub" / "two.rpn").write_text(PROGRAM)
    said = outcome(capsys, "build", "sub/two.rpn", "--for", library)
    assert said == (0, "", "dprobes: note: 'two.ppdf' is for 1 build of 'libtwo.so'\n")
    data = (directory / "two.ppdf").read_bytes()
    assert [build.identity for build in decode(data).builds] == ["abcd"]
    assert stat.S_IMODE((directory / "two.ppdf").stat().st_mode) & 0o111 == 0
    # The same program gives the same file.
    outcome(capsys, "build", "sub/two.rpn", "--for", library, "-o", "again.ppdf")
    assert (directory / "again.ppdf").read_bytes() == data
    assert sorted(path.name for path in directory.iterdir()) == ["again.ppdf", "sub", "two.ppdf", "two.rpn"]


def test_show_prints_what_is_in_the_file(library: Path, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome(capsys, "build", "two.rpn", "--for", library)
    (build,) = decode((directory / "two.ppdf").read_bytes()).builds
    (place,) = build.places
    twice = next(symbol for symbol in build.symbols if symbol.name == "twice")
    status, out, err = outcome(capsys, "show", "two.ppdf")
    assert (status, err) == (0, "")
    shown = [line for line in out.splitlines() if not line.startswith("//   ")]
    assert shown == [
        'name = "libtwo.so"',
        "major = 3",
        "// compiled by dprobes 0.1.0 for x86_64, i386",
        f"// build abcd of x86_64, from '{library}'",
        "// x86_64, 8-byte words, code: 13 bytes",
        "",
        "offset = twice",
        "minor = 1",
        f"// build abcd: twice is at file offset {place.offset:#x}: {place.raw.hex(' ')}",
        "  0000     0  push 2",
        "  0009     1  log 1",
        "  000c     0  exit",
    ]
    assert f"//   {twice.address:#x} {twice.size:#x} func global twice" in out.splitlines()
    assert "// i386, 4-byte words, code: 9 bytes" in outcome(capsys, "show", "two.ppdf", "--arch", "i386")[1]


def test_show_prints_all_ebpf_of_the_file(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ppdf = sample()
    Path("some.ppdf").write_bytes(encode(ppdf))
    status, out, _ = outcome(capsys, "show", "--bpf", "some.ppdf")
    assert status == 0
    lines = out.splitlines()
    assert "// This code is for reading: each machine compiles the code that it runs." in lines
    for loops in ("may_goto", "iterator", "bpf_loop"):
        titles = [line for line in lines if line.startswith(f"// with {loops}: ")]
        assert len(titles) == len(ppdf.program.definitions)
        assert titles[3] == f"// with {loops}: not compiled: the extension 'sample' has no form for eBPF"
    codes = [code for code in ppdf.ebpf if code.machine == "x86_64" and not code.problem]
    assert len(codes) == 6  # one handler names a register that eBPF has not
    assert sum(line.endswith(": exit") for line in lines) >= len(codes)
    assert any("map[probes][0]" in line for line in lines)


def test_show_says_what_needs_to_be_allowed(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.ppdf").write_bytes(encode(sample()))
    out = outcome(capsys, "show", "some.ppdf")[1]
    assert "// needs --allow-write: 'pop mem, u8' in sample.rpn:27:9\n" in out
    assert "// needs --allow-write: 'exit 1' in sample.rpn:28:5\n" in out
    assert "// template file '0.tpl': 9 bytes\n" in out


def test_a_module_that_is_not_there_is_an_error(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.rpn").write_text('name = "libnothing-of-this.so"\noffset = f\nexit\n')
    assert outcome(capsys, "build", "a.rpn") == (
        1,
        "",
        (
            "dprobes: error: there is no module 'libnothing-of-this.so' on this machine\n"
            "hint: name its file with --for FILE\n"
        ),
    )
    assert outcome(capsys, "build", "a.rpn", "--for", "nothing.so")[0] == 1
    assert not Path("a.ppdf").exists()


def test_a_file_that_the_name_does_not_mean_is_doubted(
    library: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.rpn").write_text(PROGRAM.replace("libtwo", "libthree"))
    _, _, said = outcome(capsys, "build", "a.rpn", "--for", library)
    other = "is not called 'libthree.so', and its SONAME is 'libtwo.so': is it the module?"
    assert said.startswith(f"a.rpn:1:1: warning: '{library}' {other}\n")


def test_what_is_wrong_with_the_program_is_said_once(
    library: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = directory / "libtwo.so"
    source = library.parent / "two.c"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(other), str(source)], check=True)
    Path("a.rpn").write_text(PROGRAM.replace("push 2", "pop mem, u8"))
    status, _, said = outcome(capsys, "build", "a.rpn", "--for", library, "--for", other)
    assert status == 2
    assert said.count("'pop mem, u8' writes to the target") == 1
    _, _, said = outcome(capsys, "build", "a.rpn", "--for", library, "--for", other, "--allow-write")
    assert said.count("warning: 'pop mem, u8' needs 2 cells") == 1
    assert said.endswith("dprobes: note: 'a.ppdf' is for 2 builds of 'libtwo.so'\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "some.ppdf"], "'some.ppdf' is compiled already"),
        (["build", "two.rpn", "-o", "./two.rpn"], "'two.rpn' is the program itself; name another file with -o"),
        (
            ["check", "some.ppdf", "-D", "A=1"],
            "'some.ppdf' is compiled: -D, -I, --cpp and --sym are for the text of a program",
        ),
        (
            ["show", "some.ppdf", "--sym", "x"],
            "'some.ppdf' is compiled: -D, -I, --cpp and --sym are for the text of a program",
        ),
        (["show", "some.ppdf", "--arch", "ppc"], "the program is compiled for x86_64 and i386, not for ppc"),
    ],
)
def test_each_usage_error_has_its_message(
    directory: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Path("some.ppdf").write_bytes(SMALL)
    status, out, err = outcome(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in " ".join(err.split())


def test_a_damaged_file_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.ppdf").write_bytes(SMALL[:100])
    problem = f"the file is truncated: expected {len(SMALL)} bytes, found 100 (at byte 100)"
    for verb in ("show", "check"):
        assert outcome(capsys, verb, "some.ppdf") == (1, "", f"dprobes: error: 'some.ppdf': {problem}\n")
    Path("text.ppdf").write_text(PROGRAM)
    assert outcome(capsys, "show", "text.ppdf")[2] == (
        "dprobes: error: 'text.ppdf': this is not a PPDF: "
        "expected it to begin with 89 50 50 44 46 0d 0a 1a (at byte 0)\n"
    )


def test_a_compiled_program_is_known_by_its_contents(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("compiled").write_bytes(SMALL)
    assert outcome(capsys, "show", "compiled")[1].startswith('name = "libwork.so"\n')
