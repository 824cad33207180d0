"""Programs as files and as texts, for all verbs that take one."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from dprobes.cli.command_group import command_group
from dprobes.cli.main import run
from dprobes.cli.shared_options import processes_named
from dprobes.ppdf.ppdf_file import decode

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "libc.so.6:malloc(size) { @[comm] = hist(size) }"
VERBS = ("run", "check", "show", "build", "insert")


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_text_is_checked_as_a_file_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "check", "-e", TEXT) == (0, "", "")
    wrong = TEXT.replace("comm]", "comm")
    place = ":1:46: error: expected ']' after the last one, found '}'\n"
    shown = "    libc.so.6:malloc(size) { @[comm = hist(size) }\n" + " " * 49 + "^\n"
    assert outcome(capsys, "check", "-e", wrong) == (2, "", f"-e{place}{shown}")
    (tmp_path / "wrong.dpc").write_text(wrong)
    file = str(tmp_path / "wrong.dpc")
    assert outcome(capsys, "check", file) == (2, "", f"{file}{place}{shown}")


def test_a_text_is_shown_and_built_as_a_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "same.dpc").write_text(TEXT)
    for verb in (["show"], ["build", "--emit", "rpn"], ["build", "--dump", "source"]):
        status, out, _ = outcome(capsys, *verb, "-e", TEXT)
        assert (status, outcome(capsys, *verb, "same.dpc")[1]) == (0, out)
        assert "malloc" in out
    assert outcome(capsys, "build", "-e", TEXT, "-o", "text.ppdf")[0] == 0
    assert outcome(capsys, "build", "same.dpc")[0] == 0
    assert decode((tmp_path / "text.ppdf").read_bytes()) == decode((tmp_path / "same.ppdf").read_bytes())
    assert decode((tmp_path / "text.ppdf").read_bytes()).program.name == "libc.so.6"


def test_what_is_built_of_a_text_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, said = outcome(capsys, "build", "-e", TEXT)
    assert status == 2
    assert said.endswith("Error: a program on the command line needs a name for what is built: -o OUT\n")


@pytest.mark.parametrize("verb", VERBS)
def test_a_program_is_needed(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, said = outcome(capsys, verb)
    assert status == 2
    assert said.endswith("Error: name the file of a program, or give its text with -e TEXT\n")


@pytest.mark.parametrize("verb", ["check", "show", "build"])
def test_one_program_is_enough(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, said = outcome(capsys, verb, "-e", TEXT, "more.dpc")
    assert status == 2
    assert said.endswith("Error: unexpected argument 'more.dpc': -e gives the program\n")


def test_a_script_of_bpftrace_is_no_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "malloc.bt"
    script.write_text("uprobe:libc:malloc { @ = count(); }\n")
    status, _, said = outcome(capsys, "check", str(script))
    assert status == 2
    made = f"'dprobes convert {script} -o malloc.dpc' makes a program of it"
    assert said.endswith(f"Error: Invalid value for '[FILE]': '{script}' is a bpftrace script; {made}\n")


# The numbers of processes behind a name that was given in the place of one.


NAME = "dprobes_named_so"
"""A name of which the kernel keeps 15 characters: the file has all of them."""


def test_the_processes_that_execute_a_file_of_the_name_are_listed(tmp_path: Path) -> None:
    assert processes_named(NAME) == "and none has that name"
    program = tmp_path / NAME
    shutil.copy("/usr/bin/sleep", program)
    with ExitStack() as stack:
        running = [stack.enter_context(subprocess.Popen([program, "60"])) for _ in range(7)]
        for each in running:
            stack.callback(each.kill)
        pids = sorted(each.pid for each in running)
        assert processes_named(NAME) == f"processes of that name are {', '.join(map(str, pids[:5]))} and 2 more"
        for each in running[1:]:
            each.kill()
            each.wait()
        assert processes_named(NAME) == f"the process of that name is {running[0].pid}"
        done = CliRunner().invoke(command_group, ["list", "-p", NAME])
        assert done.exit_code == 2
        assert (
            f"Error: Invalid value for '-p' / '--pid': '{NAME}' is not the number of a process; "
            f"the process of that name is {running[0].pid}\n"
        ) in done.output


def test_a_number_that_is_too_small_is_none_of_a_process() -> None:
    done = CliRunner().invoke(command_group, ["list", "-p", "-3"])
    assert done.exit_code == 2
    assert "-3 is not in the range x>=1" in done.output
