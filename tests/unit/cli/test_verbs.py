"""The command line: usage, exit statuses, and what the verbs print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dprobes.cli.main import VERBS, run

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """\
name = "no-such-module"
major = 7
vars = 1

offset = main
minor = 1
    push r, arg0
loop1: inc lv, 0
    jnz loop1
    call twice
    log 1

proc twice
    dup 1
    ret
endproc
"""

LISTING = """\
name = "no-such-module"
major = 7
vars = 1
// module: not on this machine, x86_64, 8-byte words
// code: 31 bytes

offset = main
minor = 1
// not resolved
  0000     0  push r, arg0
loop1:
  0003     1  inc lv, 0
  0006     1  jnz loop1
  000f     1  call twice
  0018     2  log 1
  001b     1  exit  // added

proc twice
  001c     ?  dup 1
  001e     ?  ret
endproc
"""

NOTES = """\
{file}:1:1: note: there is no module 'no-such-module' on this machine; its probes are resolved when a process maps one
    name = "no-such-module"
    ^~~~~~~~~~~~~~~~~~~~~~~
{file}:11:5: note: the handler has no 'exit' at its end; it acts as if it had one
        log 1
        ^~~~~
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.rpn"
    path.write_text(PROGRAM)
    return path


def outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_show_lists_encoded_offsets_and_stack_depths(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = outcome(capsys, "show", program, "--arch", "x86_64")
    assert (status, out) == (0, LISTING)
    assert err == NOTES.format(file=program)


def test_show_encodes_for_another_processor(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = outcome(capsys, "show", program, "--arch", "s390")
    assert "// module: not on this machine, s390, 4-byte words\n// code: 23 bytes\n" in out


def test_check_prints_diagnostics_only(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "check", program) == (0, "", NOTES.format(file=program))


def test_check_ends_with_2_and_all_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.rpn"
    file.write_text('name = "x"\noffset = main\npusj r, 1\njmp nowhere\n')
    expected = f"""\
{file}:3:1: error: unknown instruction 'pusj'
    pusj r, 1
    ^~~~
hint: did you mean 'push'?
"""
    assert outcome(capsys, "check", file) == (2, "", expected)


def test_a_program_that_writes_needs_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "write.rpn"
    file.write_text('name = "no-such-module"\noffset = main\npush 1\npop r, eax\nexit\n')
    expected = f"""\
{file}:1:1: note: there is no module 'no-such-module' on this machine; its probes are resolved when a process maps one
    name = "no-such-module"
    ^~~~~~~~~~~~~~~~~~~~~~~
{file}:4:1: error: 'pop r, eax' writes to the target
    pop r, eax
    ^~~~~~~~~~
hint: give --allow-write if that is what you want
"""
    assert outcome(capsys, "check", file) == (2, "", expected)
    assert outcome(capsys, "check", file, "--allow-write")[0] == 0


def test_a_define_reaches_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "define.rpn"
    file.write_text('name = "no-such-module"\noffset = WHERE + N\nexit\n')
    _, out, _ = outcome(capsys, "show", file, "-D", "WHERE=start", "-D", "N = 2")
    assert "\noffset = start + 0x2\n" in out


def test_locate_says_what_a_program_says(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = outcome(capsys, "locate", "libc.so.6:malloc")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("module    /")
    assert "function  malloc" in lines
    nm = subprocess.run(["nm", "-D", lines[0].split()[1]], capture_output=True, text=True, check=True).stdout
    address = next(int(line.split()[0], 16) for line in nm.splitlines() if line.split()[-1].startswith("malloc@@"))
    assert f"address   {address:#x}" in lines
    marked = next(line for line in lines if line.startswith("=> "))
    assert f"opcode = 0x{marked.split()[2 + ('+' in marked)]}" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["xyz"], "Error: there is no verb 'xyz'\n"),
        (["chek", "x"], "Error: there is no verb 'chek'; did you mean 'check'?\n"),
        (["run", "x.rpn"], "Error: give either a command (-c COMMAND) or a process (-p PID)\n"),
        (["run", "x.rpn", "-c", "ls", "-p", "1"], "Error: give either a command (-c COMMAND) or a process (-p PID)\n"),
        (["run", "x.rpn", "-c", "ls", "more"], "Error: unexpected argument 'more': the command was given with -c\n"),
        (["run", "x.rpn", "-c", "'"], "Error: the command is not well formed: no closing quotation\n"),
        (["run", "x.rpn", "-c", " "], "Error: the command is empty\n"),
        (["run", "x.rpn", "-p", "1", "--exit-status"], "Error: --exit-status needs a command (-c COMMAND)\n"),
        (["run", "x.rpn", "-c", "ls", "--log", "pdi"], "Error: --log knows no item 'pdi'; did you mean 'pid'?\n"),
        (["locate", "ls:main*2"], "Error: 'main*2' is not a symbol, a number, or a symbol and a number: "),
    ],
)
def test_each_usage_error_has_its_message_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = outcome(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["locate", "libc:malloc"], "there is no module 'libc' on this machine\nhint: did you mean 'libc.so.6'?"),
        (["locate", "/etc/passwd"], "'/etc/passwd' is not an ELF file"),
        (["locate", "/etc"], "there is no module '/etc' on this machine"),
        (["locate", "/no/such/file"], "there is no module '/no/such/file' on this machine"),
        (["locate", "libc.so.6:maloc"], "has no symbol 'maloc'\nhint: did you mean 'malloc'"),
        (["locate", "libc.so.6:0x1"], "offset 0x1 is not in the code of"),
        (["locate", "libc.so.6:malloc+1"], "is inside an instruction of"),
    ],
)
def test_each_failure_has_its_message_and_status_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = outcome(capsys, *arguments)
    assert status == 1
    assert err.startswith("dprobes: error: ")
    assert message in err


def test_every_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        status, out, _ = outcome(capsys, verb, "--help")
        assert status == 0
        assert out.startswith(f"Usage: dprobes {verb} ")
    status, out, _ = outcome(capsys, "--help")
    assert all(verb in out for verb in VERBS)


def test_doctor_says_yes_or_no_to_everything_it_tried(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = outcome(capsys, "doctor")
    first_words = [line.split()[0] for line in out.splitlines()]
    assert set(first_words) <= {"yes", "no", "remedy:"}
    assert "take over a process of this user (ptrace)" in out
    assert status == 0


def test_help_does_not_import_what_only_verbs_need() -> None:
    code = (
        "import sys; from dprobes.cli.main import run; run(['--help']);"
        "print([m for m in ('iced_x86', 'elftools', 'ctypes', 'dprobes.vm', 'dprobes.rpn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_traceback(program: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", "show", program],
        stdout=write_end, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(write_end)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_file_of_garbage_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "garbage.rpn"
    file.write_bytes(bytes(range(256)) * 10)
    status, out, err = outcome(capsys, "check", file)
    assert (status, out) == (2, "")
    assert err.count("error:") == 1


def test_json_records_of_a_run_have_the_documented_keys(tmp_path: Path) -> None:
    file = tmp_path / "malloc.rpn"
    file.write_text('name = "libc.so.6"\noffset = malloc\nmaxhits = 1\npush r, arg0\nlog 1\nexit\n')
    output = tmp_path / "records"
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", "run", file, "--format", "json", "-o", output, "-c", "ls /"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    lines = output.read_text().splitlines()
    assert len(lines) == 1
    keys = "major minor cpu pid tid uid name ip sp time module symbol data"
    assert set(keys.split()) <= json.loads(lines[0]).keys()
    assert done.stdout == subprocess.run(["ls", "/"], capture_output=True, text=True, check=True).stdout
