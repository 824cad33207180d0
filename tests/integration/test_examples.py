"""The examples on real programs of the machine, and the commands of README and of the page on RPN."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from integration.documented_commands import Step, shapes, steps_of, under_test
from integration.manager.sandbox import Sandbox
from integration.support import TIMEOUT

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
DPROBES = [sys.executable, "-m", "dprobes"]
PTRACE = [*DPROBES, "run", "--engine", "ptrace"]
SYSTEM_PYTHON = Path("/usr/bin/python3")

NEEDS_SYSTEM_PYTHON = pytest.mark.skipif(
    not SYSTEM_PYTHON.exists(), reason="needs the system's python3: apt-get install python3"
)


def run_json(directory: Path, program: Path, *arguments: str) -> list[dict[str, Any]]:
    output = directory / "records"
    subprocess.run(
        [*PTRACE, program, "--format", "json", "-o", output, *arguments],
        check=True, capture_output=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    return [json.loads(line) for line in output.read_text().splitlines()]


def items(records: list[dict[str, Any]]) -> list[str]:
    return [value for record in records for value in strings_of(record)]


def strings_of(record: dict[str, Any]) -> list[str]:
    """Return what a record says: by names, or where its handler tells none as items."""
    if "fields" not in record:
        return [item["value"] for item in record["items"]]
    found: list[str] = []
    for value in record["fields"].values():
        found += [item["value"] for item in value] if isinstance(value, list) else [value]
    return found


def test_every_example_is_free_of_errors_and_warnings() -> None:
    for program in sorted(EXAMPLES.glob("*.rpn")):
        command = [*DPROBES, "check", "--allow-write"]
        done = subprocess.run([*command, program], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        # Of a place in the kernel it may be noted what nobody can check on this machine.
        said = "error|warning" if "modtype = kernel" in program.read_text() else "."
        assert not re.search(said, done.stderr), program.name


@pytest.mark.alone
def test_the_first_suggestion_of_the_help_says_nothing_but_what_it_is_to_show() -> None:
    shown = subprocess.run([*DPROBES, "--help"], capture_output=True, text=True, check=True).stdout
    (command,) = re.findall(r"A first probe:  dprobes (.*)\n", shown)
    done = subprocess.run(
        [*DPROBES, *shlex.split(command)], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert "warning" not in done.stderr
    assert len(re.findall(r"  malloc  arg0=\d+$", done.stdout, re.MULTILINE)) == 5


def test_templates_of_examples_have_their_names() -> None:
    directory = EXAMPLES / "templates"
    listed = dict(re.findall(r"^(\d+) +(\S+)\.fmt$", (directory / "templates.lst").read_text(), re.MULTILINE))
    assert set(listed.values()) == {path.stem for path in directory.glob("*.fmt")}
    for major, name in listed.items():
        assert re.search(rf"^major = {major}\b", (EXAMPLES / f"{name}.rpn").read_text(), re.MULTILINE), name


def test_malloc_takes_itself_away_after_five_hits(tmp_path: Path) -> None:
    records = run_json(tmp_path, EXAMPLES / "malloc.rpn", "-c", "ls /")
    assert [record["symbol"] for record in records] == ["malloc"] * 5
    sizes = [int.from_bytes(bytes.fromhex(record["data"]), "little") for record in records]
    assert all(0 < size < 1 << 20 for size in sizes)


def test_the_watched_exit_status_takes_the_values_of_the_commands(tmp_path: Path) -> None:
    command = "bash -c 'true; false; (exit 3)'"
    records = run_json(tmp_path, EXAMPLES / "exit-status.rpn", "-c", command)
    values = [int.from_bytes(bytes.fromhex(record["data"]), "little") for record in records]
    assert [value for value, _ in itertools.groupby(values)] == [0, 1, 3]


def test_whoever_sleeps_wakes_up_at_once(tmp_path: Path) -> None:
    (record,) = run_json(tmp_path, EXAMPLES / "sleepless.rpn", "--allow-write", "-c", "sleep 3600")
    assert int.from_bytes(bytes.fromhex(record["data"]), "little") == 3600


def test_malloc_returns_gives_five_addresses(tmp_path: Path) -> None:
    records = run_json(tmp_path, EXAMPLES / "malloc-returns.rpn", "-c", "ls /")
    assert [record["function"] for record in records] == ["malloc"] * 5
    addresses = [int.from_bytes(bytes.fromhex(record["data"]), "little") for record in records]
    assert all(address and address % 16 == 0 for address in addresses)


# The dynamic linker has a function of this name, too: it is the C library's that counts.
GDB_GETENV = """\
set pagination off
set breakpoint pending on
tbreak __libc_start_main
run / > /dev/null
break *((long (*)(void *, const char *)) dlsym)(0, "getenv")
commands
silent
printf "NAME %s\\n", (char *) $rdi
continue
end
continue
"""


@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb: apt-get install gdb")
def test_getenv_is_called_with_the_names_that_gdb_shows(tmp_path: Path) -> None:
    script = tmp_path / "script.gdb"
    script.write_text(GDB_GETENV)
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    done = subprocess.run(
        ["gdb", "-nx", "-q", "-batch", "-x", script, "/bin/ls"],
        capture_output=True, text=True, timeout=60, check=True, env=environment,
    )  # fmt: skip
    expected = re.findall(r"^NAME (.*)$", done.stdout, re.MULTILINE)
    assert expected
    output = tmp_path / "records"
    subprocess.run(
        [*PTRACE, EXAMPLES / "strings.rpn", "--format", "json", "-o", output, "-c", "/bin/ls /"],
        check=True, capture_output=True, timeout=60, env=environment,
    )  # fmt: skip
    found = items([json.loads(line) for line in output.read_text().splitlines()])
    # What the dynamic linker's constructors ask for, gdb is too late to see.
    assert expected == found[-len(expected) :]


def test_every_argument_of_the_commands_that_a_shell_starts_is_logged(tmp_path: Path) -> None:
    records = run_json(tmp_path, EXAMPLES / "exec-args.rpn", "-c", "bash -c 'ls / | head -3'")
    found = sorted(strings_of(record) for record in records)
    assert found == [["head", "-3"], ["ls", "/"]]


def test_a_missing_string_is_a_fault_record_and_the_handler_goes_on(tmp_path: Path) -> None:
    program = tmp_path / "null.rpn"
    program.write_text(
        f'#include "{EXAMPLES / "strings.rpn"}"\n'
        "offset = free   // free(NULL) is common\nminor = 2\nmaxhits = 200\n"
        "LOG_POINTER(arg0)\npush lv, 0\nlog 1\nexit\n"
    )
    records = [r for r in run_json(tmp_path, program, "-c", "ls /") if r["minor"] == 2]
    faults = [r for r in records if r["data"].startswith("ff0800" + "00" * 8)]
    assert faults, "ls frees no null pointer on this machine"
    assert all(len(bytes.fromhex(r["data"])) == 3 + 8 + 8 for r in faults)


def test_lines_typed_into_a_shell_are_logged(tmp_path: Path) -> None:
    output = tmp_path / "records"
    command = [
        *PTRACE, str(EXAMPLES / "bash-lines.rpn"), "--format", "json", "-o", str(output),
        "-c", "bash --norc --noprofile -i",
    ]  # fmt: skip
    environment = {**os.environ, "HISTFILE": "/dev/null", "PS1": "ready> ", "TERM": "dumb"}
    child, terminal = pty.fork()
    if child == 0:
        os.execve(command[0], command, environment)
    try:
        for line in ("echo one", "ls / | head -1", "exit"):
            _read_until(terminal, b"ready> ")
            os.write(terminal, line.encode() + b"\n")
        _read_until(terminal, b"ptrace engine")
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(terminal)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert items(records) == ["echo one", "ls / | head -1", "exit"]
    assert {record["name"] for record in records} == {"bash"}
    assert status == 0


def _read_until(terminal: int, text: bytes) -> None:
    """Read what the terminal shows until ``text``; fail after some seconds without it."""
    shown = b""
    deadline = time.monotonic() + 30
    while text not in shown:
        remaining = deadline - time.monotonic()
        ready, _, _ = select.select([terminal], [], [], max(0, remaining))
        assert ready, f"the terminal shows {shown!r}, not {text!r}"
        shown += os.read(terminal, 4096)


@NEEDS_SYSTEM_PYTHON
def test_a_running_python_shows_the_integers_that_it_makes(tmp_path: Path) -> None:
    code = "import os, sys; print('up', flush=True); sys.stdin.readline(); [os.getppid() for _ in range(3)]"
    target = subprocess.Popen([SYSTEM_PYTHON, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert target.stdin is not None
    assert target.stdout is not None
    assert target.stdout.readline() == "up\n"
    output = tmp_path / "records"
    client = subprocess.Popen(
        [*PTRACE, EXAMPLES / "python-calls.rpn", "--format", "json", "-o", output, "-p", str(target.pid)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        _wait_for_breakpoint(target.pid)
        target.stdin.write("go\n")
        target.stdin.close()
        assert target.wait(TIMEOUT) == 0
        _, messages = client.communicate(timeout=TIMEOUT)
    finally:
        target.kill()
        target.stdout.close()
        client.kill()
    assert client.returncode == 0, messages
    made = [
        int.from_bytes(bytes.fromhex(record["data"]), "little")
        for record in map(json.loads, output.read_text().splitlines())
        if record["minor"] == 1
    ]
    assert made.count(os.getpid()) == 3


def _wait_for_breakpoint(pid: int) -> None:
    """Wait until a process is traced and has been let run again."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/status").read_text()
        if re.search(r"^TracerPid:\t[1-9]", status, re.MULTILINE) and re.search(r"^State:\tS", status, re.MULTILINE):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is not traced")


