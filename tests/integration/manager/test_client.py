"""The manager's client as users of the Python API write with it; what it returns is the manager's answer, typed."""

from __future__ import annotations

import base64
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

import dprobes
from dprobes.manager.manager_files import ManagerPaths
from dprobes.manager.manager_messages import Killed
from dprobes.platform.linux import ptrace_calls
from integration.manager.test_manager import MANAGER, by_hand
from integration.support import TIMEOUT, await_true

if TYPE_CHECKING:
    from pathlib import Path

    from integration.manager.sandbox import Sandbox, Service


def test_a_program_is_inserted_looked_at_and_removed(
    sandbox: Sandbox, target: Service, insertion: dict[str, Any], tmp_path: Path
) -> None:
    ppdf = base64.b64decode(insertion["ppdf"])
    notices: list[str] = []
    with (
        by_hand(sandbox),
        dprobes.ManagerClient(
            paths=ManagerPaths(sandbox.runtime, sandbox.state), notify=lambda notice: notices.append(notice.message)
        ) as manager,
    ):
        scope = dprobes.Scope(pid=target.pid)
        inserted = manager.insert(ppdf, name="svc", scope=scope, engine="ptrace")
        (probe,) = inserted.program.probepoints
        assert (probe.state, probe.major, probe.minor, probe.at_return) == (dprobes.ProbeState.ACTIVE, 5, 1, False)
        assert (inserted.replaced, inserted.reason, notices) == ((), None, [])
        target.call("write_file", 3)
        await_true(lambda: manager.programs("svc")[0].probepoints[0].counts.hits == 3, "the hits")

        found = manager.variables(index=(1, 2))
        assert (found.first, found.globals) == (1, (0, 0))
        assert [(each.name, each.local) for each in found.programs] == [("svc", (0,))]
        assert manager.variables("svc", wants_globals=False).globals is None
        assert manager.global_variables() == [0, 0, 0]

        (added,) = manager.add_target(f"file:{tmp_path}/log", "svc", "hex")
        assert (added.name, added.module, added.format) == (f"file:{tmp_path}/log", "svc", "hex")
        assert [each.name for each in manager.remove_target(f"file:{tmp_path}/log")] == [added.name]
        assert manager.targets() == []

        again = manager.insert(ppdf, name="svc", scope=scope, replaces=True)
        assert [each.probepoints[0].counts.hits for each in again.replaced] == [3]
        assert manager.remove_probepoints(5, 1) == 1
        with pytest.raises(dprobes.ManagerError, match="a program for 'svc' is inserted already"):
            manager.insert(ppdf, name="svc", scope=scope)
        with pytest.raises(dprobes.ManagerError, match="the probe manager starts no commands"):
            manager.insert(ppdf, name="command", scope=dprobes.Scope(command=("true",)))
        with pytest.raises(TypeError, match="allow_writes"):
            manager.insert(ppdf, name="misspelt", scope=scope, allow_writes=True)  # type: ignore[call-arg]
        (extended,) = manager.programs(extended=True)
        assert base64.b64decode(extended.answer["ppdf"]) == ppdf
        assert manager.stop() == dprobes.Stopped(1, ())
    target.end()


def test_a_manager_that_does_not_end_when_asked_to_is_killed(sandbox: Sandbox) -> None:
    client = dprobes.ManagerClient(paths=ManagerPaths(sandbox.runtime, sandbox.state))
    with subprocess.Popen(MANAGER, env=sandbox.environment) as process:
        await_true((sandbox.runtime / "manager.sock").exists, "the manager")
        ptrace_calls.seize(process.pid)
        ptrace_calls.interrupt(process.pid)
        assert client.kill(patience=0.5) == Killed(process.pid, by_force=True)
        assert process.wait(TIMEOUT) == -signal.SIGKILL
    assert client.kill(patience=0.5) is None


def test_a_manager_that_was_stopped_ends_by_itself(sandbox: Sandbox) -> None:
    client = dprobes.ManagerClient(paths=ManagerPaths(sandbox.runtime, sandbox.state))
    with subprocess.Popen(MANAGER, env=sandbox.environment) as process:
        await_true((sandbox.runtime / "manager.sock").exists, "the manager")
        process.send_signal(signal.SIGSTOP)
        assert client.kill(patience=TIMEOUT) == Killed(process.pid, by_force=False)
        assert process.wait(TIMEOUT) == 0
