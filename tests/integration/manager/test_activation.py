"""The manager is started by systemd's socket, or by something that passes a socket just as sd_listen_fds(3) says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support import TIMEOUT, await_true

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.manager.sandbox import Sandbox, Service

ROOT = Path(__file__).parents[3]
UNITS = ROOT / "packaging" / "systemd"
MANAGER = [sys.executable, "-m", "dprobes.manager"]

STAND_IN = """
import os, select, socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
select.select([listening], [], [])
os.dup2(listening.fileno(), 3)
os.set_inheritable(3, True)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "manager.sock"}
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture(params=["systemd-socket-activate", "stand-in"])
def activator(request: pytest.FixtureRequest, sandbox: Sandbox) -> Iterator[subprocess.Popen[bytes]]:
    """A process that listens in the place of the manager, and becomes it when somebody connects."""
    sandbox.runtime.mkdir(0o700)
    path = str(sandbox.runtime / "manager.sock")
    if request.param == "stand-in":
        command = [sys.executable, "-c", STAND_IN, path, *MANAGER]
    elif (program := shutil.which(request.param)) is not None:
        passed = [
            name for name in ("DPROBES_RUNTIME_DIR", "DPROBES_STATE_DIR", "PYTHONPATH") if name in _names(sandbox)
        ]
        command = [program, "--listen", path, *(f"--setenv={name}" for name in passed), *MANAGER]
    else:
        pytest.skip("systemd-socket-activate is not installed (package systemd)")
    with subprocess.Popen(command, env=sandbox.environment, stderr=subprocess.DEVNULL) as process:
        await_true(Path(path).is_socket, "the socket")
        yield process
        process.kill()


def _names(sandbox: Sandbox) -> set[str]:
    return set(sandbox.environment)


def test_the_first_insert_starts_the_manager(
    activator: subprocess.Popen[bytes], sandbox: Sandbox, target: Service
) -> None:
    program = sandbox.write("p.rpn", f'name = "{target.library}"\noffset = write_file\nminor = 1\nexit\n')
    assert sandbox.manager is None
    assert sandbox(f"dprobes insert {program} --engine ptrace -p {target.pid} --as svc") == (
        "inserted 'svc': 1 of 1 probepoints active\n"
    )
    assert sandbox.manager == activator.pid
    target.call("write_file", 5)
    await_true(lambda: sandbox.counts("svc") == {1: 5}, "the hits")

    second = subprocess.run(
        MANAGER, check=False, env=sandbox.environment, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert (second.returncode, second.stderr) == (3, "dprobes manager: this user's manager runs already\n")
    assert sandbox.counts("svc") == {1: 5}

    assert sandbox("dprobes stop --manager") == "stopped 1 program\n"
    assert activator.wait(TIMEOUT) == 0
    # It is not the manager's socket: the next connection is to start the next manager.
    assert (sandbox.runtime / "manager.sock").is_socket()
    target.end()


@pytest.mark.parametrize("kind", ["system", "user"])
def test_the_installed_units_are_what_systemd_takes(kind: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed (package systemd)")
    line = [sys.executable, "-m", "dprobes", "systemd", "install", "--directory", str(tmp_path / "units")]
    subprocess.run([*line, *(("--user",) if kind == "user" else ())], check=True, timeout=TIMEOUT)
    done = subprocess.run(
        [analyze, f"--{kind}", "--man=no", "verify", *(str(unit) for unit in sorted((tmp_path / "units").iterdir()))],
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    started = next(
        line for line in (tmp_path / "units/dprobes.service").read_text().splitlines() if "ExecStart" in line
    )
    assert os.access(started.removeprefix("ExecStart="), os.X_OK)


def test_the_units_name_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dprobes.manager.__main__ import run
    from dprobes.manager.manager_files import manager_paths

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["dprobes-manager"] == f"{run.__module__}:{run.__name__}"
    shared = project["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    for name in ("DPROBES_RUNTIME_DIR", "DPROBES_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for kind, user, place in (("system", 0, "/run"), ("user", 1000, "%t")):
        assert (ROOT / shared_source(shared, f"lib/systemd/{kind}")) == UNITS / kind
        assert "\nExecStart=dprobes-manager\n" in (UNITS / kind / "dprobes.service").read_text()
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        monkeypatch.setenv("XDG_RUNTIME_DIR", "%t")
        assert str(manager_paths().socket) == f"{place}/dprobes/manager.sock"
        assert f"\nListenStream={manager_paths().socket}\n" in (UNITS / kind / "dprobes.socket").read_text()


def shared_source(shared: dict[str, str], place: str) -> str:
    (source,) = (source for source, where in shared.items() if where == place)
    return source