RPN_PAGE = ROOT / "docs" / "how-to" / "rpn-example.md"
SHOWN = [
    step
    for page in (ROOT / "README.md", RPN_PAGE)
    for step in steps_of(page)
    if step.output and "redis-server" not in step.command  # test_redis_tutorial.py runs these
]


@pytest.mark.alone
@pytest.mark.parametrize("step", SHOWN)
def test_readme_and_the_page_on_rpn_show_what_really_happens(step: Step, tmp_path: Path) -> None:
    (program,) = re.findall(r"(?:-c \"| -- )(\w+)", step.command)
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    with contextlib.closing(Sandbox(tmp_path)) as sandbox:
        done = subprocess.run(
            ["sh", "-c", under_test(step)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
            cwd=ROOT, check=True, env=sandbox.environment,
        )  # fmt: skip
    assert shapes(step.output) == shapes(done.stdout)
    assert len(re.findall(r"^\d\d:", step.output, re.MULTILINE)) == len(
        re.findall(r"^\d\d:", done.stdout, re.MULTILINE)
    )


def test_readme_answers_three_questions_in_seven_kilobytes() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.encode()) <= 7000
    assert readme.count("?** ") == 3
    assert len([step for step in SHOWN if step in steps_of(ROOT / "README.md")]) == 3
    assert not re.search(r"^ *push ", readme, re.MULTILINE)


