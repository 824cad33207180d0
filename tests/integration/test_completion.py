"""Shells complete command lines: bash, fish and zsh themselves, with the scripts that ``dprobes completion`` prints."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.manager.sandbox import Sandbox, service
from integration.support import DPROBES, TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.support import Builder

ROOT = Path(__file__).parents[2]

PROGRAM = """name = "{name}"
major = 7
groupdef = filesys memory process
typedef = enter leave

offset = write_file
minor = 3
group = filesys
type = enter
exit
"""

BASH = """
eval "$(dprobes completion bash)"
COMP_LINE=$1 COMP_POINT=${#1}
# As readline splits a line: what is in COMP_WORDBREAKS are words of their own.
mapfile -t COMP_WORDS < <(sed -E 's/([:=])/ \\1 /g; s/ +/\\n/g' <<< "$1")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
compopt() { echo "compopt $*" >&2; }
_dprobes_completion dprobes "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


KILL_LINE = b"\x15"


class Shells:
    """Ask shells in a directory with programs to complete lines."""

    def __init__(self, directory: Path, sandbox: Sandbox) -> None:
        commands = directory / "commands"
        commands.mkdir()
        command = commands / "dprobes"
        command.write_text(f'#!/bin/sh\nexec {shlex.join(DPROBES)} "$@"\n')
        command.chmod(0o755)
        self.directory = directory / "here"
        self.directory.mkdir()
        self.environment = {**sandbox.environment, "PATH": f"{commands}:{os.environ['PATH']}", "HOME": str(directory)}

    def _run(self, *command: str) -> list[str]:
        assert shutil.which(command[0]), f"{command[0]} is not installed"
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=True,
        )
        return done.stdout.splitlines()

    def bash(self, line: str) -> list[str]:
        return [word for word in self._run("bash", "--norc", "-c", BASH, "bash", line) if word]

    def fish(self, line: str) -> list[str]:
        script = f"dprobes completion fish | source; complete -C {shlex.quote(line)}"
        return [word.partition("\t")[0] for word in self._run("fish", "--no-config", "-c", script)]

    @contextlib.contextmanager
    def zsh(self) -> Iterator[Callable[[str, str], str]]:
        """
        Start a zsh at a terminal.

        Give a function that types a line and Tab, reads until the expected text is there, and returns what is there.
        """
        pid, end = pty.fork()
        if pid == 0:
            os.chdir(self.directory)
            os.execvpe("zsh", ["zsh", "-f", "-i"], {**self.environment, "TERM": "dumb", "COLUMNS": "200"})

        def complete(line: str, expected: str) -> str:
            os.write(end, f"{line}\t".encode())
            shown = _read(end, expected)
            os.write(end, KILL_LINE)
            return shown

        try:
            setup = (
                'unsetopt zle_bracketed_paste; autoload -U compinit; compinit -u -D; eval "$(dprobes completion zsh)"'
            )
            os.write(end, f"{setup}; echo set''up\n".encode())
            _read(end, "\nsetup")
            yield complete
        finally:
            os.close(end)  # the shell gets a SIGHUP
            os.waitpid(pid, 0)


def _read(end: int, expected: str) -> str:
    text = ""
    until = time.monotonic() + TIMEOUT
    while expected not in text and time.monotonic() < until:
        if select.select([end], [], [], 0.2)[0]:
            text += os.read(end, 4096).decode(errors="replace")
    assert expected in text, text
    return text


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Shells]:
    sandbox = Sandbox(tmp_path)
    made = Shells(tmp_path, sandbox)
    (made.directory / "one.rpn").write_text(PROGRAM.format(name="libc.so.6"))
    (made.directory / "only.txt").write_text("")
    (made.directory / "onward").mkdir()
    (made.directory / "other.ppdf").write_bytes(b"")
    yield made
    sandbox.close()


