"""A probe manager of a test's own: the real command, in directories that nobody else uses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.support import DPROBES, TIMEOUT, await_line, await_true, running

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from integration.support import Builder

__all__ = ["Sandbox", "Service", "build_service", "rows", "service"]


_SHELL = re.compile(r"[|&;<>()$`\\*?\[#~{}!\n]")
"""Characters for which a line needs a shell."""


class Sandbox:
    """
    Run command lines with their own manager, by default as this user and with the ``command`` that is tested.

    A word ``dprobes`` at the beginning of a line, and behind ``|`` and ``;``, is the command under test.
    """

    def __init__(
        self,
        directory: Path,
        command: Sequence[str] = DPROBES,
        user: Mapping[str, Any] | None = None,
        **environment: str,
    ) -> None:
        self._command = command
        self._user = user or {}
        self.runtime = directory / "runtime"
        self.state = directory / "state"
        self.directory = directory
        self.environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "DPROBES_RUNTIME_DIR": str(self.runtime),
            "DPROBES_STATE_DIR": str(self.state),
            "COLUMNS": "200",
            **environment,
        }

    def start(self, line: str, **popen: Any) -> subprocess.Popen[str]:
        keywords: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "cwd": self.directory,
            **self._user,
            **popen,
        }
        if line.startswith("dprobes ") and not _SHELL.search(line):
            command = [*self._command, *shlex.split(line)[1:]]
        else:
            command = ["sh", "-c", f'dprobes() {{ {shlex.join(self._command)} "$@"; }}\n{line}']
        return subprocess.Popen(command, env=self.environment, text=True, **keywords)

    def shell(self, line: str, **popen: Any) -> subprocess.CompletedProcess[str]:
        """Run a line in a shell."""
        process = self.start(line, **popen)
        stdout, stderr = process.communicate(timeout=TIMEOUT)
        return subprocess.CompletedProcess(line, process.returncode, stdout, stderr)

    def __call__(self, line: str, **popen: Any) -> str:
        """Run a line that must end well; return what it printed."""
        done = self.shell(line, **popen)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def refused(self, line: str, status: int = 1) -> str:
        """Run a line that must fail; return what it says."""
        done = self.shell(line)
        assert done.returncode == status, f"{line}\n{done.stdout}{done.stderr}"
        return done.stderr

    def json(self, line: str) -> Any:
        """Run a line that prints JSON."""
        return json.loads(self(line))

    def probes(self, name: str) -> list[dict[str, Any]]:
        """Return the probepoints of a program."""
        (program,) = self.json(f"dprobes query --name {name} --json")["programs"]
        found: list[dict[str, Any]] = program["probes"]
        return found

    def counts(self, name: str, what: str = "hits") -> dict[int, int]:
        """Return a count of each probepoint of a program, by minor code."""
        return {probe["minor"]: probe["counts"][what] for probe in self.probes(name)}

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text)
        return path

    @property
    def manager(self) -> int | None:
        """The process id of the living manager."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.runtime / "manager.lock").read_text())
            if (Path(f"/proc/{pid}/cmdline").read_bytes()).find(b"dprobes.manager") >= 0:
                return pid
        return None

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the manager."""
        pid = self.manager
        assert pid is not None
        os.kill(pid, number)
        await_true(lambda: self.manager is None, "the end of the manager")

    def close(self) -> None:
        if self.manager is not None:
            with contextlib.suppress(AssertionError, ProcessLookupError):
                self.kill(signal.SIGTERM)
        if self.manager is not None:
            self.kill()


class Service:
    """Have ``tests/programs/service.c`` call functions of its library."""

    def __init__(self, process: subprocess.Popen[str], program: Path, library: Path) -> None:
        self.process = process
        self.program = program
        self.library = library

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, name: str, count: int, threads: int = 1) -> None:
        self.start(name, count, threads)
        self.finish(count * threads)

    def start(self, name: str, count: int, threads: int = 1) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name} {count} {threads}\n")
        self.process.stdin.flush()

    def finish(self, count: int, timeout: float = 60) -> None:
        assert await_line(self.process, timeout) == f"{count}\n"

    def end(self) -> None:
        """End the program, which must have seen nothing wrong."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(TIMEOUT) == 0


def build_service(build: Builder) -> tuple[Path, Path]:
    library = build("service.c", "-shared", "-fPIC", "-DLIBRARY", name="libservice.so.1")
    program = build("service.c", str(library), f"-Wl,-rpath,{library.parent}", name="service")
    return program, library


@contextlib.contextmanager
def service(build: Builder) -> Iterator[Service]:
    """Start the program."""
    program, library = build_service(build)
    with running(program, stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        yield Service(process, program, library)


def rows(text: str) -> list[list[str]]:
    """Return the cells of a plain table."""
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