def test_links_of_readme_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).is_file(), target


def test_the_page_on_rpn_quotes_its_example_program() -> None:
    quoted = re.search(r"```\n// examples/malloc\.rpn.*?\n(.*?)```", RPN_PAGE.read_text(), re.DOTALL)
    assert quoted is not None
    assert _statements(quoted.group(1)) == _statements((EXAMPLES / "malloc.rpn").read_text())


def test_the_program_of_the_page_on_rpn_is_free_of_errors_and_warnings(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```\n(name = \"python3\".*?)^```$", RPN_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    program = tmp_path / "long.rpn"
    program.write_text(text)
    done = subprocess.run([*DPROBES, "check", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_examples_of_the_page_on_rpn_exist() -> None:
    named = set(re.findall(r"examples/([\w.-]+)", RPN_PAGE.read_text()))
    assert len(named) > 5
    assert [name for name in named if not (EXAMPLES / name).exists()] == []


def _statements(text: str) -> list[str]:
    return [line.split("//")[0].strip() for line in text.splitlines() if line.split("//")[0].strip()]


def test_the_changelog_describes_a_version_in_thirty_lines_and_names_verbs_that_exist() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text.splitlines()) <= 30
    verbs = set(re.findall(r"`dprobes ([a-z]+)`", text))
    assert verbs >= {"convert", "doctor"}
    for verb in verbs:
        done = subprocess.run([*DPROBES, verb, "--help"], capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, verb