def required(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (package {shell})")


LINES = [
    ("dprobes ins", ["insert"]),
    ("dprobes log-target a", ["add"]),
    ("dprobes insert --log-t", ["--log-target"]),
    ("dprobes insert on", ["one.rpn", "onward/"]),
    ("dprobes apply o", ["onward/", "other.ppdf"]),
    ("dprobes build o", ["one.rpn", "onward/", "oom-kills", "openssl"]),
    ("dprobes run sq", ["sqlite"]),
    ("dprobes run sqlite/", ["sqlite/queries"]),
    ("dprobes run libc.malloc/l", ["libc.malloc/leaks"]),
    ("dprobes sets libc.", ["libc.dns", "libc.malloc"]),
    ("dprobes sets sqlite/", ["sqlite/queries", "sqlite/refused"]),
    ("dprobes sql on", ["onward/"]),
    ("dprobes sql onward/ sqli", ["sqlite/refused"]),
    ("dprobes sql onward/ sqlite/", ["sqlite/refused"]),
    ("dprobes examples mall", ["malloc", "malloc-returns"]),
    ("dprobes insert one.rpn --group ", ["filesys", "memory", "process"]),
    ("dprobes insert one.rpn --group process,m", ["process,memory"]),
    ("dprobes run one.rpn --type l", ["leave"]),
    ("dprobes insert one.rpn --log pid,ui", ["pid,uid"]),
    ("dprobes run one.rpn --engine p", ["ptrace"]),
    ("dprobes completion z", ["zsh"]),
    # Nothing is to be said about what is wrong with a line that is not finished.
    ("dprobes insert missing.rpn --group ", []),
    ("dprobes remove --name ", []),
]


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])
def test_bash_and_fish_complete(shells: Shells, line: str, expected: list[str]) -> None:
    required("bash")
    assert shells.bash(line) == expected
    required("fish")
    assert sorted(shells.fish(line)) == sorted(expected)


def test_groups_of_a_set(shells: Shells) -> None:
    required("bash")
    # To bash what is in front of the colon is another word.
    assert shells.bash("dprobes run sqlite:l") == ["latency", "lifecycle"]
    assert shells.bash("dprobes check sqlite:latency,li") == ["latency,lifecycle"]
    required("fish")
    assert shells.fish("dprobes run sqlite:req") == ["sqlite:requests"]


def test_symbols_of_a_module(shells: Shells) -> None:
    required("bash")
    # To bash what is in front of the colon is another word.
    assert shells.bash("dprobes locate libc.so.6:malloc_u") == ["malloc_usable_size"]
    assert shells.bash("dprobes list libc.so.6:malloc_u") == ["malloc_usable_size"]
    assert "libc.so.6" in shells.bash("dprobes locate libc.so")
    required("fish")
    assert shells.fish("dprobes locate libc.so.6:malloc_u") == ["libc.so.6:malloc_usable_size"]
    assert shells.fish("dprobes list libc.so.6:malloc_u") == ["libc.so.6:malloc_usable_size"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_a_wheel_installs_is_what_is_printed(shell: str) -> None:
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shared = installed["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    source = {
        "share/bash-completion/completions/dprobes": "bash",
        "share/zsh/site-functions/_dprobes": "zsh",
        "share/fish/vendor_completions.d/dprobes.fish": "fish",
    }
    (path,) = [path for path, target in shared.items() if source.get(target) == shell]
    printed = subprocess.run([*DPROBES, "completion", shell], capture_output=True, text=True, check=True).stdout
    assert (ROOT / path).read_text() == printed


def test_zsh_completes(shells: Shells) -> None:
    required("zsh")
    with shells.zsh() as zsh:
        zsh("dprobes inse", "dprobes insert ")
        zsh("dprobes locate libc.so.6:malloc_u", "libc.so.6:malloc_usable_size ")
        zsh("dprobes insert one.rpn --group process,m", "--group process,memory ")
        zsh("dprobes insert onw", "insert onward/")
        listed = zsh("dprobes insert one.rpn --type ", "leave")
    assert "enter" in listed


def test_names_and_processes_of_what_is_inserted(shells: Shells, build: Builder, tmp_path: Path) -> None:
    required("bash")
    with service(build) as target:
        source = tmp_path / "service.rpn"
        source.write_text(PROGRAM.format(name=target.library))
        subprocess.run(
            [*DPROBES, "insert", str(source), "--engine", "ptrace", "-p", str(target.pid), "--as", "svc"],
            env=shells.environment,
            check=True,
            timeout=TIMEOUT,
            stdout=subprocess.DEVNULL,
        )
        assert shells.bash("dprobes query --name ") == ["svc"]
        assert shells.bash("dprobes remove 7") == ["7,3"]
        assert str(target.pid) in shells.bash(f"dprobes insert service.rpn -p {str(target.pid)[:-1]}")
        assert shells.bash(f"dprobes locate -p {target.pid} libserv") == [target.library.name]
        assert shells.bash(f"dprobes locate -p {target.pid} {target.library.name}:write_") == ["write_file"]


def test_completion_costs_nothing_where_nobody_asks_for_it() -> None:
    code = (
        "import sys; from dprobes.cli.main import run; run(['insert', '--help']); "
        "sys.exit(any(name in sys.modules for name in ('dprobes.cli.completions', 'click.shell_completion')))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=TIMEOUT, check=False)
    assert done.returncode == 0
